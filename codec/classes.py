"""The coding `class`: positions told within classes of the old exponent (docs/format.md, class)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.errors import Corrupt
from weightcast.schemas.shard import CLASS_HEAD_BYTES, MAX_ROW_ELEMENTS, Row

from . import kernels_classes, kernels_lists, kernels_steps
from .jit import TAGS
from .jit_classes import CLASSES
from .lines import Lines, Pieces
from .memory import UNSIGNED
from .scratch import Scratch
from .space import FlatSpace, Interval

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]

EXPONENTS: Final = {"BF16": (7, 0xFF), "F16": (10, 0x1F), "F8_E4M3": (3, 0xF), "F8_E5M2": (2, 0x1F)}
"""dtypes that have this coding: how many bits lie to the right of the exponent, and the mask of the exponent."""

SAMPLES: Final = 2048
"""Elements of a row by which its top exponent is chosen."""

TOP_QUANTILE: Final = 0.9
"""Which share of them has at most that exponent: those above it are few, and hardly ever change."""

STEP_BYTES: Final = 8
"""Bytes a change that coded steps may take; wild ones take 4 to 5."""

MIN_LINES: Final = 16
"""Lines from which on it is tried to name those that have changes."""

MAX_DENSITY: Final = 0.5
"""Changes per element up to which this coding is tried; above it `dense` is better (see `encode`)."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Both planes of a row in this coding."""

    gaps: bytes
    steps: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return len(self.gaps) + len(self.steps)


_scratch = Scratch()


def suits(space: FlatSpace, interval: Interval, count: int) -> bool:
    """Whether a row with so many changes can have this coding, and may be smaller in it."""
    inside = space.tensor_at(interval.start) == space.tensor_at(interval.stop - 1)
    return inside and may_pay(space.dtype, interval.length, count)


def may_pay(dtype: str, length: int, count: int) -> bool:
    """The same of a row that lies in one tensor."""
    return dtype in EXPONENTS and count < MAX_DENSITY * length


def encode(
    space: FlatSpace, address: int, interval: Interval, positions: Positions, olds: Bits, news: Bits
) -> Coded | None:
    """The changes of a row that `suits`, or None if they are too many bits.

    Args:
        space: of the row's dtype.
        address: of its old bits.
        interval: the row.
        positions: of its n changes, relative to it, ascending.
        olds, news: [n], bits before and after.
    """
    first = space.tensor_at(interval.start)
    lines = Lines.of(space.specs[first].shape, interval.start - int(space.starts[first]), interval.length)
    return encode_lines(space.dtype, address, interval.length, lines, positions, olds, news)


def encode_lines(
    dtype: str, address: int, length: int, lines: Lines, positions: Positions, olds: Bits, news: Bits
) -> Coded | None:
    """The same of a row of `length` elements that lie side by side, and whose lines these are."""
    width = olds.itemsize
    exponent = np.array([*EXPONENTS[dtype], _top_exponent(dtype, address, length, width)])
    plane = _scratch.take("steps", STEP_BYTES * len(positions) + 2 * kernels_steps.ROOM, np.uint8)
    used = kernels_steps.write_steps(
        positions, olds, news, len(positions), exponent, lines.elements, lines.phase, _chances(), plane
    )
    if used < 0:
        return None
    gaps = _write_gaps(address, length, lines, positions, exponent, width)
    return Coded(gaps, plane[:used].tobytes())


def decode(space: FlatSpace, row: Row, address: int, positions: Ints, news: Bits) -> Bits:
    """The changes of a row with checked figures; the bits there before, valid until this thread's next call.

    Args:
        space: of the row's dtype.
        row: from a shard; nothing in its planes is trusted.
        address: of all its bits in the parent, side by side.
        positions, news: the result, [row.count]: places relative to the row, and the bits there after.

    Raises:
        Corrupt: the planes break a rule of docs/format.md.
    """
    lines = Lines.of(row.shape, row.offset, row.length, row.run)
    exponent = np.array([*EXPONENTS[row.dtype], row.gaps[0]])
    olds = _scratch.take("olds", row.count, news.dtype)
    if not _read_gaps(row, address, lines, exponent, positions, olds):
        raise Corrupt(
            f"row of tensor {row.tensor!r}: gaps do not lead to {row.count} of {row.length} elements"
        )
    news[:] = olds
    if not kernels_steps.read_steps(
        positions, news, exponent, lines.elements, lines.phase, _chances(), _padded(row.steps), len(row.steps)
    ):
        raise Corrupt(f"row of tensor {row.tensor!r}: the plane steps is not one of {row.count} steps")
    return olds


def check(row: Row) -> None:
    """Check what shows of such a row without its parent's bits.

    Raises:
        Corrupt: a rule of docs/format.md is broken.
    """
    lines = Lines.of(row.shape, row.offset, row.length, row.run)
    if _read_lists(row, lines) is None:
        raise Corrupt(f"row of tensor {row.tensor!r}: gaps are not those of {row.count} changes")


