"""Strided parts of flat arrays, and moves between them. Pure geometry: nothing here touches bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightcast.schemas.errors import UsageError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """A strided view of a flat array, in elements: index (i, j, …) is element offset + i · strides[0] + …

    Raises:
        UsageError: shape and strides differ in length, or a number is negative.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or min((*self.shape, *self.strides, self.offset)) < 0:
            raise UsageError(
                f"shape {list(self.shape)[:8]}, strides {list(self.strides)[:8]} and offset {self.offset} are "
                "not a region"
            )

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the last element of the array that the region reaches; `offset` if it is empty."""
        if not self.elements:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class Move:
    """A part of a checkpoint tensor, and where an engine keeps it.

    Attributes:
        tensor: name of a stored tensor of the layout.
        source: of the tensor's elements in C order.
        place: name of the engine's parameter or buffer.
        target: of the storage of `place`, same shape as `source`.
    """

    tensor: str
    source: Region
    place: str
    target: Region


def simplify(source: Region, target: Region) -> tuple[Region, Region]:
    """The same pairs of elements with the fewest dimensions, outermost in the source first.

    Dimensions of size 1 go; neighbours that are contiguous on both sides become one. However a copy was
    written down, it is the same pair of regions after this.

    Raises:
        UsageError: the shapes differ, or a side may have one element at two indices.
    """
    if source.shape != target.shape:
        raise UsageError(f"a copy of shape {list(source.shape)} to shape {list(target.shape)}")
    for side, region in (("source", source), ("target", target)):
        if overlaps(region):
            raise UsageError(f"the {side} of a copy overlaps itself: {region}")
    if not source.elements:
        return Region((0,), (1,), 0), Region((0,), (1,), 0)
    dims = _merged([d for d in zip(source.shape, source.strides, target.strides, strict=True) if d[0] > 1])
    shape = tuple(n for n, _, _ in dims)
    return (
        Region(shape, tuple(s for _, s, _ in dims), source.offset),
        Region(shape, tuple(t for _, _, t in dims), target.offset),
    )


def canonical(region: Region) -> Region:
    """The same elements in ascending order, with the fewest dimensions. Equal sets of nested strides compare equal.

    Raises:
        UsageError: as `simplify`.
    """
    return simplify(region, region)[0]


def overlaps(region: Region) -> bool:
    """Whether two indices may be one element: a stride does not reach past the dimensions inside it.

    A few views whose elements are all different count as overlapping, too; no slice, transposition or split of an
    array is among them.
    """
    if not region.elements:
        return False
    reach = 0
    for stride, n in sorted((s, n) for n, s in zip(region.shape, region.strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def runs(region: Region) -> tuple[Ints, int]:
    """The elements of a region as runs of one length.

    Returns:
        starts: int64 [n], ascending; the runs are disjoint.
        length: elements of each run; 0 if the region is empty.

    Raises:
        UsageError: the region overlaps itself.
    """
    region = canonical(region)
    dims = list(zip(region.shape, region.strides, strict=True))
    length = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
    starts = np.full(1 if region.elements else 0, region.offset, np.int64)
    for n, stride in dims:
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * stride).ravel()
    return starts, length if region.elements else 0


def collisions(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Pairs of regions of one array that have elements in common, by their numbers.

    Of every run that begins inside another region's one pair, so none only if there is none.

    Raises:
        UsageError: a region overlaps itself.
    """
    found: list[tuple[int, int]] = []
    for group in _near(regions):
        spans = [runs(regions[i]) for i in group]
        starts = np.concatenate([s for s, _ in spans])
        stops = np.concatenate([s + n for s, n in spans])
        owner = np.repeat(group, [len(s) for s, _ in spans])
        order = np.argsort(starts, kind="stable")
        starts, stops, owner = starts[order], stops[order], owner[order]
        reach = np.maximum.accumulate(stops)
        for at in np.flatnonzero(starts[1:] < reach[:-1]) + 1:
            other = int(np.searchsorted(reach, starts[at], side="right"))
            found.append((int(owner[other]), int(owner[at])))
    return sorted(set(found))


def _near(regions: Sequence[Region]) -> Iterable[list[int]]:
    """Groups of two and more regions whose spans touch one another."""
    group: list[int] = []
    reach = 0
    for i in sorted((i for i, r in enumerate(regions) if r.elements), key=lambda i: regions[i].offset):
        if regions[i].offset >= reach:
            if len(group) > 1:
                yield group
            group = []
        group.append(i)
        reach = max(reach, regions[i].stop)
    if len(group) > 1:
        yield group


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(size, source stride, target stride) by descending source stride, contiguous neighbours as one."""
    merged: list[tuple[int, int, int]] = []
    for n, source, target in sorted(dims, key=lambda d: d[1], reverse=True):
        if merged and merged[-1][1] == n * source and merged[-1][2] == n * target:
            merged[-1] = (merged[-1][0] * n, source, target)
        else:
            merged.append((n, source, target))
    return merged
