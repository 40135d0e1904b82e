"""Gap and step planes, and how a plane is compressed and, with bounds, expanded."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from weightcast.schemas.errors import Corrupt
from weightcast.schemas.frames import expand, stated_bytes

from .jit import kernel, load, store
from .kernels import code_steps

MIN_COMPRESSED_BYTES: Final = 64
"""Planes below this stay raw: a frame's headers and table take about as much as it could save."""

BLOCK: Final = 128
"""Changes that are decoded at a time. Their old bits are on their way while as many others are worked on: anything
from 64 to 512 is as fast."""

STEPPED: Final = 1024
"""Elements that are stepped on at a time, at most."""

Bytes = npt.NDArray[np.uint8]

_BYTES: Final = 0x0101010101010101
_WORD: Final = np.uint64(0)


MOST_STEP: Final = 254
"""The longest step that a byte holds, in zigzag; the next number says that it is among the escapes."""

MOST_OF_PAIR: Final = 14
"""The same of half a byte: seven units up or down."""

ESCAPES_OF_PAIRS: Final = 1 / 16
"""Share of changes that may be escaped in the coding `pairs`, about where it takes as many bytes as `gap`. On weights
that AdamW trains it is 0.02 to 0.03."""


@kernel
def write_changes(
    positions: npt.NDArray[np.uint32], olds: npt.NDArray[Any], news: npt.NDArray[Any], count: int, shift: int,
    most: int, steps: Bytes, pairs: Bytes, escapes: npt.NDArray[Any], gaps: Bytes, lows: Bytes,
) -> Any:  # fmt: skip
    """`code_steps` and `write_gaps`: (escapes, bytes of `gaps`, whether the steps are in `pairs`, two in a byte).

    In one call, since several would contend for the interpreter as often. `most` is the longest step, or 0: then steps
    are put in pairs, unless more than `ESCAPES_OF_PAIRS` would have to be escaped.
    """
    limit = most if most > 0 else MOST_OF_PAIR
    escaped = code_steps(olds, news, count, limit, limit == MOST_OF_PAIR, steps, escapes)
    if most == 0 and escaped > ESCAPES_OF_PAIRS * count:
        limit = MOST_STEP
        escaped = code_steps(olds, news, count, limit, False, steps, escapes)
    paired = limit == MOST_OF_PAIR
    if paired:
        join_pairs(steps, pairs)
    return escaped, write_gaps(positions, count, shift, gaps, lows), paired


def parted_bytes(elements: npt.NDArray[Any]) -> Bytes:
    """The lowest bytes of all elements, then the next lowest, and so on: of small numbers the higher ones repeat."""
    return np.ascontiguousarray(elements.view(np.uint8).reshape(-1, elements.itemsize).T).reshape(-1)


def joined_bytes(data: Bytes, width: int) -> Bytes:
    """Undo `parted_bytes`."""
    return np.ascontiguousarray(data.reshape(width, -1).T).reshape(-1)


@kernel
def join_pairs(steps: Bytes, pairs: Bytes) -> None:
    """Put two steps in a byte, the first one in its lower half. None may be above 15."""
    for i in range(steps.size >> 1):
        pairs[i] = steps[2 * i] | (steps[2 * i + 1] << 4)
    if steps.size & 1:
        pairs[-1] = steps[-1]


@kernel
def part_pairs(pairs: Bytes, steps: Bytes) -> Any:
    """Undo `join_pairs`, to step bytes: 15 becomes 255. False if a half byte is left over and not 0."""
    for i in range(steps.size >> 1):
        low, high = pairs[i] & 15, pairs[i] >> 4
        steps[2 * i] = low + (240 if low == 15 else 0)
        steps[2 * i + 1] = high + (240 if high == 15 else 0)
    if steps.size & 1:
        low = pairs[-1] & 15
        steps[-1] = low + (240 if low == 15 else 0)
        return pairs[-1] < 16
    return True


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
    used, expected = 0, np.int64(0)
    mask = (np.uint64(1) << np.uint64(shift)) - np.uint64(1)
    for i in range(0, count - 7, 8):
        highs, packed, most = np.uint64(0), np.uint64(0), np.uint64(0)
        before = expected
        for k in range(8):
            gap = np.uint64(np.int64(positions[i + k]) - expected)
            expected = np.int64(positions[i + k]) + 1
            high = gap >> np.uint64(shift)
            most |= high + np.uint64(1)  # reaches 256 if one does not fit a byte
            highs |= high << np.uint64(8 * k)
            packed |= (gap & mask) << np.uint64(shift * k)
        store(np.uint64(lows.ctypes.data) + np.uint64(i * shift >> 3), packed)
        if most < np.uint64(256):
            store(np.uint64(gaps.ctypes.data) + np.uint64(used), highs)
            used += 8
            continue
        for k in range(8):
            used = write_high((np.int64(positions[i + k]) - before) >> shift, gaps, used)
            before = np.int64(positions[i + k]) + 1
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


@kernel
def spread_steps(positions: npt.NDArray[np.uint32], count: int, steps: Bytes, out: Bytes) -> None:
    """out[positions[i]] = steps[i]: the dense plane from the steps of the changes. `out` must be zeroed."""
    for i in range(count):
        out[positions[i]] = steps[i]


@kernel
def find_some(plane: Bytes, at: int, start: int, positions: npt.NDArray[np.int64], steps: Bytes) -> int:
    """Fill the outputs with the non-zero bytes of `plane` from `at` on and their positions, plus `start`.

    Where it ended. There must be as many.
    """
    found = 0
    while found < positions.size and at < plane.size:
        positions[found], steps[found] = at + start, plane[at]
        found += plane[at] != 0
        at += 1
    return at


