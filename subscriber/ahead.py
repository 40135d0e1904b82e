"""Cut-through: shards of a version that is not committed yet, fetched and decoded as they appear.

Nothing of it is believed. Rows are handed out only for a manifest that names exactly the key, size and SHA-256 of what
was fetched, and what they lead to is proved by digest like any other version. All of it is memory of this process.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures import wait as wait_for
from typing import Final

from weightcast.codec import Changes, Geometry, Memory, decode
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.store import Entry, Store
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.names import DATA_PREFIX, is_shard_key
from weightcast.schemas.shard import Row

from .rhythm import Rhythm
from .target import Base

log = logging.getLogger(__name__)

_MOST_LISTED: Final = 10_000  # objects looked at below one version: a manifest of 1 MiB names no more

DECODED_BYTES: Final = 512 << 20
"""Changes decoded before their commit, at most: those of 5 billion bf16 elements at 1 %."""

LISTINGS: Final = 4
"""Listings on their way at once, at most: over 60 ms one can leave every 15 ms."""

_PATIENCE_S: Final = 1.0
"""So long a step waits for a listing that was sent with its poll: several times what either takes."""

Decoded = tuple[Changes, Digest]


class Ahead:
    """Used by the thread that moves the target; `known` by any.

    Args:
        store: where shards appear.
        fetcher: holds those that are fetched, within its bound.
        pool: for decoding.
        listers: for listing, with as many threads as there may be listings. Not those that shards are fetched or
            polls are sent with: neither is to stand behind the other.
        rhythm: is told when a shard appears.
        max_bytes: of decoded changes.
    """

    def __init__(
        self,
        store: Store,
        fetcher: DeltaFetcher,
        pool: Executor,
        listers: Executor,
        rhythm: Rhythm,
        max_bytes: int = DECODED_BYTES,
    ) -> None:
        self._store = store
        self._fetcher = fetcher
        self._pool = pool
        self._listers = listers
        self._max_bytes = max_bytes
        self._rhythm = rhythm
        self._version = -1
        self._listings: list[Future[list[Entry]]] = []  # of the version, the last one asked for at the end
        self._late: set[Future[list[Entry]]] = set()  # of the version: no step waits for them again
        self._forgotten: list[Future[list[Entry]]] = []  # of other versions, still running
        self._failing = False  # whether the last listing that ended had failed
        self._entries: list[Entry] = []  # of the version, as last listed
        self._listed_keys: set[str] = set()
        self._seen: set[str] = set()  # shards whose rows were dealt with
        self._base: tuple[Geometry, Base] | None = None
        self._decoded: dict[int, tuple[Row, Future[Decoded]]] = {}  # by id of the row, which is kept alive
        self._held_bytes = 0

    def ask(self, version: int) -> None:
        """Begin to list the shards of `version`, beside the request for its manifest."""
        if self._version != version:
            self._version = version
            self._forget_listings()
        self._forgotten = [listing for listing in self._forgotten if not listing.done()]
        if len(self._listings) + len(self._forgotten) < LISTINGS:
            self._listings.append(self._listers.submit(self._listed, version))

    def _forget_listings(self) -> None:
        """Those that have no thread yet are not sent; those that run hold theirs until they end."""
        self._forgotten += [listing for listing in self._listings if not listing.cancel()]
        self._listings, self._late = [], set()

    def _listed(self, version: int) -> list[Entry]:
        prefix = f"{DATA_PREFIX}{version:012d}/"
        entries = itertools.islice(self._store.list(prefix), _MOST_LISTED)
        return sorted((e for e in entries if is_shard_key(e.key)), key=lambda entry: entry.key)

    def take(self, base: Callable[[], tuple[Geometry, Base]], *, wait: bool) -> None:
        """The version is not committed: fetch what was listed, and decode what has come.

        Args:
            base: what the target holds; asked for once, when first needed.
            wait: for listings on their way, for a while, and for each only once.
        """
        if wait:
            fresh = [listing for listing in self._listings if listing not in self._late]
            self._late |= wait_for(fresh, _PATIENCE_S).not_done
        self._collect()
        if any(entry.key not in self._listed_keys for entry in self._entries):
            self._listed_keys = {entry.key for entry in self._entries}
            self._rhythm.shard(time.monotonic())
        for entry in self._entries:
            if not self._fetcher.expect(entry.key, entry.size):
                break
            rows = None if entry.key in self._seen else self._fetcher.expected(entry.key)
            if rows is not None:
                self._seen.add(entry.key)
                self._base = self._base or base()
                self._decode(*self._base, rows)

    def _collect(self) -> None:
        """Take the entries of listings that have ended. One that failed says nothing: a listing is only advice."""
        ended = [listing for listing in self._listings if listing.done()]
        self._listings = [listing for listing in self._listings if listing not in ended]
        self._late.difference_update(ended)
        for listing in ended:
            try:
                self._entries = listing.result()
                self._failing = False
            except WeightcastError as error:
                if not self._failing:
                    log.warning("cannot list what comes next; it is fetched once it is committed: %s", error)
                self._failing = True

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
        wait_for(futures)
        self._decoded.clear()
        self._seen.clear()
        self._forget_listings()
        self._entries = []
        self._base, self._held_bytes = None, 0
