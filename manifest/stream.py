"""One stream in a store, read: its documents, its head, its floor, its snapshots."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from weightcast.schemas.errors import Corrupt, NotFound, Untrusted
from weightcast.schemas.layout import MAX_LAYOUT_BYTES, Layout
from weightcast.schemas.manifest import (
    MAX_HINT_BYTES,
    MAX_MANIFEST_BYTES,
    FileList,
    Floor,
    Head,
    LayoutRef,
    ObjectRef,
    Reader,
    SnapshotManifest,
    Stream,
    VersionManifest,
    decode,
)
from weightcast.schemas.names import (
    FLOOR_KEY,
    HEAD_KEY,
    READERS_PREFIX,
    SNAPSHOTS_PREFIX,
    STREAM_KEY,
    VERSIONS_PREFIX,
    file_key,
    is_reader_key,
    layout_key,
    parse_snapshot_manifest_key,
    parse_version_key,
    snapshot_folder,
    snapshot_manifest_key,
    version_key,
)

from .chain import Position, TrustedChain
from .store import Store

_FORWARD_PROBES: Final = 4  # versions asked for one by one beyond a good hint, before listing


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot: where it lies and what its manifest says."""

    folder: str
    manifest: SnapshotManifest
    sha256: str


class StreamReader:
    """Reads one stream. Holds no position of its own; thread-safe.

    Methods raise StorageError when the store fails, and Untrusted for documents that break a rule.
    """

    def __init__(self, store: Store, stream: Stream) -> None:
        self.store = store
        self.stream = stream
        self._layouts: dict[str, Layout] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, store: Store) -> StreamReader:
        """Read `stream.json`.

        Raises:
            NotFound: there is no stream at the store's root.
        """
        try:
            data = store.get(STREAM_KEY, max_bytes=MAX_HINT_BYTES)
        except NotFound as error:
            raise NotFound(
                f"no stream at {store.url}", hint="check the URL, or publish a first version there"
            ) from error
        return cls(store, decode(Stream, data, STREAM_KEY))

    def chain(self, at: Position | None = None) -> TrustedChain:
        """A chain of trust for this stream, standing at `at`."""
        return TrustedChain(self.stream, at)

    def manifest_bytes(self, version: int) -> bytes | None:
        """The manifest of `version` as it is stored, unchecked; None if that version does not exist."""
        try:
            return self.store.get(version_key(version), max_bytes=MAX_MANIFEST_BYTES)
        except NotFound:
            return None

    def position(self, version: int) -> Position:
        """The version by itself, trusted on first sight.

        Raises:
            NotFound: there is no such version.
        """
        data = self.manifest_bytes(version)
        if data is None:
            raise NotFound(
                f"version {version} does not exist in {self.store.url}", hint="weightcast log shows what does"
            )
        return self.chain().anchor(data, version)

    def manifest(self, version: int) -> VersionManifest:
        """Short for `position(version).manifest`."""
        return self.position(version).manifest

    def head(self) -> int | None:
        """The newest version, or None if nothing was ever committed.

        Uses `head.json` as a hint. Where the hint fails, lists; a listing is taken as a set, whatever its
        order.
        """
        known = self._hint()
        if known is not None and self.manifest_bytes(known) is None:
            known = None
        if known is not None:
            for _ in range(_FORWARD_PROBES):
                if self.manifest_bytes(known + 1) is None:
                    return known
                known += 1
        listed = self.listed_versions()
        newest = max(listed if known is None else [*listed, known], default=None)
        while newest is not None and self.manifest_bytes(newest + 1) is not None:
            newest += 1
        return newest

    def listed_versions(self) -> list[int]:
        """All versions whose manifest a listing shows, in ascending order."""
        found = (parse_version_key(entry.key) for entry in self.store.list(VERSIONS_PREFIX))
        return sorted(v for v in found if v is not None)

    def _hint(self) -> int | None:
        try:
            return decode(Head, self.store.get(HEAD_KEY, max_bytes=MAX_HINT_BYTES), HEAD_KEY).version
        except (NotFound, Untrusted, Corrupt):
            return None  # a hint that cannot be used is no hint

    def floor(self) -> int:
        """Versions below this one may have lost their data; 0 if nothing was ever pruned."""
        try:
            return decode(Floor, self.store.get(FLOOR_KEY, max_bytes=MAX_HINT_BYTES), FLOOR_KEY).version
        except NotFound:
            return 0

    def layout(self, ref: LayoutRef) -> Layout:
        """The tensor table that `ref` names; kept, since few versions change it."""
        with self._lock:
            found = self._layouts.get(ref.sha256)
        if found is None:
            if ref.size > MAX_LAYOUT_BYTES:
                raise Untrusted(
                    f"layout {ref.sha256} claims {ref.size} bytes, at most {MAX_LAYOUT_BYTES} are read"
                )
            key = layout_key(ref.sha256)
            found = Layout.decode(self.store.fetch(key, size=ref.size, sha256=ref.sha256), key)
            with self._lock:
                self._layouts = {**dict(list(self._layouts.items())[-3:]), ref.sha256: found}
        return found

    def files(self, ref: ObjectRef | None) -> FileList:
        """The companion files of a version."""
        if ref is None:
            return FileList(files=[])
        if ref.key != file_key(ref.sha256) or ref.size > MAX_MANIFEST_BYTES:
            raise Untrusted(
                f"file list {ref.key!r} is not content-addressed, or too large ({ref.size} bytes)"
            )
        return decode(FileList, self.store.fetch(ref.key, size=ref.size, sha256=ref.sha256), ref.key)

    def snapshot_keys(self) -> list[tuple[int, str]]:
        """(version, manifest key) of every snapshot that looks usable, newest first.

        One whose folder carries a token counts only once the version it starts exists and names it.
        """
        return list(self.each_snapshot_key())

    def each_snapshot_key(self) -> Iterator[tuple[int, str]]:
        """Like `snapshot_keys`, one by one: manifests are read only as far as the caller goes."""
        listed = [(parse_snapshot_manifest_key(e.key), e.key) for e in self.store.list(SNAPSHOTS_PREFIX)]
        found = [(parsed[0], key, parsed[1]) for parsed, key in listed if parsed is not None]
        for version, key, token in sorted(found, key=lambda f: f[:2], reverse=True):
            if token is None or self._starts_chain(version, key):
                yield version, key

    def _starts_chain(self, version: int, key: str) -> bool:
        try:
            manifest = self.manifest(version)
        except (NotFound, Untrusted):
            return False  # not committed, or not ours to read: either way nothing starts from it here
        return manifest.snapshot is not None and manifest.snapshot.key == key

    def snapshot(self, key: str, position: Position) -> Snapshot:
        """The snapshot whose manifest lies at `key`, checked against the version it claims to hold.

        Raises:
            NotFound: no such snapshot.
            Untrusted: it is another version's, another stream's, or of another state.
        """
        data = self.store.get(key, max_bytes=MAX_MANIFEST_BYTES)
        manifest = decode(SnapshotManifest, data, key)
        sha256 = hashlib.sha256(data).hexdigest()
        expected = position.manifest
        if (manifest.stream, manifest.version) != (expected.stream, expected.version):
            raise Untrusted(
                f"{key} is of stream {manifest.stream} version {manifest.version}, expected "
                f"{expected.stream} version {expected.version}"
            )
        if manifest.digest != expected.digest_after or manifest.layout != expected.layout:
            raise Untrusted(
                f"{key} holds state {manifest.digest}, version {expected.version} has {expected.digest_after}"
            )
        if (
            expected.snapshot is not None
            and expected.snapshot.key == key
            and expected.snapshot.sha256 != sha256
        ):
            raise Untrusted(
                f"{key} has SHA-256 {sha256}, version {expected.version} names {expected.snapshot.sha256}"
            )
        return Snapshot(key.rpartition("/")[0], manifest, sha256)

    def own_snapshot(self, position: Position) -> Snapshot | None:
        """The snapshot of exactly this version, if there is one."""
        named = position.manifest.snapshot
        key = named.key if named else snapshot_manifest_key(snapshot_folder(position.version))
        try:
            return self.snapshot(key, position)
        except NotFound:
            return None

    def readers(self) -> list[Reader]:
        """What subscribers say they hold; advisory."""
        entries = [e for e in self.store.list(READERS_PREFIX) if is_reader_key(e.key)]
        return [r for r in map(self.reader_at, [e.key for e in entries]) if r is not None]

    def reader_at(self, key: str) -> Reader | None:
        """The lease at `key`; None if it went away or is broken: a hint that cannot be used protects
        nobody.
        """
        try:
            return decode(Reader, self.store.get(key, max_bytes=MAX_HINT_BYTES), key)
        except (NotFound, Untrusted):
            return None
