"""Boxes of checkpoint tensors, held by a process; and where a box's elements are in the flat tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weightcast.schemas.errors import UsageError


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a checkpoint tensor, and its elements here.

    Two processes that hold the same box have equal names, starts and extents.

    Attributes:
        name: of the checkpoint tensor.
        shape: of the whole checkpoint tensor.
        start: first index of the box in each dimension.
        tensor: the elements; its shape is the box's extent. Any strides, any device; may be empty. Not a copy.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def extent(self) -> tuple[int, ...]:
        """The size of the box in each dimension."""
        return tuple(self.tensor.shape)


class Span(NamedTuple):
    """Elements of a flat tensor: an interval, or runs at equal distances.

    Element j is offset + j, or, with runs, offset + (j // run) * stride + j % run.

    Attributes:
        offset: the first one.
        length: how many.
        run: elements side by side; 0: an interval.
        stride: from one run's begin to the next; 0: an interval.
    """

    offset: int
    length: int
    run: int
    stride: int


def boxes_of(shape: Sequence[int], start: Sequence[int], extent: Sequence[int]) -> list[Span]:
    """A box of a tensor as spans of its flat elements, in C order, as few as there are.

    A contiguous copy of the box holds the spans' elements one after another.

    Args:
        shape: of the tensor.
        start: first index of the box in each dimension.
        extent: size of the box in each dimension.

    Raises:
        UsageError: the box is not inside the tensor.
    """
    inside = len(shape) == len(start) == len(extent) and all(
        min(s, n) >= 0 and s + n <= size for size, s, n in zip(shape, start, extent, strict=True)
    )
    if not inside:
        raise UsageError(
            f"a box at {list(start)} of extent {list(extent)} is not inside a tensor of shape {list(shape)}"
        )
    if not math.prod(extent):
        return []
    offset, run, dims = 0, 1, list[tuple[int, int]]()  # dims: (size, stride), innermost first
    stride = 1
    for size, first, n in zip(reversed(shape), reversed(start), reversed(extent), strict=True):
        offset += first * stride
        if stride == run:
            run *= n
        elif dims and dims[-1][0] * dims[-1][1] == stride:
            dims[-1] = dims[-1][0] * n, dims[-1][1]
        elif n > 1:
            dims.append((n, stride))
        stride *= size
    count, step = dims.pop(0) if dims else (1, 0)
    starts = [offset]
    for n, stride in dims:  # inner dimensions vary fastest
        starts = [i * stride + at for i in range(n) for at in starts]
    if count == 1 or run == step:
        return [Span(at, count * run, 0, 0) for at in starts]
    return [Span(at, count * run, run, step) for at in starts]
