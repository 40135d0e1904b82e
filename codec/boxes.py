"""Boxes: parts of one tensor that are runs at equal distances, such as a rank's slice of a matrix; rows of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import UsageError
from weightcast.schemas.shard import MAX_ROW_ELEMENTS, Codec, Coding, Row

from . import classes, kernels_boxes
from .encode import Encoded, Planes, choose
from .find import Found, own_rooms
from .jit import LANES, TAGS
from .lines import Lines
from .memory import UNSIGNED
from .space import FlatSpace, Place


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of one tensor: an interval, or runs of `run` elements that begin `stride` elements apart.

    Element j is element start + (j // run) * stride + j % run of the flat space.

    Attributes:
        dtype: of the space.
        start: the first element, counted in the space.
        length: elements.
        run, stride: both 0: an interval.
    """

    dtype: str
    start: int
    length: int
    run: int = 0
    stride: int = 0

    @property
    def stop(self) -> int:
        """One past the last element, counted in the space. The figures must be possible."""
        runs = self.length // self.run if self.run else 1
        return self.start + (runs - 1) * self.stride + (self.run or self.length)

    @property
    def normal(self) -> Box:
        """The same elements as a row tells them: one run, and runs without gaps between them, are an interval."""
        if self.run in (0, self.length, self.stride):
            return Box(self.dtype, self.start, self.length)
        return self

    @property
    def spacing(self) -> tuple[int, int]:
        """(run, stride) as kernels take them: of an interval both are its length."""
        return (self.run, self.stride) if self.run else (self.length, self.length)

    def tensor(self, space: FlatSpace) -> int:
        """Position in the space of the tensor that holds the box.

        Raises:
            UsageError: it is not inside one tensor of the space, or its figures are not those of a box.
        """
        possible = self.dtype == space.dtype and 0 <= self.start < space.elements and self.length >= 1
        if possible and (self.run or self.stride):
            possible = 1 <= self.run <= self.stride and self.length % self.run == 0
        if possible:
            position = space.tensor_at(self.start)
            if self.stop <= space.starts[position + 1]:
                return position
        raise UsageError(f"{self} is not a box inside one tensor of the {space.dtype} space")


