"""Parts by hand: for writers that have no torch.distributed between them, but Ray, MPI, a queue or a folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, SupportsIndex

from weightcast.codec.threads import Workers
from weightcast.manifest.chain import Position
from weightcast.manifest.commit import Writer, create_stream
from weightcast.manifest.store import Store, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher.closing import Closing
from weightcast.publisher.label import Label
from weightcast.publisher.sources import Casts
from weightcast.publisher.upload import Uploader
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import NotFound, UsageError
from weightcast.schemas.layout import MIX
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.part import Part
from weightcast.schemas.settings import PublisherSettings

from .commit import in_order, prepare
from .draft import Draft, Stage
from .load import load
from .share import Pools, Share
from .tables import Held, Sharded, held
from .turn import head_of, position_of
from .words import Shared

_UPLOADS: Final = 8
"""Requests of one writer at once."""


class PartWriter(Closing):
    """Stores one writer's part of each version. Nothing is published before somebody commits all writers' parts.

    What it is given it owns: every element of every tensor must be with exactly one writer. Close it.

    Args:
        root: URL or path of the stream, the same for all writers.
        rank, size: which writer this is, of how many.
        settings: how to work; from the environment and defaults if not given.
        store: an opened store, instead of `root`'s.
    """

    def __init__(
        self,
        root: str,
        rank: int,
        size: int,
        settings: PublisherSettings | None = None,
        *,
        store: Store | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"there is no rank {rank} among {size} writers")
        self.settings = settings or PublisherSettings()
        self._rank, self._size = rank, size
        self._store = store or open_store(root)
        self._casts = Casts(self.settings.cast)
        self._pools = Pools(
            Workers(self.settings.threads, "weightcast-encode"), Workers(_UPLOADS, "weightcast-upload")
        )
        self._share: Share | None = None
        self._open: tuple[Draft, Part] | None = None

    def stage(self, tensors: Sharded, *, reset: bool = False) -> Part:
        """Compare, encode and store what this writer owns; or all of it, where there is no version yet.

        Tells the changes from the head, whose bits it fetches where it has them not. A part that was never committed is
        made up for by the next one.

        Args:
            tensors: DTensors, slices, or whole tensors.
            reset: for a version that starts afresh; all writers of it must say so.

        Raises:
            UsageError: the tensors cannot be published.
            StorageError: the store failed.
            Corrupt: the tensors changed while they were compared.
        """
        found = held(tensors, self._casts)
        head = self._head()
        whole = reset or head is None
        share = self._share_of(found, None if whole else head)
        version = head.version + 1 if head is not None else 0
        base = None if whole or head is None else head.sha256
        self._open = None
        draft = share.draft(found, self._casts, self._store, Stage(version, base, self._rank, self._size))
        part = draft.finished()
        if whole:
            part = part.model_copy(update={"ties": {e.name: e.tie for e in found.table if e.tie}})
        self._open = draft, part
        return part

    def settle(self, manifest: VersionManifest) -> None:
        """Learn which version the last part went into. Optional: else the next `stage` looks it up in the store.

        Raises:
            UsageError: it did not go into that one.
        """
        if not self._settled(position_of(manifest.encode().decode())):
            raise UsageError(
                f"version {manifest.version} does not hold the last part of rank {self._rank}",
                hint="pass what commit_parts() returned for that part",
            )

    def _settled(self, position: Position) -> bool:
        """Whether the last part went into `position`; then this writer's copy is of that."""
        if self._open is None or self._share is None:
            return False
        draft, part = self._open
        manifest = position.manifest
        if part.base is None:
            mine = manifest.reset and manifest.version == part.version
        else:
            keys = {shard.key for shard in manifest.shards}
            mine = manifest.parent is not None and manifest.parent.sha256 == part.base
            mine = mine and all(shard.key in keys for shard in part.shards)
        if mine:
            self._open = None
            self._share.follow(draft, position)
        return mine

    def _head(self) -> Position | None:
        try:
            return head_of(StreamReader.open(self._store))
        except NotFound:
            return None

    def _share_of(self, found: Held, head: Position | None) -> Share:
        """This writer's copy: as it is if it is of the head; else anew."""
        share = self._share
        fits = share is not None and share.table == found.table and (head is not None or share.mix == MIX)
        if share is not None and fits and (head is None or share.base == head.sha256 or self._settled(head)):
            return share
        self._share = self._open = None
        shared: list[Shared] = [(at, -1, []) for at, entry in enumerate(found.table) if entry.tie]
        reader = StreamReader.open(self._store) if head is not None else None
        mix = reader.layout(head.manifest.layout).mix if reader is not None and head is not None else MIX
        share = Share(found.table, shared, self.settings, self._pools, self._rank, mix)
        if reader is not None and head is not None:
            load(reader, head, share.holding, (), self._pools.compute, self.settings.row_elements)
            share.is_at(head.sha256)
        self._share = share
        return share

    def close(self) -> None:
        """Stop."""
        self._pools.compute.shutdown(wait=False)
        self._pools.transfer.shutdown(wait=False)


def commit_parts(
    root: str,
    parts: Iterable[Part | str | bytes],
    *,
    step: SupportsIndex | None = None,
    metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
    settings: PublisherSettings | None = None,
    store: Store | None = None,
) -> VersionManifest:
    """Commit one part of each writer as the next version. One process does.

    May be called again with the same parts after a StorageError: it finds out whether they were committed.

    Args:
        root: URL or path of the stream.
        parts: of all writers, as they are or as JSON.
        step, metadata, files: as for `Publisher.publish`.
        settings: how to work; from the environment and defaults if not given.
        store: an opened store, instead of `root`'s.

    Raises:
        UsageError: parts are missing, or do not have each element once.
        Conflict: the parts are told from a version that is not the head any more; have all writers stage again.
        StorageError: the store failed.
    """
    settings = settings or PublisherSettings()
    label = Label.of(step, metadata, files)
    found = in_order(
        p if isinstance(p, Part) else Part.decode(p, f"part {number}") for number, p in enumerate(parts)
    )
    reader = create_stream(store or open_store(root), single_writer=settings.single_writer)
    head = head_of(reader)
    if head is not None and _holds(head, found):
        return head.manifest
    with Workers(_UPLOADS, "weightcast-upload") as pool:
        uploader = Uploader(reader, Writer.fresh(settings.writer), settings, pool)
        position = uploader.commit(prepare(uploader, found, head, label))
    return position.manifest


def _holds(head: Position, parts: list[Part]) -> bool:
    """Whether these parts are the head already."""
    manifest = head.manifest
    if any(part.version != manifest.version for part in parts):
        return False
    if manifest.after != sum((part.after for part in parts), Digest()):
        return False
    if parts[0].base is None:
        return manifest.reset
    return [s.key for s in manifest.shards] == [s.key for part in parts for s in part.shards]
