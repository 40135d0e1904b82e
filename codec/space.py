"""Where the elements of a layout are: a flat space a dtype, its tensors, the intervals that rows cover."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import MIX, Layout, TensorSpec
from weightcast.schemas.shard import MAX_ROW_ELEMENTS, Codec, Row, has_possible_box

ROW_ELEMENTS: Final = 1 << 22
"""Elements of a row that `split` aims at: at 0.2 % density a plane has 8 kB, a Huffman table 1 % of it."""

SMALL_ELEMENTS: Final = 1 << 16
"""Tensors below this many elements share rows under every codec (docs/format.md, delta shard)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """`length` elements of the flat space of `dtype`, from element `start`."""

    dtype: str
    start: int
    length: int

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Place:
    """An interval in the words of a shard row: first tensor, number of tensors, shape if one, offset."""

    tensor: str
    tensors: int
    shape: tuple[int, ...]
    offset: int


class FlatSpace:
    """The untied tensors of one dtype, end to end in layout order.

    Attributes:
        dtype: safetensors name of the dtype.
        width: bytes of an element.
        mix: as of the layout.
        specs: the n tensors, in layout order.
        names: their names.
        starts: int64 [n + 1], flat element at which each begins; the last entry is the length of the space.
        elements: length of the space.
    """

    def __init__(self, dtype: str, specs: tuple[TensorSpec, ...], mix: int = MIX) -> None:
        self.dtype = dtype
        self.mix = mix
        self.width = WIDTHS[dtype]
        self.specs = specs
        self.names = tuple(spec.name for spec in specs)
        self.starts: npt.NDArray[np.int64] = np.zeros(len(specs) + 1, np.int64)
        np.cumsum([spec.elements for spec in specs], out=self.starts[1:])
        self.elements = int(self.starts[-1])

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each tensor in `specs`."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def seeds(self) -> npt.NDArray[np.uint64]:
        """uint64 [n, 3]: the digest's seeds of each tensor, and `mix` (docs/format.md, state digest)."""
        digests = b"".join(hashlib.blake2b(_seed_text(spec), digest_size=16).digest() for spec in self.specs)
        found = np.full((len(self.specs), 3), self.mix, np.uint64)
        found[:, :2] = np.frombuffer(digests, "<u8").reshape(-1, 2)
        return found

    def tensor_at(self, element: int) -> int:
        """Position in `specs` of the tensor that holds flat `element`, which must be inside the space."""
        return int(np.searchsorted(self.starts, element, side="right")) - 1

    def describe(self, interval: Interval) -> Place:
        """`interval` as a row names it. Empty tensors between two that it reaches count as reached.

        Raises:
            UsageError: the interval is empty or not inside this space.
        """
        self.check(interval)
        first, last = self.tensor_at(interval.start), self.tensor_at(interval.stop - 1)
        shape = self.specs[first].shape if first == last else ()
        return Place(self.names[first], last - first + 1, shape, interval.start - int(self.starts[first]))

    def check(self, interval: Interval) -> None:
        """Refuse an interval that is not inside this space.

        Raises:
            UsageError: it is not.
        """
        if interval.dtype != self.dtype or not 0 <= interval.start < interval.stop <= self.elements:
            raise UsageError(f"{interval} is not inside the {self.dtype} space of {self.elements} elements")

    def locate(self, row: Row) -> int:
        """Flat start of the interval or box of `row`, after checking that the row fits this space.

        Raises:
            Corrupt: dtype, tensor, shape, offset, length, `tensors`, run or stride are not those of an interval of it
                or of a box in one of its tensors.
        """
        position = self.index.get(row.tensor) if row.dtype == self.dtype else None
        if position is None:
            raise Corrupt(f"row of tensor {row.tensor!r}: the layout stores no such {row.dtype} tensor")
        spec, start = self.specs[position], int(self.starts[position]) + row.offset
        if not 0 <= row.offset < spec.elements or not 1 <= row.length <= min(
            MAX_ROW_ELEMENTS, self.elements - start
        ):
            raise Corrupt(
                f"row of tensor {row.tensor!r}: elements {row.offset} to {row.offset + row.length} are not "
                f"inside the {self.dtype} space, where the tensor has {spec.elements}"
            )
        if not has_possible_box(row) or (row.is_box and row.stop > spec.elements):
            raise Corrupt(
                f"row of tensor {row.tensor!r}: {row.length} elements from {row.offset} on in runs of {row.run} that "
                f"begin {row.stride} apart are not a box in a tensor of {spec.elements}"
            )
        tensors = 1 if row.is_box else self.tensor_at(start + row.length - 1) - position + 1
        shape = spec.shape if tensors == 1 else ()
        if (row.tensors, row.shape) != (tensors, shape):
            raise Corrupt(
                f"row of tensor {row.tensor!r}: expected {tensors} tensors and shape {list(shape)}, "
                f"found {row.tensors} and {list(row.shape)[:32]}"
            )
        return start

    def split(self, row_elements: int = ROW_ELEMENTS, small: int = SMALL_ELEMENTS) -> list[Interval]:
        """The writer's rule, first half: slices of tensors of at least `small` elements, joined runs of smaller ones.

        Together the intervals cover the space once. No interval has more than `row_elements` elements.
        """
        if not small <= row_elements <= MAX_ROW_ELEMENTS:
            raise UsageError(f"rows of {row_elements} elements; expected {small} to {MAX_ROW_ELEMENTS}")
        intervals: list[Interval] = []
        run = 0  # where the run of small tensors that is not written yet begins
        for i in np.flatnonzero(np.diff(self.starts) >= small):
            start, stop = int(self.starts[i]), int(self.starts[i + 1])
            intervals += self._runs(run, start, row_elements)
            intervals += [
                Interval(self.dtype, at, min(row_elements, stop - at))
                for at in range(start, stop, row_elements)
            ]
            run = stop
        return intervals + self._runs(run, self.elements, row_elements)

    def _runs(self, start: int, stop: int, row_elements: int) -> list[Interval]:
        """Cut [start, stop), which holds small tensors only, at tensor boundaries."""
        intervals = []
        while start < stop:
            end = int(self.starts[np.searchsorted(self.starts, start + row_elements, side="right") - 1])
            end = min(end, stop)
            intervals.append(Interval(self.dtype, start, end - start))
            start = end
        return intervals


