"""Memory for changes from version to version: used again, but never while somebody has it."""

from __future__ import annotations

import numpy as np

from weightcast.codec import Changes
from weightcast.manifest.deltas import fold
from weightcast.subscriber.spare import MOST_BYTES, Spare

from ..codec.states import space_of

SPACE = space_of(2, [(1 << 24,)])


def address(changes: Changes) -> int:
    return int(changes.positions.ctypes.data)


def test_what_nobody_has_is_used_again() -> None:
    spare = Spare()
    first = spare.take(SPACE, 1000)
    assert (len(first), len(first.values), first.dtype) == (1000, 1000, SPACE.dtype)
    at = address(first)
    del first
    again = spare.take(SPACE, 1100)
    assert (len(again), address(again)) == (1100, at)


def test_what_somebody_has_is_not() -> None:
    spare = Spare()
    first = spare.take(SPACE, 1000)
    part = first.part(10, 20)
    part.positions[:], part.values[:] = np.arange(10), 7
    second = spare.take(SPACE, 1000)
    assert not np.shares_memory(first.positions, second.positions)
    del first, second
    values = part.values
    del part  # one of the two arrays is enough
    third = spare.take(SPACE, 1000)
    fourth = spare.take(SPACE, 1000)
    assert not np.shares_memory(third.values, fourth.values)
    assert values.tolist() == [7] * 10


def test_what_was_folded_stays_its_owners() -> None:
    spare = Spare()
    first = spare.take(SPACE, 5)
    first.positions[:], first.values[:] = np.arange(5), 1
    folded = fold({}, {SPACE.dtype: first})
    del first
    spare.take(SPACE, 5).values[:] = 2
    assert folded[SPACE.dtype].values.tolist() == [1] * 5


def test_more_changes_take_new_memory_and_large_ones_are_not_kept() -> None:
    spare = Spare()
    at = address(spare.take(SPACE, 1000))
    large = spare.take(SPACE, MOST_BYTES // 10 + 1)
    assert len(large) == MOST_BYTES // 10 + 1
    assert address(spare.take(SPACE, 1000)) == at, "what was kept before still is"


def test_each_dtype_has_its_own() -> None:
    spare, other = Spare(), space_of(4, [(100,)])
    kept = address(spare.take(SPACE, 10))
    assert spare.take(other, 10).values.dtype == np.uint32
    assert address(spare.take(SPACE, 10)) == kept
