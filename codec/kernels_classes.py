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
from .jit_classes import BLOCK, CLASSES, GROUPS, classify, members, population

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]

FOREVER: Final = 1 << 40
"""More elements than a row has: the distance to a change that does not come."""


@kernel
def classify_rest(
    address: np.uint64, count: int, exponent: Ints, classes: Bytes, counts: Ints, room: Bytes, tag: Any
) -> None:
    """`classify` for fewer than BLOCK elements; past them classes are 255. room: [BLOCK * width]."""
    copy = np.uint64(room.ctypes.data)
    for i in range(count):
        store(copy + np.uint64(i * width(tag)), load(address + np.uint64(i * width(tag)), tag))
    classify(
        copy, np.uint64(exponent[0]), np.uint64(exponent[1]), np.uint64(exponent[2]),
        np.uint64(classes.ctypes.data), np.uint64(counts.ctypes.data), tag,
    )  # fmt: skip
    for i in range(count, BLOCK):
        counts[classes[i]] -= 1
        classes[i] = 255


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
    classes, room = np.empty(BLOCK, np.uint8), np.zeros(BLOCK * width(tag), np.uint8)
    counts, seen = np.empty(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    at_classes, at_counts = np.uint64(classes.ctypes.data), np.uint64(counts.ctypes.data)
    shift, mask, top = np.uint64(exponent[0]), np.uint64(exponent[1]), np.uint64(exponent[2])
    window = np.zeros(2 * GROUPS, np.uint64)  # masks of groups up to an element's, and of later ones
    window[:GROUPS] = ~np.uint64(0)
    done = 0
    for piece in range(addresses.size):
        at = 0
        while at < lengths[piece]:
            size = min(BLOCK, lengths[piece] - at)
            address = addresses[piece] + np.uint64(at * width(tag))
            if size == BLOCK:
                classify(address, shift, mask, top, at_classes, at_counts, tag)
            else:
                classify_rest(address, size, exponent, classes, counts, room, tag)
            base = begins[piece] + at
            while done < count and positions[done] < base + size:
                inside = np.int64(positions[done]) - base
                kind, group = classes[inside], inside >> 6
                window[GROUPS] = (np.uint64(1) << np.uint64(inside & 63)) - np.uint64(1)
                before = np.int64(0)
                for g in range(GROUPS):  # all of them: no processor predicts where changes are
                    found = members(at_classes + np.uint64(g * 64), np.uint64(kind))
                    before += population(found & window[GROUPS - group + g])
                kinds[done], gaps[done] = kind, seen[kind] + before
                seen[kind] = -(before + 1)
                totals[kind] += 1
                done += 1
            for c in range(CLASSES):
                seen[c] += counts[c]
            at += size
    return done


@kernel
def locate(
    addresses: Words, begins: Ints, lengths: Ints, exponent: Ints,
    gaps: Bits, offsets: Ints, positions: Ints, olds: Bits, tag: Any,
) -> int:  # fmt: skip
    """Undo `rank`: positions [count], relative to the row, and the bits there; how many were found.

    Args:
        gaps: of class c at [offsets[c], offsets[c + 1]), `count` in all; what they point past is not found.
    """
    classes, room = np.empty(BLOCK, np.uint8), np.zeros(BLOCK * width(tag), np.uint8)
    counts, hits = np.empty(CLASSES, np.int64), np.zeros(GROUPS, np.uint64)
    left, following = np.empty(CLASSES, np.int64), offsets.copy()
    at_classes, at_counts = np.uint64(classes.ctypes.data), np.uint64(counts.ctypes.data)
    shift, mask, top = np.uint64(exponent[0]), np.uint64(exponent[1]), np.uint64(exponent[2])
    for c in range(CLASSES):
        left[c] = np.int64(gaps[following[c]]) if following[c] < offsets[c + 1] else FOREVER
    found = 0
    for piece in range(addresses.size):
        at = 0
        while at < lengths[piece]:
            size = min(BLOCK, lengths[piece] - at)
            address = addresses[piece] + np.uint64(at * width(tag))
            if size == BLOCK:
                classify(address, shift, mask, top, at_classes, at_counts, tag)
            else:
                classify_rest(address, size, exponent, classes, counts, room, tag)
            any_hit = False
            for c in range(CLASSES):
                skip, rest = left[c], counts[c]
                if skip >= rest:
                    left[c] = skip - rest
                    continue
                any_hit = True
                group = 0
                bits = members(at_classes, np.uint64(c))
                have = population(bits)
                while skip < rest:
                    rest -= skip + 1
                    while skip >= have:
                        skip -= have
                        group += 1
                        bits = members(at_classes + np.uint64(group * 64), np.uint64(c))
                        have = population(bits)
                    have -= skip + 1
                    while skip > 0:
                        bits &= bits - np.uint64(1)
                        skip -= 1
                    hits[group] |= bits & (~bits + np.uint64(1))
                    bits &= bits - np.uint64(1)
                    following[c] += 1
                    skip = np.int64(gaps[following[c]]) if following[c] < offsets[c + 1] else FOREVER
                left[c] = skip - rest
            if any_hit:
                for group in range(GROUPS):
                    bits = hits[group]
                    hits[group] = np.uint64(0)
                    while bits != np.uint64(0):
                        inside = group * 64 + trailing_zeros(bits)
                        bits &= bits - np.uint64(1)
                        positions[found] = begins[piece] + at + inside
                        olds[found] = load(address + np.uint64(inside * width(tag)), tag)
                        found += 1
            at += size
    return found


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
