"""From a capture to a committed version: shards, layout, files, manifest, and the one create that is the commit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future
from typing import Final

from weightcast.manifest.chain import Position
from weightcast.manifest.commit import (
    Writer,
    commit,
    hint_head,
    new_token,
    now,
    put_files,
    put_layout,
    put_shard,
)
from weightcast.manifest.rebuild import State
from weightcast.manifest.snapshot import ReadPiece, write_snapshot
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.manifest import (
    CLASS_FEATURE,
    FORMAT,
    LayoutRef,
    ObjectRef,
    ShardRef,
    Totals,
    VersionManifest,
)
from weightcast.schemas.names import file_key, snapshot_folder
from weightcast.schemas.settings import PublisherSettings
from weightcast.schemas.shard import Row

from .capture import Capture
from .label import Label

UPLOADS_AHEAD: Final = 4
"""Shards on their way at once: with 16 MiB each and 50 ms round trips, enough to fill 1 Gbit/s."""


class Uploader:
    """Writes one publisher's versions. Used by one thread at a time."""

    def __init__(
        self, reader: StreamReader, writer: Writer, settings: PublisherSettings, pool: Executor
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._store = reader.store
        self._settings = settings
        self._pool = pool
        self._layouts: dict[str, LayoutRef] = {}

    def prepare_delta(self, capture: Capture, parent: Position) -> VersionManifest | None:
        """Upload what `capture` finds, as it comes; the manifest that would commit it on top of `parent`.

        None if the capture failed: then what was uploaded belongs to nothing, and is swept by its age.
        """
        version = parent.version + 1
        shards, features = self._shards(version, capture.rows)
        if capture.rows.failed:
            return None
        return self._manifest(
            capture.label,
            version=version,
            parent=parent,
            layout=self._layout(capture.layout),
            elements=capture.layout.elements,
            dense_bytes=capture.layout.nbytes,
            digest_after=capture.after.hex,
            shards=shards,
            features=features,
        )

    def prepare_empty(self, parent: Position, label: Label) -> VersionManifest:
        """The manifest of a version that changes nothing: the fence of a publisher that takes over."""
        totals = parent.manifest.totals
        return self._manifest(
            label,
            version=parent.version + 1,
            parent=parent,
            layout=parent.manifest.layout,
            elements=totals.elements,
            dense_bytes=totals.dense_bytes,
            digest_after=parent.manifest.digest_after,
            shards=[],
        )

    def prepare_reset(self, capture: Capture, parent: Position | None) -> VersionManifest:
        """Write a snapshot of a fresh capture; the manifest that would commit the version that starts from it."""
        if capture.fresh is None:
            raise UsageError("only a fresh capture can start a chain")
        version = parent.version + 1 if parent else 0
        memory = capture.fresh

        def read(spec: TensorSpec, begin: int, end: int) -> bytes:
            return memory.tensor(spec.name).reshape(-1)[begin:end].tobytes()

        layout = self._layout(capture.layout)
        folder = snapshot_folder(version, new_token())
        files = self._files(parent) if capture.label.files is None else capture.label.files
        snapshot = self._write_snapshot(
            folder, version, capture.layout, layout, capture.after.hex, read, files
        )
        return self._manifest(
            capture.label,
            version=version,
            parent=parent,
            layout=layout,
            elements=capture.layout.elements,
            dense_bytes=capture.layout.nbytes,
            digest_after=capture.after.hex,
            shards=[],
            snapshot=snapshot,
        )

    def snapshot(self, state: State, read: ReadPiece) -> ObjectRef:
        """Write a snapshot of a committed version beside the chain."""
        manifest = state.position.manifest
        folder = snapshot_folder(manifest.version)
        files = self._files(state.position)
        return self._write_snapshot(
            folder, manifest.version, state.layout, manifest.layout, manifest.digest_after, read, files
        )

    def _files(self, position: Position | None) -> dict[str, bytes]:
        """The companion files of a version."""
        listed = self.reader.files(position.manifest.files).files if position else []
        return {f.name: self._store.fetch(file_key(f.sha256), size=f.size, sha256=f.sha256) for f in listed}

    def _write_snapshot(
        self,
        folder: str,
        version: int,
        layout: Layout,
        ref: LayoutRef,
        digest: str,
        read: ReadPiece,
        files: Mapping[str, bytes],
    ) -> ObjectRef:
        return write_snapshot(
            self._store,
            folder,
            stream=self.reader.stream.stream,
            version=version,
            layout=layout,
            layout_ref=ref,
            digest=digest,
            read=read,
            files=files,
            writer=self.writer,
            max_file_bytes=self._settings.snapshot_file_bytes,
        )

    def _shards(self, version: int, rows: Iterable[Row]) -> tuple[list[ShardRef], list[str]]:
        """Upload rows in shards of about `shard_bytes`, a few at a time; and the features that a reader needs."""
        refs: list[ShardRef] = []
        features: set[str] = set()
        flying: deque[Future[ShardRef]] = deque()
        batch: list[Row] = []
        part = nbytes = 0
        try:
            for row in rows:
                batch.append(row)
                if row.coding == "class":
                    features.add(CLASS_FEATURE)
                nbytes += row.nbytes
                if nbytes >= self._settings.shard_bytes:
                    flying.append(self._put(version, part, batch))
                    part, nbytes, batch = part + 1, 0, []
                    if len(flying) >= UPLOADS_AHEAD:
                        refs.append(flying.popleft().result())
            if batch:
                flying.append(self._put(version, part, batch))
            refs += [f.result() for f in flying]
        finally:
            for future in flying:
                future.cancel()
        return refs, sorted(features)

    def _put(self, version: int, part: int, rows: list[Row]) -> Future[ShardRef]:
        return self._pool.submit(put_shard, self._store, version, self.writer.name, part, rows)

    def _layout(self, layout: Layout) -> LayoutRef:
        if layout.sha256 not in self._layouts:
            self._layouts = {layout.sha256: put_layout(self._store, layout)}
        return self._layouts[layout.sha256]

    def _manifest(
        self,
        label: Label,
        *,
        version: int,
        parent: Position | None,
        layout: LayoutRef,
        elements: int,
        dense_bytes: int,
        digest_after: str,
        shards: list[ShardRef],
        features: list[str] | None = None,
        snapshot: ObjectRef | None = None,
    ) -> VersionManifest:
        files = (
            put_files(self._store, label.files, parent.manifest.files if parent else None)
            if label.files is not None
            else (parent.manifest.files if parent else None)
        )
        return VersionManifest(
            format=FORMAT,
            features=features or [],
            stream=self.reader.stream.stream,
            version=version,
            parent=parent.as_parent if parent else None,
            reset=snapshot is not None,
            snapshot=snapshot,
            layout=layout,
            digest_before=parent.manifest.digest_after if parent else None,
            digest_after=digest_after,
            shards=shards,
            files=files,
            totals=Totals(
                elements=elements,
                changed=sum(s.changed for s in shards),
                bytes=sum(s.size for s in shards),
                dense_bytes=dense_bytes,
            ),
            writer=self.writer.name,
            run=self.writer.run,
            token=new_token(),
            step=label.step,
            time=now(),
            metadata=dict(label.metadata),
        )

    def commit(self, manifest: VersionManifest) -> Position:
        """Create the version.

        Raises:
            Conflict: another writer committed it.
            StorageError: the outcome is unknown; calling again with the same manifest finds out.
        """
        position = commit(self._store, manifest)
        hint_head(self._store, position.version)
        return position
