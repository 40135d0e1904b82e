"""Rows to shards, uploaded as they come: small ones first, so that the link has work from the start."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from weightcast.manifest.commit import put_shard
from weightcast.manifest.store import Store
from weightcast.schemas.manifest import ShardRef
from weightcast.schemas.shard import Row, features_of

UPLOADS_AHEAD: Final = 8
"""Shards on their way at once: with 8 MiB each and 60 ms round trips, enough to fill 1 Gbit/s."""

FIRST_SHARD_BYTES: Final = 1 << 20
"""The first shards are closed after so many bytes, each later one after 1/_CLOSED_SHARE of what was closed before it,
up to the setting: what is coded last leaves last, and that is to be little."""

_CLOSED_SHARE: Final = 8
"""A shard is an eighth of what was closed before it: large enough that there are not many."""

LAST_SHARD_BYTES: Final = 1 << 20
"""What is left at the end is spread over connections that are free, in shards of at least so many bytes."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A version's shards.

    Attributes:
        refs: in the order of their rows.
        features: that a reader needs.
        busy_s: seconds in which at least one of them was on its way.
    """

    refs: list[ShardRef]
    features: list[str]
    busy_s: float

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(ref.size for ref in self.refs)


class Busy:
    """How long at least one of several overlapping things was under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since = self._total_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds, of what has ended."""
        return self._total_s

    @contextmanager
    def one(self) -> Iterator[None]:
        """While one of them is under way."""
        with self._lock:
            self._since = self._since if self._running else time.monotonic()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._total_s += time.monotonic() - self._since


class ShardWriter:
    """Uploads versions' rows. Used by one thread at a time."""

    def __init__(self, store: Store, writer: str, pool: Executor, shard_bytes: int) -> None:
        self._store = store
        self._writer = writer
        self._pool = pool
        self._shard_bytes = shard_bytes

    def send(self, version: int, rows: Iterable[Row]) -> Sent:
        """Upload rows of `version` as they come, a few shards at a time."""
        refs: list[ShardRef] = []
        features: set[str] = set()
        flying: deque[Future[ShardRef]] = deque()
        busy = Busy()
        try:
            for part, batch in enumerate(batches(rows, self._shard_bytes)):
                features |= features_of(batch)
                flying.append(self._pool.submit(self._put, busy, version, part, batch))
                if len(flying) >= UPLOADS_AHEAD:
                    refs.append(flying.popleft().result())
            refs += [future.result() for future in flying]
        finally:
            for future in flying:
                future.cancel()
        return Sent(refs, sorted(features), busy.total_s)

    def _put(self, busy: Busy, version: int, part: int, rows: list[Row]) -> ShardRef:
        with busy.one():
            return put_shard(self._store, version, self._writer, part, rows)


def batches(rows: Iterable[Row], shard_bytes: int) -> Iterator[list[Row]]:
    """Rows by shard, each yielded as soon as it is full."""
    batch: list[Row] = []
    nbytes = closed = 0
    for row in rows:
        batch.append(row)
        nbytes += row.nbytes
        if nbytes >= min(max(FIRST_SHARD_BYTES, closed // _CLOSED_SHARE), shard_bytes):
            yield batch
            closed += nbytes
            batch, nbytes = [], 0
    yield from spread(batch, min(LAST_SHARD_BYTES, shard_bytes))


def spread(rows: list[Row], least_bytes: int) -> Iterator[list[Row]]:
    """Rows in up to `UPLOADS_AHEAD` shards of about equal size, none much smaller than `least_bytes`."""
    left = sum(row.nbytes for row in rows)
    share = max(left / UPLOADS_AHEAD, least_bytes)
    batch: list[Row] = []
    nbytes = 0
    for row in rows:
        batch.append(row)
        nbytes += row.nbytes
        if nbytes >= share and left - nbytes >= share / 2:
            yield batch
            left -= nbytes
            batch, nbytes = [], 0
    if batch:
        yield batch
