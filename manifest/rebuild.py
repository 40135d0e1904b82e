"""One version's tensors, whole, in memory or in a mapped file: from a snapshot and the deltas after it."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from weightcast.codec import Geometry, Interval, Memory, digest, digest_all
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, Gap, NotFound, Untrusted, WeightcastError
from weightcast.schemas.layout import Layout

from .chain import Position
from .deltas import apply_directly
from .fetch import DeltaFetcher
from .plan import Route, SnapshotChoice, plan
from .snapshot import fetch_weights
from .stream import Snapshot, StreamReader
from .tensorfile import read_header

FETCH_BYTES: Final = 64 << 20
"""Bytes of shards held while a version is rebuilt."""

_MANIFESTS_AHEAD: Final = 64
"""Manifests asked for at once; a hole ends the chain, so that no more than these are asked for in vain."""


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


def snapshot_choices(
    reader: StreamReader, head: int, *, limit: int | None = None, avoid: Collection[str] = ()
) -> list[SnapshotChoice]:
    """Snapshots of versions up to `head`, with their sizes, newest first; broken ones are left out.

    Args:
        reader: the stream.
        head: newest version of interest.
        limit: stop after so many. A route over an older one needs all deltas that a route over a newer one
        needs, so
            that the newest is the best but for layouts that grew a lot.
        avoid: manifest keys of snapshots that are known to be of no use.
    """
    found: list[SnapshotChoice] = []
    for version, key in reader.each_snapshot_key():
        if version > head or key in avoid:
            continue
        try:
            snapshot = reader.snapshot(key, reader.position(version))
        except (NotFound, Untrusted, Corrupt):
            continue  # one that is gone or does not check out cannot be chosen
        found.append(SnapshotChoice(version, key, snapshot.manifest.bytes))
        if len(found) == limit:
            break
    return found


def usable_deltas(positions: Sequence[Position], floor: int) -> dict[int, int]:
    """Bytes of each delta that may be read: not a reset, and its data not below the floor."""
    return {
        p.version: p.manifest.totals.bytes for p in positions if not p.manifest.reset and p.version > floor
    }


def read_chain(
    reader: StreamReader, first: int, last: int, pool: Executor, *, at: Position | None = None
) -> list[Position]:
    """Positions of versions `first` to `last`, each bound to the one before; ends early where one is missing.

    `at`: the version before `first`, if the caller holds it already.
    """
    chain = reader.chain(at)
    positions: list[Position] = []
    for begin in range(first, last + 1, _MANIFESTS_AHEAD):
        versions = range(begin, min(begin + _MANIFESTS_AHEAD, last + 1))
        for version, data in zip(versions, pool.map(reader.manifest_bytes, versions), strict=True):
            if data is None:
                return positions
            positions.append(chain.extend(data) if chain.at else chain.anchor(data, version))
    return positions


def rebuild(reader: StreamReader, version: int, pool: Executor, *, start: State | None = None) -> State:
    """The tensors of `version`.

    Args:
        reader: the stream.
        version: a committed version.
        pool: for fetching and decoding.
        start: an older state to go on from if that is cheaper; its memory is changed and must not be used
        again.

    A snapshot that turns out to be damaged is passed over for the next older one.

    Raises:
        Gap: data on the way was pruned and no snapshot leads past it.
        Untrusted: the chain is broken, or `start` is not of this stream.
        Corrupt: an object, or the outcome, is not what the manifests say.
    """
    route, state = _start(reader, version, start, pool)
    positions = {p.version: p for p in route.positions}
    fetcher = DeltaFetcher(reader.store, pool, FETCH_BYTES)
    for number in route.plan.versions:
        state = advance(reader, state, positions[number], fetcher, pool)
    return state


@dataclass(frozen=True, slots=True)
class _Routed:
    """A way to a version, and the manifests on it."""

    plan: Route
    positions: list[Position]


def _start(reader: StreamReader, version: int, state: State | None, pool: Executor) -> tuple[_Routed, State]:
    """The way to `version`, and the state at its beginning."""
    damaged: dict[str, WeightcastError] = {}
    while True:
        try:
            route = _route(reader, version, state.position if state else None, pool, damaged)
        except Gap as gap:
            raise (next(iter(damaged.values())) if damaged else gap) from gap
        choice = route.plan.snapshot
        if choice is None:
            if state is None:
                raise Gap(f"no snapshot leads to version {version}")
            return route, state
        position = next(p for p in route.positions if p.version == choice.version)
        try:
            return route, load_snapshot(reader, reader.snapshot(choice.key, position), position, pool)
        except (Corrupt, NotFound) as error:
            damaged[choice.key] = error


def _route(
    reader: StreamReader, version: int, held: Position | None, pool: Executor, avoid: Collection[str]
) -> _Routed:
    """Plan from what is held, or from the newest snapshot that is not to be avoided."""
    floor, choices = reader.floor(), snapshot_choices(reader, version, limit=1, avoid=avoid)
    # Below the floor there are no deltas to go on with, and beyond the version there is no way back.
    if held is not None and (held.version > version or (held.version < floor and choices)):
        held = None
    positions: list[Position] = []
    if held is not None:
        positions = [held, *read_chain(reader, held.version + 1, version, pool, at=held)]
    beyond_hole = bool(positions) and bool(choices) and choices[0].version > positions[-1].version
    if held is None or beyond_hole:
        held, positions = None, read_chain(reader, choices[0].version if choices else version, version, pool)
    route = plan(held.version if held else None, version, usable_deltas(positions, floor), choices)
    return _Routed(route, positions)


def load_snapshot(reader: StreamReader, snapshot: Snapshot, position: Position, pool: Executor) -> State:
    """Fetch a snapshot and prove it. Passes through a temporary folder; memory grows by the tensors alone."""
    geometry = Geometry(reader.layout(snapshot.manifest.layout))
    memory = Memory.allocate(geometry)
    with TemporaryDirectory(prefix="weightcast-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
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
                raise Corrupt(
                    f"{path.name} has tensor {name!r} {entry.spec.dtype}{list(entry.spec.shape)}, which "
                    f"the layout does not list so"
                )
            target = memory.tensor(name).reshape(-1)
            target[:] = np.frombuffer(view, target.dtype, len(target), entry.begin)


def proved(state: State, pool: Executor) -> State:
    """Return `state` if its bytes have the digest of its version.

    Raises:
        Corrupt: they have not.
    """
    found = digest_all(state.geometry, state.memory, pool)
    if found != state.position.digest:
        raise Corrupt(
            f"version {state.position.version} rebuilt has state {found}, its manifest says "
            f"{state.position.digest}"
        )
    return state


def advance(
    reader: StreamReader, state: State, position: Position, fetcher: DeltaFetcher, pool: Executor
) -> State:
    """Apply one delta to a state that nobody serves from; the old state must not be used again."""
    manifest = position.manifest
    geometry, memory = state.geometry, state.memory
    lost = Digest()
    if manifest.layout != state.position.manifest.layout:
        geometry = Geometry(reader.layout(manifest.layout))
        memory, lost = carry_over(state, geometry, pool)
    moved = apply_directly(geometry, fetcher.rows(manifest), memory, pool)
    if state.position.digest - lost + moved != position.digest:
        raise Corrupt(
            f"version {position.version} rebuilt has state {state.position.digest - lost + moved}, its "
            f"manifest says {position.digest}"
        )
    return State(position, geometry, memory)


def retained(old: Layout, new: Layout) -> list[str]:
    """Names whose old bits carry over from `old` to `new`: stored in both with the same dtype and shape."""
    before = old.stored_by_name
    return [spec.name for spec in new.stored if before.get(spec.name) == spec]


def under_layout(before: Layout, memory: Memory, geometry: Geometry) -> Memory:
    """Old bits as a delta to another layout is told from: kept tensors where they are, zeros for all others.

    Nothing is copied, and zeros that are only read take no memory.
    """
    kept = retained(before, geometry.layout)
    known = set(kept)
    new = [spec for spec in geometry.layout.stored if spec.name not in known]
    zeros = np.zeros(max([spec.nbytes for spec in new], default=0), np.uint8)
    return Memory.over(
        geometry, {s.name: zeros[: s.nbytes] for s in new} | {name: memory.tensor(name) for name in kept}
    )


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
        return digest(
            space, memory, Interval(spec.dtype, int(space.starts[space.index[name]]), spec.elements)
        )

    total = Digest()
    for part in pool.map(one, [n for n in names if geometry.layout[n].elements]):
        total += part
    return total
