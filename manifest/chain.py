"""Every judgement about version manifests, in one place and without I/O.

A manifest is accepted only if, in this order,
1. it is within bounds and a valid document of a known format and known features;
2. it belongs to this stream;
3. it is the version that was asked for;
4. it names as its parent the exact bytes of the manifest held before (hash chain);
5. its digest before is the digest after of the one held before.

The first manifest a reader holds is an anchor: it is checked by 1 to 3 alone, and against the hash that the
reader
remembers of it, if it does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Untrusted
from weightcast.schemas.manifest import MAX_MANIFEST_BYTES, ParentRef, Stream, VersionManifest, decode
from weightcast.schemas.names import version_key


@dataclass(frozen=True, slots=True)
class Position:
    """A version in a stream: its manifest and the SHA-256 of the manifest's bytes."""

    manifest: VersionManifest
    sha256: str

    @property
    def version(self) -> int:
        """The version's number."""
        return self.manifest.version

    @property
    def digest(self) -> Digest:
        """State digest of the version."""
        return self.manifest.after

    @property
    def as_parent(self) -> ParentRef:
        """The reference that the next version's manifest must carry."""
        return ParentRef(version=self.version, sha256=self.sha256)


class TrustedChain:
    """The versions of one stream that a reader has accepted, up to `at`. Not thread-safe."""

    def __init__(self, stream: Stream, at: Position | None = None) -> None:
        self.stream = stream
        self.at = at

    def anchor(self, data: bytes, version: int, *, sha256: str | None = None) -> Position:
        """Start, or start again, at `version` (rules 1 to 3); `sha256` is what the reader remembers of it.

        Raises:
            Untrusted: a rule is broken; `at` stays as it was.
        """
        position = self._read(data, version)
        if sha256 is not None and position.sha256 != sha256:
            raise Untrusted(
                f"{version_key(version)} has SHA-256 {position.sha256}, but this reader applied {sha256}",
                hint="the history was rewritten; point the reader at the right stream or start it afresh",
            )
        self.at = position
        return position

    def extend(self, data: bytes) -> Position:
        """Accept the manifest that follows `at` (rules 1 to 5).

        Raises:
            Untrusted: a rule is broken; `at` stays as it was.
        """
        if self.at is None:
            raise Untrusted("the chain has no anchor yet")
        position = self._read(data, self.at.version + 1)
        where, manifest = version_key(position.version), position.manifest
        if manifest.parent != self.at.as_parent:
            found = manifest.parent.sha256 if manifest.parent else "none"
            raise Untrusted(
                f"{where} follows a manifest with SHA-256 {found}, but version {self.at.version} here has "
                f"{self.at.sha256}"
            )
        if manifest.before != self.at.digest:
            raise Untrusted(
                f"{where} starts from state {manifest.digest_before}, but version {self.at.version} ended "
                f"in {self.at.digest}"
            )
        self.at = position
        return position

    def _read(self, data: bytes, version: int) -> Position:
        where = version_key(version)
        if len(data) > MAX_MANIFEST_BYTES:
            raise Untrusted(f"{where} has {len(data)} bytes, at most {MAX_MANIFEST_BYTES} are read")
        manifest = decode(VersionManifest, data, where)
        if manifest.stream != self.stream.stream:
            raise Untrusted(f"{where} belongs to stream {manifest.stream}, expected {self.stream.stream}")
        if manifest.version != version:
            raise Untrusted(f"{where} holds the manifest of version {manifest.version}")
        return Position(manifest, hashlib.sha256(data).hexdigest())
