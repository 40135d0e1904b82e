"""The loops over elements. Everything else in this package only prepares their arguments.

Common arguments: `addresses` uint64 [n], byte address of each tensor of a flat space; `starts` int64 [n + 1]
and `seeds` uint64 [n, 3] as in `FlatSpace`; `seed`, a row of those as a tuple; `first`, the tensor in which the work
begins; `tag`, see `jit`. Positions are elements of the flat space, or of the interval where they are said to be
relative. Nothing here is checked: callers pass intervals inside the space and outputs that hold the worst case.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .jit import (
    GOLDEN,
    GROUP,
    LANES,
    LINE_BYTES,
    LOW,
    MIX1,
    MIX2,
    MIX3,
    OWN,
    SHARED,
    differ,
    kernel,
    load,
    prefetch,
    store,
    trailing_zeros,
    weigh_words,
    width,
)
from .jit_changes import weigh_changes

BLOCK_BYTES: Final = 1024
"""Bytes digested, then compared with the other side's, out of the first-level cache. 2048 was slower."""

AHEAD_BYTES: Final = 2048
"""How far ahead of the work memory is fetched; without that the digest ran at half its speed."""

FETCHED: Final = 32
"""Elements that `gather`, `scatter` and `put` have fetched ahead of the one they work on."""

MIX_2: Final = np.uint64(2)
"""In a seed: weights are those of `mix_2` (docs/format.md, state digest). Else of `mix_1`."""

Seed = tuple[np.uint64, np.uint64, np.uint64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]


@kernel
def seed_of(seeds: Words, tensor: int) -> Seed:
    """Of a tensor: the seeds of both lanes, and the number of the way in which weights are made of them."""
    return seeds[tensor, 0], seeds[tensor, 1], seeds[tensor, 2]


@kernel
def weight(seed: Seed, lane: int, word: int | np.uint64) -> np.uint64:
    """R_lane(word) of a tensor."""
    golden = np.uint64(word) * np.uint64(GOLDEN)
    if seed[2] != MIX_2:
        z = seed[lane] + golden
        z = (z ^ z >> np.uint64(30)) * np.uint64(MIX1)
        z = (z ^ z >> np.uint64(27)) * np.uint64(MIX2)
        return z ^ z >> np.uint64(31) | np.uint64(1)
    z = seed[0] + golden
    turned = z << np.uint64(32) | z >> np.uint64(32)
    z = turned ^ (z & np.uint64(LOW)) * ((turned | np.uint64(1)) & np.uint64(LOW))
    z = z * np.uint64(MIX2) if lane == 0 else (z ^ seed[1]) * np.uint64(MIX3)
    return z ^ z >> np.uint64(32) | np.uint64(1)


@kernel
def weigh(address: np.uint64, vectors: int, seed: Seed, word: int, tag: Any) -> Any:
    """Digest of `LANES` * vectors words at `address`, the first of which is word `word` of its tensor."""
    golden = np.uint64(word) * np.uint64(GOLDEN)
    if seed[2] == MIX_2:
        return weigh_words(address, vectors, seed[0] + golden, seed[1], SHARED, tag)
    return weigh_words(address, vectors, seed[0] + golden, seed[1] + golden, OWN, tag)


