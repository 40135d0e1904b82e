"""Checking snapshots: their manifests, every file by size and SHA-256, and, if asked for, the state they
hold.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from weightcast.codec import Geometry, Memory
from weightcast.manifest.chain import Position
from weightcast.manifest.rebuild import State, copy_file, proved
from weightcast.manifest.stream import Snapshot, StreamReader
from weightcast.manifest.tensorfile import read_header
from weightcast.schemas.errors import Corrupt, NotFound, WeightcastError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.manifest import FileRef, ObjectRef
from weightcast.schemas.names import (
    SNAPSHOTS_PREFIX,
    parse_snapshot_manifest_key,
    snapshot_folder,
    snapshot_manifest_key,
)

from .findings import Findings
from .pool import ahead, workers

FILES_AHEAD: Final = 3
"""Files that lie on disk at once while they are hashed: a snapshot's have a GiB each by default."""


class SnapshotCheck:
    """Checks the snapshots of a stream."""

    def __init__(self, reader: StreamReader, findings: Findings, threads: int, *, deep: bool) -> None:
        self._reader = reader
        self._findings = findings
        self._threads = threads
        self._deep = deep

    def run(self, named: dict[int, ObjectRef], floor: int, last: int) -> dict[int, str]:
        """Check every snapshot of the versions `floor` to `last`, and that those which must exist do.

        Args:
            named: the snapshots that versions start from.
            floor: versions below need none.
            last: newest version to look at.

        Returns:
            Version and manifest key of the snapshots that are whole.
        """
        wanted = {v: ref.key for v, ref in named.items() if v >= floor}
        for entry in self._reader.store.list(SNAPSHOTS_PREFIX):
            parsed = parse_snapshot_manifest_key(entry.key)
            # One with a token that no version names is left from an attempt that was never committed.
            if parsed is not None and parsed[1] is None and floor <= parsed[0] <= last:
                wanted.setdefault(parsed[0], entry.key)
        if floor > 0:  # pruning relies on it
            wanted.setdefault(floor, snapshot_manifest_key(snapshot_folder(floor)))
        return {v: key for v, key in sorted(wanted.items()) if self._check(v, key)}

    def _check(self, version: int, key: str) -> bool:
        self._findings.count("snapshots")
        try:
            position = self._reader.position(version)
        except WeightcastError:
            return False  # the manifest's own problem is listed already
        try:
            snapshot = self._reader.snapshot(key, position)
            layout = self._reader.layout(position.manifest.layout)
        except NotFound as error:
            if version >= self._reader.floor():
                self._findings.add(version, key, error)
            return False
        except WeightcastError as error:
            self._findings.add(version, key, error)
            return False
        with TemporaryDirectory(prefix="weightcast-verify-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            whole = self._files(snapshot, position, layout, folder)
            return whole and (not self._deep or self._state(snapshot, position, layout, folder))

    def _files(self, snapshot: Snapshot, position: Position, layout: Layout, folder: Path) -> bool:
        """Fetch and hash each file; in the deep mode the weight files stay in `folder`."""
        weights = snapshot.manifest.weights

        def one(ref: FileRef) -> list[TensorSpec]:
            path = folder / ref.name
            self._reader.store.download(
                f"{snapshot.folder}/{ref.name}", path, size=ref.size, sha256=ref.sha256
            )
            specs = [e.spec for e in read_header(path)] if ref in weights else []
            if not self._deep or ref not in weights:
                path.unlink()
            return specs

        found: list[TensorSpec] = []
        whole = True
        with workers(self._threads) as pool:
            for ref, future in ahead(pool, one, [*weights, *snapshot.manifest.files], FILES_AHEAD):
                self._findings.count("bytes", ref.size)
                try:
                    found += future.result()
                except WeightcastError as error:
                    whole = False
                    self._findings.add(position.version, f"{snapshot.folder}/{ref.name}", error)
        if whole and sorted(found, key=lambda s: (s.dtype, s.name)) != list(layout.stored):
            whole = False
            problem = Corrupt(
                "the snapshot's weight files do not hold exactly the tensors of the version's layout"
            )
            self._findings.add(position.version, snapshot_manifest_key(snapshot.folder), problem)
        return whole

    def _state(self, snapshot: Snapshot, position: Position, layout: Layout, folder: Path) -> bool:
        geometry = Geometry(layout)
        memory = Memory.allocate(geometry)
        try:
            for ref in snapshot.manifest.weights:
                copy_file(folder / ref.name, layout, memory)
            with workers(self._threads) as pool:
                proved(State(position, geometry, memory), pool)
        except WeightcastError as error:
            self._findings.add(position.version, snapshot_manifest_key(snapshot.folder), error)
            return False
        return True
