"""Cut-through: shards of a version that is not committed yet, fetched and decoded as they appear.

Nothing of it is believed. Rows are handed out only for a manifest that names exactly the key, size and SHA-256 of what
was fetched, and what they lead to is proved by digest like any other version. All of it is memory of this process.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from typing import Final

from weightcast.codec import Changes, Geometry, Memory, decode
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.store import Entry, Store
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.names import DATA_PREFIX, is_shard_key
from weightcast.schemas.shard import Row

from .target import Base

_MOST_LISTED: Final = 10_000  # objects looked at below one version: a manifest of 1 MiB names no more

Decoded = tuple[Changes, Digest]


class Ahead:
    """Used by the thread that moves the target; `known` by any.

    Args:
        store: where shards appear.
        fetcher: holds those that are fetched, within its bound.
        pool: for decoding.
        requests: for listing.
        max_bytes: of decoded changes.

    Attributes:
        news_at: when a shard last appeared, by the monotonic clock.
    """

    def __init__(
        self, store: Store, fetcher: DeltaFetcher, pool: Executor, requests: Executor, max_bytes: int
    ) -> None:
        self._store = store
        self._fetcher = fetcher
        self._pool = pool
        self._requests = requests
        self._max_bytes = max_bytes
        self.news_at = -math.inf
        self._listing: Future[list[Entry]] | None = None
        self._listed_keys: set[str] = set()
        self._seen: set[str] = set()  # shards whose rows were dealt with
        self._base: tuple[Geometry, Base] | None = None
        self._decoded: dict[int, tuple[Row, Future[Decoded]]] = {}  # by id of the row, which is kept alive
        self._held_bytes = 0

    def ask(self, version: int) -> None:
        """Begin to list the shards of `version`, beside the request for its manifest."""
        self._listing = self._requests.submit(self._listed, version)

    def _listed(self, version: int) -> list[Entry]:
        prefix = f"{DATA_PREFIX}{version:012d}/"
        entries = itertools.islice(self._store.list(prefix), _MOST_LISTED)
        return sorted((e for e in entries if is_shard_key(e.key)), key=lambda entry: entry.key)

    def take(self, base: Callable[[], tuple[Geometry, Base]]) -> None:
        """The version is not committed: fetch what was listed, and decode what has come.

        Args:
            base: what the target holds; asked for once, when first needed.

        Raises:
            StorageError: the listing failed.
        """
        listing, self._listing = self._listing, None
        entries = listing.result() if listing is not None else []
        if any(entry.key not in self._listed_keys for entry in entries):
            self._listed_keys, self.news_at = {entry.key for entry in entries}, time.monotonic()
        for entry in entries:
            if not self._fetcher.expect(entry.key, entry.size):
                break
            rows = None if entry.key in self._seen else self._fetcher.expected(entry.key)
            if rows is not None:
                self._seen.add(entry.key)
                self._base = self._base or base()
                self._decode(*self._base, rows)

    def _decode(self, geometry: Geometry, base: Base, rows: Sequence[Row]) -> None:
        """Start decoding rows; those that do not fit the layout held, or the room, are left for later."""
        if not isinstance(base, Memory):
            return  # its bits are had in one read, once all of the version's rows are there
        for row in rows:
            try:
                space = geometry.space_of(row)
                space.locate(row)
            except WeightcastError:
                return
            self._held_bytes += row.count * (8 + space.width)
            if self._held_bytes > self._max_bytes:
                return
            self._decoded[id(row)] = row, self._pool.submit(decode, space, row, base)

    def known(self, row: Row) -> Decoded | None:
        """What `row` does to the version that the target holds, if that was found out ahead."""
        found = self._decoded.get(id(row))
        if found is None or found[0] is not row:
            return None
        try:
            return found[1].result()
        except (WeightcastError, CancelledError):
            return None  # whoever decodes it again is told why

    def drop(self) -> None:
        """Forget all of it, and let go of the base: it is about to change, or has."""
        futures = [future for _, future in self._decoded.values()]
        for future in futures:
            future.cancel()
        wait(futures)
        self._decoded.clear()
        self._seen.clear()
        self._base, self._held_bytes = None, 0
