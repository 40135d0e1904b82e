"""From a version's manifest to its verified rows, and from rows to changes: fetched ahead, decoded in
parallel.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from weightcast.codec import Changes, Geometry, Memory, decode, gather, merge, positions, scatter
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt
from weightcast.schemas.manifest import ShardRef, VersionManifest
from weightcast.schemas.shard import Row, decode_shard

from .store import Store

A = TypeVar("A")
B = TypeVar("B")

_ROWS_AHEAD: Final = 8  # rows decoded at once; each holds at most a few times its own length


class DeltaFetcher:
    """Fetches the shards of versions in parallel, holding at most about `max_pending_bytes` of them.

    Not thread-safe: it belongs to one reader. `prefetch` may be called for a version before its rows are
    wanted.
    """

    def __init__(self, store: Store, pool: Executor, max_pending_bytes: int) -> None:
        self._store = store
        self._pool = pool
        self._max_pending_bytes = max_pending_bytes
        self._ahead: dict[str, Future[list[Row]]] = {}
        self._held_bytes = 0  # sizes of the shards in `_ahead`

    def prefetch(self, manifest: VersionManifest) -> None:
        """Start fetching the first shards of `manifest`, as far as there is room; never blocks, raises
        nothing.
        """
        for ref in manifest.shards:
            if not self._has_room(ref):
                break
            self._start(ref)

    def rows(self, manifest: VersionManifest) -> Iterator[Row]:
        """The rows of `manifest`, shard by shard in the manifest's order, each shard verified first.

        Raises:
            NotFound: a shard is gone (pruned, or never there).
            Corrupt: a shard is not what the manifest says, after a second fetch.
        """
        window: deque[ShardRef] = deque()
        try:
            for ref in manifest.shards:
                while window and not self._has_room(ref):
                    yield from self._take(window.popleft())
                self._start(ref)
                window.append(ref)
            while window:
                yield from self._take(window.popleft())
        finally:
            for ref in window:
                self._forget(ref)

    def drop(self) -> None:
        """Forget what was prefetched."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()
        self._held_bytes = 0

    def _has_room(self, ref: ShardRef) -> bool:
        return ref.key in self._ahead or self._held_bytes + ref.size <= self._max_pending_bytes

    def _start(self, ref: ShardRef) -> Future[list[Row]]:
        if ref.key not in self._ahead:
            self._ahead[ref.key] = self._pool.submit(self._fetch, ref)
            self._held_bytes += ref.size
        return self._ahead[ref.key]

    def _take(self, ref: ShardRef) -> Iterator[Row]:
        """The rows of a shard, which counts as held until the last of them is consumed."""
        try:
            yield from self._start(ref).result()
        finally:
            self._forget(ref)

    def _forget(self, ref: ShardRef) -> None:
        future = self._ahead.pop(ref.key, None)
        if future is not None:
            future.cancel()
            self._held_bytes -= ref.size

    def _fetch(self, ref: ShardRef) -> list[Row]:
        rows = decode_shard(self._store.fetch(ref.key, size=ref.size, sha256=ref.sha256), ref.key)
        if len(rows) != ref.rows or sum(r.count for r in rows) != ref.changed:
            raise Corrupt(
                f"shard {ref.key} has {len(rows)} rows, its manifest says {ref.rows}, or another number "
                f"of changes"
            )
        return rows


def _without_overlap(geometry: Geometry, rows: Iterable[Row]) -> Iterator[Row]:
    """Pass `rows` on, checking that no two intervals of a dtype overlap."""
    spans: dict[str, list[tuple[int, int]]] = {}  # disjoint, ascending
    for row in rows:
        begin = geometry.space_of(row).locate(row)
        span, taken = (begin, begin + row.length), spans.setdefault(row.dtype, [])
        at = bisect(taken, span)
        if (at and taken[at - 1][1] > begin) or (at < len(taken) and taken[at][0] < span[1]):
            raise Corrupt(f"two rows of the delta overlap in tensor {row.tensor!r} at offset {row.offset}")
        taken.insert(at, span)  # at the end, if rows come in order
        yield row


