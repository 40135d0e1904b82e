"""From two states of an interval to a shard row, the digest of the new one, and that of the difference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import UsageError
from weightcast.schemas.shard import Codec, Coding, Row

from . import classes
from .find import Found, find
from .jit import TAGS
from .kernels import gather
from .kernels_moves import ESCAPES_OF_PAIRS, code_steps, spread_steps, write_changes
from .memory import UNSIGNED, Memory
from .planes import compress_plane, parted_bytes
from .space import FlatSpace, Interval, Place

DENSE_DENSITY: Final = 0.5
"""Changes per element from which on every element gets a step byte. Measured on bf16 weights: the two codings
cross between 0.45 and 0.5 with steps of one unit and of about ten; with wild steps they differ by 5 %."""

WHOLE_FRACTION: Final = 0.5
"""Share of the raw new bits that the planes of the other codings must reach before `whole` is tried too. zstd level 1
takes bf16 weights to 0.78 of their bits, and takes three times as long for it as all else of a dense row."""

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
class Planes:
    """The planes of a row, and the figures that describe them; see `Row`."""

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
        """Bytes of all planes."""
        return len(self.gaps) + len(self.lows) + len(self.steps) + len(self.escapes)

    def row(
        self, dtype: str, place: Place, length: int, digest: Digest, run: int = 0, stride: int = 0
    ) -> Row:
        """The row at `place` that these are the planes of; the rest as in `Row`."""
        return Row(
            tensor=place.tensor,
            tensors=place.tensors,
            dtype=dtype,
            shape=place.shape,
            offset=place.offset,
            length=length,
            count=self.count,
            escaped=self.escaped,
            coding=self.coding,
            gap_shift=self.gap_shift,
            gap_bytes=self.gap_bytes,
            gaps=self.gaps,
            lows=self.lows,
            steps=self.steps,
            escapes=self.escapes,
            digest=digest,
            run=run,
            stride=stride,
        )


def encode(
    space: FlatSpace,
    new: Memory,
    old: Memory,
    interval: Interval,
    level: int = 1,
    coding: Coding | None = None,
    codec: Codec = "gap",
) -> Encoded:
    """Compare, digest and code one interval: `find`, then `code`.

    Raises:
        UsageError: the interval is not in the space, or a memory is not of its layout; or it cannot have `coding`.
    """
    found = find(space, new, old, interval)
    row = code(space, interval, found, old, level, coding, codec) if len(found) else None
    return Encoded(row, found.digest, found.change)


def code(
    space: FlatSpace,
    interval: Interval,
    found: Found,
    old: Memory,
    level: int = 1,
    coding: Coding | None = None,
    codec: Codec = "gap",
) -> Row:
    """Code the changes found in an interval, at least one. Releases the GIL; deterministic.

    Args:
        space: the flat space of the interval's dtype.
        interval: the row.
        found: its changes.
        old: where they were found; read by the codings `class` and `whole` alone.
        level: zstd level.
        coding: use this coding instead of the smallest.
        codec: whether `class` is among the codings to choose from.

    Raises:
        UsageError: the row cannot have `coding`.
    """
    first = space.tensor_at(interval.start)

    def whole() -> npt.NDArray[Any]:
        values = np.empty(interval.length, UNSIGNED[space.width])
        every = np.arange(interval.start, interval.stop)
        gather(old.addresses(space), space.starts, first, every, values, TAGS[space.width])
        return values

    def by_class() -> classes.Coded | None:
        if not classes.suits(space, interval, len(found)):
            return None
        address = old.address(space, interval.start)
        return classes.encode(space, address, interval, found.positions, found.olds, found.news)

    planes = choose(found, level, coding, codec, whole, by_class)
    return planes.row(space.dtype, space.describe(interval), interval.length, found.digest)


def choose(
    found: Found,
    level: int,
    coding: Coding | None,
    codec: Codec,
    whole: Callable[[], npt.NDArray[Any]],
    by_class: Callable[[], classes.Coded | None],
) -> Planes:
    """The planes of a row in the coding asked for, or in the smallest of those that can be it.

    Args:
        found: its changes, at least one.
        level: zstd level.
        coding: use this coding instead of the smallest.
        codec: whether `class` is among the codings to choose from.
        whole: makes a fresh array [length] of the row's old bits.
        by_class: codes the row by class, or says None where it cannot be.

    Raises:
        UsageError: the row cannot have `coding`.
    """
    if coding == "whole":
        return _whole(found, level, whole())
    if coding == "class":
        asked = by_class()
        if asked is None:
            raise UsageError(
                f"a row of {found.length} elements with {len(found)} changes cannot be coded by class"
            )
        return _class(found, asked)
    dense = coding == "dense" or (coding is None and len(found) >= DENSE_DENSITY * found.length)
    best = _dense(found, level) if dense else _gapped(found, level, coding)
    if coding is None and best.nbytes >= WHOLE_FRACTION * found.length * found.news.itemsize:
        every = _whole(found, level, whole())
        best = every if every.nbytes < best.nbytes else best
    if coding is None and codec != "gap":
        coded = by_class()
        if coded is not None and coded.nbytes < best.nbytes:
            return _class(found, coded)
    return best


def _class(found: Found, coded: classes.Coded) -> Planes:
    return Planes("class", len(found), 0, gap_bytes=len(coded.gaps), gaps=coded.gaps, steps=coded.steps)


_SHARES: Final[dict[Coding | None, float]] = {"gap": -1.0, "pairs": 1.0}
"""Of changes that may be escaped in pairs where a coding is asked for: none of them, all of them."""


def _gapped(found: Found, level: int, coding: Coding | None) -> Planes:
    """In coding `gap` or `pairs`, whichever is asked for or likely to be smaller."""
    count = len(found)
    shift = gap_shift(found.length, count)
    steps, pairs = np.empty(count, np.uint8), np.empty(-(-count // 2), np.uint8)
    escapes = np.empty(count, found.olds.dtype)
    gaps = np.empty(count + (found.length >> shift) // 255, np.uint8)
    low_bytes = -(-count * shift // 8)
    lows = np.empty(low_bytes + 8, np.uint8)
    escaped, gap_bytes, paired = write_changes(
        found.positions, found.olds, found.news, count, shift, _SHARES.get(coding, ESCAPES_OF_PAIRS),
        steps, pairs, escapes, gaps, lows,
    )  # fmt: skip
    return Planes(
        "pairs" if paired else "gap", count, escaped, shift, gap_bytes, compress_plane(gaps[:gap_bytes], level),
        lows[:low_bytes].tobytes(), compress_plane(pairs if paired else steps, level),
        compress_plane(parted_bytes(escapes[:escaped]) if paired else escapes[:escaped], level, noisy=False),
    )  # fmt: skip


def _dense(found: Found, level: int) -> Planes:
    steps, escapes = np.empty(len(found), np.uint8), np.empty(len(found), found.olds.dtype)
    escaped = code_steps(found.olds, found.news, len(found), False, steps, escapes)
    plane = np.zeros(found.length, np.uint8)
    spread_steps(found.positions, len(found), steps, plane)
    return Planes(
        "dense", len(found), escaped,
        steps=compress_plane(plane, level), escapes=compress_plane(escapes[:escaped], level, noisy=False),
    )  # fmt: skip


def _whole(found: Found, level: int, values: npt.NDArray[Any]) -> Planes:
    """All new bits: the old ones with the changes found, so that a source in motion cannot add to them."""
    values[found.positions] = found.news
    return Planes("whole", found.length, found.length, escapes=compress_plane(values, level, noisy=False))


def gap_shift(length: int, count: int) -> int:
    """How many low bits of each gap are split off: what brings the mean gap down to `HIGH_GAP`, rounded down.

    The low bits of long gaps are noise, which no coder shortens; what is left then fits one byte and a short
    Huffman table.
    """
    return max(0, math.floor(math.log2(length / count / HIGH_GAP)) + 1) if length > HIGH_GAP * count else 0
