"""Bits in, bits out: changes between two states of a layout as shard rows, and back; the state digest.

Works on raw addresses, a row at a time, without the GIL: callers spread intervals over a thread pool. Knows
neither torch nor files nor the store.
"""

from .decode import Changes, check, decode, gather, merge, positions, scatter
from .digest import change_digest, digest, digest_all
from .encode import Encoded, encode
from .memory import Memory
from .regions import Move, Region, canonical, collisions, overlaps, runs, simplify
from .space import ROW_ELEMENTS, FlatSpace, Geometry, Interval, Place

__all__ = [
    "ROW_ELEMENTS",
    "Changes",
    "Encoded",
    "FlatSpace",
    "Geometry",
    "Interval",
    "Memory",
    "Move",
    "Place",
    "Region",
    "canonical",
    "change_digest",
    "check",
    "collisions",
    "decode",
    "digest",
    "digest_all",
    "encode",
    "gather",
    "merge",
    "overlaps",
    "positions",
    "runs",
    "scatter",
    "simplify",
]
