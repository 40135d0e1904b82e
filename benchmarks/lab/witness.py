"""When a version was committed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from weightcast.manifest.store import Store
from weightcast.schemas.names import VERSIONS_PREFIX


class Witness:
    """Passes everything on to another store, and knows when a version's create was asked for and answered.

    The commit is between the two. Whoever waits for `publish()` is told later, once the publisher's own copy has moved
    on; a subscriber may have applied the version before the answer is here, but never before it was asked for.

    Attributes:
        asked_at: seconds by `time.monotonic()`, of the latest version.
        answered_at: the same.
    """

    def __init__(self, store: Store, answered: Callable[[], None] = lambda: None) -> None:
        """Take the store, and what to call at each answer."""
        self._store, self._answered = store, answered
        self.asked_at = self.answered_at = 0.0

    def create(self, key: str, data: bytes) -> bool:
        """See Store."""
        asked_at = time.monotonic()
        found = self._store.create(key, data)
        if key.startswith(VERSIONS_PREFIX):
            self.asked_at, self.answered_at = asked_at, time.monotonic()
            self._answered()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
