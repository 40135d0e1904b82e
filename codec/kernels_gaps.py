"""Positions as gaps: their high bits a plane of bytes, their low bits another one."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .jit import kernel, load, store
from .jit_code import part_gaps

Bytes = npt.NDArray[np.uint8]

_BYTES: Final = 0x0101010101010101
_WORD: Final = np.uint64(0)


@kernel
def write_gaps(positions: npt.NDArray[np.uint32], count: int, shift: int, gaps: Bytes, lows: Bytes) -> int:
    """Code ascending positions [count] into the planes `gaps` and `lows`; bytes of `gaps` used.

    `gaps` must hold count + (last position >> shift) // 255 bytes, `lows` count * shift / 8, rounded up, and 8 more.
    """
    done, used = 0, 0
    if shift <= 8:  # eight at a time: their low bits fill `shift` bytes
        done, used = write_eights(positions, count, shift, gaps, lows)
    low, pending, held = done * shift // 8, np.uint64(0), 0
    mask = (np.int64(1) << shift) - 1
    expected = np.int64(0)  # position of a change without a gap
    if done:
        expected = np.int64(positions[done - 1]) + 1
    for i in range(done, count):
        gap = np.int64(positions[i]) - expected
        expected = np.int64(positions[i]) + 1
        used = write_high(gap >> shift, gaps, used)
        pending |= np.uint64(gap & mask) << np.uint64(held)
        held += shift
        while held >= 8:
            lows[low] = pending & np.uint64(255)
            low += 1
            pending >>= np.uint64(8)
            held -= 8
    if held > 0:
        lows[low] = pending
    return used


@kernel
def write_eights(positions: npt.NDArray[np.uint32], count: int, shift: int, gaps: Bytes, lows: Bytes) -> Any:
    """As `write_gaps`, for a shift of at most 8, as far as there are eight changes: (changes coded, bytes of gaps)."""
    used, before, address = 0, np.uint32(0xFFFFFFFF), np.uint64(positions.ctypes.data)
    for i in range(0, count - 7, 8):
        highs, packed, fits = part_gaps(address + np.uint64(4 * i), before, shift)
        store(np.uint64(lows.ctypes.data) + np.uint64(i * shift >> 3), packed)
        if fits:
            store(np.uint64(gaps.ctypes.data) + np.uint64(used), highs)
            used += 8
        else:
            expected = np.int64(positions[i - 1]) + 1 if i else np.int64(0)
            for k in range(8):
                used = write_high((np.int64(positions[i + k]) - expected) >> shift, gaps, used)
                expected = np.int64(positions[i + k]) + 1
        before = positions[i + 7]
    return count // 8 * 8, used


@kernel
def write_high(high: Any, gaps: Bytes, used: int) -> int:
    """Append the high bits of a gap; bytes used then."""
    while high >= 255:
        gaps[used] = 255
        used += 1
        high -= 255
    gaps[used] = high
    return used + 1


@kernel
def read_some(
    gaps: Bytes,
    lows: Bytes,
    shift: int,
    used: int,
    position: Any,
    first: int,
    positions: npt.NDArray[np.int64],
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
        many = min(8, size - i) if (shift <= 8 and at + 8 <= lows.size) or shift == 0 else 1
        low = np.uint64(0)
        if many > 1 and shift > 0:  # so far by eights: at the beginning of a byte
            low = load(np.uint64(lows.ctypes.data) + np.uint64(at), _WORD)
        elif shift > 0:
            for k in range(at, min(at + 4, lows.size)):
                low |= np.uint64(lows[k]) << np.uint64(8 * (k - at))
            low >>= np.uint64(bit & 7)
        if many == 8 and used + 8 <= gaps.size:
            highs = load(np.uint64(gaps.ctypes.data) + np.uint64(used), _WORD)
            full = (~highs - np.uint64(_BYTES)) & highs & np.uint64(_BYTES << 7)
            if full == np.uint64(0):  # none is 255
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
def read_gaps(
    gaps: Bytes, lows: Bytes, shift: int, length: int, start: int, positions: npt.NDArray[np.int64]
) -> bool:
    """Decode positions [count], plus `start`; False unless planes are used up, positions below `length`.

    `lows` must have count * shift / 8 bytes, rounded up.
    """
    used, position = read_some(gaps, lows, shift, 0, start - 1, 0, positions)
    rest = positions.size * shift & 7
    return used == gaps.size and position < start + length and (rest == 0 or lows[-1] >> rest == 0)
