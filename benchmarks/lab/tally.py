"""A store that counts what is read through it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

from weightcast.manifest.store import Store


class Tally:
    """Passes everything on to another store.

    Args:
        store: that other one.

    Attributes:
        fetched: bytes read since the last `reset`.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self.fetched = 0

    @property
    def as_store(self) -> Store:
        """Itself, which has all that a store has."""
        return cast(Store, self)

    def reset(self) -> None:
        """Count from here."""
        self.fetched = 0

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See Store."""
        return self._count(self._store.get(key, max_bytes=max_bytes))

    def fetch(self, key: str, *, size: int, sha256: str) -> bytes:
        """See Store."""
        return self._count(self._store.fetch(key, size=size, sha256=sha256))

    def fetch_part(self, key: str, *, start: int, stop: int) -> bytes:
        """See Store."""
        return self._count(self._store.fetch_part(key, start=start, stop=stop))

    def download(self, key: str, path: Path, *, size: int, sha256: str) -> None:
        """See Store."""
        self._store.download(key, path, size=size, sha256=sha256)
        with self._lock:
            self.fetched += size

    def _count(self, data: bytes) -> bytes:
        with self._lock:
            self.fetched += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
