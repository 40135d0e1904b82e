"""From verified rows to absolute values, several versions folded into one, without touching anything live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from weightcast.codec import Changes, Geometry, Memory
from weightcast.manifest.chain import Position
from weightcast.manifest.deltas import changed_positions, collect, fold
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.rebuild import digest_of, retained, under_layout
from weightcast.manifest.rowset import MakesRoom
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, NotFound, StorageError
from weightcast.schemas.layout import Layout
from weightcast.schemas.shard import Row

from .target import Base

Known = Callable[[Row], tuple[Changes, Digest] | None]


@dataclass(frozen=True)
class Staged:
    """What leads from one version to a later one of the same layout: absolute values, proved by digest."""

    position: Position
    changes: Mapping[str, Changes]
    versions: int


def stage(
    geometry: Geometry,
    base: Base,
    at: Position,
    run: Sequence[Position],
    fetcher: DeltaFetcher,
    pool: Executor,
    max_bytes: int,
    known: Known,
    make_room: MakesRoom,
) -> Staged:
    """Decode the versions of `run`, which follow `at` and share its layout, until `max_bytes` of changes are folded.

    Args:
        geometry: of that layout.
        base: bits that were proved to be version `at`; only read.
        at, run: where the base is, and the versions after it; at least one is staged.
        known: what a row of the first version does to the base, if that was decoded ahead.
        make_room: gives what changes are put in.

    Raises:
        NotFound: a shard of the first version is gone. A failure at a later version only ends the run before it.
        Corrupt: a shard is damaged, or the outcome does not have the digest of its version.
        StorageError: the store failed.
    """
    folded: dict[str, Changes] = {}
    done = 0
    for number, position in enumerate(run):
        # In this order: shards of the next version are not in the way of this one's.
        for wanted in run[number : number + 2]:
            fetcher.prefetch(wanted.manifest)
        try:
            rows, expected = fetcher.rows(position.manifest), position.manifest.totals.changed
            changes, moved = _collect(geometry, rows, base, pool, folded, known, expected, make_room)
            _prove(position, at.digest + moved)
        except (NotFound, Corrupt, StorageError):
            if not done:
                raise
            break  # the versions before are good; this one is met again from there
        folded, at, done = fold(folded, changes), position, done + 1
        del changes  # nor is memory that it was put in held, which the next one may be put in
        if sum(c.nbytes for c in folded.values()) > max_bytes:
            break
    return Staged(at, folded, done)


def _collect(
    geometry: Geometry,
    rows: Iterable[Row],
    base: Base,
    pool: Executor,
    folded: Mapping[str, Changes],
    known: Known,
    expected: int,
    make_room: MakesRoom,
) -> tuple[dict[str, Changes], Digest]:
    """`collect`; of a base that is read, the old bits of a version that `folded` has not are had in one read.

    `known` goes by the identity of a row, so that it knows none of a later version than the one it was made for.
    """
    if isinstance(base, Memory):
        return collect(geometry, rows, base, pool, folded, known, expected, make_room)
    rows = list(rows)
    wanted = {
        dtype: found[~np.isin(found, folded[dtype].positions, assume_unique=True)]
        if dtype in folded
        else found
        for dtype, found in changed_positions(geometry, rows, pool).items()
    }
    old = base.read({dtype: found for dtype, found in wanted.items() if len(found)})
    return collect(geometry, rows, old, pool, folded, known, expected, make_room)


def stage_relaid(
    before: Geometry,
    base: Memory,
    at: Position,
    position: Position,
    after: Layout,
    fetcher: DeltaFetcher,
    pool: Executor,
) -> tuple[Geometry, dict[str, Changes]]:
    """The same for one version that changes the layout; tensors that are new to it are told from zeros.

    Raises:
        NotFound, Corrupt: as `stage`.
    """
    geometry = Geometry(after)
    old = under_layout(before.layout, base, geometry)
    rows, expected = fetcher.rows(position.manifest), position.manifest.totals.changed
    changes, moved = collect(geometry, rows, old, pool, {}, expected=expected)
    kept = set(retained(before.layout, after))
    lost = digest_of(before, base, [s.name for s in before.layout.stored if s.name not in kept], pool)
    found = at.digest - lost + moved
    _prove(position, found)
    return geometry, changes


def _prove(position: Position, found: Digest) -> None:
    if found != position.digest:
        raise Corrupt(
            f"version {position.version} decodes to state {found}, its manifest says {position.digest}",
            hint="what it was decoded against, or the delta, is not what the manifests say",
        )
