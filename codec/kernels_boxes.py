"""The loops over elements of a box, which lie side by side in memory, and whose places in the tensor do not.

Common arguments: `begin`, the box's first element, counted in its tensor; `run`, `stride` as in `Row`, and both
`length` for an interval; `seed` of the tensor, see `kernels`; `spare`, the address of `LANES` words to work in; `tag`,
see `jit`. Nothing here is checked.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .jit import GROUP, LANES, kernel, load, store, width
from .kernels import (
    AHEAD_BYTES,
    BLOCK_BYTES,
    Bits,
    Ints,
    Positions,
    Seed,
    Words,
    digest_list,
    digest_word,
    fetch,
    mark_run,
    read_marked,
    weigh,
)
from .kernels_find import compare_run, find_few

LONG_RUN_BYTES: Final = 4096
"""Runs from here on are compared one by one; shorter ones lose more at their ends than the loop over groups gains."""

_WORD: Final = np.uint64(0)
"""Tag of a word."""


@kernel
def digest_piece(address: np.uint64, index: int, count: int, seed: Seed, spare: np.uint64, tag: Any) -> Any:
    """As `kernels.digest_run`, but what does not fill a vector is padded to one: made for runs of a few vectors."""
    each = 8 // width(tag)
    lane0, lane1 = np.uint64(0), np.uint64(0)
    done = min(-index % each, count)
    if done > 0:
        lane0, lane1 = digest_word(address, index, done, seed, tag)
    vectors = (count - done) // (each * LANES)
    if vectors > 0:
        at = address + np.uint64(done * width(tag))
        part0, part1 = weigh(at, vectors, seed, (index + done) // each, tag)
        lane0, lane1 = lane0 + part0, lane1 + part1
        done += vectors * each * LANES
    left, at = count - done, address + np.uint64(done * width(tag))
    if left > each:
        pad(at, left, spare, tag)
        part0, part1 = weigh(spare, 1, seed, (index + done) // each, tag)
        lane0, lane1 = lane0 + part0, lane1 + part1
    elif left > 0:
        part0, part1 = digest_word(at, index + done, left, seed, tag)
        lane0, lane1 = lane0 + part0, lane1 + part1
    return lane0, lane1


@kernel
def pad(address: np.uint64, count: int, out: np.uint64, tag: Any) -> None:
    """Copy less than `LANES` words of elements, and zeros behind them."""
    each = 8 // width(tag)
    words = count // each
    for k in range(LANES):
        at = np.uint64(8 * k)
        store(out + at, load(address + at, _WORD) if k < words else np.uint64(0))
    for i in range(words * each, count):
        at = np.uint64(i * width(tag))
        store(out + at, load(address + at, tag))


@kernel
def digest_part(
    address: np.uint64, begin: int, at: int, count: int, run: int, stride: int,
    seed: Seed, spare: np.uint64, tag: Any,
) -> Any:  # fmt: skip
    """Digest of the elements [at, at + count) of a box, the first of which is at `address`."""
    lane0, lane1, done = np.uint64(0), np.uint64(0), 0
    number = at // run
    inside = at - number * run
    place = begin + number * stride
    while done < count:
        piece = min(run - inside, count - done)
        part0, part1 = digest_piece(
            address + np.uint64(done * width(tag)), place + inside, piece, seed, spare, tag
        )
        lane0 += part0
        lane1 += part1
        done += piece
        inside = 0
        place += stride
    return lane0, lane1


@kernel
def digest_box(
    address: np.uint64, begin: int, length: int, run: int, stride: int,
    seed: Seed, spare: np.uint64, tag: Any,
) -> Any:  # fmt: skip
    """Digest of a box whose elements lie side by side from `address` on."""
    lane0, lane1, at = np.uint64(0), np.uint64(0), 0
    while at < length:
        count = min(BLOCK_BYTES // width(tag), length - at)
        part = address + np.uint64(at * width(tag))
        fetch(part + np.uint64(AHEAD_BYTES), count * width(tag))
        part0, part1 = digest_part(part, begin, at, count, run, stride, seed, spare, tag)
        lane0 += part0
        lane1 += part1
        at += count
    return lane0, lane1


@kernel
def compare_box(
    old: np.uint64, new: np.uint64, begin: int, length: int, run: int, stride: int,
    seed: Seed, spare: Words, positions: Positions, olds: Bits, news: Bits, tag: Any,
) -> Any:  # fmt: skip
    """All changes of a box: how many, and both pairs of lanes, as `kernels_find.compare_run` returns them.

    Both sides lie side by side. spare: uint64 [LANES]. positions (relative to the box), olds and news must hold
    `length` + `GROUP` entries.
    """
    work = np.uint64(spare.ctypes.data)
    if run * width(tag) < LONG_RUN_BYTES:
        found, lane0, lane1 = compare_blocks(
            old, new, begin, length, run, stride, seed, work, positions, olds, news, tag
        )
        places = positions[:found].astype(np.int64)
        spread(places, begin, run, stride)
        moved0, moved1 = digest_list(places, 0, olds[:found], news[:found], seed)
        return found, lane0, lane1, moved0, moved1
    lane0, lane1, moved0, moved1 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    found, place, each = 0, begin, 8 // width(tag)
    for at in range(0, length, run):
        head = -place % each
        rest = (run - head) % GROUP
        for first, last in ((0, head), (head, run - rest), (run - rest, run)):
            count, skipped = last - first, np.uint64((at + first) * width(tag))
            a, b, index, relative = old + skipped, new + skipped, place + first, at + first
            if count < GROUP:
                part0, part1 = digest_piece(b, index, count, seed, work, tag)
                found, step0, step1 = find_few(
                    a, b, index, count, relative, seed, positions, olds, news, found, tag
                )
            else:
                found, part0, part1, step0, step1 = compare_run(
                    a, b, index, count, relative, seed, positions, olds, news, found, tag
                )
            lane0, lane1 = lane0 + part0, lane1 + part1
            moved0, moved1 = moved0 + step0, moved1 + step1
        place += stride
    return found, lane0, lane1, moved0, moved1


@kernel
def compare_blocks(
    old: np.uint64, new: np.uint64, begin: int, length: int, run: int, stride: int,
    seed: Seed, spare: np.uint64,
    positions: Positions, olds: Bits, news: Bits, tag: Any,
) -> Any:  # fmt: skip
    """(number of changes, lane 0, lane 1 of the new bits) for short runs, many of which are compared at once."""
    lane0, lane1, found, at = np.uint64(0), np.uint64(0), 0, 0
    while at < length:
        count = min(BLOCK_BYTES // width(tag), length - at)
        shift = np.uint64(at * width(tag))
        a, b = old + shift, new + shift
        fetch(a + np.uint64(AHEAD_BYTES), count * width(tag))
        fetch(b + np.uint64(AHEAD_BYTES), count * width(tag))
        part0, part1 = digest_part(b, begin, at, count, run, stride, seed, spare, tag)
        lane0 += part0
        lane1 += part1
        marked = mark_run(a, b, count, at, positions, found, tag)
        found = read_marked(a, b, at, positions, olds, news, found, marked, tag)
        at += count
    return found, lane0, lane1


@kernel
def spread(positions: Ints, start: int, run: int, stride: int) -> None:
    """Turn ascending positions relative to a box into elements of what it begins in at element `start`, in place."""
    first, base = np.int64(0), np.int64(start)  # where the run begins, in the box and in the space
    for i in range(positions.size):
        ahead = positions[i] - first
        if ahead >= run:
            number = ahead // run
            first += number * run
            base += number * stride
            ahead -= number * run
        positions[i] = base + ahead


@kernel
def pick(address: np.uint64, length: int, run: int, stride: int, out: Bits, tag: Any) -> None:
    """out[j] = element j of a box in a tensor; `address` is that of its first element there."""
    done, place = 0, address
    while done < length:
        for i in range(run):
            out[done + i] = load(place + np.uint64(i * width(tag)), tag)
        done += run
        place += np.uint64(stride * width(tag))


@kernel
def put(positions: Ints, values: Bits, start: int, run: int, stride: int, out: Bits) -> None:
    """out[j] = values[i] where flat element positions[i], which is not before `start`, is element j of a box."""
    for i in range(positions.size):
        number = (positions[i] - start) // stride
        inside = positions[i] - start - number * stride
        if inside < run:
            out[number * run + inside] = values[i]
