"""What a stream may lose: a pure plan.

The floor F is the newest version that has a usable snapshot and from which the versions to keep, and the
readers that are alive, can go forward. Then these go:
- shards of versions up to F, since what follows F needs none of them, and snapshots of versions below F;
- shards and snapshots of attempts that never committed, left-overs of probes and leases of readers long gone,
  by age.

Version manifests, layouts and companion files always stay, and so does whatever is not named as one of our
objects.
Ages are told by the store's clock alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from weightcast.schemas.errors import UsageError
from weightcast.schemas.names import (
    is_probe_key,
    is_reader_key,
    is_shard_key,
    parse_data_key,
    parse_snapshot_file_key,
    snapshot_folder,
    snapshot_manifest_key,
)

from .store import Entry

LEASE_AGE_S: Final = 3600.0
"""A lease counts for an hour since it was last written: 60 times the default between two leases."""

ORPHAN_AGE_S: Final = 86_400.0
"""A day: far longer than the slowest upload. A writer that sleeps longer between its uploads and its
commit loses.
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A snapshot that a reader can start from: its version and its folder."""

    version: int
    folder: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A reader's word that it holds `version`, and when the store saw it last (None: the store does not
    say).
    """

    reader: str
    version: int
    modified: datetime | None


@dataclass(frozen=True, slots=True)
class Survey:
    """What is in the store.

    Attributes:
        head: newest version, -1 if there is none.
        floor: as `floor.json` has it.
        snapshots: the usable ones, in any order.
        named: for versions whose manifest could be read, the keys of its shards and the folder of its
        snapshot.
        leases: of readers.
        entries: a listing; objects that nothing here knows are left alone.
    """

    head: int
    floor: int
    snapshots: Sequence[Candidate]
    named: Mapping[int, frozenset[str]]
    leases: Sequence[Lease]
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Deletion:
    """An object that goes, its size in bytes, and why."""

    key: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What pruning would do.

    Attributes:
        head: newest version.
        floor_before, floor: as it is, and as it will be.
        held_by: what keeps the floor from rising further, for people.
        deletions: in the order in which they must happen.
    """

    head: int
    floor_before: int
    floor: int
    held_by: str
    deletions: tuple[Deletion, ...]

    @property
    def bytes(self) -> int:
        """Bytes that the deletions free."""
        return sum(d.size for d in self.deletions)


def plan_prune(
    survey: Survey,
    *,
    keep: int,
    now: datetime,
    orphan_age_s: float = ORPHAN_AGE_S,
    lease_age_s: float = LEASE_AGE_S,
) -> PrunePlan:
    """Decide the floor and what goes. Pure.

    Args:
        survey: what is there.
        keep: how many of the newest versions must stay reachable, at least 1.
        now: the store's clock.
        orphan_age_s: what was never committed goes at this age.
        lease_age_s: a lease older than this protects nobody.

    Raises:
        UsageError: `keep` or an age is out of bounds.
    """
    if keep < 1 or orphan_age_s < 0 or lease_age_s < 0:
        raise UsageError(
            f"keep is {keep}, expected at least 1; ages are {orphan_age_s} s and {lease_age_s} s, "
            f"expected 0 or more"
        )
    alive = now - timedelta(seconds=lease_age_s)
    leases = [x for x in survey.leases if x.modified is None or x.modified > alive]
    floor, held_by = _raised(survey, keep, leases)
    sweeper = _Sweeper(survey, floor, now - timedelta(seconds=orphan_age_s), alive)
    return PrunePlan(survey.head, survey.floor, floor, held_by, tuple(sweeper.deletions()))


def _raised(survey: Survey, keep: int, leases: Sequence[Lease]) -> tuple[int, str]:
    """The new floor, and what limits it. A reader already below the floor needs a snapshot anyway: it
    limits nothing.
    """
    limit, held_by = survey.head - keep + 1, f"the last {keep} versions are kept"
    for lease in leases:
        if survey.floor <= lease.version < limit:
            limit, held_by = lease.version, f"reader {lease.reader} holds version {lease.version}"
    newest = max((s.version for s in survey.snapshots if s.version <= limit), default=survey.floor)
    if newest < limit:
        held_by += f", and there is no usable snapshot from version {newest + 1} to {limit}"
    return max(newest, survey.floor), held_by


class _Sweeper:
    """Goes through a survey once the floor is known. `old` and `alive`: what was written before them is
    old, or dead.
    """

    def __init__(self, survey: Survey, floor: int, old: datetime, alive: datetime) -> None:
        self._survey = survey
        self._floor = floor
        self._old = old
        self._alive = alive

    def deletions(self) -> Iterator[Deletion]:
        """Everything that goes, in order."""
        folders: dict[tuple[int, str | None], list[Entry]] = {}
        for entry in self._survey.entries:
            place = parse_snapshot_file_key(entry.key)
            if place is not None:
                folders.setdefault(place[:2], []).append(entry)
            elif reason := self._why(entry):
                yield Deletion(entry.key, entry.size, reason)
        for (version, token), files in folders.items():
            if reason := self._why_snapshot(version, token, files):
                manifest = snapshot_manifest_key(snapshot_folder(version, token))
                # Without its manifest a snapshot does not exist, whatever is left of it.
                for entry in sorted(files, key=lambda e: e.key != manifest):
                    yield Deletion(entry.key, entry.size, reason)

    def _why(self, entry: Entry) -> str:
        """Why an object that is not part of a snapshot goes; "" if it stays."""
        version = parse_data_key(entry.key)
        if version is not None:
            return self._why_shard(entry, version)
        if is_probe_key(entry.key) and self._is_old(entry):
            return "left over from a probe"
        if (
            is_reader_key(entry.key)
            and self._is_old(entry)
            and entry.modified is not None
            and entry.modified < self._alive
        ):
            return "lease of a reader that is gone"
        return ""

    def _why_shard(self, entry: Entry, version: int) -> str:
        survey = self._survey
        if not is_shard_key(entry.key) and entry.key not in survey.named.get(version, ()):
            return ""
        if version <= min(self._floor, survey.head):
            return f"version {version} is not above the floor"
        if version <= survey.head and (version not in survey.named or entry.key in survey.named[version]):
            return ""
        return "never committed" if self._is_old(entry) else ""

    def _why_snapshot(self, version: int, token: str | None, files: list[Entry]) -> str:
        survey, folder = self._survey, snapshot_folder(version, token)
        if version < self._floor and version <= survey.head:
            return f"version {version} is below the floor"
        complete = any(e.key == snapshot_manifest_key(folder) for e in files)
        unknown = version <= survey.head and version not in survey.named
        named = folder in survey.named.get(version, ())
        if named or not all(map(self._is_old, files)) or (unknown if token else complete):
            return ""
        return "snapshot that no version starts from" if complete else "snapshot that was never completed"

    def _is_old(self, entry: Entry) -> bool:
        return entry.modified is not None and entry.modified < self._old
