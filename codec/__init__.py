"""Bits in, bits out: changes between two states of a layout as shard rows, and back; the state digest.

Works on raw addresses, a row at a time, without the GIL: callers spread intervals over a thread pool. Knows
neither torch nor files nor the store.
"""

from .boxes import Box, code_box, digest_box, encode_box, find_box, split_box
from .changes import Changes, gather, merge, put, scatter
from .crossings import crossing
from .decode import check, decode, positions
from .digest import change_digest, digest, digest_all
from .encode import Encoded, code, encode
from .find import Found, Room, find
from .memory import Memory
from .regions import Move, Region, canonical, collisions, overlaps, runs, simplify
from .space import ROW_ELEMENTS, FlatSpace, Geometry, Interval, Place, joined
from .update import update, update_box

__all__ = [
    "ROW_ELEMENTS",
    "Box",
    "Changes",
    "Encoded",
    "FlatSpace",
    "Found",
    "Geometry",
    "Interval",
    "Memory",
    "Move",
    "Place",
    "Region",
    "Room",
    "canonical",
    "change_digest",
    "check",
    "code",
    "code_box",
    "collisions",
    "crossing",
    "decode",
    "digest",
    "digest_all",
    "digest_box",
    "encode",
    "encode_box",
    "find",
    "find_box",
    "gather",
    "joined",
    "merge",
    "overlaps",
    "positions",
    "put",
    "runs",
    "scatter",
    "simplify",
    "split_box",
    "update",
    "update_box",
]
