"""The loops over elements: undoing a step of AdamW, and comparing while masters are cast.

**Undoing a step.** All of torch's implementations (torch/optim/adam.py: `_single_tensor_adam` and `_multi_tensor_adam`;
aten/src/ATen/native/cpu/FusedAdamKernel.cpp: `adam_math`) round each operation to fp32 and compute

    a = old * d                             d = fp32(1 - lr * weight_decay); left out where weight_decay is 0
    S = c * m / (sqrt(v) / r + eps)         c = lr / (1 - beta1^t), r = sqrt(1 - beta2^t), both in fp64, then fp32
    new = a - S

and differ only in the order of the product and the quotients inside S, and in the sign that goes with c. Let u = 2^-24,
so that each rounding is off by at most u of its result, and let s be S as it is computed here. Both S and s are at most
8 roundings from the exact quotient (c, r, eps, root, quotient, sum, product, quotient), so |S - s| <= 16 u |s| and a
little. `new` is one rounding from a - S, and a is one from old * d. In fp64, whose own roundings do not count, hence

    |old - q| <= t        q = (new + s) / d        t = (u |new| + u |new + s| + 17 u |s|) / d

with 1 % added to u for products of roundings, and without u |new + s| where the product is left out. Rounding to bf16
is monotone and `old` is an fp32 number: where both ends of q ± t round to the same bf16 bits, those are the old bits.
Where they do not, the element is *open*: a boundary of rounding lies within t of q, and so within 2 t of `old`.

**Noting.** Hence every element within 2 t of a boundary is noted while its value is at hand, one publish earlier, with
a t for any next step that moves by at most `reach`. An open element that was not noted is counted, and ends the
attempt: nothing is guessed. What this argument does not cover (values that underflow, a step that was not what it was
taken for) shows in the digest.

Arguments: arrays are of one piece, contiguous, of n elements; outputs hold n.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.codec.jit import kernel
from weightcast.codec.rounding import round_all, rounded

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint32]

BLOCK: Final = 1024
"""Elements whose bounds are computed before they are looked at; they stay in the first-level cache."""

ROUNDING: Final = 1.01 * 2.0**-24
"""u of the argument above."""

UPDATE: Final = 17 * ROUNDING
"""How far s and S may be apart, of s, and what the last sum adds for it."""

TINY: Final = 1e-300
"""Leaves zeros open, of which nothing here can tell the sign; next to any other fp32 number it is nothing."""

_OPEN: Final = 1
_NEAR: Final = 2


@kernel
def invert(
    new: Floats,
    mean: Floats,
    square: Floats,
    decay: float,
    size: np.float32,
    root: np.float32,
    eps: np.float32,
    reach: float,
    olds: Bits,
    opens: Positions,
    nears: Positions,
) -> Any:
    """Write the bf16 bits from before a step to `olds`, and say which are open and which of the new ones are near.

    Args:
        new: parameters after the step.
        mean, square: both moments after the step (m, v).
        decay: d; 1 where there was none.
        size: c.
        root: r.
        eps: as the step had it.
        reach: what the next step may move an element by, at most.
        olds: output.
        opens: output, positions of open elements, ascending.
        nears: output, positions of elements to be noted, ascending.

    Returns:
        How many are open, how many are near.
    """
    low, high = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    low_near, high_near = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    flags = np.empty(BLOCK, np.uint8)
    opened, noted = 0, 0
    undo = 1.0 / decay
    kept = ROUNDING if decay != 1.0 else 0.0
    for at in range(0, new.size, BLOCK):
        count = min(BLOCK, new.size - at)
        p, m, v = new[at : at + count], mean[at : at + count], square[at : at + count]
        for i in range(count):
            value = np.float64(p[i])
            moved = np.float64(size * m[i] / (np.sqrt(v[i]) / root + eps))
            before = value + moved
            bound = (ROUNDING * abs(value) + kept * abs(before) + UPDATE * abs(moved)) * undo + TINY
            low[i] = before * undo - bound
            high[i] = before * undo + bound
        _bounds(p, undo, reach, low_near, high_near)
        if _decide(low, high, low_near, high_near, olds[at : at + count], flags):
            for i in range(count):
                opens[opened] = at + i
                opened += flags[i] & _OPEN
                nears[noted] = at + i
                noted += flags[i] >> 1
    return opened, noted


@kernel
def look(new: Floats, undo: float, reach: float, olds: Bits, nears: Positions) -> int:
    """The same where there was no step: the old bits are those of `new`. How many are near.

    `undo`: 1 / d of the step to come.
    """
    low, high = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    flags = np.empty(BLOCK, np.uint8)
    noted = 0
    for at in range(0, new.size, BLOCK):
        count = min(BLOCK, new.size - at)
        p = new[at : at + count]
        _bounds(p, undo, reach, low, high)
        if _decide(p, p, low, high, olds[at : at + count], flags):
            for i in range(count):
                nears[noted] = at + i
                noted += flags[i] >> 1
    return noted


@kernel
def _bounds(p: Floats, undo: float, reach: float, low: Floats, high: Floats) -> None:
    """Both ends of value ± 2 t for a step of at most `reach`, which ends at no more than |value| + reach."""
    for i in range(p.size):
        value = np.float64(p[i])
        bound = 2 * (2 * ROUNDING * abs(value) + (UPDATE + 2 * ROUNDING) * reach) * undo
        low[i] = value - bound
        high[i] = value + bound


@kernel
def _decide(low: Floats, high: Floats, low_near: Floats, high_near: Floats, olds: Bits, flags: Any) -> Any:
    """Round all ends; flag the elements whose two ends differ. Whether there are any."""
    a, b = low.view(np.uint32), high.view(np.uint32)
    c, d = low_near.view(np.uint32), high_near.view(np.uint32)
    found = np.uint8(0)
    for i in range(olds.size):
        left, right = rounded(a[i]), rounded(b[i])
        olds[i] = right
        flag = np.uint8(left != right) | (np.uint8(rounded(c[i]) != rounded(d[i])) << np.uint8(1))
        flags[i] = flag
        found |= flag
    return found != 0


@kernel
def settle(opens: Positions, places: Positions, bits: Bits, olds: Bits) -> int:
    """Give open elements the bits that were noted at `places`; both ascend. How many were not noted."""
    missing, j = 0, 0
    for i in range(opens.size):
        while j < places.size and places[j] < opens[i]:
            j += 1
        if j < places.size and places[j] == opens[i]:
            olds[opens[i]] = bits[j]
        else:
            missing += 1
    return missing


@kernel
def replace_bits(fresh: Bits, bits: Bits, begin: int, places: Positions, olds: Bits) -> int:
    """Overwrite `bits`, the first of which has place `begin`; list where that changes them, with those from before.

    Returns:
        How many there are.
    """
    found = 0
    for at in range(0, bits.size, BLOCK):
        stop = min(at + BLOCK, bits.size)
        found = _replace(fresh[at:stop], bits[at:stop], begin + at, found, places, olds)
    return found


@kernel
def round_over(words: Words, bits: Bits, begin: int, places: Positions, olds: Bits) -> int:
    """As `replace_bits`, by numbers that are given as their fp32 bits."""
    fresh = np.empty(BLOCK, np.uint16)
    found = 0
    for at in range(0, bits.size, BLOCK):
        stop = min(at + BLOCK, bits.size)
        block = fresh[: stop - at]
        round_all(words[at:stop], block)
        found = _replace(block, bits[at:stop], begin + at, found, places, olds)
    return found


@kernel
def _replace(fresh: Bits, bits: Bits, begin: int, found: int, places: Positions, olds: Bits) -> int:
    """A block of them, whose list goes on at `found`."""
    differ = np.uint16(0)
    for i in range(bits.size):
        differ |= bits[i] ^ fresh[i]
    if differ:
        for i in range(bits.size):
            places[found], olds[found] = begin + i, bits[i]
            found += bits[i] != fresh[i]
            bits[i] = fresh[i]
    return found


@kernel
def first_of_both(
    earlier: Positions, earlier_bits: Bits, later: Positions, later_bits: Bits, places: Positions, bits: Bits
) -> int:
    """Merge two ascending lists, the earlier one's bits winning, into outputs of both their sizes; entries written."""
    i, j, n = 0, 0, 0
    while i < earlier.size or j < later.size:
        take = j == later.size or (i < earlier.size and earlier[i] <= later[j])
        if take:
            j += j < later.size and later[j] == earlier[i]
            places[n], bits[n] = earlier[i], earlier_bits[i]
            i += 1
        else:
            places[n], bits[n] = later[j], later_bits[j]
            j += 1
        n += 1
    return n