@kernel
def digest_word(address: np.uint64, index: int, count: int, seed: Seed, tag: Any) -> Any:
    """Digest of `count` elements of one word, from element `index` of the tensor on."""
    low, high = np.uint64(0), np.uint64(0)
    each = 8 // width(tag)
    for i in range(count):
        bits = np.uint64(load(address + np.uint64(i * width(tag)), tag))
        slot = (index + i) % each
        low |= bits << np.uint64(8 * width(tag) * slot)
        high |= bits << np.uint64(8 * width(tag) * (each - 1 - slot))
    return low * weight(seed, 0, index // each), high * weight(seed, 1, index // each)


@kernel
def digest_run(address: np.uint64, index: int, count: int, seed: Seed, tag: Any) -> Any:
    """Digest of `count` elements at `address`, the first of which is element `index` of its tensor."""
    each = 8 // width(tag)
    lane0, lane1, i = np.uint64(0), np.uint64(0), 0
    while i < count:
        vectors = (count - i) // (each * LANES)
        if (index + i) % each == 0 and vectors > 0:
            at = address + np.uint64(i * width(tag))
            part0, part1 = weigh(at, vectors, seed, (index + i) // each, tag)
            i += vectors * each * LANES
        else:
            part = min(each - (index + i) % each, count - i)
            at = address + np.uint64(i * width(tag))
            part0, part1 = digest_word(at, index + i, part, seed, tag)
            i += part
        lane0 += part0
        lane1 += part1
    return lane0, lane1


@kernel
def fetch(address: np.uint64, nbytes: int) -> None:
    """Have the cache lines of a run fetched."""
    for at in range(0, nbytes, LINE_BYTES):
        prefetch(address + np.uint64(at))


@kernel
def digest_interval(
    addresses: Words, starts: Ints, seeds: Words, first: int, start: int, length: int, tag: Any
) -> Any:
    """Digest of the elements [start, start + length)."""
    lane0, lane1 = np.uint64(0), np.uint64(0)
    tensor, at, stop = first, start, start + length
    while at < stop:
        end = min(starts[tensor + 1], stop)
        while at < end:
            count = min(BLOCK_BYTES // width(tag), end - at)
            index = at - starts[tensor]
            address = addresses[tensor] + np.uint64(index * width(tag))
            fetch(address + np.uint64(AHEAD_BYTES), count * width(tag))
            part0, part1 = digest_run(address, index, count, seed_of(seeds, tensor), tag)
            lane0 += part0
            lane1 += part1
            at += count
        tensor += 1
    return lane0, lane1


@kernel
def mark_run(
    old: np.uint64, new: np.uint64, count: int, relative: int, positions: Positions, found: int, tag: Any
) -> int:
    """Append relative + i for the elements i that differ to positions at `found`; return the new `found`.

    Writes at most one entry an element and never past it, whatever the two sides do meanwhile.
    """
    for group in range(0, count - GROUP + 1, GROUP):
        mask = differ(old + np.uint64(group * width(tag)), new + np.uint64(group * width(tag)), tag)
        turn = 0  # the first two turns are taken without a look: no processor predicts where changes are
        while turn < 2 or mask != np.uint64(0):
            positions[found] = relative + group + trailing_zeros(mask | np.uint64(1 << 63))
            found += mask != np.uint64(0)
            mask &= mask - np.uint64(1)
            turn += 1
    for i in range(count // GROUP * GROUP, count):
        at = np.uint64(i * width(tag))
        if load(old + at, tag) != load(new + at, tag):
            positions[found] = relative + i
            found += 1
    return found


@kernel
def read_marked(
    old: np.uint64, new: np.uint64, relative: int,
    positions: Positions, olds: Bits, news: Bits, kept: int, found: int, tag: Any,
) -> int:  # fmt: skip
    """Read both sides of the entries [kept, found) of positions; keep those that differ; return their end."""
    for i in range(kept, found):
        position = positions[i]
        at = np.uint64((np.int64(position) - relative) * width(tag))
        a, b = load(old + at, tag), load(new + at, tag)
        positions[kept], olds[kept], news[kept] = position, a, b
        kept += a != b  # a source that is being written may be equal by now
    return kept


@kernel
def part_below(positions: Any, begin: int, end: int, limit: int) -> int:
    """Where the entries [begin, end) of positions, which ascend and the first of which is below `limit`, reach it."""
    if np.int64(positions[end - 1]) < limit:
        return end
    while begin < end:
        middle = (begin + end) // 2
        if np.int64(positions[middle]) < limit:
            begin = middle + 1
        else:
            end = middle
    return begin


@kernel
def digest_step(index: int | np.int64, old: Any, new: Any, seed: Seed) -> Any:
    """(new - old) * R of element `index` of a tensor."""
    bits = np.uint64(width(old) * 8)
    level = np.uint64(6 - trailing_zeros(bits))  # 2^level elements make a word
    slot = (np.uint64(index) & ((np.uint64(1) << level) - np.uint64(1))) * bits
    step, word = np.uint64(new) - np.uint64(old), np.uint64(index) >> level
    return (step << slot) * weight(seed, 0, word), (step << (np.uint64(64) - bits - slot)) * weight(
        seed, 1, word
    )


@kernel
def digest_change(
    starts: Ints, seeds: Words, first: int, positions: Any, start: int, olds: Bits, news: Bits, count: int
) -> Any:
    """Sum of (new - old) * R over changes at start + positions, which must ascend from tensor `first` on.

    All three arrays are contiguous.
    """
    lane0, lane1 = np.uint64(0), np.uint64(0)
    tensor, done = first, 0
    while done < count:
        while np.int64(positions[done]) + start >= starts[tensor + 1]:
            tensor += 1
        stop = part_below(positions, done, count, starts[tensor + 1] - start)
        at, old, new = positions[done:stop], olds[done:stop], news[done:stop]
        part0, part1 = digest_list(at, start - starts[tensor], old, new, seed_of(seeds, tensor))
        lane0 += part0
        lane1 += part1
        done = stop
    return lane0, lane1


@kernel
def digest_list(positions: Any, shift: int, olds: Bits, news: Bits, seed: Seed) -> Any:
    """Sum of (new - old) * R over changes of the elements positions + shift of one tensor."""
    if positions.size == 0:
        return np.uint64(0), np.uint64(0)
    vectors = positions.size // LANES
    a, b, c = np.uint64(positions.ctypes.data), np.uint64(olds.ctypes.data), np.uint64(news.ctypes.data)
    position, element = positions[0], olds[0]
    if seed[2] == MIX_2:
        lane0, lane1 = weigh_changes(a, b, c, vectors, shift, seed[0], seed[1], SHARED, position, element)
    else:
        lane0, lane1 = weigh_changes(a, b, c, vectors, shift, seed[0], seed[1], OWN, position, element)
    for i in range(vectors * LANES, positions.size):
        index = np.int64(positions[i]) + shift
        part0, part1 = digest_step(index, olds[i], news[i], seed)
        lane0 += part0
        lane1 += part1
    return lane0, lane1


@kernel
def gather(addresses: Words, starts: Ints, first: int, positions: Ints, out: Bits, tag: Any) -> None:
    """out[i] = the element at positions[i], which must ascend from tensor `first` on."""
    tensor, ahead = first, first
    for i in range(positions.size):
        if i + FETCHED < positions.size:
            while positions[i + FETCHED] >= starts[ahead + 1]:
                ahead += 1
            inside = positions[i + FETCHED] - starts[ahead]
            prefetch(addresses[ahead] + np.uint64(inside * width(tag)))
        while positions[i] >= starts[tensor + 1]:
            tensor += 1
        out[i] = load(addresses[tensor] + np.uint64((positions[i] - starts[tensor]) * width(tag)), tag)


@kernel
def scatter(addresses: Words, starts: Ints, first: int, positions: Ints, values: Bits) -> None:
    """The element at positions[i] = values[i]; positions must ascend from tensor `first` on."""
    tensor, ahead = first, first
    for i in range(positions.size):
        if i + FETCHED < positions.size:
            while positions[i + FETCHED] >= starts[ahead + 1]:
                ahead += 1
            inside = positions[i + FETCHED] - starts[ahead]
            prefetch(addresses[ahead] + np.uint64(inside * values.itemsize))
        while positions[i] >= starts[tensor + 1]:
            tensor += 1
        store(addresses[tensor] + np.uint64((positions[i] - starts[tensor]) * values.itemsize), values[i])


@kernel
def ascends(positions: Ints, elements: int) -> Any:
    """Whether positions strictly ascend inside [0, elements)."""
    last = np.int64(-1)
    for i in range(positions.size):
        if positions[i] <= last:
            return False
        last = positions[i]
    return last < elements


@kernel
def overlay(positions: Ints, values: Bits, over_positions: Ints, over_values: Bits) -> int:
    """Replace values[i] by the overlay's where it has positions[i]; how often it has. Both sides ascend."""
    j, found = 0, 0
    for i in range(positions.size):
        while j < over_positions.size and over_positions[j] < positions[i]:
            j += 1
        if j == over_positions.size:
            break
        if over_positions[j] == positions[i]:
            values[i] = over_values[j]
            found += 1
    return found


@kernel
def merge(
    older: Ints, older_values: Bits, newer: Ints, newer_values: Bits, positions: Ints, values: Bits
) -> int:
    """Merge two ascending lists, the newer one winning, into outputs of both their sizes; entries written."""
    i, j, n = 0, 0, 0
    while i < older.size and j < newer.size:
        take_newer = newer[j] <= older[i]
        i += newer[j] >= older[i]
        if take_newer:
            positions[n], values[n] = newer[j], newer_values[j]
            j += 1
        else:
            positions[n], values[n] = older[i - 1], older_values[i - 1]
        n += 1
    while i < older.size:
        positions[n], values[n] = older[i], older_values[i]
        i += 1
        n += 1
    while j < newer.size:
        positions[n], values[n] = newer[j], newer_values[j]
        j += 1
        n += 1
    return n
