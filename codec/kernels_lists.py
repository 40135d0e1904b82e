"""Lists of numbers in a stream of bits: Golomb codes whose divisor follows the mean (docs/format.md, class).

S. W. Golomb, Run-length encodings, IEEE Transactions on Information Theory 12 (1966): the best code for numbers of a
geometric distribution, as distances between changes of equal chance are.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .jit import kernel, leading_zeros, load, store, trailing_zeros

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

MEAN_RATE: Final = 6
"""A list's mean follows its numbers by 2^-6 of the difference, once it has seen as many."""

LN2: Final = 177
"""ln 2 in 256ths: Golomb's parameter for a geometric distribution is its mean times ln 2."""

ROUND: Final = 49152
"""Added before the divisor is rounded down, in 2^-16: 0.5 would be the nearest, 0.75 cost 0.005 bits less."""

LONG: Final = 32
"""Zero bits that a number starts with which is written out, in `LONG_BITS` bits."""

LONG_BITS: Final = 24
"""Bits of such a number: a row has at most 2^24 elements."""


@kernel
def divisor_of(mean: Any) -> Any:
    """What numbers of this mean, in 256ths, are divided by."""
    return max(np.int64(1), (mean * LN2 + ROUND) >> 16)


@kernel
def follow(mean: Any, number: Any, seen: int) -> Any:
    """The mean after a number that `seen` others came before."""
    rate = min(np.int64(MEAN_RATE), 66 - leading_zeros(np.uint64(seen + 1)))
    return mean + (((number << 8) - mean) >> rate)


@kernel
def pack(number: Any, divisor: Any) -> Any:
    """(code, bits): a number below 2^24 in up to 56 bits."""
    quotient = np.int64(np.uint64(number) // np.uint64(divisor))
    if quotient >= LONG:
        return np.uint64(number) << np.uint64(LONG), np.int64(LONG + LONG_BITS)
    rest = number - quotient * divisor
    size = 63 - leading_zeros(np.uint64(2 * divisor - 1))
    short = (np.int64(1) << size) - divisor  # so many remainders take a bit less
    doubled = 2 * rest if rest < short else rest + short
    last = np.uint64(quotient + max(size, np.int64(1)))  # where the bit goes that those do not have
    code = np.uint64(1) << np.uint64(quotient)
    code |= np.uint64(doubled >> 1) << np.uint64(quotient + 1)
    code |= np.uint64(doubled & 1) << last
    return code, quotient + 1 + size - np.int64(rest < short)


@kernel
def unpack(word: Any, divisor: Any) -> Any:
    """Undo `pack`: (number, bits) of the code that `word` begins with."""
    if word & np.uint64((1 << LONG) - 1) == np.uint64(0):
        number = np.int64((word >> np.uint64(LONG)) & np.uint64((1 << LONG_BITS) - 1))
        return number, np.int64(LONG + LONG_BITS)
    quotient = trailing_zeros(word)
    size = 63 - leading_zeros(np.uint64(2 * divisor - 1))
    short = (np.int64(1) << size) - divisor
    bits, rest = quotient + 1, np.int64(0)
    if size > 0:
        word >>= np.uint64(quotient + 1)
        rest = np.int64(word & ((np.uint64(1) << np.uint64(size - 1)) - np.uint64(1)))
        bits += size - 1
        if rest >= short:
            rest = 2 * rest + np.int64((word >> np.uint64(size - 1)) & np.uint64(1)) - short
            bits += 1
    return quotient * divisor + rest, bits


@kernel
def write_list(numbers: Any, mean: Any, out: np.uint64, state: Words) -> Any:
    """Append numbers below 2^24 to a stream of bits; the mean in 256ths after them.

    Args:
        numbers: [n].
        mean: what they are expected to be on average, in 256ths.
        out: address of the stream, which must have 7 bytes a number, and 8 more.
        state: bits that do not fill a byte yet, bytes written, how many those bits are.
    """
    pending, used, held = state[0], np.int64(state[1]), np.int64(state[2])
    for i in range(numbers.size):
        number = np.int64(numbers[i])
        code, bits = pack(number, divisor_of(mean))
        mean = follow(mean, number, i)
        pending |= code << np.uint64(held)
        held += bits
        store(out + np.uint64(used), pending)
        used += held >> 3
        pending >>= np.uint64(held & 56)
        held &= 7
    state[0], state[1], state[2] = pending, np.uint64(used), np.uint64(held)
    return mean


@kernel
def write_lists(numbers: Any, offsets: Ints, mean: Any, out: np.uint64, state: Words) -> None:
    """`write_list` of numbers[offsets[c] : offsets[c + 1]] for each c; each after the first expects half the mean."""
    for c in range(offsets.size - 1):
        mean = max(np.int64(1), write_list(numbers[offsets[c] : offsets[c + 1]], mean, out, state) // 2)


@kernel
def read_list(numbers: Any, mean: Any, limit: int, stream: np.uint64, state: Ints) -> Any:
    """Undo `write_list`; the mean in 256ths after the numbers.

    Args:
        numbers: the result.
        mean: as for `write_list`.
        limit: what all numbers must be below.
        stream: its address; 8 bytes past its end may be read.
        state: bits read, -1 after a fault; bits in the stream.
    """
    at, end = state[0], state[1]
    for i in range(numbers.size):
        if at >= end:
            state[0] = -1
            return mean
        word = load(stream + np.uint64(at >> 3), np.uint64(0)) >> np.uint64(at & 7)
        number, bits = unpack(word, divisor_of(mean))
        at += bits
        if number >= limit:
            state[0] = -1
            return mean
        mean = follow(mean, number, i)
        numbers[i] = number
    state[0] = at
    return mean


@kernel
def read_lists(numbers: Any, offsets: Ints, mean: Any, limit: int, stream: np.uint64, state: Ints) -> None:
    """Undo `write_lists`."""
    for c in range(offsets.size - 1):
        if state[0] >= 0:
            part = numbers[offsets[c] : offsets[c + 1]]
            mean = max(np.int64(1), read_list(part, mean, limit, stream, state) // 2)
