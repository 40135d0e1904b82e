"""A version on its way, from the side that works on it and from the side that waits for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field

from weightcast.manifest.chain import Position
from weightcast.schemas.errors import StorageError
from weightcast.schemas.manifest import VersionManifest

from .capture import Capture

log = logging.getLogger(__name__)


def announce(manifest: VersionManifest) -> None:
    """Log that a version is committed."""
    totals = manifest.totals
    log.info(
        "published version %d: %d of %d elements changed, %d bytes",
        manifest.version,
        totals.changed,
        totals.elements,
        totals.bytes,
        extra={"version": manifest.version, "step": manifest.step, "bytes": totals.bytes},
    )


@dataclass
class Job:
    """A capture on its way, and those who wait for it: itself and the versions that it replaced."""

    capture: Capture
    futures: list[Future[VersionManifest]] = field(default_factory=lambda: [Future()])

    def succeed(self, position: Position) -> None:
        """Tell everybody that the version is committed."""
        for future in self.futures:
            if not future.done():  # one whose outcome was unknown was told so
                future.set_result(position.manifest)

    def fail(self, error: BaseException) -> None:
        """Tell everybody that it is not."""
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


class PendingVersion:
    """A version on its way to the store."""

    def __init__(self, future: Future[VersionManifest], told: Callable[[BaseException], None]) -> None:
        self._future = future
        self._told = told

    @property
    def done(self) -> bool:
        """Whether it is settled, one way or the other."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> VersionManifest:
        """The manifest, once committed. Where versions coalesced, that of the later one that holds this one's changes.

        Raises:
            StorageError: not committed in time, or the store failed; the changes will be in the next version.
            Conflict: another publisher has taken over.
        """
        try:
            error = self._future.exception(timeout)
        except FutureTimeout:
            raise StorageError(f"the version was not committed within {timeout} s") from None
        if error is not None:
            self._told(error)
        return self._future.result()
