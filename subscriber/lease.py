"""Telling the store which version is held: pruning spares what follows, and trainers see who lags. Advisory."""

from __future__ import annotations

import logging
import time
import uuid

from weightcast.manifest.commit import now
from weightcast.manifest.store import Store
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.manifest import Reader
from weightcast.schemas.names import READERS_PREFIX
from weightcast.schemas.settings import SubscriberSettings

log = logging.getLogger(__name__)


class Lease:
    """One subscriber's lease, renewed with each version and every `lease_s` seconds.

    A failure does no harm: it is told once, and tried again when due.
    """

    def __init__(self, store: Store, settings: SubscriberSettings) -> None:
        self._store = store
        self._enabled = settings.lease
        self._every_s = settings.lease_s
        self._id = uuid.uuid4().hex
        self._renewed: float | None = None
        self._version: int | None = None  # last told, or tried to
        self._failed = False

    def renew(self, version: int, *, force: bool = False) -> None:
        """Say that `version` is held, if that is news or it is time to."""
        due = self._renewed is None or time.monotonic() - self._renewed >= self._every_s
        news = version != self._version
        if not self._enabled or not (due or news or force):
            return
        self._renewed, self._version = time.monotonic(), version
        try:
            lease = Reader(reader=self._id, version=version, time=now())
            self._store.put(f"{READERS_PREFIX}{self._id}.json", lease.encode())
            self._failed = False
        except WeightcastError as error:
            log.log(
                logging.DEBUG if self._failed else logging.WARNING,
                "no lease, so pruning may not wait for this subscriber: %s",
                error,
            )
            self._failed = True