def _top_exponent(dtype: str, address: int, length: int, width: int) -> int:
    bits = np.empty(-(-length // max(1, length // SAMPLES)), UNSIGNED[width])
    kernels_classes.sample(np.uint64(address), max(1, length // SAMPLES), bits, TAGS[width])
    shift, mask = EXPONENTS[dtype]
    counts = np.bincount((bits >> shift) & mask, minlength=mask + 1)
    return int(np.searchsorted(np.cumsum(counts), TOP_QUANTILE * len(bits)))


def _write_gaps(
    address: int, length: int, lines: Lines, positions: Positions, exponent: Ints, width: int
) -> bytes:
    count = len(positions)
    live = _live_lines(lines, positions)
    pieces = (
        Pieces.whole(address, length)
        if live is None
        else Pieces.of_lines(address, length, lines, live, width)
    )
    kinds, gaps = _scratch.take("kinds", count, np.uint8), _scratch.take("gaps", count, np.uint32)
    totals = np.zeros(CLASSES, np.int64)
    kernels_classes.rank(
        pieces.addresses, pieces.begins, pieces.lengths, exponent, positions, count, kinds, gaps, totals,
        TAGS[width],
    )  # fmt: skip
    offsets, grouped = _offsets(totals), _scratch.take("grouped", count, np.uint32)
    kernels_classes.by_class(kinds, gaps, count, offsets[:-1].copy(), grouped)
    head = totals if live is None else np.append(totals, len(live))
    numbers = count + len(head) + (0 if live is None else len(live))
    stream = _scratch.take("stream", CLASS_HEAD_BYTES + 7 * numbers + 8, np.uint8)
    state = np.zeros(3, np.uint64)
    stream[0], stream[1] = exponent[2], live is not None
    out = np.uint64(stream.ctypes.data + CLASS_HEAD_BYTES)
    kernels_lists.write_list(head, _head_mean(count), out, state)
    if live is not None:
        dead = np.diff(live, prepend=-1) - 1
        kernels_lists.write_list(dead, _line_mean(lines.count, len(live)), out, state)
    mean = _first_mean(int(pieces.lengths.sum()), int(totals[0]))
    kernels_lists.write_lists(grouped, offsets, mean, out, state)
    pending, used, held = map(int, state)
    return stream[: CLASS_HEAD_BYTES + used].tobytes() + (bytes([pending]) if held else b"")


@dataclass(frozen=True, slots=True)
class _Lists:
    """What the plane `gaps` says: lines that have changes, or None for all; gaps by class; where classes begin."""

    live: Ints | None
    gaps: npt.NDArray[np.uint32]
    offsets: Ints


def _read_lists(row: Row, lines: Lines) -> _Lists | None:
    stream, marked = _padded(row.gaps), row.gaps[1]
    if marked > 1:
        return None
    at, state = (
        np.uint64(stream.ctypes.data + CLASS_HEAD_BYTES),
        np.array([0, 8 * (len(row.gaps) - CLASS_HEAD_BYTES)]),
    )
    head = np.empty(CLASSES + marked, np.int64)
    kernels_lists.read_list(head, _head_mean(row.count), MAX_ROW_ELEMENTS, at, state)
    totals, elements, live = head[:CLASSES], row.length, None
    if state[0] < 0 or totals.sum() != row.count:
        return None
    if marked:
        if not 1 <= head[-1] <= lines.count:
            return None
        dead = np.empty(head[-1], np.int64)
        kernels_lists.read_list(dead, _line_mean(lines.count, len(dead)), lines.count, at, state)
        live = np.cumsum(dead + 1) - 1
        if state[0] < 0 or live[-1] >= lines.count:
            return None
        elements = int(Pieces.of_lines(0, row.length, lines, live, 1).lengths.sum())
    offsets, gaps = _offsets(totals), _scratch.take("grouped", row.count, np.uint32)
    mean = _first_mean(elements, int(totals[0]))
    kernels_lists.read_lists(gaps, offsets, mean, row.length, at, state)
    spare = int(state[1] - state[0])
    if state[0] < 0 or not 0 <= spare < 8 or row.gaps[-1] >> (8 - spare):
        return None
    return _Lists(live, gaps, offsets)


def _read_gaps(row: Row, address: int, lines: Lines, exponent: Ints, positions: Ints, olds: Bits) -> bool:
    """Write positions relative to the row, and the bits there; False if the plane is not right."""
    lists = _read_lists(row, lines)
    if lists is None:
        return False
    pieces = (
        Pieces.whole(address, row.length)
        if lists.live is None
        else Pieces.of_lines(address, row.length, lines, lists.live, olds.itemsize)
    )
    found = kernels_classes.locate(
        pieces.addresses, pieces.begins, pieces.lengths, exponent, lists.gaps, lists.offsets,
        positions, olds, TAGS[olds.itemsize],
    )  # fmt: skip
    return bool(found == row.count)


def _live_lines(lines: Lines, positions: Positions) -> Ints | None:
    """Lines that have changes, if it pays to name them, and to count elements in those alone."""
    if lines.count < MIN_LINES:
        return None
    live = np.empty(min(lines.count, len(positions)), np.int64)
    count = kernels_classes.live_lines(positions, len(positions), lines.elements, lines.phase, live)
    saved = math.log2(lines.count / count)  # bits of each gap, if dead lines are spread evenly
    # To name a line takes about `saved` + 1.5 bits: the entropy of a geometric distribution of that mean.
    return live[:count] if len(positions) * saved > count * (saved + 1.5) + 2 * 8 else None


def _head_mean(changes: int) -> int:
    """What the changes in a class are expected to be, in 256ths."""
    return changes * 256 // CLASSES


def _line_mean(lines: int, live: int) -> int:
    """The same of the lines without a change before one that has."""
    return lines * 256 // live


def _first_mean(elements: int, changes: int) -> int:
    """The same of the gap in the first class: about a quarter of the elements are in it."""
    return elements * 64 // (changes + 1)


def _offsets(totals: Ints) -> Ints:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(totals)])


def _padded(plane: bytes) -> npt.NDArray[np.uint8]:
    """The plane, and zeros that readers may run into."""
    return np.frombuffer(plane + bytes(kernels_steps.ROOM), np.uint8)


def _chances() -> npt.NDArray[np.uint32]:
    """What the step coder starts from."""
    chances = np.full(kernels_steps.CHANCES, kernels_steps.HALF, np.uint32)
    chances[kernels_steps.ONE : kernels_steps.LENGTH] = kernels_steps.FIRST_ONE
    return chances
