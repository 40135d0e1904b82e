from __future__ import annotations

import mmap
from typing import Any

import pytest

from weightcast.codec import Room
from weightcast.publisher.spare import Spare


def taken(spare: Spare, length: int = 100, width: int = 2) -> Room:
    room = spare.take(length, width)
    assert room is not None
    assert room.holds(length, width)
    return room


def test_what_was_given_back_is_taken_again_and_only_then() -> None:
    spare = Spare(10, 1000)
    first, second = taken(spare), taken(spare)
    assert first is not second
    spare.give(first, 10)
    assert taken(spare, 90) is first
    assert taken(spare) is not first


def test_a_room_is_for_one_width_and_for_no_longer_rows() -> None:
    spare = Spare(10, 1000)
    room = taken(spare)
    spare.give(room, 0)
    assert taken(spare, 101) is not room
    assert taken(spare, 100, 4) is not room
    assert taken(spare) is room


def test_beyond_the_number_there_is_none_until_one_is_given_back_or_gone() -> None:
    spare = Spare(2, 1000)
    first, second = taken(spare), taken(spare)
    assert spare.take(100, 2) is None
    spare.give(first, 0)
    assert taken(spare) is first
    del second  # whoever had it met an error
    spare.give(taken(spare), 0)
    other = taken(spare, 100, 4)  # in the place of one that nobody uses
    assert spare.take(100, 2) is None
    del other


def test_no_more_is_kept_than_was_allowed() -> None:
    spare = Spare(10, 1000)
    rooms = [taken(spare) for _ in range(3)]
    for room, nbytes in zip(rooms, (600, 500, 400), strict=True):
        spare.give(room, nbytes)
    assert taken(spare) is rooms[2]
    assert taken(spare) is rooms[0]
    assert taken(spare) not in rooms
    spare.give(rooms[0], 1)  # which has 600 all the same
    spare.give(rooms[1], 1)
    assert taken(spare) is rooms[0]


def test_what_nobody_uses_can_be_let_go() -> None:
    spare = Spare(10, 1000)
    used, free = taken(spare), taken(spare)
    spare.give(free, 1000)
    spare.clear()
    assert taken(spare) is not free
    spare.give(used, 1000)
    assert taken(spare) is used, "and there is room for as many bytes again"


def test_without_address_space_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    assert Spare(10, 1000).take(100, 2) is None
