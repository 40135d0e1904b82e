"""The writes that make things exist: streams, layouts, shards, versions. Everything here may be repeated."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from weightcast.schemas.errors import Conflict, StorageError, UsageError, WeightcastError
from weightcast.schemas.layout import Layout
from weightcast.schemas.manifest import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    FileList,
    FileRef,
    Head,
    LayoutRef,
    ObjectRef,
    ShardRef,
    Stream,
    VersionManifest,
    decode,
)
from weightcast.schemas.names import HEAD_KEY, STREAM_KEY, file_key, layout_key, shard_key, version_key
from weightcast.schemas.shard import Row, store_shard

from .chain import Position
from .store import Store
from .stream import StreamReader


@dataclass(frozen=True, slots=True)
class Writer:
    """Who writes: a name for people, and an id that is new for every run of a publisher."""

    name: str
    run: str

    @classmethod
    def fresh(cls, name: str) -> Writer:
        """A writer with a new run id."""
        return cls(name, uuid.uuid4().hex)


def new_token() -> str:
    """32 hex digits that nobody else has."""
    return uuid.uuid4().hex


def now() -> str:
    """The time in RFC 3339, UTC: for people, never compared."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def create_stream(store: Store, *, single_writer: bool = False) -> StreamReader:
    """Make a stream at the store's root, or open the one that is there.

    Raises:
        UsageError: the store cannot create-only, and `single_writer` was not given.
    """
    if not single_writer and not store.probe().create_only:
        raise UsageError(
            f"{store.url} does not honour create-only writes, so two publishers could both commit a version",
            hint="use another store, or accept that only one publisher will ever run (--single-writer)",
        )
    stream = Stream(format=FORMAT, stream=new_token(), created=now(), single_writer=single_writer)
    store.create(STREAM_KEY, stream.encode())
    return StreamReader.open(store)


def put_layout(store: Store, layout: Layout) -> LayoutRef:
    """Store the tensor table under its hash."""
    store.put(layout_key(layout.sha256), layout.encoded)
    return LayoutRef(sha256=layout.sha256, size=len(layout.encoded), tensors=len(layout))


def put_files(store: Store, files: Mapping[str, bytes], before: ObjectRef | None) -> ObjectRef | None:
    """Store companion files and their list under their hashes; None if there are none.

    Nothing is sent if the list is `before`, the list of the version before.
    """
    if not files:
        return None
    refs = [
        FileRef(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in sorted(files.items())
    ]
    encoded = FileList(files=refs).encode()
    sha256 = hashlib.sha256(encoded).hexdigest()
    ref = ObjectRef(key=file_key(sha256), size=len(encoded), sha256=sha256)
    if ref != before:
        for file in refs:
            store.put(file_key(file.sha256), files[file.name])
        store.put(ref.key, encoded)
    return ref


def put_shard(store: Store, version: int, writer: str, part: int, rows: Sequence[Row]) -> ShardRef:
    """Store `rows` as one shard of `version` under a key that was never used before."""
    data = store_shard(rows)
    key = shard_key(version, writer, part, new_token())
    store.put(key, data)
    return ShardRef(
        key=key,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        rows=len(rows),
        elements=sum(r.length for r in rows),
        changed=sum(r.count for r in rows),
    )


def commit(store: Store, manifest: VersionManifest) -> Position:
    """Create the version. When this returns, it is committed; when it raises Conflict, it never will be.

    Raises:
        UsageError, Untrusted: no reader would accept the manifest; nothing was written.
        Conflict: another writer committed this version; names it.
        StorageError: the outcome is unknown. Calling again with the same manifest is safe, and finds out.
    """
    data = manifest.encode()
    key = version_key(manifest.version)
    if len(data) > MAX_MANIFEST_BYTES:
        raise UsageError(
            f"the manifest of version {manifest.version} has {len(data)} bytes, at most "
            f"{MAX_MANIFEST_BYTES} are read"
        )
    decode(
        VersionManifest, data, key
    )  # what no reader would accept must not be committed: it could never be taken back
    if not store.create(key, data):
        raise Conflict(
            f"version {manifest.version} was committed by {_who(store, key)}; this is {manifest.writer!r} "
            f"run {manifest.run}",
            hint="another publisher has taken over this stream; stop this one, or restart it to continue "
            "from the new head",
        )
    return Position(manifest, hashlib.sha256(data).hexdigest())


def _who(store: Store, key: str) -> str:
    try:
        winner = decode(VersionManifest, store.get(key, max_bytes=MAX_MANIFEST_BYTES), key)
    except WeightcastError:
        return "another publisher"
    return f"{winner.writer!r} run {winner.run} at {winner.time}"


def hint_head(store: Store, version: int) -> None:
    """Tell readers that start where to look. A failure does no harm: the next commit writes it again."""
    try:
        store.put(HEAD_KEY, Head(version=version).encode())
    except StorageError:
        return
