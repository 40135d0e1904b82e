"""The first half of encoding: what changed in an interval, held compactly, and the digests that prove it.

Once an interval's changes are found, its new bits are not read any more: whoever owns them may write them again.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import UsageError
from weightcast.schemas.shard import MAX_ROW_ELEMENTS

from .jit import GROUP, TAGS
from .kernels_find import find_interval
from .memory import UNSIGNED, Memory
from .space import FlatSpace, Interval

Bits = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]


class Room:
    """Memory for the changes of one row. Whoever has it may use it for one row after another.

    Mapped for a row that changes everywhere, 8 bytes an element at width 2; only what rows fill is ever memory.

    Attributes:
        positions: uint32 [length + `GROUP`].
        olds, news: unsigned, as many.
        written_bytes: for the owner to note how much of it was ever filled.

    Raises:
        OSError: there is no address space left.
    """

    def __init__(self, length: int, width: int) -> None:
        entries = length + GROUP
        sizes = [-(-entries * each // mmap.PAGESIZE) * mmap.PAGESIZE for each in (4, width, width)]
        mapped = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError, AttributeError):  # a kernel, or a system, without huge pages
            mapped.madvise(mmap.MADV_NOHUGEPAGE)  # of which a few changes would fill three
        self.positions: Positions = np.frombuffer(mapped, np.uint32, entries)
        dtype = UNSIGNED[width]
        self.olds: Bits = np.frombuffer(mapped, dtype, entries, sizes[0])
        self.news: Bits = np.frombuffer(mapped, dtype, entries, sizes[0] + sizes[1])
        self.written_bytes = 0

    def holds(self, length: int, width: int) -> bool:
        """Whether it is for rows of `length` elements of `width` bytes."""
        return len(self.positions) >= length + GROUP and self.olds.itemsize == width


@dataclass(frozen=True, slots=True)
class Found:
    """The n changes of a row.

    Attributes:
        length: elements of the row.
        positions: uint32 [n], relative to the row, ascending.
        olds, news: unsigned [n], bits before and after.
        digest: of all new bits of the row.
        change: sum over the changes of (new - old) * R. Detection is right only if the digest of the old bits and this
            add up to `digest`.
    """

    length: int
    positions: Positions
    olds: Bits
    news: Bits
    digest: Digest
    change: Digest

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes that the changes take: 8 each at width 2."""
        return self.positions.nbytes + self.olds.nbytes + self.news.nbytes

    def copied(self) -> Found:
        """The same in memory of its own."""
        return replace(self, positions=self.positions.copy(), olds=self.olds.copy(), news=self.news.copy())


def find(space: FlatSpace, new: Memory, old: Memory, interval: Interval, room: Room | None = None) -> Found:
    """Compare and digest one interval, in one pass over both memories. Releases the GIL; deterministic.

    The result lies in `room`, or in memory that the calling thread uses again at its next call: see `Found.copied`. If
    either side is written meanwhile, the result may be of no use, which `change` shows, but nothing breaks.

    Args:
        space: the flat space of the interval's dtype.
        new: the state to publish.
        old: the state that readers have.
        interval: what to look at; at most 2^24 elements.
        room: for such an interval, or None.

    Raises:
        UsageError: the interval is not in the space, or a memory is not of its layout.
    """
    space.check(interval)
    if interval.length > MAX_ROW_ELEMENTS:
        raise UsageError(f"{interval} is longer than a row may be, {MAX_ROW_ELEMENTS} elements")
    first, width = space.tensor_at(interval.start), space.width
    if room is None:
        room = own_rooms.take(interval.length, width)
    elif not room.holds(interval.length, width):
        raise UsageError(f"the room is not for {interval} at width {width}")
    positions, olds, news = room.positions, room.olds, room.news
    count, *lanes = find_interval(
        old.addresses(space), new.addresses(space), space.starts, space.seeds, first,
        interval.start, interval.length, positions, olds, news, TAGS[width],
    )  # fmt: skip
    digest, change = Digest(*map(int, lanes[:2])), Digest(*map(int, lanes[2:]))
    return Found(interval.length, positions[:count], olds[:count], news[:count], digest, change)


class OwnRooms(threading.local):
    """A thread's rooms, one a width, kept from row to row."""

    def __init__(self) -> None:
        self._rooms: dict[int, Room] = {}

    def take(self, length: int, width: int) -> Room:
        """Room for a row of `length` elements, valid until this thread's next call."""
        if width not in self._rooms or not self._rooms[width].holds(length, width):
            self._rooms[width] = Room(length, width)
        return self._rooms[width]


own_rooms = OwnRooms()
