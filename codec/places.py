"""Elements of a flat space where an engine keeps them in host memory: written, read and digested through moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.layout import Layout, TensorSpec

from . import kernels_places as kernels
from .digest import change_digest
from .jit import TAGS
from .kernels import ascends
from .memory import UNSIGNED
from .regions import Ints, Move, Region
from .space import FlatSpace, Geometry
from .threads import spread

SHARE: Final = 1 << 17
"""Positions of a task: 1.5 ms of work."""

PIECE_ELEMENTS: Final = 1 << 23
"""Elements digested at once by one thread: a few milliseconds of work."""


class Table:
    """Moves of one flat space whose targets lie at byte addresses in this process. Addresses must stay valid.

    Args:
        space: the flat space.
        moves: simplified, of tensors of the space, inside them.
        addresses: byte address of the storage that each move's target is a region of.
    """

    def __init__(self, space: FlatSpace, moves: Sequence[Move], addresses: Sequence[int]) -> None:
        self.space = space
        self.moves = moves
        self._tag = TAGS[space.width]
        self._addresses = addresses
        self.spans = spans(space, moves)
        self._table = _table(space, moves, addresses)

    def write(
        self, positions: Ints, values: npt.NDArray[Any], use: Sequence[int]
    ) -> tuple[list[Digest], int]:
        """Write changes to every place that the moves `use` have for them, and read each back.

        Args:
            positions: int64 [n], flat elements, ascending, contiguous.
            values: unsigned [n], contiguous.
            use: numbers of the moves that count.

        Returns:
            moved: for each of `use` how far its digest moved. Worthless if one failed.
            failed: number of a move that did not read back what was written, or -1.
        """
        tasks = self._tasks(positions, use)
        lanes = np.zeros((len(tasks), 2), np.uint64)

        def run(first: int, last: int) -> int:
            part = tasks[first:last]
            failed = kernels.write(
                self._table, part, _address(positions), _address(values), self.space.starts, self.space.seeds,
                self._spare(), lanes[first:last], self._tag,
            )  # fmt: skip
            return int(part[failed, 0]) if failed >= 0 else -1

        failed = max(spread(run, tasks[:, 2] - tasks[:, 1]), default=-1)
        return _sums(lanes, tasks[:, 0], use), failed

    def gather(self, positions: Ints, use: Sequence[int]) -> tuple[Ints, npt.NDArray[Any]]:
        """The bits that the moves `use` lead to at some of the positions (int64 [n], ascending, contiguous).

        Returns:
            index: int64 [m], which of the positions; ascending within each move only.
            values: unsigned [m], their bits.
        """
        tasks = self._tasks(positions, use)
        at = _address(positions)
        counts = np.zeros(len(tasks), np.int64)
        kernels.count(self._table, tasks, at, counts, self._tag)
        tasks[:, 3] = np.cumsum(counts) - counts
        index = np.empty(int(counts.sum()), np.int64)
        values = np.empty(len(index), UNSIGNED[self.space.width])

        def run(first: int, last: int) -> None:
            kernels.gather(self._table, tasks[first:last], at, index, values, self._tag)

        spread(run, counts)
        return index, values

    def digests(self, use: Sequence[int]) -> list[Digest]:
        """For each of the moves `use` the digest of the bits it leads to, as part of its tensor."""
        cut = [(i, piece) for i in use for piece in pieces(self.moves[i], PIECE_ELEMENTS)]
        number = np.array([i for i, _ in cut], np.int64)
        table = _table(self.space, [piece for _, piece in cut], [self._addresses[i] for i, _ in cut])
        lanes = np.zeros((len(cut), 2), np.uint64)

        def run(first: int, last: int) -> None:
            kernels.digest(
                table, first, last, self.space.starts, self.space.seeds, self._spare(), lanes, self._tag
            )

        spread(run, np.array([piece.source.elements for _, piece in cut], np.int64))
        return _sums(lanes, number, use)

    def _spare(self) -> npt.NDArray[Any]:
        return np.empty(kernels.BLOCK, UNSIGNED[self.space.width])

    def _tasks(self, positions: Ints, use: Sequence[int]) -> Ints:
        """int64 [t, 4] as the kernels take it: for each move its stretch of the positions, cut into shares."""
        wanted = np.asarray(use, np.int64)
        bounds = np.searchsorted(positions, self.spans[wanted])
        counts = -(-(bounds[:, 1] - bounds[:, 0]) // SHARE)
        which = np.repeat(np.arange(len(wanted)), counts)
        part = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = bounds[which, 0] + part * SHARE
        last = np.minimum(first + SHARE, bounds[which, 1])
        return np.stack([wanted[which], first, last, np.zeros_like(first)], axis=1)


def spans(space: FlatSpace, moves: Sequence[Move]) -> Ints:
    """int64 [m, 2]: the flat elements from the first to one past the last of each move's source."""
    begin = space.starts[[space.index[m.tensor] for m in moves]]
    reach = np.array([(m.source.offset, m.source.stop) for m in moves], np.int64).reshape(-1, 2)
    return begin[:, None] + reach