class Geometry:
    """All flat spaces of a layout, by dtype."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._spaces = {
            d: FlatSpace(d, layout.stored[first:last], layout.mix)
            for d, (first, last) in layout.dtypes.items()
        }
        self._intervals: dict[tuple[int, int], tuple[Interval, ...]] = {}

    def __getitem__(self, dtype: str) -> FlatSpace:
        return self._spaces[dtype]

    def __contains__(self, dtype: str) -> bool:
        return dtype in self._spaces

    def get(self, dtype: str) -> FlatSpace | None:
        """The space of `dtype`, or None if the layout stores no such tensor."""
        return self._spaces.get(dtype)

    def __iter__(self) -> Iterator[FlatSpace]:
        return iter(self._spaces.values())

    def __len__(self) -> int:
        return len(self._spaces)

    def space_of(self, row: Row) -> FlatSpace:
        """The space that `row` lies in.

        Raises:
            Corrupt: the layout stores no tensor of the row's dtype.
        """
        if row.dtype not in self._spaces:
            raise Corrupt(f"row of tensor {row.tensor!r}: the layout stores no {row.dtype} tensor")
        return self._spaces[row.dtype]

    def intervals(self, row_elements: int = ROW_ELEMENTS, small: int = SMALL_ELEMENTS) -> Sequence[Interval]:
        """`split` of every space, in layout order; kept, as each version asks for the same."""
        found = self._intervals.get((row_elements, small))
        if found is None:
            found = tuple(interval for space in self for interval in space.split(row_elements, small))
            self._intervals[row_elements, small] = found
        return found


def joined(intervals: Iterable[Interval], most: int, codec: Codec = "gap") -> list[Interval]:
    """The second half: ascending intervals that follow each other become one of at most `most` elements.

    Few rows are shorter than many, in the table and in what a coder must learn about each. Not under `class`, which
    tells positions within one tensor. Each interval lies in one of the result whole.
    """
    found: list[Interval] = []
    for interval in intervals:
        last = found[-1] if found and codec == "gap" else None
        follows = last is not None and (last.dtype, last.stop) == (interval.dtype, interval.start)
        if last is not None and follows and last.length + interval.length <= most:
            found[-1] = Interval(last.dtype, last.start, last.length + interval.length)
        else:
            found.append(interval)
    return found


def _seed_text(spec: TensorSpec) -> bytes:
    return f"{spec.name}\0{spec.dtype}\0{','.join(map(str, spec.shape))}".encode()
