"""The loop that finds changes: compare, digest and note, group by group, while memory further on is fetched.

A group is compared, weighed and noted in one go, since each leaves units of the processor idle that the others need:
the digest is bound by its multiplications, comparing by memory, and noting by neither. Changes are read and weighed
after each block, while it is near.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .jit import GOLDEN, GROUP, OWN, SHARED, kernel, trailing_zeros, width
from .jit_changes import read_changes, take_groups
from .jit_find import COMPRESSES, compare_groups, note_groups
from .kernels import (
    MIX_2,
    Bits,
    Ints,
    Positions,
    Seed,
    Words,
    digest_list,
    digest_run,
    mark_run,
    read_marked,
    seed_of,
)

AHEAD_BYTES: Final = 4096
"""How far ahead of the work both sides are fetched. Where the third-level cache has them, 2048 took an eighth longer,
1024 half as long again; out of memory they are alike."""

BLOCK_GROUPS: Final = 64
"""Groups that are compared before their changes are read, which are then still near: 8 KiB of each side at width 2."""

MANY: Final = 4
"""Changes a group, on average of a block, from which on the block's elements are compared once more, now to move what
changed together: that takes as long however many there are."""

TURNS: Final = 2
"""Changes of a group that are noted without a branch."""


@kernel
def note_by_turns(
    old: np.uint64, new: np.uint64, groups: int, z0: np.uint64, z1: np.uint64, mix: Any, relative: np.uint32,
    positions: Positions, found: int, tag: Any,
) -> Any:  # fmt: skip
    """As `note_by_vectors`, on any machine. At most `BLOCK_GROUPS` groups."""
    masks = np.empty(BLOCK_GROUPS, np.uint64)
    lane0, lane1 = compare_groups(
        old, new, AHEAD_BYTES, groups, z0, z1, mix, np.uint64(masks.ctypes.data), tag
    )
    for group in range(groups):
        mask, turn = masks[group], 0
        while turn < TURNS or mask != np.uint64(0):  # no processor predicts where changes are
            positions[found] = relative + group * GROUP + trailing_zeros(mask | np.uint64(1 << 63))
            found += mask != np.uint64(0)
            mask &= mask - np.uint64(1)
            turn += 1
    return found, lane0, lane1


@kernel
def note_by_vectors(
    old: np.uint64, new: np.uint64, groups: int, z0: np.uint64, z1: np.uint64, mix: Any, relative: np.uint32,
    positions: Positions, found: int, tag: Any,
) -> Any:  # fmt: skip
    """`jit_find.note_groups` to positions from entry `found` on: (the new `found`, lane 0, lane 1)."""
    at = np.uint64(positions.ctypes.data) + np.uint64(4 * found)
    noted, lane0, lane1 = note_groups(old, new, AHEAD_BYTES, groups, z0, z1, mix, relative, at, tag)
    return found + np.int64(noted), lane0, lane1


note_mixed: Final = note_by_vectors if COMPRESSES else note_by_turns


@kernel
def note(
    old: np.uint64, new: np.uint64, groups: int, seed: Seed, word: int, relative: np.uint32,
    positions: Positions, found: int, tag: Any,
) -> Any:  # fmt: skip
    """`note_by_vectors` where the machine can: groups of which the first begins with word `word` of its tensor."""
    golden = np.uint64(word) * np.uint64(GOLDEN)
    z0, z1 = seed[0] + golden, seed[1]
    if seed[2] == MIX_2:
        return note_mixed(old, new, groups, z0, z1, SHARED, relative, positions, found, tag)
    return note_mixed(old, new, groups, z0, z1 + golden, OWN, relative, positions, found, tag)


@kernel
def take(
    old: np.uint64, new: np.uint64, groups: int, relative: int, shift: int, seed: Seed,
    positions: Positions, olds: Bits, news: Bits, tag: Any,
) -> Any:  # fmt: skip
    """Write the changes of groups, as both sides are now, to the start of the outputs: (how many there are, lane 0,
    lane 1 of what they move the digest by). The element at position p is element p + shift of its tensor.
    """
    found = take_groups(
        old, new, groups, np.uint32(relative),
        np.uint64(positions.ctypes.data), np.uint64(olds.ctypes.data), np.uint64(news.ctypes.data), tag,
    )  # fmt: skip
    lane0, lane1 = digest_list(positions[:found], shift, olds[:found], news[:found], seed)
    return found, lane0, lane1


@kernel
def keep_by_vectors(
    old: np.uint64, new: np.uint64, relative: int, index: int, seed: Seed,
    positions: np.uint64, olds: np.uint64, news: np.uint64, kept: int, found: int, ahead: int, tag: Any,
) -> Any:  # fmt: skip
    """`keep_marked` where the machine can and both sides are aligned; positions, olds and news by their addresses.

    What both sides have from `ahead` bytes on is fetched meanwhile: memory that waits for changes to be read has not
    been fetched when they have been. Up to `LANES` entries more are overwritten.
    """
    count, entries = found - kept, np.uint64(kept)
    at, size = positions + np.uint64(4) * entries, np.uint64(width(tag)) * entries
    if seed[2] == MIX_2:
        more, lane0, lane1 = read_changes(
            old, new, at, olds + size, news + size, count, relative, index, ahead,
            seed[0], seed[1], SHARED, tag,
        )  # fmt: skip
    else:
        more, lane0, lane1 = read_changes(
            old, new, at, olds + size, news + size, count, relative, index, ahead,
            seed[0], seed[1], OWN, tag,
        )  # fmt: skip
    return kept + more, lane0, lane1


@kernel
def keep_marked(
    old: np.uint64, new: np.uint64, relative: int, index: int, seed: Seed,
    positions: Positions, olds: Bits, news: Bits, kept: int, found: int, tag: Any,
) -> Any:  # fmt: skip
    """(their end, lane 0, lane 1): as `read_marked`, and the sum of (new - old) * R over what is kept.

    The element at position p is element p - relative + index of its tensor.
    """
    end = read_marked(old, new, relative, positions, olds, news, kept, found, tag)
    lane0, lane1 = digest_list(positions[kept:end], index - relative, olds[kept:end], news[kept:end], seed)
    return end, lane0, lane1


@kernel
def find_few(
    old: np.uint64, new: np.uint64, index: int, count: int, relative: int, seed: Seed,
    positions: Positions, olds: Bits, news: Bits, found: int, tag: Any,
) -> Any:  # fmt: skip
    """As `compare_run`, of a few elements, maybe none: (found, lane 0, lane 1 of what they move the digest by)."""
    marked = mark_run(old, new, count, relative, positions, found, tag)
    if marked == found:
        return found, np.uint64(0), np.uint64(0)
    return keep_marked(old, new, relative, index, seed, positions, olds, news, found, marked, tag)


@kernel
def compare_run(
    old: np.uint64, new: np.uint64, index: int, count: int, relative: int, seed: Seed,
    positions: Positions, olds: Bits, news: Bits, found: int, tag: Any,
) -> Any:  # fmt: skip
    """Append the changes of a run to positions, olds and news: (found, lane 0, lane 1 of its new bits, the same of what
    the changes move the digest by).

    The first element is element `index` of its tensor, and `relative` in positions. There are at most as many entries
    as elements, whatever the two sides do meanwhile; up to `GROUP` more are overwritten.
    """
    each = 8 // width(tag)
    head = min(count, -index % each)
    end = head + (count - head) // GROUP * GROUP
    aligned = (old | new) % np.uint64(width(tag)) == 0
    at, to_old, to_new = (
        np.uint64(positions.ctypes.data), np.uint64(olds.ctypes.data), np.uint64(news.ctypes.data)
    )  # fmt: skip
    lane0, lane1, moved0, moved1 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    if head > 0:
        lane0, lane1 = digest_run(new, index, head, seed, tag)
        found, moved0, moved1 = find_few(
            old, new, index, head, relative, seed, positions, olds, news, found, tag
        )
    for block in range(head, end, BLOCK_GROUPS * GROUP):
        groups = min(BLOCK_GROUPS, (end - block) // GROUP)
        shift = np.uint64(block * width(tag))
        marked, part0, part1 = note(
            old + shift, new + shift, groups, seed, (index + block) // each, np.uint32(relative + block),
            positions, found, tag,
        )  # fmt: skip
        lane0, lane1 = lane0 + part0, lane1 + part1
        if COMPRESSES and marked - found > groups * MANY:
            more, part0, part1 = take(
                old + shift, new + shift, groups, relative + block, index - relative, seed,
                positions[found:], olds[found:], news[found:], tag,
            )  # fmt: skip
            found += more
        elif COMPRESSES and aligned:
            ahead = (block + groups * GROUP) * width(tag) + AHEAD_BYTES  # where the loop over groups left off
            found, part0, part1 = keep_by_vectors(
                old, new, relative, index, seed, at, to_old, to_new, found, marked, ahead, tag
            )
        else:
            found, part0, part1 = keep_marked(
                old, new, relative, index, seed, positions, olds, news, found, marked, tag
            )
        moved0, moved1 = moved0 + part0, moved1 + part1
    if end == count:
        return found, lane0, lane1, moved0, moved1
    shift = np.uint64(end * width(tag))
    part0, part1 = digest_run(new + shift, index + end, count - end, seed, tag)
    found, step0, step1 = find_few(
        old + shift, new + shift, index + end, count - end, relative + end, seed,
        positions, olds, news, found, tag,
    )  # fmt: skip
    return found, lane0 + part0, lane1 + part1, moved0 + step0, moved1 + step1


@kernel
def find_interval(
    old: Words, new: Words, starts: Ints, seeds: Words, first: int, start: int, length: int,
    positions: Positions, olds: Bits, news: Bits, tag: Any,
) -> Any:  # fmt: skip
    """All changes of an interval: how many, and both pairs of lanes, as `compare_run` returns them.

    positions (relative), olds and news must hold `length` + `GROUP` entries.
    """
    lane0, lane1, moved0, moved1 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
    tensor, at, stop, found = first, start, start + length, 0
    while at < stop:
        end, index = min(starts[tensor + 1], stop), at - starts[tensor]
        shift = np.uint64(index * width(tag))
        found, part0, part1, step0, step1 = compare_run(
            old[tensor] + shift, new[tensor] + shift, index, end - at, at - start, seed_of(seeds, tensor),
            positions, olds, news, found, tag,
        )  # fmt: skip
        lane0, lane1 = lane0 + part0, lane1 + part1
        moved0, moved1 = moved0 + step0, moved1 + step1
        at = end
        tensor += 1
    return found, lane0, lane1, moved0, moved1
