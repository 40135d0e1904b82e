"""What a publisher can say about its stream's readers, for bounds on staleness."""

from __future__ import annotations

from datetime import UTC, datetime

from weightcast.manifest.chain import Position
from weightcast.manifest.inspect import lags
from weightcast.manifest.inspect.values import ReaderStatus
from weightcast.manifest.staleness import version_of, wait_held
from weightcast.manifest.store import Store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import NotFound


class Audience:
    """The part of a publisher that only reads. Any thread may call it, whatever is on its way."""

    _store: Store

    def version_of(self, step: int) -> Position | None:
        """See `staleness.version_of`; None, too, if nothing was ever published."""
        reader = self._reader()
        return version_of(reader, step) if reader is not None else None

    def lags(self) -> tuple[ReaderStatus, ...]:
        """How far each known subscriber is behind the head, as of its last lease; the one furthest behind first."""
        reader = self._reader()
        return lags(reader, datetime.now(UTC)) if reader is not None else ()

    def wait_for(
        self, version: int, *, subscribers: int, max_lag: int = 0, timeout: float | None = None
    ) -> tuple[ReaderStatus, ...]:
        """Wait until so many subscribers hold `version`, or are at most `max_lag` versions behind it.

        The version may still be on its way. See `staleness.wait_held`, and there what counts.

        Raises:
            NotFound: nothing was ever published.
            StorageError: time ran out; says who holds what.
        """
        reader = self._reader()
        if reader is None:
            raise NotFound(f"no stream at {self._store.url} yet", hint="publish first")
        return wait_held(reader, version, subscribers=subscribers, max_lag=max_lag, timeout=timeout)

    def _reader(self) -> StreamReader | None:
        try:
            return StreamReader.open(self._store)
        except NotFound:
            return None
