"""When a snapshot is due, and writing it in a thread of its own while versions go on."""

from __future__ import annotations

import logging
import threading
from typing import Final

from weightcast.manifest.chain import Position
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.settings import PublisherSettings

from .baseline import Baseline, View
from .upload import Uploader

log = logging.getLogger(__name__)

_LEAST_CHAIN_BYTES: Final = 1 << 20
"""A reader fetches this much in no time, however small the model is beside the few kB that each delta takes."""


class Snapshots:
    """Writes a snapshot every so many versions, or when the deltas since the last one outweigh it. One at a time."""

    def __init__(self, uploader: Uploader, settings: PublisherSettings) -> None:
        self._uploader = uploader
        self._settings = settings
        self._last: int | None = None
        self._bytes_since = 0
        self._thread: threading.Thread | None = None

    def resume(self, newest: int | None, bytes_since: int) -> None:
        """Say of which version an existing stream has its newest snapshot, and how many bytes of deltas follow it."""
        self._last = newest
        self._bytes_since = bytes_since

    def after(self, position: Position, baseline: Baseline) -> None:
        """Note a commit, and start a snapshot of it if one is due. Called by the committing thread only."""
        if position.manifest.reset:
            self._last, self._bytes_since = position.version, 0
            return
        self._bytes_since += position.manifest.totals.bytes
        if self._is_due(position) and (self._thread is None or not self._thread.is_alive()):
            self.start(position, baseline)

    def _is_due(self, position: Position) -> bool:
        snapshot_bytes = position.manifest.totals.dense_bytes
        if self._last is None or self._bytes_since > max(snapshot_bytes, _LEAST_CHAIN_BYTES):
            return True
        every = self._settings.snapshot_every
        return every > 0 and position.version - self._last >= every

    def start(self, position: Position, baseline: Baseline) -> None:
        """Write a snapshot of `position`, which is the baseline's, in the background."""
        self._last, self._bytes_since = position.version, 0
        view = baseline.view(self._settings.max_pending_bytes)
        thread = threading.Thread(target=self._write, args=(view,), name="weightcast-snapshot", daemon=False)
        thread.start()
        self._thread = thread

    def _write(self, view: View) -> None:
        version = view.state.position.version
        try:
            self._uploader.snapshot(view.state, view.read)
            log.info("wrote snapshot of version %d", version, extra={"version": version})
        except WeightcastError as error:
            # The chain does not depend on it: readers use the one before, and the next version tries again.
            log.warning("no snapshot of version %d: %s", version, error)
            self._last = None
        finally:
            view.close()

    def join(self, timeout: float | None) -> None:
        """Wait for a snapshot that is being written."""
        if self._thread is not None:
            self._thread.join(timeout)
