"""From verified rows of a version to changes: decoded in parallel, folded, or written at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from weightcast.codec import Changes, Geometry, Memory, decode, merge, positions, update
from weightcast.schemas.digest import Digest
from weightcast.schemas.shard import Row

from .ahead import map_ahead
from .rowset import Joined, MakesRoom, ascending, without_overlap


def changed_positions(
    geometry: Geometry, rows: Iterable[Row], pool: Executor
) -> dict[str, npt.NDArray[np.int64]]:
    """Flat elements that rows of one version change, by dtype: int64, ascending.

    Raises:
        Corrupt: rows overlap, or one breaks a rule that shows without a base.
    """

    def one(row: Row) -> tuple[str, npt.NDArray[np.int64]]:
        return row.dtype, positions(geometry[row.dtype], row)

    found: dict[str, list[npt.NDArray[np.int64]]] = {}
    for dtype, part in map_ahead(pool, one, without_overlap(geometry, rows)):
        found.setdefault(dtype, []).append(part)
    return {dtype: ascending(parts) for dtype, parts in found.items()}


def collect(
    geometry: Geometry,
    rows: Iterable[Row],
    base: Memory | Mapping[str, Changes],
    pool: Executor,
    overlay: Mapping[str, Changes],
    known: Callable[[Row], tuple[Changes, Digest] | None] = lambda _: None,
    expected: int = 0,
    make_room: MakesRoom = Changes.room,
) -> tuple[dict[str, Changes], Digest]:
    """Absolute new values of a version, by dtype, and what they do to the digest. Nothing is written.

    Old bits are those of `base`, except where `overlay` (changes of the versions in between) has newer ones; of a base
    that is not memory, only bits that `overlay` has may be missing. `known` may have decoded a row before. `expected`,
    how many changes there are, saves a copy of them if it is right; `make_room` gives what they are put in.
    """
    joined: dict[str, Joined] = {}

    def placed() -> Iterator[tuple[Row, Changes]]:
        for row in without_overlap(geometry, rows):
            if row.dtype not in joined:
                joined[row.dtype] = Joined(geometry[row.dtype], expected, make_room)
            yield row, joined[row.dtype].take(row)

    def one(row: Row, out: Changes) -> Digest:
        done = known(row)
        if done is not None:
            out.positions[:], out.values[:] = done[0].positions, done[0].values
            return done[1]
        space = geometry[row.dtype]
        old = base if isinstance(base, Memory) else base.get(row.dtype, Changes.none(space))
        return decode(space, row, old, overlay.get(row.dtype), out)[1]

    moved = Digest()
    for digest in map_ahead(pool, lambda task: one(*task), placed()):
        moved += digest
    return {dtype: each.filled() for dtype, each in joined.items()}, moved


def apply_directly(
    geometry: Geometry,
    rows: Iterable[Row],
    memory: Memory,
    pool: Executor,
    keep: Callable[[Changes], None] | None = None,
) -> Digest:
    """Decode against `memory` and write into it row by row; returns what that did to the digest.

    For memory that nobody serves from: if this raises, or the digest is wrong, `memory` is worthless. (Whether boxes
    overlap shows after the last row.) `keep` is given the old bits of each row, in this thread and in any order.
    """

    def one(row: Row) -> tuple[Digest, Changes | None]:
        return update(geometry[row.dtype], row, memory, keep=keep is not None)

    total = Digest()
    for moved, old in map_ahead(pool, one, without_overlap(geometry, rows)):
        total += moved
        if keep is not None and old is not None:
            keep(old)
    return total


def fold(older: Mapping[str, Changes], newer: Mapping[str, Changes]) -> dict[str, Changes]:
    """The changes of two versions in a row as one; the newer write to an element wins."""
    both = dict(older)
    for dtype, changes in newer.items():
        both[dtype] = merge(both[dtype], changes) if dtype in both else changes
    return both
