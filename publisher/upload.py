"""From a capture to a committed version: shards, layout, files, manifest, and the one create that is the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future

from weightcast.manifest.chain import Position
from weightcast.manifest.commit import (
    Writer,
    commit,
    hint_head,
    new_token,
    now,
    put_files,
    put_layout,
)
from weightcast.manifest.rebuild import State
from weightcast.manifest.snapshot import ReadPiece, write_snapshot
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import MIX_FEATURE, Layout, TensorSpec
from weightcast.schemas.manifest import (
    FORMAT,
    LayoutRef,
    ObjectRef,
    ShardRef,
    Totals,
    VersionManifest,
)
from weightcast.schemas.names import file_key, snapshot_folder
from weightcast.schemas.settings import PublisherSettings

from .capture import Capture
from .choice import CodecChoice, Cost
from .label import Label
from .shards import ShardWriter


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
        self._shards = ShardWriter(self._store, writer.name, pool, settings.shard_bytes)
        self.choice = CodecChoice(settings.codec, settings.threads)
        self._layouts: dict[str, LayoutRef] = {}
        self._hint: Future[None] | None = None  # to readers that start, about the last version

    def prepare_delta(self, capture: Capture, parent: Position) -> VersionManifest | None:
        """Upload what `capture` finds, as it comes; the manifest that would commit it on top of `parent`.

        None if the capture failed: then what was uploaded belongs to nothing, and is swept by its age.
        """
        version = parent.version + 1
        files = self._pool.submit(self._stored, capture.label, parent)
        sent = self._shards.send(version, capture.rows)
        if capture.rows.failed:
            return None
        changed = sum(ref.changed for ref in sent.refs)
        cost = Cost(capture.layout.elements, changed, sent.nbytes, capture.rows.coding_s)
        self.choice.note(capture.rows.codec, cost, sent.busy_s)
        return self.manifest(
            capture.label,
            version=version,
            parent=parent,
            layout=self.layout_ref(capture.layout),
            elements=capture.layout.elements,
            dense_bytes=capture.layout.nbytes,
            digest_after=capture.after.hex,
            shards=sent.refs,
            features=sent.features,
            files=files.result,
        )

    def prepare_empty(self, parent: Position, label: Label) -> VersionManifest:
        """The manifest of a version that changes nothing: the fence of a publisher that takes over."""
        totals = parent.manifest.totals
        return self.manifest(
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
        memory = capture.fresh

        def read(spec: TensorSpec, begin: int, end: int) -> bytes:
            return memory.tensor(spec.name).reshape(-1)[begin:end].tobytes()

        return self.prepare_whole(capture.label, parent, capture.layout, capture.after, read)

    def prepare_whole(
        self, label: Label, parent: Position | None, layout: Layout, after: Digest, read: ReadPiece
    ) -> VersionManifest:
        """Write a snapshot of bits with digest `after`; the manifest that would commit the version that starts from it.

        Args:
            label: of the version.
            parent: the head; None: there is none yet.
            layout: the tensors.
            after: of all their bits; `read` is trusted to give those.
            read: gives their bits, in ascending order.
        """
        version = parent.version + 1 if parent else 0
        ref = self.layout_ref(layout)
        folder = snapshot_folder(version, new_token())
        files = self._files(parent) if label.files is None else label.files
        return self.manifest(
            label,
            version=version,
            parent=parent,
            layout=ref,
            elements=layout.elements,
            dense_bytes=layout.nbytes,
            digest_after=after.hex,
            shards=[],
            features=layout.features,
            snapshot=self._write_snapshot(folder, version, layout, ref, after.hex, read, files),
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
        """Write a snapshot; `ref` and `digest` are what its manifest names."""
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

    def layout_ref(self, layout: Layout) -> LayoutRef:
        """Store a layout, if it is not the last one that was, and name it."""
        if layout.sha256 not in self._layouts:
            self._layouts = {layout.sha256: put_layout(self._store, layout)}
        return self._layouts[layout.sha256]

    def manifest(
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
        features: Iterable[str] = (),
        snapshot: ObjectRef | None = None,
        files: Callable[[], ObjectRef | None] | None = None,
    ) -> VersionManifest:
        """The manifest of a version; stores the label's files, unless `files` says where they are stored already.

        features: of the shards, and of the layout where the version starts afresh; else that is the parent's.
        """
        kept = {MIX_FEATURE}.intersection(parent.manifest.features if parent and snapshot is None else ())
        return VersionManifest(
            format=FORMAT,
            features=sorted(kept.union(features)),
            stream=self.reader.stream.stream,
            version=version,
            parent=parent.as_parent if parent else None,
            reset=snapshot is not None,
            snapshot=snapshot,
            layout=layout,
            digest_before=parent.manifest.digest_after if parent else None,
            digest_after=digest_after,
            shards=shards,
            files=files() if files else self._stored(label, parent),
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

    def _stored(self, label: Label, parent: Position | None) -> ObjectRef | None:
        """The list of a version's companion files, stored if they changed."""
        before = parent.manifest.files if parent else None
        return before if label.files is None else put_files(self._store, label.files, before)

    def commit(self, manifest: VersionManifest) -> Position:
        """Create the version. Nobody waits for the hint to readers that start, which follows it.

        Raises:
            Conflict: another writer committed it.
            StorageError: the outcome is unknown; calling again with the same manifest finds out.
        """
        position = commit(self._store, manifest)
        if self._hint is not None:
            self._hint.exception()  # waits, so that an old one is not written over a new one; a lost one does no harm
        self._hint = self._pool.submit(hint_head, self._store, position.version)
        return position
