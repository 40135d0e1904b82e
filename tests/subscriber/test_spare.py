"""Memory for changes from version to version: used again, but never while somebody has it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from weightcast.codec import Changes, FlatSpace
from weightcast.manifest.deltas import fold
from weightcast.subscriber import Subscriber, Tensors
from weightcast.subscriber.spare import MOST_BYTES, Spare

from ..codec.states import space_of
from ..faultstore import FaultStore
from .conftest import Trainer
from .kit import Model, bits, blank

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


def test_room_for_more_is_cut_where_it_would_be_too_large_to_be_kept() -> None:
    spare, most = Spare(), MOST_BYTES // 10
    at = address(spare.take(SPACE, most))
    assert address(spare.take(SPACE, most)) == at


def test_arrays_that_do_not_show_who_holds_them_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As arrays over memory of something else: their parts refer to that, and not to them."""
    monkeypatch.setattr(
        Changes,
        "room",
        lambda space, count: Changes(
            space.dtype, np.frombuffer(bytes(8 * count), np.int64), np.frombuffer(bytes(2 * count), np.uint16)
        ),
    )
    spare = Spare()
    part = spare.take(SPACE, 10).part(2, 3)
    assert not np.shares_memory(part.positions, spare.take(SPACE, 10).positions)


def test_a_chain_that_is_folded_takes_turns_with_two_rooms(
    store: FaultStore, trainer: Trainer, subscriber_at: Callable[..., Subscriber]
) -> None:
    """Not a new one for each version: what was folded into another one is free again."""
    model: Model = {"w": torch.zeros(1000)}
    trainer.publish(model)
    live = blank(model)
    subscriber = subscriber_at(store, Tensors(live))
    subscriber.once()
    for version in range(1, 9):
        model["w"][version] = version
        trainer.publish(model)
    taken: list[int] = []
    spare = subscriber._mover._spare
    inner = spare.take

    def noted(space: FlatSpace, count: int) -> Changes:
        found = inner(space, count)
        taken.append(address(found))
        return found

    spare.take = noted  # type: ignore[method-assign]
    subscriber.once()
    assert bits(live) == bits(model)
    assert len(taken) == 8
    assert len(set(taken)) == 2
