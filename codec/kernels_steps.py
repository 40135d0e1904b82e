"""Steps in the coding `class`: an adaptive binary arithmetic coder (docs/format.md, coded steps).

Common arguments: `chances` uint32 [CHANCES], of each decision the chance of a 1 in 2^-16, and above it how often it
was made, up to `OFTEN`; the coder's interval, from `low` to `low + span`; `used`, bytes of the plane that are settled.
Of an interval it is the width that the next decision waits for, so that it is kept, and not where the interval ends.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .jit import kernel, leading_zeros, load, store

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]
Chances = npt.NDArray[np.uint32]

HALF: Final = 1 << 15
"""The chance of a 1 that a decision starts with, in 2^-16."""

FIRST_ONE: Final = 59_000
"""The same of a step being one unit: nine in ten are."""

CHANCE_RATE: Final = 7
"""A chance follows the decisions made by it by 2^-7 of the difference, once it has seen as many."""

OFTEN: Final = (1 << CHANCE_RATE) - 1
"""So often a decision is counted: from then on its chance follows at that rate."""

SUM: Final = 7
"""The sum of directions in a line is held within this on both sides."""

SCALES: Final = 32
"""Exponents that steps are told apart by."""

ONE: Final = SUM + 1
LENGTH: Final = ONE + SCALES
LENGTHS: Final = 32
CHANCES: Final = LENGTH + LENGTHS
"""Chances: of a direction, from 0 on; of a step of one unit, from ONE on; of a larger one's length, from LENGTH on."""

MIDDLE: Final = 14
"""Where among the chances of lengths the length is that equals the scale: steps double from exponent to exponent."""

ROOM: Final = 128
"""Bytes that one change may take or a reader may run past the end, at width 2: 30 bits, each of which may settle
4 bytes at the very worst, and 4 bytes ahead."""

NOTED: Final = 1024
"""Changes that are looked at before they are coded: few, so that what is noted of them stays in the first cache."""

_WORD: Final = 0xFFFFFFFF


@kernel
def swapped(word: np.uint64) -> np.uint64:
    """The low 32 bits with their bytes in reverse order."""
    a, b, c = np.uint64(0xFF), np.uint64(8), np.uint64(24)
    return (
        ((word & a) << c)
        | (((word >> b) & a) << np.uint64(16))
        | (((word >> np.uint64(16)) & a) << b)
        | ((word >> c) & a)
    )


@kernel
def put(bit: np.uint64, chance: Any, out: np.uint64, low: np.uint64, span: np.uint64, used: np.uint64) -> Any:
    """Code one bit: (low, span, used) after it."""
    lower = (span * np.uint64(chance)) >> np.uint64(16)
    upper = span - np.uint64(1) - lower
    is_one = bit != np.uint64(0)
    low, span = (low if is_one else low + lower + np.uint64(1)), (lower if is_one else upper)
    # Mostly not: a guess is faster than a shift by the outcome.
    while (low ^ (low + span)) >> np.uint64(24) == np.uint64(0):
        store(out + used, np.uint8(low >> np.uint64(24)))
        used += np.uint64(1)
        low = (low << np.uint64(8)) & np.uint64(_WORD)
        span = (span << np.uint64(8)) | np.uint64(0xFF)
    return low, span, used


@kernel
def get(chance: Any, data: np.uint64, low: Any, span: Any, code: Any, used: Any) -> Any:
    """Undo `put`: (bit, low, span, code, used). `code` has the four bytes of the plane from `used` on."""
    lower = (span * np.uint64(chance)) >> np.uint64(16)
    upper = span - np.uint64(1) - lower
    is_one = code - low <= lower
    low, span = (low if is_one else low + lower + np.uint64(1)), (lower if is_one else upper)
    while (low ^ (low + span)) >> np.uint64(24) == np.uint64(0):  # as in `put`
        low = (low << np.uint64(8)) & np.uint64(_WORD)
        span = (span << np.uint64(8)) | np.uint64(0xFF)
        more = np.uint64(load(data + used + np.uint64(4), np.uint8(0)))
        code = ((code << np.uint64(8)) & np.uint64(_WORD)) | more
        used += np.uint64(1)
    return np.uint64(is_one), low, span, code, used


