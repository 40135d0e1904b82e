"""Finding changes while the trainer waits, and coding them once it does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Final, TypeVar

from weightcast.codec import FlatSpace, Found, Geometry, Interval, Memory, Room, code, find
from weightcast.manifest.rebuild import State
from weightcast.schemas.digest import Digest
from weightcast.schemas.shard import Codec, Row

from .olds import Olds
from .rows import Rows, ready
from .spare import Spare

LEAST_FOUND_BYTES: Final = 64 << 20
"""Changes, at 8 bytes each, that may always wait to be coded: those of 0.8 billion elements at 1 %."""

FOUND_SHARE: Final = 16
"""Of a larger model, changes may wait that take 1/16 of its bytes: those of 1.5 % of its bf16 elements."""

MOST_FOUND_BYTES: Final = 256 << 20
"""And never more, whatever the model's size: those of 3.2 billion elements at 1 %."""

HANDED_OVER: Final = 64
"""Intervals whose rows are handed over together: each time the calling thread wakes, it takes a core from those who
compare, while the trainer waits."""

MOST_ROOMS: Final = 1024
"""Rooms of rows that wait, at 32 MiB of address space each; changes of more rows are copied."""

_spare: Final = Spare(MOST_ROOMS, LEAST_FOUND_BYTES)
"""Of all publishers of this process."""

T = TypeVar("T")


class Coder:
    """Fills one capture's rows.

    Changes that are found wait until `start`, in rooms that are used again; where too many wait, whoever finds more
    codes them at once.
    """

    def __init__(self, rows: Rows, pool: Executor, state: State, *, level: int, codec: Codec) -> None:
        self._rows = rows
        self._pool = pool
        self._level = level
        self._codec = rows.codec = codec
        self._lock = threading.Lock()
        self._room = min(max(LEAST_FOUND_BYTES, state.layout.nbytes // FOUND_SHARE), MOST_FOUND_BYTES)
        self._waiting: list[tuple[Future[Row], Callable[[], Row]]] = []

    def find(
        self, geometry: Geometry, new: Memory, olds: Olds, intervals: Sequence[Interval]
    ) -> Iterator[tuple[Digest, Digest]]:
        """Compare intervals with the pool, and hand over their rows in order. At the end nothing refers to `new`.

        Yields:
            Of each interval the digest of its new bits, and what its changes move it by.
        """

        def one(interval: Interval) -> tuple[Digest, Digest, Callable[[], Row] | Row | None]:
            with olds.memory(interval) as old:
                space = geometry[interval.dtype]
                room = _spare.take(interval.length, space.width) if olds.lasting else None
                found = find(space, new, old, interval, room)
                return found.digest, found.change, self._made(space, interval, found, old, olds.lasting, room)

        if not olds.lasting:
            _spare.clear()  # of the versions before the detector had what it needs, which is there to save memory
        # Where nothing may wait rows are coded at once, and each is to be on its way as soon as it is.
        together = HANDED_OVER if olds.lasting else 1
        found = self._in_order(one, intervals, together)
        for interval, (digest, change, made) in zip(intervals, found, strict=True):
            if isinstance(made, Row):
                self._rows.add(interval, ready(made))
            elif made is not None:
                future: Future[Row] = Future()
                self._waiting.append((future, made))
                self._rows.add(interval, future)
            yield digest, change

    def _in_order(
        self, call: Callable[[Interval], T], intervals: Sequence[Interval], together: int
    ) -> Iterator[T]:
        """`pool.map`, but the calling thread wakes once for so many of them together; a single one it calls itself."""
        if len(intervals) == 1:
            yield call(intervals[0])
            return
        futures = [self._pool.submit(call, interval) for interval in intervals]
        try:
            for at in range(0, len(futures), together):
                some = futures[at : at + together]
                wait(some)
                yield from (future.result() for future in some)
        finally:
            for future in futures:  # after an error nobody wants the rest
                future.cancel()

    def _made(
        self,
        space: FlatSpace,
        interval: Interval,
        found: Found,
        old: Memory,
        lasting: bool,
        room: Room | None,
    ) -> Callable[[], Row] | Row | None:
        """The row of what was found, or what makes it later, without what was found being in the way."""
        nbytes = found.nbytes

        def make(kept: Found) -> Row:
            try:
                return self._code(space, interval, kept, old)
            finally:
                if room is not None:
                    _spare.give(room, nbytes)

        if len(found) and lasting and self._has_room(nbytes):
            kept = found if room is not None else found.copied()
            return lambda: make(kept)
        if len(found):
            return make(found)
        if room is not None:
            _spare.give(room, 0)
        return None

    def _code(self, space: FlatSpace, interval: Interval, found: Found, old: Memory) -> Row:
        began = time.thread_time()
        row = code(space, interval, found, old, self._level, codec=self._codec)
        self._rows.spent(time.thread_time() - began)
        return row

    def _has_room(self, nbytes: int) -> bool:
        """Whether so many bytes more may wait; then they count."""
        with self._lock:
            fits = nbytes <= self._room
            self._room -= nbytes if fits else 0
            return fits

    def start(self) -> None:
        """Have the pool code what waits."""
        waiting, self._waiting = self._waiting, []
        for future, make in waiting:
            self._pool.submit(_fulfil, future, make)


def _fulfil(future: Future[Row], make: Callable[[], Row]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(make())
    except BaseException as error:  # noqa: BLE001 - handed to whoever asks the future
        future.set_exception(error)
