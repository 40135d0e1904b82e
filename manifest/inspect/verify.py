"""Checking a whole stream. Every problem is listed; none ends the search.

The quick mode checks the hash chain of the manifests, and size, SHA-256 and structure of everything they
name. The deep mode also rebuilds every version and compares digests. Missing data below the floor was
pruned: no problem.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from weightcast.codec import Box, FlatSpace, Geometry, check
from weightcast.manifest.chain import Position
from weightcast.manifest.rebuild import FETCH_BYTES
from weightcast.manifest.rowset import RowSet, box_of
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Corrupt, Gap, NotFound, Untrusted, WeightcastError
from weightcast.schemas.frames import MAGIC
from weightcast.schemas.layout import Layout
from weightcast.schemas.manifest import LayoutRef, ObjectRef, ShardRef
from weightcast.schemas.names import file_key, layout_key, version_key
from weightcast.schemas.shard import Row, decode_shard, features_of

from . import MANIFESTS_AHEAD
from .findings import Findings, Problem, Progress, VerifyReport
from .pool import THREADS, ahead, workers
from .snapshots import SnapshotCheck

__all__ = ["Problem", "Progress", "VerifyReport", "verify"]

Placed = tuple[FlatSpace, Box]
"""The elements of a row, and the space that they are in."""


@dataclass(frozen=True, slots=True)
class _Job:
    position: Position
    ref: ShardRef
    geometry: Geometry | None


def verify(
    reader: StreamReader,
    version: int | None = None,
    deep: bool = False,
    *,
    threads: int = THREADS,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check the stream up to `version`, by default up to the head.

    Memory: a few shards; with `deep` one model on top, and one on disk (TMPDIR) while a snapshot is checked.

    Raises:
        NotFound: there is no such version.
        StorageError: the store fails again and again.
    """
    head = reader.head()
    if version is not None and (head is None or version > head):
        raise NotFound(
            f"version {version} does not exist in {reader.store.url}", hint="weightcast log shows what does"
        )
    last = head if version is None else version
    findings = Findings(progress)
    check = _Check(reader, findings, threads)
    if last is not None:
        check.chain_and_shards(last)
        good = SnapshotCheck(reader, findings, threads, deep=deep).run(
            check.named_snapshots, check.floor, last
        )
        if deep:
            from .deep import rebuild_all

            rebuild_all(reader, check, good, last)
    return VerifyReport(
        url=reader.store.url,
        version=last,
        floor=check.floor,
        deep=deep,
        manifests=findings.counts["manifests"],
        shards=findings.counts["shards"],
        snapshots=findings.counts["snapshots"],
        bytes=findings.counts["bytes"],
        rebuilt=findings.counts["rebuilt"],
        problems=findings.problems,
        unchecked=_unchecked(check.floor, deep, version if version != head else None),
    )


def _unchecked(floor: int, deep: bool, version: int | None) -> tuple[str, ...]:
    found = []
    if not deep:
        found.append("whether the deltas lead to the states that the manifests promise (--deep does)")
        found.append("whether the snapshots hold the states that the manifests promise (--deep does)")
    if floor:
        found.append(f"data of versions below {floor}, which may have been pruned")
    if version is not None:
        found.append(f"versions after {version}")
    return tuple(found)


