"""The rows of a version taken together: no two have an element in common, and their changes are one ascending list."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from weightcast.codec import Box, Changes, FlatSpace, Geometry, crossing, merge
from weightcast.schemas.errors import Corrupt
from weightcast.schemas.shard import Row

T = TypeVar("T")

Ints = npt.NDArray[np.int64]

MakesRoom = Callable[[FlatSpace, int], Changes]
"""Gives arrays for so many changes of a space, with anything in them."""


def without_overlap(geometry: Geometry, rows: Iterable[Row]) -> Iterator[Row]:
    """Pass the rows of a version on, checking that no two have an element in common; see `RowSet`.

    Raises:
        Corrupt: two have, or a row does not fit the layout.
    """
    seen = RowSet()
    for row in rows:
        space = geometry.space_of(row)
        seen.add(space, box_of(space, row))
        yield row
    seen.close()


def box_of(space: FlatSpace, row: Row) -> Box:
    """The elements of `row`, after checking that it fits this space. Intervals may reach over several tensors.

    Raises:
        Corrupt: it does not.
    """
    return Box(row.dtype, space.locate(row), row.length, row.run, row.stride)


class RowSet:
    """The rows of one version, no two of which may have an element in common.

    Intervals that have are refused as they are added, boxes when all rows are there; but never are there more elements
    than the space has, so that what is decoded before is no more than a model.
    """

    def __init__(self) -> None:
        self._covers: dict[str, _Cover] = {}

    def add(self, space: FlatSpace, box: Box) -> None:
        """Add a row that lies in `space`.

        Raises:
            Corrupt: it overlaps another one for sure.
        """
        self._covers.setdefault(space.dtype, _Cover(space)).add(box)

    def close(self) -> None:
        """Check what `add` could not.

        Raises:
            Corrupt: two rows overlap, or there are too many boxes to tell.
        """
        for cover in self._covers.values():
            cover.close()


class _Cover:
    """Elements of a space that rows have been seen of."""

    def __init__(self, space: FlatSpace) -> None:
        self._space = space
        self._spans: list[tuple[int, int]] = []  # of intervals: disjoint, ascending
        self._boxes: list[Box] = []
        self._elements = 0

    def add(self, box: Box) -> None:
        self._elements += box.length
        if self._elements > self._space.elements:
            raise Corrupt(
                f"rows of the delta overlap: they have more than the {self._space.elements} elements of the "
                f"{self._space.dtype} tensors"
            )
        if box.run:
            self._boxes.append(box)
            return
        span, taken = (box.start, box.stop), self._spans
        at = bisect(taken, span)
        if (at and taken[at - 1][1] > box.start) or (at < len(taken) and taken[at][0] < box.stop):
            raise self._overlap(box)
        taken.insert(at, span)  # at the end, if rows come in order

    def close(self) -> None:
        if not self._boxes:
            return
        intervals = [Box(self._space.dtype, begin, end - begin) for begin, end in self._spans]
        pair = crossing(intervals + self._boxes)
        if pair is not None:
            raise self._overlap(pair[1])

    def _overlap(self, box: Box) -> Corrupt:
        tensor = self._space.tensor_at(box.start)
        return Corrupt(
            f"two rows of the delta overlap in tensor {self._space.names[tensor]!r} at offset "
            f"{box.start - int(self._space.starts[tensor])}"
        )


class Joined:
    """Where the changes of rows are put one behind the other, so that in the end they are one list without a copy.

    Args:
        space: of the rows.
        expected: changes of all of them. More than that are put elsewhere, and copied in the end.
        make_room: makes room for as many.
    """

    def __init__(self, space: FlatSpace, expected: int, make_room: MakesRoom) -> None:
        self._space = space
        self._block = make_room(space, min(expected, space.elements))
        self._used = 0
        self._parts: list[Changes] = []

    def take(self, row: Row) -> Changes:
        """The places for a row's changes. Its count need not be possible: then it will not be decoded."""
        count = min(max(row.count, 0), row.length)
        end = self._used + count
        fits = end <= len(self._block)
        part = self._block.part(self._used, end) if fits else Changes.room(self._space, count)
        self._used = end
        self._parts.append(part)
        return part

    def filled(self) -> Changes:
        """All that was put in, which must not overlap, in ascending order."""
        in_order = all(a.positions[-1] < b.positions[0] for a, b in pairwise(self._parts))
        if in_order and self._used <= len(self._block):
            return self._block.part(0, self._used)
        return concatenated(self._parts)


def concatenated(parts: list[Changes]) -> Changes:
    """Changes of rows of one dtype that do not overlap, as one."""
    merged = []
    for group in _interleaved(parts, [c.positions for c in parts]):
        while len(group) > 1:  # two and two, so that each change is moved log2(rows) times
            group = [
                merge(*group[i : i + 2]) if i + 1 < len(group) else group[i] for i in range(0, len(group), 2)
            ]
        merged += group
    if len(merged) == 1:
        return merged[0]
    return Changes(
        parts[0].dtype,
        np.concatenate([c.positions for c in merged]),
        np.concatenate([c.values for c in merged]),
    )


def ascending(parts: list[Ints]) -> Ints:
    """Positions of rows of one dtype that do not overlap, as one list."""
    groups = list(_interleaved(parts, parts))
    return np.concatenate([np.sort(np.concatenate(g)) if len(g) > 1 else g[0] for g in groups])


def _interleaved(parts: Sequence[T], positions: Sequence[Ints]) -> Iterator[list[T]]:
    """Groups of parts whose positions lie across each other, in ascending order."""
    order = sorted(range(len(parts)), key=lambda i: int(positions[i][0]))
    group: list[T] = []
    reach = -1
    for i in order:
        if group and positions[i][0] > reach:
            yield group
            group = []
        group.append(parts[i])
        reach = max(reach, int(positions[i][-1]))
    if group:
        yield group
