"""From the planes of coding `gap` to new bits, in one pass: what is to be read is fetched while gaps are added up."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .jit import kernel, load, prefetch, width
from .kernels import digest_change

BLOCK: Final = 128
"""Changes whose old bits are on their way while as many others are worked on. Anything from 64 to 512 is as fast."""

GAPS_FAULT: Final = 4
"""The gaps do not lead to as many elements of the row. Smaller numbers are those of `planes.apply_steps`."""

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]

_BYTES: Final = 0x0101010101010101
_WORD: Final = np.uint64(0)


@kernel
def read_some(
    gaps: Bytes, lows: Bytes, shift: int, used: int, position: Any, first: int, positions: Ints
) -> Any:
    """(gap bytes used, last position): positions of the changes `first` on, the one before which is at `position`.

    (-1, 0) if the gaps end before. `first` must be a multiple of 8; positions: the result, of any size. Nothing but the
    ends of both planes is checked.
    """
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    i, size = 0, positions.size
    while i < size:
        bit = (first + i) * shift
        at = bit >> 3
        many = min(8, size - i) if (shift <= 7 and at + 8 <= lows.size) or shift == 0 else 1
        low = np.uint64(0)
        if many > 1 and shift > 0:
            low = load(np.uint64(lows.ctypes.data) + np.uint64(at), _WORD) >> np.uint64(bit & 7)
        elif shift > 0:
            for k in range(at, min(at + 4, lows.size)):
                low |= np.uint64(lows[k]) << np.uint64(8 * (k - at))
            low >>= np.uint64(bit & 7)
        if many == 8 and used + 8 <= gaps.size:
            highs = load(np.uint64(gaps.ctypes.data) + np.uint64(used), _WORD)
            plain = (~highs - np.uint64(_BYTES)) & highs & np.uint64(_BYTES << 7) == np.uint64(
                0
            )  # none is 255
            if plain:
                for k in range(8):
                    high = (highs >> np.uint64(8 * k)) & np.uint64(255)
                    position += np.int64((high << np.uint64(shift)) | (low & mask)) + 1
                    positions[i + k] = position
                    low >>= np.uint64(shift)
                used += 8
                i += 8
                continue
        for k in range(many):
            high = np.int64(0)
            while used < gaps.size and gaps[used] == 255:
                high += 255
                used += 1
            if used == gaps.size:
                return -1, 0
            high += gaps[used]
            used += 1
            position += ((high << shift) | np.int64(low & mask)) + 1
            positions[i + k] = position
            low >>= np.uint64(shift)
        i += many
    return used, position


@kernel
def apply_some(steps: Bytes, escapes: Bits, used: int, olds: Bits, news: Bits) -> int:
    """New bits from old ones; escapes used up to there, or minus the number of what is wrong (`planes.apply_steps`)."""
    for i in range(steps.size):
        step = np.int64(steps[i])
        if step == 0:
            return -1
        if step == 255:
            if used == escapes.size:
                return -2
            if escapes[used] == olds[i]:
                return -3
            news[i] = escapes[used]
            used += 1
        else:
            news[i] = olds[i] + np.uint64((step >> 1) ^ -(step & 1))
    return used


@kernel
def locate(addresses: Words, starts: Ints, tensor: int, positions: Ints, places: Words, tag: Any) -> int:
    """Byte address of the element at each of the ascending positions, which is fetched; tensor of the last one."""
    for i in range(positions.size):
        while positions[i] >= starts[tensor + 1]:
            tensor += 1
        places[i] = addresses[tensor] + np.uint64((positions[i] - starts[tensor]) * width(tag))
        prefetch(places[i])
    return tensor


@kernel
def change_by_gaps(
    addresses: Words, starts: Ints, seeds: Words, first: int, start: int, length: int, shift: int,
    gaps: Bytes, lows: Bytes, steps: Bytes, escapes: Bits, positions: Ints, news: Bits, tag: Any,
) -> Any:  # fmt: skip
    """(0 or what is wrong, lane 0, lane 1): decode a row against memory, and digest the change. Writes no memory.

    Args:
        addresses, starts, seeds: of the memory and the space.
        first: tensor in which the row begins.
        start, length: the row; flat.
        shift: the row's gap_shift.
        gaps, lows, steps, escapes: its planes, steps [n]; lows of n * shift bits in bytes.
        positions, news: [n], the result: flat.
        tag: of the space.
    """
    n = steps.size
    places, olds = np.empty((2, BLOCK), np.uint64), np.empty(BLOCK, news.dtype)
    lane0, lane1 = np.uint64(0), np.uint64(0)
    used, escaped, position, tensor, owner = 0, 0, start - 1, first, first
    for begin in range(0, n + BLOCK, BLOCK):
        if begin < n:  # this block's old bits are fetched while the one before is worked on
            here = positions[begin : min(begin + BLOCK, n)]
            used, position = read_some(gaps, lows, shift, used, position, begin, here)
            if used < 0 or position >= start + length:
                return GAPS_FAULT, lane0, lane1
            tensor = locate(addresses, starts, tensor, here, places[begin // BLOCK % 2], tag)
        if begin > 0:
            last = begin - BLOCK
            size = min(BLOCK, n - last)
            where = places[last // BLOCK % 2]
            for k in range(size):
                olds[k] = load(where[k], tag)
            escaped = apply_some(steps[last : last + size], escapes, escaped, olds, news[last : last + size])
            if escaped < 0:
                return -escaped, lane0, lane1
            at = positions[last : last + size]
            while at[0] >= starts[owner + 1]:
                owner += 1
            part0, part1 = digest_change(starts, seeds, owner, at, 0, olds, news[last : last + size], size)
            lane0 += part0
            lane1 += part1
    rest = n * shift & 7
    if used != gaps.size or (rest and lows[-1] >> rest):
        return GAPS_FAULT, lane0, lane1
    return 0 if escaped == escapes.size else 2, lane0, lane1
