"""Read-only questions about a stream: its log, one version, its state. Values in, values out; nothing is
printed.

What needs tensors lies in `changes` and `verify`, so that these questions start fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from weightcast.manifest.chain import Position, TrustedChain
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Corrupt, Gap, NotFound, Untrusted
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.names import DATA_PREFIX, SNAPSHOTS_PREFIX, version_key

from .pool import THREADS, ahead, workers
from .values import Kind, LogEntry, ReaderStatus, Shard, Status, TensorChange, VersionDetails

MANIFESTS_AHEAD: Final = 64
"""Manifests read ahead: usually of a few KiB, of 8 MiB at most."""


def log(
    reader: StreamReader, limit: int = 20, before: int | None = None, *, threads: int = THREADS
) -> list[LogEntry]:
    """The newest `limit` versions, or those before version `before`; newest first. Their hash chain is
    checked.

    Raises:
        Untrusted: a manifest breaks the chain.
        Gap: a manifest between others is missing.
    """
    head = reader.head()
    last = -1 if head is None else head if before is None else min(head, before - 1)
    first = max(0, last - limit + 1)
    if last < first:
        return []
    entries: list[LogEntry] = []
    parent: Position | None = None
    for position in _positions(reader, max(0, first - 1), last, threads):
        if position.version >= first:
            entries.append(describe(position, parent))
        parent = position
    return entries[::-1]


def _positions(reader: StreamReader, first: int, last: int, threads: int) -> Iterator[Position]:
    chain = reader.chain()
    with workers(threads) as pool:
        for version, data in ahead(pool, reader.manifest_bytes, range(first, last + 1), MANIFESTS_AHEAD):
            yield _accept(chain, version, data.result())


def _accept(chain: TrustedChain, version: int, data: bytes | None) -> Position:
    if data is None:
        raise Gap(
            f"{version_key(version)} is missing, although later versions exist",
            hint="something deleted it; weightcast verify lists all damage",
        )
    return chain.extend(data) if chain.at else chain.anchor(data, version)


def kind_of(manifest: VersionManifest) -> Kind:
    """Whether a version starts afresh or changes the one before."""
    return "snapshot" if manifest.reset else "delta"


def describe(position: Position, parent: Position | None) -> LogEntry:
    """The line of a version in the log; `parent` is None for version 0 alone."""
    manifest = position.manifest
    return LogEntry(
        version=position.version,
        kind=kind_of(manifest),
        step=manifest.step,
        time=manifest.time,
        writer=manifest.writer,
        run=manifest.run,
        tensors=manifest.layout.tensors,
        elements=manifest.totals.elements,
        changed=manifest.totals.elements if manifest.reset else manifest.totals.changed,
        bytes=manifest.totals.bytes,
        dense_bytes=manifest.totals.dense_bytes,
        shards=len(manifest.shards),
        relaid=parent is None or parent.manifest.layout != manifest.layout,
        digest=manifest.digest_after,
    )


def show(reader: StreamReader, version: int, tensors: bool = False) -> VersionDetails:
    """One version in full; with `tensors`, how much of each tensor it changed, counted from its shards.

    Raises:
        NotFound: there is no such version, or (`tensors`) its shards were pruned.
        Untrusted: it breaks a rule.
        Corrupt: (`tensors`) a shard is not what the manifest says.
    """
    data = reader.manifest_bytes(version)
    if data is None:
        raise NotFound(
            f"version {version} does not exist in {reader.store.url}", hint="weightcast log shows what does"
        )
    position = reader.chain().anchor(data, version)
    manifest = position.manifest
    changes: tuple[TensorChange, ...] | None = None
    if tensors:
        from .changes import tensor_changes

        changes = tensor_changes(reader, position)
    return VersionDetails(
        entry=describe(position, _parent(reader, version)),
        manifest_sha256=position.sha256,
        manifest_bytes=len(data),
        parent_sha256=manifest.parent.sha256 if manifest.parent else None,
        layout_sha256=manifest.layout.sha256,
        digest_before=manifest.digest_before,
        metadata=manifest.metadata,
        shards=tuple(Shard(s.key, s.size, s.sha256, s.rows, s.elements, s.changed) for s in manifest.shards),
        files=tuple(f.name for f in reader.files(manifest.files).files),
        snapshot=_snapshot_folder(reader, position),
        pruned=version <= reader.floor() and version > 0 and not manifest.reset,
        tensors=changes,
    )


def _parent(reader: StreamReader, version: int) -> Position | None:
    try:
        return reader.position(version - 1) if version > 0 else None
    except (NotFound, Untrusted):
        return None  # what a version says can be shown even if the one before is damaged


def _snapshot_folder(reader: StreamReader, position: Position) -> str | None:
    try:
        found = reader.own_snapshot(position)
    except (Untrusted, Corrupt):
        return None  # one that does not check out is verify's business
    return found.folder if found else None


def status(reader: StreamReader, now: datetime, *, threads: int = THREADS) -> Status:
    """The stream at a glance, at the time `now`. Lists the store; reads the manifests since the newest
    snapshot.
    """
    head = reader.head()
    snapshots = [v for v, _ in reader.snapshot_keys() if head is not None and v <= head]
    newest = max(snapshots, default=None)
    chain: list[Position] = []
    if head is not None:
        begin = head if newest is None else newest
        chain = list(_positions(reader, max(0, begin - 1), head, threads))
    after = [p for p in chain if newest is None or p.version > newest]
    entry = describe(chain[-1], chain[-2] if len(chain) > 1 else None) if chain else None
    return Status(
        url=reader.store.url,
        stream=reader.stream.stream,
        created=reader.stream.created,
        single_writer=reader.stream.single_writer,
        head=entry,
        age_s=_age(entry.time, now) if entry else None,
        floor=reader.floor(),
        snapshot=newest,
        behind_snapshot=len(after) if newest is not None else 0,
        chain_bytes=sum(p.manifest.totals.bytes for p in after) if newest is not None else 0,
        delta_bytes=sum(e.size for e in reader.store.list(DATA_PREFIX)),
        snapshot_bytes=sum(e.size for e in reader.store.list(SNAPSHOTS_PREFIX)),
        readers=_lags(reader, head, now),
    )


def lags(reader: StreamReader, now: datetime) -> tuple[ReaderStatus, ...]:
    """How far each known subscriber is behind the head, as of its last lease; the one furthest behind first.

    A subscriber renews its lease every `lease_s` seconds, with each version, too, and after each `once`; one that
    died leaves its last.
    """
    return _lags(reader, reader.head(), now)


def _lags(reader: StreamReader, head: int | None, now: datetime) -> tuple[ReaderStatus, ...]:
    return tuple(
        ReaderStatus(r.reader, r.version, (head or 0) - r.version, r.time, _age(r.time, now))
        for r in sorted(reader.readers(), key=lambda r: (r.version, r.reader))
    )


def _age(time: str, now: datetime) -> float | None:
    """Seconds from `time`, which another machine's clock said and nothing was checked about, to `now`."""
    try:
        then = datetime.fromisoformat(time)
    except ValueError:
        return None
    return (now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()
