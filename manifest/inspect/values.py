"""What queries of a stream return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["snapshot", "delta"]


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One version, as a line of the log.

    Attributes:
        version, step, time, writer, run: as in the manifest.
        kind: "snapshot" if the version starts afresh, else "delta".
        tensors, elements: in the version's layout; elements without those of tied tensors.
        changed: elements that were sent: all of them for a "snapshot".
        bytes: of the shards on the wire.
        dense_bytes: of all tensors, uncompressed.
        shards: how many.
        relaid: whether tensors came, went or changed shape or dtype.
        digest: state digest, in hex.
    """

    version: int
    kind: Kind
    step: int | None
    time: str
    writer: str
    run: str
    tensors: int
    elements: int
    changed: int
    bytes: int
    dense_bytes: int
    shards: int
    relaid: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as its manifest names it."""

    key: str
    size: int
    sha256: str
    rows: int
    elements: int
    changed: int


@dataclass(frozen=True, slots=True)
class TensorChange:
    """How much of one tensor a version changed. `tied_to`: it has no bytes of its own, and counts that
    one's changes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tied_to: str | None
    elements: int
    changed: int


@dataclass(frozen=True, slots=True)
class VersionDetails:
    """One version in full.

    Attributes:
        entry: its line in the log.
        manifest_sha256, manifest_bytes: of the manifest as stored.
        parent_sha256: SHA-256 of the manifest before; None for version 0.
        layout_sha256: names the tensor table.
        digest_before: None for version 0.
        metadata: what the trainer said about the version.
        shards: in the manifest's order.
        files: names of the companion files.
        snapshot: folder of the snapshot of exactly this version, or None.
        pruned: whether the delta may be gone, since the version is not above the floor.
        tensors: changes of every tensor, in layout order; None if not asked for.
    """

    entry: LogEntry
    manifest_sha256: str
    manifest_bytes: int
    parent_sha256: str | None
    layout_sha256: str
    digest_before: str | None
    metadata: dict[str, Any]
    shards: tuple[Shard, ...]
    files: tuple[str, ...]
    snapshot: str | None
    pruned: bool
    tensors: tuple[TensorChange, ...] | None


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """What a subscriber said last. `lag`: versions behind the head; `age_s`: None if its time cannot be
    read.
    """

    reader: str
    version: int
    lag: int
    time: str
    age_s: float | None


@dataclass(frozen=True, slots=True)
class Status:
    """A stream at a glance.

    Attributes:
        url, stream, created, single_writer: what it is; `stream` is its id.
        head: the newest version, or None if nothing was ever committed.
        age_s: seconds since the head's time; None without a head or if its time cannot be read.
        floor: versions below it may have lost their data.
        snapshot: version of the newest snapshot, or None.
        behind_snapshot: deltas that a new reader applies after the newest snapshot, and
        chain_bytes: their bytes.
        delta_bytes, snapshot_bytes: what lies in the store, orphans included.
        readers: what subscribers say they hold.
    """

    url: str
    stream: str
    created: str
    single_writer: bool
    head: LogEntry | None
    age_s: float | None
    floor: int
    snapshot: int | None
    behind_snapshot: int
    chain_bytes: int
    delta_bytes: int
    snapshot_bytes: int
    readers: tuple[ReaderStatus, ...]
