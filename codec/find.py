"""The first half of encoding: what changed in an interval, held compactly, and the digests that prove it.

Once an interval's changes are found, its new bits are not read any more: whoever owns them may write them again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Final

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

_WORD: Final = 8


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

    @property
    def room_bytes(self) -> int:
        """Bytes of the buffer that `copied` takes: `nbytes`, and what it takes for each array to begin at a word."""
        return sum(-(-part.nbytes // _WORD) * _WORD for part in (self.positions, self.olds, self.news))

    def copied(self, room: npt.NDArray[np.uint8] | None = None) -> Found:
        """The same in `room`, uint8 [at least `room_bytes`], which begins at a word; or in memory of its own."""
        room = np.empty(self.room_bytes, np.uint8) if room is None else room
        at, parts = 0, []
        for part in (self.positions, self.olds, self.news):
            copy = room[at : at + part.nbytes].view(part.dtype)
            copy[:] = part
            parts.append(copy)
            at += -(-part.nbytes // _WORD) * _WORD
        return replace(self, positions=parts[0], olds=parts[1], news=parts[2])


def find(space: FlatSpace, new: Memory, old: Memory, interval: Interval) -> Found:
    """Compare and digest one interval, in one pass over both memories. Releases the GIL; deterministic.

    The result lies in memory that the calling thread uses again at its next call: see `Found.copied`. If either side is
    written meanwhile, the result may be of no use, which `change` shows, but nothing breaks.

    Args:
        space: the flat space of the interval's dtype.
        new: the state to publish.
        old: the state that readers have.
        interval: what to look at; at most 2^24 elements.

    Raises:
        UsageError: the interval is not in the space, or a memory is not of its layout.
    """
    space.check(interval)
    if interval.length > MAX_ROW_ELEMENTS:
        raise UsageError(f"{interval} is longer than a row may be, {MAX_ROW_ELEMENTS} elements")
    first, width = space.tensor_at(interval.start), space.width
    positions, olds, news = scratch.take(interval.length + GROUP, width)
    count, *lanes = find_interval(
        old.addresses(space), new.addresses(space), space.starts, space.seeds, first,
        interval.start, interval.length, positions, olds, news, TAGS[width],
    )  # fmt: skip
    digest, change = Digest(*map(int, lanes[:2])), Digest(*map(int, lanes[2:]))
    return Found(interval.length, positions[:count], olds[:count], news[:count], digest, change)


class Scratch(threading.local):
    """Room for the changes of a row, kept from row to row instead of being asked of the system each time.

    Only what a row fills is ever touched: 8 bytes a change at width 2, up to what the densest row needed.
    """

    def __init__(self) -> None:
        self._positions = np.empty(0, np.uint32)
        self._bits: dict[int, tuple[Bits, Bits]] = {}

    def take(self, length: int, width: int) -> tuple[Positions, Bits, Bits]:
        """positions, olds and news of at least `length` entries, valid until this thread's next call."""
        if len(self._positions) < length:
            self._positions = np.empty(length, np.uint32)
        if width not in self._bits or len(self._bits[width][0]) < length:
            self._bits[width] = np.empty(length, UNSIGNED[width]), np.empty(length, UNSIGNED[width])
        return self._positions, *self._bits[width]


scratch = Scratch()
