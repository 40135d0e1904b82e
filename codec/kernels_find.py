"""The loop that finds changes: compare, digest and note, group by group, while memory further on is fetched.

A group is compared, weighed and noted in one go, since each leaves units of the processor idle that the others need:
the digest is bound by its multiplications, comparing by memory, and noting by neither.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .jit import GOLDEN, GROUP, LANES, kernel, load, trailing_zeros, width
from .jit_find import COMPRESSES, compare_group, note_group
from .kernels import AHEAD_BYTES, Bits, Ints, Positions, Words, digest_run, mark_run, read_marked

TURNS: Final = 3
"""Changes of a group that are noted without a branch."""


@kernel
def note_by_turns(
    old: np.uint64, new: np.uint64, z0: np.uint64, z1: np.uint64, sums: np.uint64, relative: np.uint32,
    positions: Positions, olds: Bits, news: Bits, found: int, tag: Any,
) -> int:  # fmt: skip
    """As `jit.note_group`, on any machine."""
    mask = compare_group(old, new, AHEAD_BYTES, z0, z1, sums, tag)
    turn = 0  # the first turns are taken without a look: no processor predicts where changes are
    while turn < TURNS or mask != np.uint64(0):
        j = trailing_zeros(mask | np.uint64(1 << 63))
        before, after = load(old + np.uint64(j * width(tag)), tag), load(new + np.uint64(j * width(tag)), tag)
        positions[found], olds[found], news[found] = relative + j, before, after
        found += (mask != np.uint64(0)) & (
            before != after
        )  # a source that is being written may be equal by now
        mask &= mask - np.uint64(1)
        turn += 1
    return found


@kernel
def note_by_vectors(
    old: np.uint64, new: np.uint64, z0: np.uint64, z1: np.uint64, sums: np.uint64, relative: np.uint32,
    positions: Positions, olds: Bits, news: Bits, found: int, tag: Any,
) -> Any:  # fmt: skip
    """As `jit.note_group`."""
    return note_group(
        old, new, AHEAD_BYTES, z0, z1, sums, relative, np.uint64(positions.ctypes.data), np.uint64(olds.ctypes.data),
        np.uint64(news.ctypes.data), found, tag,
    )  # fmt: skip


note: Final = note_by_vectors if COMPRESSES else note_by_turns


@kernel
def compare_run(
    old: np.uint64, new: np.uint64, index: int, count: int, relative: int, seed0: np.uint64, seed1: np.uint64,
    sums: np.uint64, positions: Positions, olds: Bits, news: Bits, found: int, tag: Any,
) -> Any:  # fmt: skip
    """(found, lane 0, lane 1): append the changes of a run to positions, olds and news; the digest of its new bits.

    The first element is element `index` of its tensor. Entries are as many as elements at most, whatever the two sides
    do meanwhile. sums: two vectors of zeros, which are used up.
    """
    each = 8 // width(tag)
    head = min(count, -index % each)
    lane0, lane1 = digest_run(new, index, head, seed0, seed1, tag)
    marked = mark_run(old, new, head, relative, positions, found, tag)
    found = read_marked(old, new, relative, positions, olds, news, found, marked, tag)
    for group in range(head, head + (count - head) // GROUP * GROUP, GROUP):
        golden = np.uint64((index + group) // each) * np.uint64(GOLDEN)
        a, b = old + np.uint64(group * width(tag)), new + np.uint64(group * width(tag))
        found = note(
            a,
            b,
            seed0 + golden,
            seed1 + golden,
            sums,
            np.uint32(relative + group),
            positions,
            olds,
            news,
            found,
            tag,
        )
    rest = (count - head) % GROUP
    shift = np.uint64((count - rest) * width(tag))
    part0, part1 = digest_run(new + shift, index + count - rest, rest, seed0, seed1, tag)
    marked = mark_run(old + shift, new + shift, rest, relative + count - rest, positions, found, tag)
    found = read_marked(
        old + shift, new + shift, relative + count - rest, positions, olds, news, found, marked, tag
    )
    return found, lane0 + part0, lane1 + part1


@kernel
def compare_interval(
    old: Words, new: Words, starts: Ints, seeds: Words, first: int, start: int, length: int,
    positions: Positions, olds: Bits, news: Bits, tag: Any,
) -> Any:  # fmt: skip
    """(number of changes, lane 0, lane 1): all changes of an interval and the digest of its new bits.

    positions (relative), olds and news must hold `length` entries.
    """
    lane0, lane1, found = np.uint64(0), np.uint64(0), 0
    sums = np.empty(2 * LANES, np.uint64)
    tensor, at, stop = first, start, start + length
    while at < stop:
        end, index = min(starts[tensor + 1], stop), at - starts[tensor]
        shift = np.uint64(index * width(tag))
        sums[:] = np.uint64(0)
        found, part0, part1 = compare_run(
            old[tensor] + shift, new[tensor] + shift, index, end - at, at - start, seeds[tensor, 0], seeds[tensor, 1],
            np.uint64(sums.ctypes.data), positions, olds, news, found, tag,
        )  # fmt: skip
        lane0 += part0 + sums[:LANES].sum()
        lane1 += part1 + sums[LANES:].sum()
        at = end
        tensor += 1
    return found, lane0, lane1
