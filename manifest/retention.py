"""Pruning: raise the floor, wait, delete.

What goes is `retention_plan`'s business. Every step may be cut short and repeated: the floor only rises, it
is written
before anything is deleted, and a snapshot's manifest goes before its files. One pruner at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from weightcast.schemas.errors import Conflict, NotFound, StorageError, Untrusted, UsageError
from weightcast.schemas.manifest import Floor, VersionManifest
from weightcast.schemas.names import (
    DATA_PREFIX,
    FLOOR_KEY,
    PROBE_PREFIX,
    READERS_PREFIX,
    SNAPSHOTS_PREFIX,
    is_reader_key,
    parse_data_key,
    parse_snapshot_file_key,
    parse_snapshot_manifest_key,
    snapshot_folder,
    snapshot_manifest_key,
)

from .chain import Position
from .commit import now as time_for_people
from .retention_plan import (
    LEASE_AGE_S,
    ORPHAN_AGE_S,
    Candidate,
    Deletion,
    Lease,
    PrunePlan,
    Survey,
    plan_prune,
)
from .store import Entry
from .stream import StreamReader

__all__ = [
    "GRACE_S",
    "LEASE_AGE_S",
    "ORPHAN_AGE_S",
    "Candidate",
    "Deletion",
    "Lease",
    "PrunePlan",
    "PruneResult",
    "Survey",
    "plan_prune",
    "prune",
    "survey_store",
]

GRACE_S: Final = 3600.0
"""An hour: longer than a reader takes to fetch what it has planned when the floor rises."""

_THREADS: Final = 8
_FLOOR_CHECK_EVERY: Final = 500  # deletions between two looks at the floor


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What pruning did, or would do (`dry_run`): the plan, and how much of it is done."""

    plan: PrunePlan
    dry_run: bool
    deleted: int
    deleted_bytes: int


def prune(
    reader: StreamReader,
    *,
    keep: int,
    grace_s: float = GRACE_S,
    orphan_age_s: float = ORPHAN_AGE_S,
    lease_age_s: float = LEASE_AGE_S,
    dry_run: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], datetime] | None = None,
) -> PruneResult:
    """Raise the floor as far as `keep` allows, wait, and delete. May be stopped at any time and called again.

    Args:
        reader: the stream.
        keep: how many of the newest versions stay reachable.
        grace_s: seconds, by the store's clock, between the floor and the first deletion of what lies below
        it.
        orphan_age_s: see `plan_prune`.
        lease_age_s: see `plan_prune`.
        dry_run: only plan. Writes nothing but the small object that tells the store's clock.
        sleep: for the grace.
        clock: the store's clock; by default asked from it.

    Raises:
        UsageError: a figure out of bounds.
        Conflict: another pruner is at work; what this one planned is not done.
        StorageError: the store fails, or gives no modification times. Some deletions may have been done.
    """
    if grace_s < 0:
        raise UsageError(f"the grace is {grace_s} s, expected 0 or more")
    clock = clock or reader.store.clock

    def plan() -> PrunePlan:
        moment = clock()  # before the listing, so that nothing written meanwhile can be old
        return plan_prune(
            survey_store(reader), keep=keep, now=moment, orphan_age_s=orphan_age_s, lease_age_s=lease_age_s
        )

    first = plan()
    if dry_run:
        return PruneResult(first, True, 0, 0)
    _raise_floor(reader, first.floor)
    if first.floor > 0 and first.deletions:
        _wait(reader, grace_s, sleep, clock)
    return _delete(reader, first, plan())


def _raise_floor(reader: StreamReader, floor: int) -> None:
    if reader.floor() < floor:
        reader.store.put(FLOOR_KEY, Floor(version=floor, time=time_for_people()).encode())


def _wait(
    reader: StreamReader, grace_s: float, sleep: Callable[[float], None], clock: Callable[[], datetime]
) -> None:
    """Return once `floor.json` is `grace_s` old. After an interrupted run it may be so already."""
    while True:
        entry = next((e for e in reader.store.list(FLOOR_KEY) if e.key == FLOOR_KEY), None)
        if entry is None or entry.modified is None:
            raise StorageError(
                f"{reader.store.url}: expected {FLOOR_KEY} with a modification time in a listing, found none"
            )
        left = grace_s - (clock() - entry.modified).total_seconds()
        if left <= 0:
            return
        sleep(min(left, 60.0))


