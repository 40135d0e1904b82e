"""From two states of an interval to a shard row, the digest of the new one, and that of the difference."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import UsageError
from weightcast.schemas.shard import MAX_ROW_ELEMENTS, Codec, Coding, Row

from . import classes
from .jit import TAGS
from .kernels import code_steps, compare_interval, digest_change, gather
from .memory import UNSIGNED, Memory
from .planes import compress_plane, spread_steps, write_gaps
from .space import FlatSpace, Interval

DENSE_DENSITY: Final = 0.5
"""Changes per element from which on every element gets a step byte. Measured on bf16 weights: the two codings
cross between 0.45 and 0.5 with steps of one unit and of about ten; with wild steps they differ by 5 %."""

WHOLE_FRACTION: Final = 0.5
"""Share of the raw new bits that the raw planes of the other codings must reach before `whole` is tried too.
zstd level 1 takes bf16 weights to 0.78 of their bits."""

HIGH_GAP: Final = 16
"""Mean gap that `gaps` is left with once the low bits are split off. On settled AdamW data of 0.2 to 5 %
density anything from 8 to 32 is within 0.04 bits a change; without a split, 0.2 % takes 0.7 bits more."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """What `encode` found in an interval.

    Attributes:
        row: the changes, or None if there are none.
        digest: of all new bits of the interval.
        change: sum over the changes found of (new - old) * R. Detection is right only if the digest of the
            old bits and this add up to `digest`.
    """

    row: Row | None
    digest: Digest
    change: Digest


@dataclass(frozen=True, slots=True)
class _Found:
    """Changes of an interval: positions relative to it, old and new bits, step bytes, new bits that are escaped."""

    positions: npt.NDArray[np.uint32]
    olds: npt.NDArray[Any]
    news: npt.NDArray[Any]
    steps: npt.NDArray[np.uint8]
    escapes: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Planes:
    coding: Coding
    count: int
    escaped: int
    gap_shift: int = 0
    gap_bytes: int = 0
    gaps: bytes = b""
    lows: bytes = b""
    steps: bytes = b""
    escapes: bytes = b""

    @property
    def nbytes(self) -> int:
        return len(self.gaps) + len(self.lows) + len(self.steps) + len(self.escapes)


def encode(
    space: FlatSpace,
    new: Memory,
    old: Memory,
    interval: Interval,
    level: int = 1,
    coding: Coding | None = None,
    codec: Codec = "gap",
) -> Encoded:
    """Compare, digest and code one interval, in one pass over both memories. Releases the GIL; deterministic.

    If either side is written meanwhile, the row may be of no use, which `change` shows, but nothing breaks.

    Args:
        space: the flat space of the interval's dtype.
        new: the state to publish.
        old: the state that readers have.
        interval: what to look at; at most 2^24 elements.
        level: zstd level.
        coding: use this coding instead of the smallest.
        codec: whether `class` is among the codings to choose from.

    Raises:
        UsageError: the interval is not in the space, or a memory is not of its layout; or it cannot have `coding`.
    """
    space.check(interval)
    if interval.length > MAX_ROW_ELEMENTS:
        raise UsageError(f"{interval} is longer than a row may be, {MAX_ROW_ELEMENTS} elements")
    first, width = space.tensor_at(interval.start), space.width
    positions, olds, news = _scratch.take(interval.length, width)
    count, *lanes = compare_interval(
        old.addresses(space), new.addresses(space), space.starts, space.seeds, first,
        interval.start, interval.length, positions, olds, news, TAGS[width],
    )  # fmt: skip
    digest = Digest(*map(int, lanes))
    if count == 0:
        return Encoded(None, digest, Digest())
    lanes = digest_change(space.starts, space.seeds, first, positions, interval.start, olds, news, count)
    steps, escapes = np.empty(count, np.uint8), np.empty(count, olds.dtype)
    escaped = code_steps(olds, news, count, steps, escapes)
    found = _Found(positions[:count], olds[:count], news[:count], steps, escapes[:escaped])
    planes = _smallest(space, old, interval, found, level, coding, codec)
    return Encoded(_row(space, interval, planes, digest), digest, Digest(*map(int, lanes)))


def _row(space: FlatSpace, interval: Interval, planes: _Planes, digest: Digest) -> Row:
    place = space.describe(interval)
    return Row(
        tensor=place.tensor,
        tensors=place.tensors,
        dtype=space.dtype,
        shape=place.shape,
        offset=place.offset,
        length=interval.length,
        count=planes.count,
        escaped=planes.escaped,
        coding=planes.coding,
        gap_shift=planes.gap_shift,
        gap_bytes=planes.gap_bytes,
        gaps=planes.gaps,
        lows=planes.lows,
        steps=planes.steps,
        escapes=planes.escapes,
        digest=digest,
    )


class _Scratch(threading.local):
    """Room for the changes of a row, kept from row to row instead of being asked of the system each time.

    Only what a row fills is ever touched: 8 bytes a change at width 2, up to what the densest row needed.
    """

    def __init__(self) -> None:
        self._positions = np.empty(0, np.uint32)
        self._bits: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}

    def take(
        self, length: int, width: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[Any], npt.NDArray[Any]]:
        """positions, olds and news of at least `length` entries, valid until this thread's next call."""
        if len(self._positions) < length:
            self._positions = np.empty(length, np.uint32)
        if width not in self._bits or len(self._bits[width][0]) < length:
            self._bits[width] = np.empty(length, UNSIGNED[width]), np.empty(length, UNSIGNED[width])
        return self._positions, *self._bits[width]


