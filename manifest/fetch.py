"""Shards on their way from the store: several at once, large ones in parts, none used before it is proved."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Final

from weightcast.schemas.errors import Corrupt
from weightcast.schemas.manifest import ShardRef, VersionManifest
from weightcast.schemas.shard import Row, decode_shard

from .parts import Part, cut
from .store import Store

FEWER_PARTS: Final = 2
"""Shards of a version that is not there yet come one by one, and share the link with few others: in parts as of a
version so many times as large they cost fewer requests, and are there no later."""


@dataclass
class _Shard:
    """One shard on its way. Parts land in any order, and are hashed in theirs as they come.

    `ref` is None as long as no manifest names the shard: then `sha256` of what was fetched is kept for it.
    """

    key: str
    size: int
    parts: Sequence[Part]
    ref: ShardRef | None
    rows: Future[list[Row]] = field(default_factory=Future)
    sha256: str | None = None
    _data: bytearray = field(default_factory=bytearray)
    _landed: set[int] = field(default_factory=set)
    _hashed: int = 0  # parts
    _hasher: hashlib._Hash = field(default_factory=hashlib.sha256)
    _hashing: threading.Lock = field(default_factory=threading.Lock)
    _changing: threading.Lock = field(default_factory=threading.Lock)
    _futures: list[Future[list[Row] | None]] = field(default_factory=list)

    def start(self, store: Store, pool: Executor) -> None:
        """Ask for all parts."""
        for number in range(len(self.parts)):
            future = pool.submit(self._fetch, store, number)
            self._futures.append(future)
            future.add_done_callback(self._ended)

    def cancel(self) -> None:
        """Ask for no more."""
        with self._changing:
            self.rows.cancel()
        for future in self._futures:
            future.cancel()

    def name(self, ref: ShardRef) -> bool:
        """A manifest names this shard. False if what was fetched is not it, or was not to be had."""
        with self._changing:
            failed = self.rows.cancelled() or (self.rows.done() and self.rows.exception() is not None)
            differs = ref.size != self.size or self.sha256 not in (None, ref.sha256)
            if self.ref is None and (failed or differs):
                return False
            self.ref = ref
            return True

    def checked(self, ref: ShardRef) -> list[Row]:
        """The rows of a shard that `ref` was found to name; waits for them.

        Raises:
            NotFound, StorageError: it could not be had.
            Corrupt: it is not what the manifest says.
        """
        rows = self.rows.result()
        if len(rows) != ref.rows or sum(r.count for r in rows) != ref.changed:
            said = f"its manifest says {ref.rows}, or another number of changes"
            raise Corrupt(f"shard {self.key} has {len(rows)} rows, {said}")
        return rows

    def _ended(self, future: Future[list[Row] | None]) -> None:
        """A request is over. Whatever it ended with reaches those who wait for the rows."""
        if future.cancelled():  # a pool that was closed: nobody else will ever settle it
            with self._changing:
                self.rows.cancel()
            return
        outcome = future.exception() or future.result()
        if outcome is not None:
            self._settle(outcome)

    def _fetch(self, store: Store, number: int) -> list[Row] | None:
        """What one request brings: the rows, if it was the last that was missing."""
        if self.rows.done():
            return None
        return self._whole(store) if len(self.parts) == 1 else self._part(store, number)

    def _settle(self, outcome: list[Row] | BaseException) -> None:
        with self._changing:
            if self.rows.done():
                return
            if isinstance(outcome, BaseException):
                self.rows.set_exception(outcome)
            else:
                self.rows.set_result(outcome)

    def _whole(self, store: Store) -> list[Row]:
        """The shard by one request."""
        ref = self.ref
        if ref is not None:
            return decode_shard(store.fetch(self.key, size=self.size, sha256=ref.sha256), self.key)
        data = store.fetch_part(self.key, start=0, stop=self.size)
        return self._judged(store, data, hashlib.sha256(data).hexdigest())

    def _part(self, store: Store, number: int) -> list[Row] | None:
        """One part; the rows, if it was the last that was missing."""
        part = self.parts[number]
        try:
            piece = store.fetch_part(self.key, start=part.start, stop=part.stop)
        except Corrupt:
            piece = b""  # a store that cannot do ranges, or another object: the hash will not be right
        with self._changing:
            if not self._data:
                self._data = bytearray(self.size)
            if piece:
                self._data[part.start : part.stop] = piece
            self._landed.add(number)
            last = len(self._landed) == len(self.parts)
        if self._hashing.acquire(blocking=last):
            try:
                self._hash_landed()
            finally:
                self._hashing.release()
        if not last:
            return None
        data, self._data = self._data, bytearray()
        return self._judged(store, data, self._hasher.hexdigest())

    def _hash_landed(self) -> None:
        """Hash what follows without a gap on what was hashed."""
        while self._hashed in self._landed:
            part = self.parts[self._hashed]
            self._hasher.update(memoryview(self._data)[part.start : part.stop])
            self._hashed += 1

    def _judged(self, store: Store, data: bytes | bytearray, sha256: str) -> list[Row]:
        """The rows of `data`, if that is the shard, or may be; else the shard is fetched anew."""
        with self._changing:  # so that either this sees who names the shard, or `name` sees the hash
            ref, self.sha256 = self.ref, sha256
        if ref is not None and ref.sha256 != sha256:
            data = store.fetch(self.key, size=self.size, sha256=ref.sha256)
        return decode_shard(data, self.key)


class DeltaFetcher:
    """Fetches the shards of versions in parallel, holding at most about `max_pending_bytes` of them.

    Not thread-safe: it belongs to one reader. `prefetch` may be called for a version before its rows are
    wanted, `expect` for a shard before there is a version.
    """

    def __init__(self, store: Store, pool: Executor, max_pending_bytes: int, connections: int = 8) -> None:
        self._store = store
        self._pool = pool
        self._max_pending_bytes = max_pending_bytes
        self._connections = connections
        self._ahead: dict[str, _Shard] = {}
        self._held_bytes = 0  # sizes of the shards in `_ahead`
        self._total = 0  # bytes of the last version that was asked for

    def prefetch(self, manifest: VersionManifest) -> None:
        """Start fetching the first shards of `manifest`, as far as there is room; never blocks."""
        self._total = manifest.totals.bytes
        for ref in manifest.shards:
            if not self._has_room(ref.key, ref.size):
                break
            self._start(ref)

    def expect(self, key: str, size: int) -> bool:
        """Start fetching a shard that no manifest names yet. False if there is no room for it.

        Its rows are handed out only for a manifest that names exactly this key, size and hash.
        """
        if not self._has_room(key, size):
            return False
        if key not in self._ahead:
            total = max(size, FEWER_PARTS * self._total)
            self._add(_Shard(key, size, cut(size, total, self._connections), None))
        return True

    def expected(self, key: str) -> list[Row] | None:
        """The rows of an expected shard, if they are there already. They are not proved."""
        shard = self._ahead.get(key)
        if shard is None or not shard.rows.done() or shard.rows.cancelled() or shard.rows.exception():
            return None
        return shard.rows.result()

    def settle(self, manifest: VersionManifest | None) -> None:
        """Forget expected shards that `manifest` does not name: those of a writer that lost, say."""
        named = {ref.key for ref in manifest.shards} if manifest else set()
        for key in [k for k, shard in self._ahead.items() if shard.ref is None and k not in named]:
            self._forget(key)

    def rows(self, manifest: VersionManifest) -> Iterator[Row]:
        """The rows of `manifest`, shard by shard in the manifest's order, each shard verified first.

        Raises:
            NotFound: a shard is gone (pruned, or never there).
            Corrupt: a shard is not what the manifest says, after a second fetch.
        """
        window: deque[ShardRef] = deque()
        self._total = manifest.totals.bytes
        try:
            for ref in manifest.shards:
                while window and not self._has_room(ref.key, ref.size):
                    yield from self._take(window.popleft())
                self._start(ref)
                window.append(ref)
            while window:
                yield from self._take(window.popleft())
        finally:
            for ref in window:
                self._forget(ref.key)

    def drop(self) -> None:
        """Forget what was prefetched."""
        for key in list(self._ahead):
            self._forget(key)

    def _has_room(self, key: str, size: int) -> bool:
        return key in self._ahead or self._held_bytes + size <= self._max_pending_bytes

    def _start(self, ref: ShardRef) -> _Shard:
        shard = self._ahead.get(ref.key)
        if shard is not None and not shard.name(ref):
            self._forget(ref.key)
            shard = None
        if shard is None:
            shard = _Shard(ref.key, ref.size, cut(ref.size, self._total, self._connections), ref)
            self._add(shard)
        return shard

    def _add(self, shard: _Shard) -> None:
        self._ahead[shard.key] = shard
        self._held_bytes += shard.size
        try:
            shard.start(self._store, self._pool)
        except BaseException:  # no thread to be had, say: nobody may wait for what was not asked for
            self._forget(shard.key)
            raise

    def _take(self, ref: ShardRef) -> Iterator[Row]:
        """The rows of a shard, which counts as held until the last of them is consumed."""
        try:
            yield from self._start(ref).checked(ref)
        finally:
            self._forget(ref.key)

    def _forget(self, key: str) -> None:
        shard = self._ahead.pop(key, None)
        if shard is not None:
            shard.cancel()
            self._held_bytes -= shard.size