class _Check:
    """The chain of manifests, and what each of them names. One use."""

    def __init__(self, reader: StreamReader, findings: Findings, threads: int) -> None:
        self.reader = reader
        self.findings = findings
        self.threads = threads
        self.floor = self._read_floor()
        self.named_snapshots: dict[int, ObjectRef] = {}
        self._layouts: dict[str, bool] = {}
        self._files: set[str] = set()
        self._geometry: tuple[str, Geometry] | None = None

    def _read_floor(self) -> int:
        try:
            return self.reader.floor()
        except Untrusted as error:
            self.findings.add(None, "floor.json", error)
            return 0

    def is_pruned(self, version: int) -> bool:
        """Whether the delta of `version` may be gone by now."""
        self.floor = max(self.floor, self._read_floor())
        return version <= self.floor

    def positions(self, last: int) -> Iterator[Position | None]:
        """Versions 0 to `last`; None where the manifest is missing or broken, after which the chain starts
        anew.
        """
        chain = self.reader.chain()
        with workers(self.threads) as pool:
            for version, future in ahead(pool, self._manifest, range(last + 1), MANIFESTS_AHEAD):
                data, error = future.result()
                position: Position | None = None
                try:
                    if error is not None:
                        raise error
                    if data is None:
                        raise Gap(f"the manifest is missing, although version {last} exists")
                    linked = chain.at is not None and chain.at.version == version - 1
                    position = chain.extend(data) if linked else chain.anchor(data, version)
                except WeightcastError as problem:
                    self.findings.add(version, version_key(version), problem)
                    position = self._by_itself(data, version)
                    chain = self.reader.chain(position)
                yield position

    def _manifest(self, version: int) -> tuple[bytes | None, WeightcastError | None]:
        try:
            return self.reader.manifest_bytes(version), None
        except WeightcastError as error:
            return None, error

    def _by_itself(self, data: bytes | None, version: int) -> Position | None:
        """A version that does not follow the one before can still be read."""
        try:
            return self.reader.chain().anchor(data, version) if data is not None else None
        except Untrusted:
            return None

    def chain_and_shards(self, last: int) -> None:
        """Check manifests, layouts, companion files and shards of versions 0 to `last`."""
        rows, first_job = RowSet(), None
        with workers(self.threads) as pool:
            for job, future in ahead(pool, self._shard, self._jobs(last), FETCH_BYTES, lambda j: j.ref.size):
                if first_job is None or job.position.version != first_job.position.version:
                    self._close(rows, first_job)
                    rows, first_job = RowSet(), job
                try:
                    for space, box in future.result():
                        rows.add(space, box)
                except NotFound as error:
                    if not self.is_pruned(job.position.version):
                        self.findings.add(job.position.version, job.ref.key, error)
                except WeightcastError as error:
                    self.findings.add(job.position.version, job.ref.key, error)
                self.findings.count("shards")
                self.findings.count("bytes", job.ref.size)
        self._close(rows, first_job)

    def _close(self, rows: RowSet, job: _Job | None) -> None:
        """Check the rows of the version of `job` against each other."""
        try:
            rows.close()
        except WeightcastError as error:
            if job is not None:
                self.findings.add(job.position.version, version_key(job.position.version), error)

    def _jobs(self, last: int) -> Iterator[_Job]:
        for position in self.positions(last):
            self.findings.count("manifests")
            if position is None:
                continue
            manifest = position.manifest
            if manifest.snapshot is not None:
                self.named_snapshots[position.version] = manifest.snapshot
            geometry = self._check_layout(position.version, manifest.layout)
            if geometry is not None:
                self._check_features(position, geometry.layout)
            self._check_files(position)
            if position.version > self.floor:
                for ref in manifest.shards:
                    yield _Job(position, ref, geometry)

    def _check_layout(self, version: int, ref: LayoutRef) -> Geometry | None:
        if self._geometry is not None and self._geometry[0] == ref.sha256:
            return self._geometry[1]
        if self._layouts.get(ref.sha256) is False:
            return None
        try:
            layout = self.reader.layout(ref)
            if len(layout) != ref.tensors:
                raise Corrupt(f"the layout lists {len(layout)} tensors, the manifest says {ref.tensors}")
        except WeightcastError as error:
            self._layouts[ref.sha256] = False
            self.findings.add(version, layout_key(ref.sha256), error)
            return None
        self._geometry = (ref.sha256, Geometry(layout))
        return self._geometry[1]

    def _check_features(self, position: Position, layout: Layout) -> None:
        missing = set(layout.features) - set(position.manifest.features)
        if missing:
            error = Corrupt(f"the layout needs {_unlisted(missing)}")
            self.findings.add(position.version, version_key(position.version), error)

    def _check_files(self, position: Position) -> None:
        ref = position.manifest.files
        if ref is None or ref.sha256 in self._files:
            return
        self._files.add(ref.sha256)
        try:
            listed = self.reader.files(ref).files
        except WeightcastError as error:
            self.findings.add(position.version, ref.key, error)
            return
        for file in listed:
            key = file_key(file.sha256)
            try:
                self.reader.store.fetch(key, size=file.size, sha256=file.sha256)
            except WeightcastError as error:
                self.findings.add(position.version, key, error)

    def _shard(self, job: _Job) -> list[Placed]:
        ref = job.ref
        data = self.reader.store.fetch(ref.key, size=ref.size, sha256=ref.sha256)
        rows = decode_shard(data, ref.key)
        found = (len(rows), sum(r.length for r in rows), sum(r.count for r in rows))
        if found != (ref.rows, ref.elements, ref.changed):
            raise Corrupt(
                f"the shard has {found[0]} rows, {found[1]} elements, {found[2]} changes; the manifest says "
                f"{ref.rows}, {ref.elements}, {ref.changed}"
            )
        missing = features_of(rows, packed=data[: len(MAGIC)] == MAGIC) - set(job.position.manifest.features)
        if missing:
            raise Corrupt(f"the shard needs {_unlisted(missing)}")
        if job.geometry is None:
            return []
        return [_check_row(job.geometry, row) for row in rows]


def _unlisted(features: Collection[str]) -> str:
    return (
        f"the features {sorted(features)}, which the manifest does not list: a release that does not know them "
        "cannot say so"
    )


def _check_row(geometry: Geometry, row: Row) -> Placed:
    """Unpack a row as far as that goes without its base."""
    space = geometry.space_of(row)
    box = box_of(space, row)
    check(space, row)
    return space, box
