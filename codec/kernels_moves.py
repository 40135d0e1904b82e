"""How far each changed element moves: step bytes, two steps in a byte, and what neither holds.

A row is `paired` in coding `pairs`: two steps in a byte, and among the escapes longer steps in zigzag. In `gap` and
`dense` a step has a byte of its own, and escapes are new bits.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .jit import GROUP, kernel, width
from .jit_code import note_bytes
from .jit_find import COMPRESSES
from .kernels_gaps import write_gaps

MOST_STEP: Final = 254
"""The longest step that a byte holds, in zigzag; the next number says that it is among the escapes."""

MOST_OF_PAIR: Final = 14
"""The same of half a byte: seven units up or down."""

ESCAPES_OF_PAIRS: Final = 1 / 16
"""Share of changes that may be escaped in the coding `pairs`, about where it takes as many bytes as `gap`. On weights
that AdamW trains it is 0.02 to 0.03."""

STEPPED: Final = 1024
"""Elements that are stepped on at a time, at most."""

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]


@kernel
def write_changes(
    positions: npt.NDArray[np.uint32], olds: Bits, news: Bits, count: int, shift: int, share: float,
    steps: Bytes, pairs: Bytes, escapes: Bits, gaps: Bytes, lows: Bytes,
) -> Any:  # fmt: skip
    """`code_steps` and `write_gaps`: (escapes, bytes of `gaps`, whether the steps are in `pairs`, two in a byte).

    In one call, since several would contend for the interpreter as often. Steps are put in pairs unless more than
    `share` of them would have to be escaped.
    """
    escaped = code_steps(olds, news, count, True, steps, escapes)
    paired = escaped <= share * count
    if paired:
        join_pairs(steps, pairs)
    else:
        escaped = code_steps(olds, news, count, False, steps, escapes)
    return escaped, write_gaps(positions, count, shift, gaps, lows), paired


@kernel
def code_steps(olds: Bits, news: Bits, count: int, paired: bool, steps: Bytes, escapes: Bits) -> int:
    """Write the step of each change, 15 or 255 for those that are escaped; how many are."""
    beyond = np.uint64((MOST_OF_PAIR if paired else MOST_STEP) + 1)
    for i in range(count):  # without a branch, so that it becomes vectors
        steps[i] = min(zigzag(olds[i], news[i]), beyond)
    escaped, far = 0, np.empty(STEPPED + GROUP, np.uint32)
    for begin in range(0, count, STEPPED):
        found = find_bytes(steps[begin : min(begin + STEPPED, count)], np.uint8(beyond), far)
        for i in far[:found]:
            at = begin + np.int64(i)
            escapes[escaped] = zigzag(olds[at], news[at]) if paired else np.uint64(news[at])
            escaped += 1
    return escaped


@kernel
def zigzag(old: Any, new: Any) -> np.uint64:
    """The step between two elements of a width, its sign lowest."""
    unused = np.uint64(64 - 8 * width(old))
    wrapped = (np.uint64(new) - np.uint64(old)) << unused  # the sign of the step, as 64 bits of it
    return ((wrapped << np.uint64(1)) ^ np.uint64(np.int64(wrapped) >> 63)) >> unused


@kernel
def find_bytes(plane: Bytes, byte: np.uint8, out: npt.NDArray[np.uint32]) -> int:
    """Write where `plane` has `byte` to `out`, which has `GROUP` entries more than that may be; how often it has."""
    found = done = 0
    if COMPRESSES:
        done = plane.size // GROUP * GROUP
        found = note_bytes(np.uint64(plane.ctypes.data), done // GROUP, byte, np.uint64(out.ctypes.data))
    for i in range(done, plane.size):  # no processor predicts where they are
        out[found] = i
        found += plane[i] == byte
    return found


@kernel
def join_pairs(steps: Bytes, pairs: Bytes) -> None:
    """Put two steps in a byte, the first one in its lower half. None may be above 15."""
    for i in range(steps.size >> 1):
        pairs[i] = steps[2 * i] | (steps[2 * i + 1] << 4)
    if steps.size & 1:
        pairs[-1] = steps[-1]


@kernel
def part_pairs(pairs: Bytes, steps: Bytes) -> None:
    """Undo `join_pairs`, to step bytes: 15 becomes 255. A half byte that is left over is not looked at."""
    for i in range(steps.size >> 1):
        low, high = pairs[i] & 15, pairs[i] >> 4
        steps[2 * i] = low + (240 if low == 15 else 0)
        steps[2 * i + 1] = high + (240 if high == 15 else 0)
    if steps.size & 1:
        low = pairs[steps.size >> 1] & 15
        steps[-1] = low + (240 if low == 15 else 0)


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
def escaped_bits(escapes: Bits, used: int, paired: bool, old: Any) -> Any:
    """(0 or what is wrong, as `apply_steps` says; new bits) of an element that is escaped."""
    if used == escapes.size:
        return 2, old
    bits = escapes[used]
    if paired:
        step = np.uint64(bits)
        bits = escapes.dtype.type(np.uint64(old) + ((step >> np.uint64(1)) ^ -(step & np.uint64(1))))
    return 3 if bits == old else 0, bits


@kernel
def apply_some(
    steps: Bytes, escapes: Bits, used: int, paired: bool, olds: Bits, news: Bits, far: npt.NDArray[np.uint32]
) -> Any:
    """As `apply_marks`, of changes, none of which may have the step 0."""
    none = 0
    for i in range(steps.size):
        none += steps[i] == 0
    if none > 0:
        return -1
    return apply_marks(steps, escapes, used, paired, olds, news, far)


@kernel
def apply_marks(
    marks: Bytes, escapes: Bits, used: int, paired: bool, olds: Bits, news: Bits, far: npt.NDArray[np.uint32]
) -> Any:
    """New bits from old ones and step bytes, of which 0 leaves an element as it is.

    `far`: scratch, `GROUP` longer than `marks`. Escapes used up to there, or minus the number of what is wrong
    (`apply_steps`).
    """
    for i in range(marks.size):  # without a branch, so that it becomes vectors
        step = np.int64(marks[i])
        news[i] = olds[i] + np.uint64((step >> 1) ^ -(step & 1))
    for i in far[: find_bytes(marks, np.uint8(255), far)]:
        fault, news[i] = escaped_bits(escapes, used, paired, olds[i])
        if fault:
            return -fault
        used += 1
    return used


@kernel
def apply_steps(steps: Bytes, escapes: Bits, paired: bool, olds: Bits, news: Bits) -> Any:
    """New bits from old ones and the step bytes of changes; 0, or what is wrong.

    1: a step is zero; 2: the escapes are not exactly used up; 3: an escape changes nothing.
    """
    used, far = 0, np.empty(STEPPED + GROUP, np.uint32)
    for i in range(0, steps.size, STEPPED):
        j = min(i + STEPPED, steps.size)
        used = apply_some(steps[i:j], escapes, used, paired, olds[i:j], news[i:j], far)
        if used < 0:
            return -used
    return 0 if used == escapes.size else 2
