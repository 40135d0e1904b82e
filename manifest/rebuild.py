"""One version's tensors, whole, in memory or in a mapped file: from a snapshot and the deltas after it."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from weightcast.codec import Geometry, Interval, Memory, digest, digest_all
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, Gap, WeightcastError
from weightcast.schemas.layout import Layout
from .chain import Position
from .deltas import DeltaFetcher, apply_directly
from .plan import Route, SnapshotChoice, plan
from .snapshot import fetch_weights
from .stream import Snapshot, StreamReader
from .tensorfile import read_header

FETCH_BYTES = 64 << 20
"""Bytes of shards held while a version is rebuilt."""


@dataclass(frozen=True)
class State:
    """The tensors of one version, proved by digest."""

    position: Position
    geometry: Geometry
    memory: Memory

    @property
    def layout(self) -> Layout:
        """The version's tensor table."""
        return self.geometry.layout


def snapshot_choices(reader: StreamReader, head: int) -> list[SnapshotChoice]:
    """Snapshots of versions up to `head`, with their sizes; broken ones are left out."""
    found = []
    for version, key in reader.snapshot_keys():
        if version > head:
            continue
        try:
            snapshot = reader.snapshot(key, reader.position(version))
        except WeightcastError:
            continue  # one that is gone or does not check out cannot be chosen
        found.append(SnapshotChoice(version, key, snapshot.manifest.bytes))
    return found


def usable_deltas(positions: Sequence[Position], floor: int) -> dict[int, int]:
    """Bytes of each delta that may be read: not a reset, and its data not below the floor."""
    return {
        p.version: p.manifest.totals.bytes for p in positions if not p.manifest.reset and p.version > floor
    }


def read_chain(reader: StreamReader, first: int, last: int, pool: Executor) -> list[Position]:
    """Positions of versions `first` to `last`, each bound to the one before; ends early where one is missing."""
    chain = reader.chain()
    positions: list[Position] = []
    for version, data in zip(range(first, last + 1), pool.map(reader.manifest_bytes, range(first, last + 1)), strict=True):
        if data is None:
            break
        positions.append(chain.extend(data) if chain.at else chain.anchor(data, version))
    return positions


def rebuild(
    reader: StreamReader, version: int, pool: Executor, *, start: State | None = None
) -> State:
    """The tensors of `version`.

    Args:
        reader: the stream.
        version: a committed version.
        pool: for fetching and decoding.
        start: an older state to go on from if that is cheaper; its memory is changed and must not be used again.

    Raises:
        Gap: data on the way was pruned and no snapshot leads past it.
        Corrupt: an object, or the outcome, is not what the manifests say.
    """
    route, positions = _route(reader, version, start.position.version if start else None, pool)
    if route.snapshot is not None:
        position = positions[route.snapshot.version]
        start = load_snapshot(reader, reader.snapshot(route.snapshot.key, position), position, pool)
    if start is None:
        raise Gap(f"no snapshot leads to version {version}")
    fetcher = DeltaFetcher(reader.store, pool, FETCH_BYTES)
    for number in route.versions:
        start = advance(reader, start, positions[number], fetcher, pool)
    return start


def _route(reader: StreamReader, version: int, current: int | None, pool: Executor) -> tuple[Route, dict[int, Position]]:
    choices = snapshot_choices(reader, version)
    oldest = min([c.version for c in choices] + ([current] if current is not None else []), default=version)
    positions = read_chain(reader, oldest, version, pool)
    route = plan(current, version, usable_deltas(positions, reader.floor()), choices)
    return route, {p.version: p for p in positions}


def load_snapshot(reader: StreamReader, snapshot: Snapshot, position: Position, pool: Executor) -> State:
    """Fetch a snapshot and prove it. Passes through a temporary folder; memory grows by the tensors alone."""
    geometry = Geometry(reader.layout(snapshot.manifest.layout))
    memory = Memory.allocate(geometry)
    with _scratch() as folder:
        for path in fetch_weights(reader, snapshot, folder, pool):
            copy_file(path, geometry.layout, memory)
    return proved(State(position, geometry, memory), pool)


def copy_file(path: Path, layout: Layout, memory: Memory) -> None:
    """Copy the tensors of a safetensors file into `memory`, which must expect exactly these."""
    entries = read_header(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for entry in entries:
            name = entry.spec.name
            if name not in layout or layout[name] != entry.spec:
                raise Corrupt(f"{path.name} has tensor {name!r} {entry.spec.dtype}{list(entry.spec.shape)}, which the layout does not list so")
            target = memory.tensor(name).reshape(-1)
            target[:] = np.frombuffer(view, target.dtype, len(target), entry.begin)


def proved(state: State, pool: Executor) -> State:
    """Return `state` if its bytes have the digest of its version.

    Raises:
        Corrupt: they have not.
    """
    found = digest_all(state.geometry, state.memory, pool)
    if found != state.position.digest:
        raise Corrupt(f"version {state.position.version} rebuilt has state {found}, its manifest says {state.position.digest}")
    return state


def advance(reader: StreamReader, state: State, position: Position, fetcher: DeltaFetcher, pool: Executor) -> State:
    """Apply one delta to a state that nobody serves from; the old state must not be used again."""
    manifest = position.manifest
    geometry, memory = state.geometry, state.memory
    lost = Digest()
    if manifest.layout != state.position.manifest.layout:
        geometry = Geometry(reader.layout(manifest.layout))
        memory, lost = carry_over(state, geometry, pool)
    moved = apply_directly(geometry, fetcher.rows(manifest), memory, pool)
    if state.position.digest - lost + moved != position.digest:
        raise Corrupt(f"version {position.version} rebuilt has state {state.position.digest - lost + moved}, its manifest says {position.digest}")
    return State(position, geometry, memory)


def retained(old: Layout, new: Layout) -> list[str]:
    """Names whose old bits carry over from `old` to `new`: stored in both with the same dtype and shape."""
    before = {spec.name: spec for spec in old.stored}
    return [spec.name for spec in new.stored if before.get(spec.name) == spec]


def carry_over(state: State, geometry: Geometry, pool: Executor) -> tuple[Memory, Digest]:
    """New memory for a changed layout, filled as the format's base rule says: kept tensors, and zeros.

    Returns:
        The memory, and the digest of the tensors that were left behind.
    """
    memory = Memory.allocate(geometry)
    kept = retained(state.layout, geometry.layout)
    for name in kept:
        np.copyto(memory.tensor(name), state.memory.tensor(name))
    return memory, digest_of(state.geometry, state.memory, _others(state.layout, kept), pool)


def _others(layout: Layout, names: list[str]) -> list[str]:
    known = set(names)
    return [spec.name for spec in layout.stored if spec.name not in known]


def digest_of(geometry: Geometry, memory: Memory, names: Sequence[str], pool: Executor) -> Digest:
    """State digest of some tensors."""

    def one(name: str) -> Digest:
        spec = geometry.layout[name]
        space = geometry[spec.dtype]
        return digest(space, memory, Interval(spec.dtype, int(space.starts[space.index[name]]), spec.elements))

    total = Digest()
    for part in pool.map(one, [n for n in names if geometry.layout[n].elements]):
        total += part
    return total


@contextmanager
def _scratch() -> Iterator[Path]:
    """A temporary folder for downloads (TMPDIR says where), removed afterwards."""
    folder = Path(mkdtemp(prefix="weightcast-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