@kernel
def escaped_bits(escapes: npt.NDArray[Any], used: int, relative: bool, old: Any) -> Any:
    """(0 or what is wrong, as `apply_steps` says; new bits) of an element that is escaped."""
    if used == escapes.size:
        return 2, old
    bits = escapes[used]
    if relative:
        step = np.uint64(bits)
        bits = escapes.dtype.type(np.uint64(old) + ((step >> np.uint64(1)) ^ -(step & np.uint64(1))))
    return 3 if bits == old else 0, bits


@kernel
def apply_some(
    steps: Bytes, escapes: npt.NDArray[Any], used: int, relative: bool, olds: npt.NDArray[Any], news: npt.NDArray[Any]
) -> Any:  # fmt: skip
    """As `apply_marks`, of at most `STEPPED` changes, none of which may have the step 0."""
    none = 0
    for i in range(steps.size):
        none += steps[i] == 0
    if none > 0:
        return -1
    return apply_marks(steps, escapes, used, relative, olds, news)


@kernel
def apply_marks(
    marks: Bytes, escapes: npt.NDArray[Any], used: int, relative: bool, olds: npt.NDArray[Any], news: npt.NDArray[Any]
) -> Any:  # fmt: skip
    """New bits from old ones and at most `STEPPED` step bytes, of which 0 leaves an element as it is.

    `relative`: escapes are steps in zigzag, not bits. Escapes used up to there, or minus the number of what is wrong
    (`apply_steps`).
    """
    for i in range(marks.size):  # without a branch, so that it becomes vectors
        step = np.int64(marks[i])
        news[i] = olds[i] + np.uint64((step >> 1) ^ -(step & 1))
    escaped, places = 0, np.empty(STEPPED, np.int64)
    for i in range(marks.size):  # no processor predicts where they are
        places[escaped] = i
        escaped += marks[i] == 255
    for i in places[:escaped]:
        fault, news[i] = escaped_bits(escapes, used, relative, olds[i])
        if fault:
            return -fault
        used += 1
    return used


@kernel
def apply_steps(
    steps: Bytes, escapes: npt.NDArray[Any], relative: bool, olds: npt.NDArray[Any], news: npt.NDArray[Any]
) -> Any:
    """New bits from old ones, as `apply_some`; 0, or what is wrong.

    1: a step is zero; 2: the escapes are not exactly used up; 3: an escape changes nothing.
    """
    used = 0
    for i in range(0, steps.size, BLOCK):
        j = min(i + BLOCK, steps.size)
        used = apply_some(steps[i:j], escapes, used, relative, olds[i:j], news[i:j])
        if used < 0:
            return -used
    return 0 if used == escapes.size else 2


_HUFFMAN: Final = {
    "window_log": 17,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
    "strategy": zstandard.STRATEGY_FAST,
}
"""As close to Huffman coding alone as zstd comes: gaps and steps repeat by chance only, and each match that
is taken costs more than it saves. Against level 1 on settled AdamW data: steps 2.28 instead of 2.48 bits,
gaps the same, in less time (`benchmarks/parts/race.py`)."""


class _PerThread(threading.local):
    """zstd contexts, which must not be shared between threads that run at once."""

    def __init__(self) -> None:
        self.compressors: dict[int | None, zstandard.ZstdCompressor] = {}

    def compressor(self, level: int | None) -> zstandard.ZstdCompressor:
        """The compressor of a level; None stands for `_HUFFMAN`."""
        if level not in self.compressors:
            parameters = zstandard.ZstdCompressionParameters(**_HUFFMAN)
            self.compressors[level] = (
                zstandard.ZstdCompressor(compression_params=parameters)
                if level is None
                else zstandard.ZstdCompressor(level=level)
            )
        return self.compressors[level]


_contexts = _PerThread()


def compress_plane(plane: npt.NDArray[Any], level: int, *, noisy: bool = True) -> bytes:
    """`plane` raw or as one frame, whichever is shorter; the same bytes give the same result.

    Args:
        plane: contiguous.
        level: of zstd.
        noisy: the plane is gaps or steps, for which level 1 does not look for repetitions.
    """
    raw = plane.view(np.uint8).data
    if len(raw) < MIN_COMPRESSED_BYTES:
        return bytes(raw)
    frame = _contexts.compressor(None if noisy and level == 1 else level).compress(raw)
    return frame if len(frame) < len(raw) else bytes(raw)


def expand_plane(data: bytes, raw_bytes: int, tensor: str, plane: str) -> Bytes:
    """Undo `compress_plane`. Nothing is allocated before the frame's stated size has been found right.

    Raises:
        Corrupt: not `raw_bytes` raw bytes nor one frame that states and has exactly that content.
    """
    if len(data) == raw_bytes:
        return np.frombuffer(data, np.uint8)
    try:
        stated = stated_bytes(data) if len(data) < raw_bytes else -1
        if stated == raw_bytes:
            return np.frombuffer(expand(data, raw_bytes), np.uint8)
        found = f"a content size of {stated}" if stated >= 0 else "no single frame"
    except ValueError as error:
        found = str(error)
    raise Corrupt(
        f"row of tensor {tensor!r}: plane {plane} of {len(data)} bytes, expected {raw_bytes} raw bytes "
        f"or one shorter zstd frame of them, found {found}"
    )