def _delete(reader: StreamReader, first: PrunePlan, second: PrunePlan) -> PruneResult:
    """Do what both plans say: `second` was made after the grace, `first` before the floor was raised."""
    if second.floor_before < first.floor:
        raise Conflict(
            f"{FLOOR_KEY} is {second.floor_before}, but {first.floor} was written here: another pruner is "
            f"at work",
            hint="run one pruner at a time, and prune again",
        )
    announced = {d.key for d in first.deletions}
    done = [d for d in second.deletions if d.key in announced]
    for i, deletion in enumerate(done):
        if i % _FLOOR_CHECK_EVERY == 0 and reader.floor() < first.floor:
            raise Conflict(
                f"{FLOOR_KEY} sank below {first.floor} meanwhile",
                hint="run one pruner at a time, and prune again",
            )
        reader.store.delete(deletion.key)
    plan = PrunePlan(second.head, first.floor_before, first.floor, first.held_by, tuple(done))
    return PruneResult(plan, False, len(done), plan.bytes)


def survey_store(reader: StreamReader) -> Survey:
    """Look at everything that pruning needs. The head comes after the listing: what is committed
    meanwhile is known as such.
    """
    floor = reader.floor()
    leases = [e for e in reader.store.list(READERS_PREFIX) if is_reader_key(e.key)]
    entries = [
        e for prefix in (DATA_PREFIX, SNAPSHOTS_PREFIX, PROBE_PREFIX) for e in reader.store.list(prefix)
    ]
    newest = reader.head()
    head = -1 if newest is None else newest
    versions = sorted({v for v in map(_version_of, entries) if v is not None and v <= head})
    with ThreadPoolExecutor(_THREADS) as pool:
        known = [lease for lease in pool.map(lambda e: _lease(reader, e), leases) if lease is not None]
        read = pool.map(lambda v: _position(reader, v), versions)
        positions = {p.version: p for p in read if p is not None}
        named = {v: _named(p.manifest) for v, p in positions.items()}
        snapshots = _usable(reader, entries, positions, pool)
    return Survey(head, floor, snapshots, named, known, [*entries, *leases])


def _version_of(entry: Entry) -> int | None:
    place = parse_snapshot_file_key(entry.key)
    return place[0] if place else parse_data_key(entry.key)


def _lease(reader: StreamReader, entry: Entry) -> Lease | None:
    found = reader.reader_at(entry.key)
    return None if found is None else Lease(found.reader, found.version, entry.modified)


def _position(reader: StreamReader, version: int) -> Position | None:
    """The version, or None if its manifest is missing or is not for this release to read: then its
    objects stay.
    """
    try:
        return reader.position(version)
    except (NotFound, Untrusted):
        return None


def _named(manifest: VersionManifest) -> frozenset[str]:
    """Keys of the shards that a version names, and the folder of its snapshot."""
    folders = [manifest.snapshot.key.rpartition("/")[0]] if manifest.snapshot else []
    return frozenset([s.key for s in manifest.shards] + folders)


def _usable(
    reader: StreamReader, entries: Sequence[Entry], positions: Mapping[int, Position], pool: Executor
) -> list[Candidate]:
    """The snapshots whose manifest is right and all of whose files are listed with the right size."""
    sizes = {e.key: e.size for e in entries}
    found = []
    for key in sizes:
        place = parse_snapshot_manifest_key(key)
        if place is not None and place[0] in positions:
            folder = snapshot_folder(*place)
            if place[1] is None or folder in _named(positions[place[0]].manifest):
                found.append((place[0], folder))

    def is_whole(version: int, folder: str) -> bool:
        try:
            manifest = reader.snapshot(snapshot_manifest_key(folder), positions[version]).manifest
        except (NotFound, Untrusted):
            return False
        return all(sizes.get(f"{folder}/{f.name}") == f.size for f in manifest.weights + manifest.files)

    whole = pool.map(lambda place: is_whole(*place), found)
    return [Candidate(*place) for place, good in zip(found, whole, strict=True) if good]
