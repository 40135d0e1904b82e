"""The version on its way: at most one, in a thread of its own; and an error of one that nobody was told of yet."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from weightcast.manifest.chain import Position
from weightcast.publisher.job import PendingVersion
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.manifest import VersionManifest

log = logging.getLogger(__name__)


class Flight:
    """One rank's version on its way.

    Attributes:
        version: the last one known to be committed.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._thread: threading.Thread | None = None
        self._pending: Future[VersionManifest] | None = None
        self._untold: WeightcastError | None = None

    def start(self, finish: Callable[[], Position]) -> PendingVersion:
        """Have `finish` work on a version; none may be on its way."""
        pending: Future[VersionManifest] = Future()
        # Not a daemon: a trainer that returns from main with a version in flight has it committed first.
        thread = threading.Thread(
            target=self._run, args=(finish, pending), name="weightcast-group", daemon=False
        )
        thread.start()
        self._thread, self._pending = thread, pending
        return PendingVersion(pending, self._told)

    def _run(self, finish: Callable[[], Position], pending: Future[VersionManifest]) -> None:
        try:
            position = finish()
        except WeightcastError as error:
            self._fail(pending, error)
        except Exception as error:  # noqa: BLE001 - must reach the trainer, whatever it is
            self._fail(pending, WeightcastError(f"publishing failed: {type(error).__name__}: {error}"))
        else:
            self._untold, self.version = None, position.version
            pending.set_result(position.manifest)

    def _fail(self, pending: Future[VersionManifest], error: WeightcastError) -> None:
        log.error("version not committed: %s", error)
        self._untold = error
        pending.set_exception(error)

    def _told(self, error: BaseException) -> None:
        if self._untold is error:
            self._untold = None

    def heard(self, error: WeightcastError) -> None:
        """Note that this rank was told of `error` in a meeting: `raise_untold` need not raise it as well."""
        if self._untold is not None and str(self._untold) == str(error):
            self._untold = None

    def raise_untold(self) -> None:
        """Raise the error of the last version, if nobody waited for it; once.

        Raises:
            WeightcastError: it.
        """
        error, self._untold = self._untold, None
        if error is not None:
            raise error

    @property
    def busy(self) -> bool:
        """Whether one is on its way."""
        return self._pending is not None and not self._pending.done()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until none is on its way; False if time ran out."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()
