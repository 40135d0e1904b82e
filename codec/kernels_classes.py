"""Positions to ranks within classes of the old exponent, and back (docs/format.md, class).

Common arguments: a row is given in pieces, `addresses` uint64 [n], byte address of each, `begins` int64 [n], its
first element relative to the row, and `lengths` int64 [n]. `exponent` int64 [3]: bits to the right of an element's
exponent field, the field's mask, and the row's top exponent. Nothing is checked but what comes from a shard.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .jit import kernel, load, store, trailing_zeros, width
from .jit_classes import BLOCK, CLASSES, DEPOSITS, GROUPS, deposit, nth_in, pass_over, rank_in, separate
from .kernels import AHEAD_BYTES

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]

FOREVER: Final = 1 << 40
"""More elements than a row has: the distance to a change that does not come."""


@kernel
def copy_rest(address: np.uint64, count: int, room: Bytes, tag: Any) -> None:
    """Copy fewer than BLOCK elements, and zeros behind them. room: [BLOCK * width]."""
    room[:] = 0
    copy = np.uint64(room.ctypes.data)
    for i in range(count):
        store(copy + np.uint64(i * width(tag)), load(address + np.uint64(i * width(tag)), tag))


@kernel
def class_of(bits: Any, exponent: Ints) -> Any:
    """The class of an element."""
    here = np.int64((np.uint64(bits) >> np.uint64(exponent[0])) & np.uint64(exponent[1]))
    return min(max(exponent[2] - here, 0), CLASSES - 1)


@kernel
def rank(
    addresses: Words, begins: Ints, lengths: Ints, exponent: Ints,
    positions: Positions, count: int, kinds: Bytes, gaps: Bits, totals: Ints, tag: Any,
) -> int:  # fmt: skip
    """Class of each change, and how many elements of its class lie before it and after that class's last change.

    Args:
        positions: ascending, relative to the row.
        kinds, gaps: the results, [count].
        totals: zeros [CLASSES]; how many changes are in each class.

    Returns:
        How many of the changes lie in the pieces.
    """
    found, seen = np.empty((CLASSES, GROUPS), np.uint64), np.zeros((CLASSES, GROUPS), np.uint64)
    spare, copy = np.empty(4 * GROUPS, np.uint64), np.empty(BLOCK * width(tag), np.uint8)
    at_found, at_seen = np.uint64(found.ctypes.data), np.uint64(seen.ctypes.data)
    shift, mask, top = np.uint64(exponent[0]), np.uint64(exponent[1]), np.uint64(exponent[2])
    last = np.zeros(CLASSES, np.int64)  # the rank that follows that of the class's last change
    done = 0
    for piece in range(addresses.size):
        at = 0
        while at < lengths[piece]:
            size = min(BLOCK, lengths[piece] - at)
            address = addresses[piece] + np.uint64(at * width(tag))
            if size < BLOCK:
                copy_rest(address, size, copy, tag)
                address = np.uint64(copy.ctypes.data)
            separate(
                address, AHEAD_BYTES, shift, mask, top, at_found, at_seen, np.uint64(spare.ctypes.data), tag
            )
            base = begins[piece] + at
            while done < count and positions[done] < base + size:
                inside = np.uint64(np.int64(positions[done]) - base)
                kind = class_of(load(address + inside * np.uint64(width(tag)), tag), exponent)
                words = np.uint64(8 * GROUPS * kind)
                before = rank_in(at_found + words, at_seen + words, inside)
                kinds[done], gaps[done] = kind, before - last[kind]
                last[kind] = before + 1
                totals[kind] += 1
                done += 1
            seen[class_of(np.uint64(0), exponent), 0] -= np.uint64(BLOCK - size)  # zeros behind the rest
            at += size
    return done


@kernel
def nth_by_deposit(word: np.uint64, n: Any) -> Any:
    """The 1 bit of a word that has `n` others below it, alone. Needs `DEPOSITS`."""
    return deposit(np.uint64(1) << np.uint64(n), word)


@kernel
def nth_by_turns(word: np.uint64, n: Any) -> Any:
    """The same on any machine."""
    for _ in range(n):
        word &= word - np.uint64(1)
    return word & (~word + np.uint64(1))


nth_bit: Final = nth_by_deposit if DEPOSITS else nth_by_turns


@kernel
def list_bits(words: Words, out: Ints) -> int:
    """Write which bits of some words are 1, ascending, and zero the words; how many. out: room for one more."""
    found = 0
    for group in range(words.size):
        bits = words[group]
        words[group] = np.uint64(0)
        turn = 0  # the first two turns are taken without a look: no processor predicts where changes are
        while turn < 2 or bits != np.uint64(0):
            out[found] = 64 * group + trailing_zeros(bits | np.uint64(1 << 63))
            found += bits != np.uint64(0)
            bits &= bits - np.uint64(1)
            turn += 1
    return found


@kernel
def locate(
    addresses: Words, begins: Ints, lengths: Ints, exponent: Ints,
    gaps: Bits, offsets: Ints, positions: Ints, olds: Bits, tag: Any,
) -> int:  # fmt: skip
    """Undo `rank`: positions [count], relative to the row, and the bits there; how many were found.

    Args:
        gaps: of class c at [offsets[c], offsets[c + 1]), `count` in all; what they point past is not found.
    """
    found, left = np.empty((CLASSES, GROUPS), np.uint64), np.full((2, 2 * GROUPS), FOREVER)
    spare, copy = np.empty(4 * GROUPS, np.uint64), np.empty(BLOCK * width(tag), np.uint8)
    hits, insides = np.zeros(GROUPS, np.uint64), np.empty(BLOCK + 1, np.int64)
    at_found, at_left = np.uint64(found.ctypes.data), np.uint64(left.ctypes.data)
    shift, mask, top = np.uint64(exponent[0]), np.uint64(exponent[1]), np.uint64(exponent[2])
    following, lowest = offsets.copy(), class_of(np.uint64(0), exponent)
    for c in range(CLASSES):
        if following[c] < offsets[c + 1]:
            left[0, c] = np.int64(gaps[following[c]])
    done = 0
    for piece in range(addresses.size):
        at = 0
        while at < lengths[piece]:
            size = min(BLOCK, lengths[piece] - at)
            address = addresses[piece] + np.uint64(at * width(tag))
            if size < BLOCK:
                copy_rest(address, size, copy, tag)
                address = np.uint64(copy.ctypes.data)
            left[0, lowest] += BLOCK - size  # zeros behind the rest, which do not count
            marks = pass_over(
                address, AHEAD_BYTES, shift, mask, top, at_found, at_left, np.uint64(spare.ctypes.data), tag
            )
            left[1, lowest] -= BLOCK - size
            any_hit = marks != np.uint64(0)
            while marks != np.uint64(0):
                c = trailing_zeros(marks)
                marks &= marks - np.uint64(1)
                rest = left[1, c]
                rank_in_block = left[0, c] + rest
                while rank_in_block < rest:
                    group, inside = nth_in(at_found + np.uint64(8 * GROUPS * c), rank_in_block)
                    hits[group] |= nth_bit(found[c, group], inside)
                    following[c] += 1
                    more = following[c] < offsets[c + 1]
                    rank_in_block += 1 + (np.int64(gaps[following[c]]) if more else FOREVER)
                left[0, c] = rank_in_block - rest
            if any_hit:
                count = list_bits(hits, insides)
                for k in range(count):
                    positions[done + k] = begins[piece] + at + insides[k]
                    olds[done + k] = load(address + np.uint64(insides[k] * width(tag)), tag)
                done += count
            at += size
    return done


@kernel
def by_class(kinds: Bytes, gaps: Bits, count: int, offsets: Ints, out: Bits) -> None:
    """Move the gaps of class c to out[offsets[c]] and on, in their order. `offsets` is used up."""
    for i in range(count):
        out[offsets[kinds[i]]] = gaps[i]
        offsets[kinds[i]] += 1


@kernel
def live_lines(positions: Positions, count: int, line: int, phase: int, lines: Ints) -> int:
    """Lines that have a change, ascending, and how many they are; see `kernels_steps.write_steps`."""
    found = 0
    end = np.int64(-1)  # of the last line found, relative to the row
    for i in range(count):
        if positions[i] >= end:
            lines[found] = (np.int64(positions[i]) + phase) // line
            end = (lines[found] + 1) * line - phase
            found += 1
    return found


@kernel
def sample(address: np.uint64, stride: int, out: Bits, tag: Any) -> None:
    """out[i] = element i * stride at `address`."""
    for i in range(out.size):
        out[i] = load(address + np.uint64(i * stride * width(tag)), tag)