@kernel
def adapt(chances: Chances, index: Any, bit: np.uint64) -> None:
    """Move the chance of a decision towards how it was made."""
    both = chances[index]
    chance, is_one = both & np.uint32(0xFFFF), bit != np.uint64(0)
    if both >= np.uint32(OFTEN << 16):  # nearly always, and shorter
        up, down = (np.uint32(65536) - chance) >> np.uint32(CHANCE_RATE), chance >> np.uint32(CHANCE_RATE)
        chances[index] = both + up if is_one else both - down
    else:
        seen = np.int64(both >> np.uint32(16)) + 1
        rate = np.uint32(min(np.int64(CHANCE_RATE), 64 - leading_zeros(np.uint64(seen))))
        moved = chance + ((np.uint32(65536) - chance) >> rate) if is_one else chance - (chance >> rate)
        chances[index] = np.uint32(seen << 16) | moved


@kernel
def code_bit(
    bit: np.uint64,
    chances: Chances,
    index: Any,
    out: np.uint64,
    low: np.uint64,
    span: np.uint64,
    used: np.uint64,
) -> Any:
    """`put` by a chance that is kept, and `adapt` it."""
    low, span, used = put(bit, chances[index] & np.uint32(0xFFFF), out, low, span, used)
    adapt(chances, index, bit)
    return low, span, used


@kernel
def read_bit(
    chances: Chances,
    index: Any,
    data: np.uint64,
    low: np.uint64,
    span: np.uint64,
    code: np.uint64,
    used: np.uint64,
) -> Any:
    """Undo `code_bit`."""
    bit, low, span, code, used = get(chances[index] & np.uint32(0xFFFF), data, low, span, code, used)
    adapt(chances, index, bit)
    return bit, low, span, code, used


@kernel
def scale_of(old: np.uint64, shift: np.uint64, mask: np.uint64, top: int) -> Any:
    """Which exponent the element had: 0 above the row's top, 1 at it, and on downwards. The rest: `exponent`."""
    return min(max(top + 1 - np.int64((old >> shift) & mask), 0), SCALES - 1)


