"""Rebuilding every version of a stream, one state moved forward delta by delta."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from typing import Protocol

from weightcast.manifest.chain import Position
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.rebuild import FETCH_BYTES, State, advance, load_snapshot
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Gap, NotFound, WeightcastError
from weightcast.schemas.names import version_key

from .findings import Findings
from .pool import workers


class Chain(Protocol):
    """What is needed of the check of the manifests."""

    findings: Findings
    threads: int
    floor: int

    def positions(self, last: int) -> Iterator[Position | None]:
        """Versions 0 to `last`; None for those that cannot be read."""

    def is_pruned(self, version: int) -> bool:
        """Whether the delta of `version` may be gone."""


def rebuild_all(reader: StreamReader, chain: Chain, snapshots: Mapping[int, str], last: int) -> None:
    """Rebuild versions `floor` to `last` and compare digests; `snapshots` are those that are whole.

    After a version that cannot be rebuilt the next whole snapshot is taken up; those in between are listed
    as one gap.
    """
    lost: list[int] = []
    state: State | None = None
    with workers(chain.threads) as pool:
        fetcher = DeltaFetcher(reader.store, pool, FETCH_BYTES)
        for version, position in enumerate(chain.positions(last)):
            if version < chain.floor:
                continue
            if position is None:
                state = None
            elif state is not None and not position.manifest.reset:
                state = _forward(reader, chain, state, position, fetcher, pool)
            else:
                state = None
            if state is None and position is not None and version in snapshots:
                state = _load(reader, chain, snapshots[version], position, pool)
            if state is not None:
                chain.findings.count("rebuilt")
                _note_gap(chain.findings, lost)
                lost = []
            elif not chain.is_pruned(version) or version == chain.floor:
                lost.append(version)
    _note_gap(chain.findings, lost)


def _forward(
    reader: StreamReader,
    chain: Chain,
    state: State,
    position: Position,
    fetcher: DeltaFetcher,
    pool: Executor,
) -> State | None:
    try:
        return advance(reader, state, position, fetcher, pool)
    except NotFound as error:
        if not chain.is_pruned(position.version) and not chain.findings.concerns(position.version):
            chain.findings.add(position.version, version_key(position.version), error)
    except WeightcastError as error:
        if not chain.findings.concerns(position.version):  # a shard's own problem is listed already
            chain.findings.add(position.version, version_key(position.version), error)
    return None


def _load(reader: StreamReader, chain: Chain, key: str, position: Position, pool: Executor) -> State | None:
    try:
        return load_snapshot(reader, reader.snapshot(key, position), position, pool)
    except WeightcastError as error:
        chain.findings.add(position.version, key, error)
        return None


def _note_gap(findings: Findings, lost: list[int]) -> None:
    if lost:
        which = f"version {lost[0]}" if len(lost) == 1 else f"versions {lost[0]} to {lost[-1]}"
        findings.add(lost[0], which, Gap(f"{which} cannot be rebuilt from what the store holds"))