_scratch = _Scratch()


def _smallest(
    space: FlatSpace,
    old: Memory,
    interval: Interval,
    found: _Found,
    level: int,
    coding: Coding | None,
    codec: Codec,
) -> _Planes:
    """The planes in the coding asked for, or in the smallest of those that can be it."""
    length, count = interval.length, len(found.positions)
    if coding == "whole":
        return _whole(space, old, interval, found, level)
    if coding == "class":
        asked = _class(space, old, interval, found)
        if asked is None:
            raise UsageError(f"{interval} with {count} changes cannot be coded by class")
        return asked
    dense = coding == "dense" or (coding is None and count >= DENSE_DENSITY * length)
    sparse = _dense(length, found, level) if dense else _gap(length, found, level)
    raw_bytes = (length if dense else count) + found.escapes.nbytes
    if coding is None and raw_bytes >= WHOLE_FRACTION * length * space.width:
        whole = _whole(space, old, interval, found, level)
        sparse = whole if whole.nbytes < sparse.nbytes else sparse
    if coding is None and codec != "gap":
        by_class = _class(space, old, interval, found)
        return by_class if by_class is not None and by_class.nbytes < sparse.nbytes else sparse
    return sparse


def _class(space: FlatSpace, old: Memory, interval: Interval, found: _Found) -> _Planes | None:
    count = len(found.positions)
    if not classes.suits(space, interval, count):
        return None
    coded = classes.encode(
        space, old.address(space, interval.start), interval, found.positions, found.olds, found.news
    )
    if coded is None:
        return None
    return _Planes("class", count, 0, gap_bytes=len(coded.gaps), gaps=coded.gaps, steps=coded.steps)


def _gap(length: int, found: _Found, level: int) -> _Planes:
    count = len(found.positions)
    shift = gap_shift(length, count)
    gaps = np.empty(count + (length >> shift) // 255, np.uint8)
    low_bytes = -(-count * shift // 8)
    lows = np.empty(low_bytes + 8, np.uint8)
    gap_bytes = write_gaps(found.positions, count, shift, gaps, lows)
    return _Planes(
        "gap", count, len(found.escapes), shift, gap_bytes, compress_plane(gaps[:gap_bytes], level),
        lows[:low_bytes].tobytes(), compress_plane(found.steps, level),
        compress_plane(found.escapes, level, noisy=False),
    )  # fmt: skip


def _dense(length: int, found: _Found, level: int) -> _Planes:
    plane = np.zeros(length, np.uint8)
    spread_steps(found.positions, len(found.positions), found.steps, plane)
    return _Planes(
        "dense", len(found.positions), len(found.escapes),
        steps=compress_plane(plane, level), escapes=compress_plane(found.escapes, level, noisy=False),
    )  # fmt: skip


def _whole(space: FlatSpace, old: Memory, interval: Interval, found: _Found, level: int) -> _Planes:
    """All new bits: the old ones with the changes found, so that a source in motion cannot add to them."""
    values = np.empty(interval.length, UNSIGNED[space.width])
    positions = np.arange(interval.start, interval.stop)
    gather(
        old.addresses(space),
        space.starts,
        space.tensor_at(interval.start),
        positions,
        values,
        TAGS[space.width],
    )
    values[found.positions] = found.news
    return _Planes(
        "whole", interval.length, interval.length, escapes=compress_plane(values, level, noisy=False)
    )


def gap_shift(length: int, count: int) -> int:
    """How many low bits of each gap are split off: what brings the mean gap down to `HIGH_GAP`, rounded down.

    The low bits of long gaps are noise, which no coder shortens; what is left then fits one byte and a short
    Huffman table.
    """
    return max(0, math.floor(math.log2(length / count / HIGH_GAP)) + 1) if length > HIGH_GAP * count else 0
