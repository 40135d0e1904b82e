"""A hook's way to its stream, and walking tensors that several ranks make together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Generic, SupportsIndex, TypeVar

import torch.distributed as dist

from weightcast.manifest.staleness import Stamp
from weightcast.publisher.checkpoint import open_checkpoint
from weightcast.publisher.group import GroupPublisher
from weightcast.publisher.group.tables import Sharded
from weightcast.publisher.job import PendingVersion
from weightcast.publisher.label import Label
from weightcast.publisher.publisher import Publisher
from weightcast.publisher.sources import Casts, Tensors, recast
from weightcast.schemas.errors import UsageError
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.settings import PublisherSettings

T = TypeVar("T")
P = TypeVar("P", bound=Publisher | GroupPublisher)

TIMEOUT_S: Final = 1800.0
"""For a commit; as long as torch's process groups wait at most by default."""


class Way(ABC, Generic[P]):
    """Publishes what a hook gives it. Opens the publisher when first needed, and so only where something is published.

    Args:
        stream: URL or path of the stream; or an open publisher, which stays the caller's to close.
        settings: how to publish; from the environment and defaults if not given. Not for an open publisher.
    """

    def __init__(self, stream: str | P, settings: PublisherSettings | None = None) -> None:
        self._stream: str | P = stream
        self._settings = settings
        self._opened: P | None = None
        self._last: PendingVersion | None = None

    def open(self) -> P:
        """The publisher, opened if it is not.

        Raises:
            WeightcastError: as the publisher says.
        """
        if not isinstance(self._stream, str):
            return self._stream
        if self._opened is None:
            self._opened = self._made(self._stream)
        return self._opened

    @abstractmethod
    def _made(self, root: str) -> P:
        """A publisher to the stream at `root`."""

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
        if not isinstance(self._stream, str):
            self.wait(None)
        elif self._opened is not None:
            publisher, self._opened = self._opened, None
            publisher.close()


class Outlet(Way[Publisher]):
    """For a model that is whole in this process."""

    def _made(self, root: str) -> Publisher:
        return Publisher(root, self._settings)

    def publish(
        self,
        tensors: Tensors,
        *,
        step: SupportsIndex | None = None,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> PendingVersion:
        """See `Publisher.publish`."""
        self._last = self.open().publish(tensors, step=step, metadata=metadata, files=files)
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


class GroupOutlet(Way[GroupPublisher]):
    """For a model that lies on several ranks: all of them call each method alike."""

    def _made(self, root: str) -> GroupPublisher:
        return GroupPublisher(root, settings=self._settings)

    def publish(
        self,
        tensors: Sharded,
        *,
        step: SupportsIndex | None = None,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> PendingVersion:
        """See `GroupPublisher.publish`."""
        pending = self.open().publish(tensors, step=step, metadata=metadata, files=files)
        if pending is None:
            raise UsageError("the version was skipped, although it was to wait for the one before")
        self._last = pending
        return pending


def outlet_of(
    stream: str | Publisher | GroupPublisher, settings: PublisherSettings | None, *, group: bool
) -> Outlet | GroupOutlet:
    """The way to a stream, of a group of ranks or not.

    Raises:
        UsageError: an open publisher is of the other kind.
    """
    if group:
        if isinstance(stream, Publisher):
            raise UsageError(
                "an open Publisher is of one process, and the model is published by all ranks",
                hint="pass the stream's URL, or an open GroupPublisher, on all ranks",
            )
        return GroupOutlet(stream, settings)
    if isinstance(stream, GroupPublisher):
        raise UsageError(
            "an open GroupPublisher is of all ranks, and the model is published by one process",
            hint="pass the stream's URL, or an open Publisher",
        )
    return Outlet(stream, settings)


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