def changed_positions(
    geometry: Geometry, rows: Iterable[Row], pool: Executor
) -> dict[str, npt.NDArray[np.int64]]:
    """Flat elements that rows of one version change, by dtype: int64, ascending.

    Raises:
        Corrupt: rows overlap, or one breaks a rule that shows without a base.
    """

    def one(row: Row) -> tuple[str, npt.NDArray[np.int64]]:
        return row.dtype, positions(geometry[row.dtype], row)

    found: dict[str, list[npt.NDArray[np.int64]]] = {}
    for dtype, part in _map_ahead(pool, one, _without_overlap(geometry, rows)):
        found.setdefault(dtype, []).append(part)
    for parts in found.values():
        parts.sort(key=lambda part: int(part[0]))
    return {dtype: np.concatenate(parts) for dtype, parts in found.items()}


def collect(
    geometry: Geometry,
    rows: Iterable[Row],
    base: Memory | Mapping[str, Changes],
    pool: Executor,
    overlay: Mapping[str, Changes],
) -> tuple[dict[str, Changes], Digest]:
    """Absolute new values of a version, by dtype, and what they do to the digest. Nothing is written.

    Old bits are those of `base`, except where `overlay` (changes of the versions in between) has newer ones; of a base
    that is not memory, only bits that `overlay` has may be missing.
    """

    def one(row: Row) -> tuple[Changes, Digest]:
        space = geometry[row.dtype]
        old = base if isinstance(base, Memory) else base.get(row.dtype, Changes.none(space))
        return decode(space, row, old, overlay.get(row.dtype))

    found: dict[str, list[Changes]] = {}
    moved = Digest()
    for changes, digest in _map_ahead(pool, one, _without_overlap(geometry, rows)):
        found.setdefault(changes.dtype, []).append(changes)
        moved += digest
    return {dtype: concatenated(parts) for dtype, parts in found.items()}, moved


def apply_directly(
    geometry: Geometry,
    rows: Iterable[Row],
    memory: Memory,
    pool: Executor,
    keep: Callable[[Changes], None] | None = None,
) -> Digest:
    """Decode against `memory` and write into it row by row; returns what that did to the digest.

    For memory that nobody serves from: if this raises, or the digest is wrong, `memory` is worthless. `keep` is
    given the old bits of each row, in this thread and in any order.
    """

    def one(row: Row) -> tuple[Digest, Changes | None]:
        space = geometry[row.dtype]
        changes, digest = decode(space, row, memory)
        old = (
            Changes(row.dtype, changes.positions, gather(space, memory, changes.positions)) if keep else None
        )
        scatter(space, memory, changes)
        return digest, old

    moved = Digest()
    for digest, old in _map_ahead(pool, one, _without_overlap(geometry, rows)):
        moved += digest
        if keep is not None and old is not None:
            keep(old)
    return moved


def fold(older: Mapping[str, Changes], newer: Mapping[str, Changes]) -> dict[str, Changes]:
    """The changes of two versions in a row as one; the newer write to an element wins."""
    both = dict(older)
    for dtype, changes in newer.items():
        both[dtype] = merge(both[dtype], changes) if dtype in both else changes
    return both


def _map_ahead(pool: Executor, call: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Like `pool.map`, but takes items only a few ahead of the results, so that memory stays bounded."""
    window: deque[Future[B]] = deque()
    for item in items:
        window.append(pool.submit(call, item))
        if len(window) >= _ROWS_AHEAD:
            yield window.popleft().result()
    while window:
        yield window.popleft().result()


def concatenated(parts: list[Changes]) -> Changes:
    """Changes of rows of one dtype that do not overlap, as one."""
    parts.sort(key=lambda c: int(c.positions[0]))
    return Changes(
        parts[0].dtype,
        np.concatenate([c.positions for c in parts]),
        np.concatenate([c.values for c in parts]),
    )
