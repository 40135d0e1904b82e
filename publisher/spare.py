"""Memory that changes waited in, for those of the next version."""

from __future__ import annotations

import threading
from weakref import WeakSet

from weightcast.codec import Room


class Spare:
    """Rooms that nobody uses at the moment: pages that were used before cost nothing, new ones more than to fill them.

    Args:
        most_rooms: there may be in all, at work or not. They take address space for rows that change everywhere.
        most_bytes: what was ever written in those that nobody uses. One that would exceed it is let go.
    """

    def __init__(self, most_rooms: int, most_bytes: int) -> None:
        self._most_rooms, self._most_bytes = most_rooms, most_bytes
        self._lock = threading.Lock()
        self._all: WeakSet[Room] = WeakSet()  # one that nobody gives back is gone with whoever had it
        self._free: list[Room] = []
        self._bytes = 0  # written in those

    def take(self, length: int, width: int) -> Room | None:
        """Room for a row, for the caller alone until it is given back; None if there are too many, or no memory."""
        with self._lock:
            for at in reversed(range(len(self._free))):
                if self._free[at].holds(length, width):
                    return self._pop(at)
            if len(self._all) >= self._most_rooms and self._free:
                self._pop(0)  # of another width, or for shorter rows
            if len(self._all) >= self._most_rooms:
                return None
            try:
                room = Room(length, width)
            except OSError:
                return None
            self._all.add(room)
            return room

    def give(self, room: Room, nbytes: int) -> None:
        """Give back what `take` gave, of which `nbytes` were written; nothing may refer to it any more."""
        with self._lock:
            room.written_bytes = max(room.written_bytes, nbytes)
            if self._bytes + room.written_bytes <= self._most_bytes:
                self._bytes += room.written_bytes
                self._free.append(room)

    def clear(self) -> None:
        """Let go of all that nobody uses."""
        with self._lock:
            self._free.clear()
            self._bytes = 0

    def _pop(self, at: int) -> Room:
        room = self._free.pop(at)
        self._bytes -= room.written_bytes
        return room