def split_box(box: Box, row_elements: int) -> Iterator[Box]:
    """Cut a box into rows of at most `row_elements` elements, in the order of its own elements.

    Rows have whole runs; a run that is longer than a row is cut into intervals.

    Raises:
        UsageError: the rows would be longer than the format allows, or empty.
    """
    if not 1 <= row_elements <= MAX_ROW_ELEMENTS:
        raise UsageError(f"rows of {row_elements} elements; expected 1 to {MAX_ROW_ELEMENTS}")
    box = box.normal
    run, stride = box.spacing
    if run > row_elements:
        for number in range(box.length // run):
            first, last = box.start + number * stride, box.start + number * stride + run
            for at in range(first, last, row_elements):
                yield Box(box.dtype, at, min(row_elements, last - at))
        return
    step = row_elements // run * run
    for done in range(0, box.length, step):
        length = min(step, box.length - done)
        yield Box(box.dtype, box.start + done // run * stride, length, box.run, box.stride).normal


def digest_box(space: FlatSpace, box: Box, address: int) -> Digest:
    """Digest of a box of any length, whose elements lie side by side at a byte address. Releases the GIL.

    Raises:
        UsageError: the box is not inside one tensor of the space.
    """
    begin, length, run, stride, seed = _figures(space, box, box.tensor(space))
    spare = _spare()
    lanes = kernels_boxes.digest_box(
        np.uint64(address),
        begin,
        length,
        run,
        stride,
        seed,
        np.uint64(spare.ctypes.data),
        TAGS[space.width],
    )
    return Digest(*map(int, lanes))


def find_box(space: FlatSpace, box: Box, new: int, old: int) -> Found:
    """Compare and digest one box, as `find` does an interval: the result lies in the same memory as its results do.

    Args:
        space: the flat space of the box's dtype.
        box: of at most 2^24 elements.
        new, old: byte addresses of the box's elements, which lie side by side in order.

    Raises:
        UsageError: the box is not inside one tensor of the space, or longer than a row may be.
    """
    position = _row_tensor(space, box)
    begin, length, run, stride, seed = _figures(space, box, position)
    room = own_rooms.take(box.length, space.width)
    positions, olds, news = room.positions, room.olds, room.news
    count, *lanes = kernels_boxes.compare_box(
        np.uint64(old), np.uint64(new), begin, length, run, stride, seed, _spare(),
        positions, olds, news, TAGS[space.width],
    )  # fmt: skip
    digest, change = Digest(*map(int, lanes[:2])), Digest(*map(int, lanes[2:]))
    return Found(box.length, positions[:count], olds[:count], news[:count], digest, change)


def code_box(
    space: FlatSpace,
    box: Box,
    found: Found,
    old: int,
    level: int = 1,
    coding: Coding | None = None,
    codec: Codec = "gap",
) -> Row:
    """Code the changes found in a box, at least one; `old` and the rest as for `code`, but side by side in memory.

    Raises:
        UsageError: the row cannot have `coding`.
    """
    place = _row_tensor(space, box)
    box, offset = box.normal, box.start - int(space.starts[place])

    def by_class() -> classes.Coded | None:
        if not classes.may_pay(space.dtype, box.length, len(found)):
            return None
        lines = Lines.of(space.specs[place].shape, offset, box.length, box.run)
        return classes.encode_lines(space.dtype, old, box.length, lines, *_sides(found))

    planes = choose(found, level, coding, codec, lambda: _copy(old, box.length, space.width), by_class)
    return _row(space, place, box, planes, found.digest)


def encode_box(
    space: FlatSpace,
    box: Box,
    new: int,
    old: int | None,
    level: int = 1,
    coding: Coding | None = None,
    codec: Codec = "gap",
) -> Encoded:
    """Compare, digest and code one box: `find_box`, then `code_box`.

    Args:
        space: the flat space of the box's dtype.
        box: of at most 2^24 elements.
        new: byte address of the box's elements in the state to publish; they lie side by side in order.
        old: likewise in the state that readers have; None: they have nothing, or nothing that is at hand. Then the
            row is `whole`, and `change` is told from zeros.
        level: zstd level.
        coding: use this coding instead of the smallest.
        codec: whether `class` is among the codings to choose from.

    Raises:
        UsageError: the box is not inside one tensor of the space, or too long; or it cannot have `coding`.
    """
    if old is None:
        return _encode_whole(space, box, new, level, coding)
    found = find_box(space, box, new, old)
    row = code_box(space, box, found, old, level, coding, codec) if len(found) else None
    return Encoded(row, found.digest, found.change)


def _encode_whole(space: FlatSpace, box: Box, new: int, level: int, coding: Coding | None) -> Encoded:
    if coding not in (None, "whole"):
        raise UsageError(f"a row of coding {coding} needs old bits", hint="pass them, or take coding whole")
    place = _row_tensor(space, box)
    values = _copy(new, box.length, space.width)  # digested as sent, whatever happens to the source meanwhile
    digest = digest_box(space, box, values.ctypes.data)
    none = values[:0]
    found = Found(box.length, np.empty(0, np.uint32), none, none, digest, digest)
    planes = choose(found, level, "whole", "gap", lambda: values, lambda: None)
    return Encoded(_row(space, place, box.normal, planes, digest), digest, digest)


def _row_tensor(space: FlatSpace, box: Box) -> int:
    position = box.tensor(space)
    if box.length > MAX_ROW_ELEMENTS:
        raise UsageError(f"{box} is longer than a row may be, {MAX_ROW_ELEMENTS} elements")
    return position


def _figures(space: FlatSpace, box: Box, position: int) -> tuple[Any, ...]:
    """What the kernels take of a box: begin, length, run, stride, the tensor's seed."""
    begin = box.start - int(space.starts[position])
    seeds = space.seeds[position]
    return begin, box.length, *box.spacing, (seeds[0], seeds[1], seeds[2])


def _spare() -> npt.NDArray[np.uint64]:
    """Room for the kernels, for one call."""
    return np.empty(LANES, np.uint64)


def _sides(found: Found) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any], npt.NDArray[Any]]:
    return found.positions, found.olds, found.news


def _copy(address: int, length: int, width: int) -> npt.NDArray[Any]:
    values = np.empty(length, UNSIGNED[width])
    kernels_boxes.pick(np.uint64(address), length, length, length, values, TAGS[width])
    return values


def _row(space: FlatSpace, position: int, box: Box, planes: Planes, digest: Digest) -> Row:
    spec = space.specs[position]
    place = Place(spec.name, 1, spec.shape, box.start - int(space.starts[position]))
    return planes.row(space.dtype, place, box.length, digest, box.run, box.stride)