def pieces(move: Move, limit: int) -> Iterable[Move]:
    """A move in parts of at most `limit` elements, in the source's order. An empty one has no part."""
    if move.source.elements <= limit:
        if move.source.elements:
            yield move
        return
    n, inner = move.source.shape[0], move.source.elements // move.source.shape[0]
    step = max(1, limit // inner)
    for at in range(0, n, step):
        size = min(step, n - at)
        part = Move(move.tensor, _part(move.source, at, size), move.place, _part(move.target, at, size))
        yield from pieces(part, limit)


def _part(region: Region, at: int, size: int) -> Region:
    """Of the outermost dimension the indices [at, at + size); one index alone is no dimension."""
    offset = region.offset + at * region.strides[0]
    if size == 1:
        return Region(region.shape[1:], region.strides[1:], offset)
    return Region((size, *region.shape[1:]), region.strides, offset)


def _table(space: FlatSpace, moves: Sequence[Move], addresses: Sequence[int]) -> tuple[npt.NDArray[Any], ...]:
    """What the kernels call `table`. A scalar becomes one dimension of one element."""
    depth = max((len(m.source.shape) for m in moves), default=1) or 1
    shape, sources, targets = (np.ones((len(moves), depth), np.int64) for _ in range(3))
    for i, move in enumerate(moves):
        dims = len(move.source.shape)
        shape[i, :dims] = move.source.shape
        sources[i, :dims] = move.source.strides
        targets[i, :dims] = move.target.strides
    offsets = np.array([m.target.offset * space.width for m in moves], np.uint64)
    return (
        np.array([len(m.source.shape) or 1 for m in moves], np.int64),
        shape,
        sources,
        targets,
        spans(space, moves)[:, 0].copy(),
        np.array([space.index[m.tensor] for m in moves], np.int64),
        np.array(addresses, np.uint64) + offsets,
    )


def _address(array: npt.NDArray[Any]) -> np.uint64:
    """Of its first byte, as kernels take it."""
    return np.uint64(array.ctypes.data)


def _sums(lanes: npt.NDArray[np.uint64], number: Ints, use: Iterable[int]) -> list[Digest]:
    """Sum of the lanes of each number of `use`."""
    use = list(use)
    sums = np.zeros((max([*use, -1]) + 1, 2), np.uint64)
    np.add.at(sums, number, lanes)
    return [Digest(int(sums[i, 0]), int(sums[i, 1])) for i in use]


def warm(width: int) -> None:
    """Compile the kernels for elements of `width` bytes, by a first call of each on memory of its own."""
    dtype = next(name for name, found in WIDTHS.items() if found == width)
    space = Geometry(Layout.of([TensorSpec("warm", dtype, (4,))]))[dtype]
    bits, region = np.zeros(4, UNSIGNED[width]), Region((2,), (2,), 0)
    table = Table(space, [Move("warm", region, "warm", region)], [bits.ctypes.data])
    positions, values = np.arange(2), np.ones(2, bits.dtype)
    sealed = positions.copy()
    sealed.flags.writeable = False
    for array in (positions, sealed):  # mapped files may not be written: numba takes them for another type
        ascends(array, 4)
    table.write(positions, values, [0])
    table.gather(positions, [0])
    table.digests([0])
    change_digest(space, positions, bits[:2], values)