@kernel
def end_of_line(position: Any, line: int, phase: int) -> Any:
    """Where the line of a position ends, relative to the row; see `write_steps`."""
    return (np.int64(np.uint64(position + phase) // np.uint64(line)) + 1) * line - phase


@kernel
def length_at(scale: Any, bits: Any) -> Any:
    """Which chance says whether a step at this scale is longer than so many bits."""
    return LENGTH + min(max(bits - scale + MIDDLE, 0), LENGTHS - 1)


@kernel
def write_more(
    more: Any, scale: Any, width: Any, chances: Chances, out: Any, low: Any, span: Any, used: Any
) -> Any:
    """Code how many units a step has beyond the first, at least 1: (low, span, used)."""
    bits = 64 - leading_zeros(more)
    for b in range(1, np.int64(width) - 1):
        index = length_at(scale, b)
        low, span, used = code_bit(np.uint64(bits > b), chances, index, out, low, span, used)
        if bits == b:
            break
    for b in range(bits - 2, -1, -1):
        bit = (more >> np.uint64(b)) & np.uint64(1)
        low, span, used = put(bit, np.uint64(HALF), out, low, span, used)
    return low, span, used


@kernel
def read_more(
    scale: Any, width: Any, chances: Chances, data: Any, low: Any, span: Any, code: Any, used: Any
) -> Any:
    """Undo `write_more`: (more, low, span, code, used)."""
    bits = np.int64(1)
    while bits < np.int64(width) - 1:
        index = length_at(scale, bits)
        bit, low, span, code, used = read_bit(chances, index, data, low, span, code, used)
        if bit == np.uint64(0):
            break
        bits += 1
    more = np.uint64(1)
    for _ in range(bits - 1):
        bit, low, span, code, used = get(np.uint64(HALF), data, low, span, code, used)
        more = (more << np.uint64(1)) | bit
    return more, low, span, code, used


@kernel
def note(olds: Bits, news: Bits, exponent: Ints, notes: Bytes) -> None:
    """What is coded of most steps, a byte each, in a loop without branches.

    Bit 0: the value falls; bit 1: by one unit, as it does or rises mostly; above them its scale.
    """
    sign = np.uint64(olds.itemsize * 8 - 1)
    keep = (np.uint64(2) << sign) - np.uint64(1)
    shift, mask, top = np.uint64(exponent[0]), np.uint64(exponent[1]), exponent[2]
    for i in range(olds.size):
        old = np.uint64(olds[i])
        step = (np.uint64(news[i]) - old) & keep
        falls = (step ^ old) >> sign
        is_one = np.uint64((step == np.uint64(1)) | (step == keep))
        scale = np.uint64(scale_of(old, shift, mask, top))
        notes[i] = falls | (is_one << np.uint64(1)) | (scale << np.uint64(2))


@kernel
def write_steps(
    positions: Any, olds: Bits, news: Bits, count: int, exponent: Ints, line: int, phase: int,
    chances: Chances, plane: Bytes,
) -> Any:  # fmt: skip
    """Code the steps of changes in a row; bytes of `plane`, or -1 if they do not fit it.

    Args:
        positions: ascending, relative to the row.
        line: elements in a line, at the end of which the sum of directions is forgotten.
        phase: elements of the first line that lie before the row.
    """
    out = np.uint64(plane.ctypes.data)
    low, span, used = np.uint64(0), np.uint64(_WORD), np.uint64(0)
    sign = np.uint64(olds.itemsize * 8 - 1)
    keep = (np.uint64(2) << sign) - np.uint64(1)
    total: Any = np.int64(0)
    end = end_of_line(np.int64(0), line, phase)
    notes = np.empty(NOTED, np.uint8)
    for begin in range(0, count, NOTED):
        part = min(NOTED, count - begin)
        note(olds[begin : begin + part], news[begin : begin + part], exponent, notes)
        for i in range(begin, begin + part):
            if np.int64(used) + ROOM > plane.size:
                return -1
            if np.int64(positions[i]) >= end:
                total = np.int64(0)
                end = end_of_line(np.int64(positions[i]), line, phase)
            noted = np.uint64(notes[i - begin])
            falls, is_one, scale = noted & np.uint64(1), noted & np.uint64(2), np.int64(noted >> np.uint64(2))
            bit = falls ^ np.uint64(total >= 0)
            low, span, used = code_bit(bit, chances, abs(total), out, low, span, used)
            total = min(max(total + 1 - 2 * np.int64(falls), -SUM), SUM)
            low, span, used = code_bit(is_one, chances, ONE + scale, out, low, span, used)
            if is_one == np.uint64(0):
                step = (np.uint64(news[i]) - np.uint64(olds[i])) & keep
                size = step if step >> sign == np.uint64(0) else (np.uint64(0) - step) & keep
                low, span, used = write_more(
                    size - np.uint64(1), scale, sign + np.uint64(1), chances, out, low, span, used
                )
    plane[used] = (low >> np.uint64(24)) + np.uint64(1)
    return np.int64(used) + 1


@kernel
def read_steps(
    positions: Ints, values: Bits, exponent: Ints, line: int, phase: int,
    chances: Chances, plane: Bytes, size: int,
) -> Any:  # fmt: skip
    """Undo `write_steps`: turn old bits into new ones, in place. False if the plane is not what it would have made.

    Args:
        positions: relative to the row.
        plane: of `size` bytes, and ROOM zeros more.
    """
    data = np.uint64(plane.ctypes.data)
    low, span, used = np.uint64(0), np.uint64(_WORD), np.uint64(0)
    code = swapped(np.uint64(load(data, np.uint32(0))))
    width = np.uint64(values.itemsize * 8)
    sign = width - np.uint64(1)
    shift, mask, top = np.uint64(exponent[0]), np.uint64(exponent[1]), exponent[2]
    total: Any = np.int64(0)
    end = end_of_line(np.int64(0), line, phase)
    for i in range(positions.size):
        if np.int64(used) >= size:
            return False
        if positions[i] >= end:
            total = np.int64(0)
            end = end_of_line(positions[i], line, phase)
        old = np.uint64(values[i])
        bit, low, span, code, used = read_bit(chances, abs(total), data, low, span, code, used)
        rises = (bit != np.uint64(0)) != (total < 0)
        total = min(max(total + (1 if rises else -1), -SUM), SUM)
        scale = scale_of(old, shift, mask, top)
        is_one, low, span, code, used = read_bit(chances, ONE + scale, data, low, span, code, used)
        step = np.uint64(1)
        if is_one == np.uint64(0):
            more, low, span, code, used = read_more(scale, width, chances, data, low, span, code, used)
            step += more
        values[i] = old + step if rises == ((old >> sign) == np.uint64(0)) else old - step
    return np.int64(used) + 1 == size and np.uint64(plane[used]) == (low >> np.uint64(24)) + np.uint64(1)
