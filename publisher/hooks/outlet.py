"""A hook's way to its stream, and walking tensors that several ranks make together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, SupportsIndex, TypeVar

import torch.distributed as dist

from weightcast.manifest.staleness import Stamp
from weightcast.publisher.checkpoint import open_checkpoint
from weightcast.publisher.job import PendingVersion
from weightcast.publisher.label import Label
from weightcast.publisher.publisher import Publisher
from weightcast.publisher.sources import Casts, Tensors, recast
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.settings import PublisherSettings

T = TypeVar("T")

TIMEOUT_S: Final = 1800.0
"""For a commit; as long as torch's process groups wait at most by default."""


class Outlet:
    """Publishes what a hook gives it. Opens the publisher when first needed, and so only in the process that publishes.

    Args:
        stream: URL or path of the stream; or an open publisher, which stays the caller's to close.
        settings: how to publish; from the environment and defaults if not given. Not for an open publisher.
    """

    def __init__(self, stream: str | Publisher, settings: PublisherSettings | None = None) -> None:
        self._stream = stream
        self._settings = settings
        self._publisher: Publisher | None = None
        self._last: PendingVersion | None = None

    def open(self) -> Publisher:
        """The publisher, opened if it is not.

        Raises:
            WeightcastError: as `Publisher` says.
        """
        if isinstance(self._stream, Publisher):
            return self._stream
        if self._publisher is None:
            self._publisher = Publisher(self._stream, self._settings)
        return self._publisher

    def publish(
        self,
        tensors: Tensors,
        *,
        step: SupportsIndex | None = None,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> PendingVersion:
        """See `Publisher.publish`."""
        publisher = self.open()
        self._last = publisher.publish(tensors, step=step, metadata=metadata, files=files)
        return self._last

    def publish_folder(
        self, folder: Path, *, step: int | None = None, metadata: Mapping[str, Any] | None = None
    ) -> PendingVersion:
        """Publish a finished Hugging Face checkpoint folder, whose files are read before this returns.

        Raises:
            NotFound, Corrupt, UsageError: it is no whole checkpoint; nothing was published.
        """
        publisher, checkpoint = self.open(), open_checkpoint(folder)
        casts = Casts(publisher.settings.cast)
        label = Label.of(step, metadata, checkpoint.companions())
        with checkpoint.items() as contents:
            found = (recast(item, casts) for item in contents.values())
            self._last = publisher.publish_items(found, label)
        return self._last

    def wait(self, timeout_s: float | None = TIMEOUT_S) -> VersionManifest | None:
        """Wait until what was published last is committed; None if nothing was.

        Raises:
            StorageError, Conflict: it is not; as `PendingVersion.wait` says.
        """
        return self._last.wait(timeout_s) if self._last is not None else None

    def stamp(self, timeout_s: float | None = TIMEOUT_S) -> Stamp | None:
        """The stamp of what was published last, once it is committed; None if nothing was published."""
        manifest = self.wait(timeout_s)
        return Stamp.of_manifest(manifest) if manifest is not None else None

    def close(self) -> None:
        """Wait for what is on its way, then close what was opened here. May be used again after that."""
        if isinstance(self._stream, Publisher):
            self.wait(None)
        elif self._publisher is not None:
            publisher, self._publisher = self._publisher, None
            publisher.close()


def is_main() -> bool:
    """Whether this process is rank 0 of `torch.distributed`, or the only one."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@contextmanager
def drained(pairs: Iterable[T]) -> Iterator[Iterator[T]]:
    """Walk `pairs` to the end whatever happens.

    Making a tensor may be a collective: a rank that stops half way, for whatever reason, leaves all others hanging.
    """
    source = iter(pairs)
    try:
        yield source
    finally:
        walk(source)


def walk(pairs: Iterable[object]) -> None:
    """Make all of `pairs`, for the sake of the ranks that make them too, and keep none."""
    for _ in pairs:
        pass
