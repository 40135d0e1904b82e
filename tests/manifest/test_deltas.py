"""Shards fetched ahead within bounds and in order; rows checked, applied, collected, folded."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.codec import Geometry, Memory, scatter
from weightcast.manifest.commit import put_shard
from weightcast.manifest.deltas import apply_directly, collect, fold
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.store import open_store
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, NotFound
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.shard import Row

from ..waiting import until
from .author import POOL, Author, CountingStore, Tensors


def memory_author() -> Author:
    return Author(open_store(f"memory://{uuid.uuid4().hex}"))


def ten_shards() -> Author:
    """Version 1 has ten shards of one row each; versions 2 and 3 likewise."""
    author = memory_author()
    names = {f"t{i}": ("U8", np.zeros(64, np.uint8)) for i in range(10)}
    author.reset(Tensors.of(None, **names))
    for version in range(1, 4):
        bits = {n: np.full(64, version + i, np.uint8) for i, n in enumerate(names)}
        author.publish(Tensors(bits, author.tensors[0].dtypes), row_elements=64, small=1, rows_a_shard=1)
    return author


@dataclass
class Gate(CountingStore):
    """Counts the bytes of shards that were asked for and not yet released by the test, and who is late."""

    slow: str = ""

    def fetch(self, key: str, *, size: int, sha256: str) -> bytes:
        self.calls.append(("fetch", key))
        if self.slow and self.slow in key:
            time.sleep(0.2)
        return self.inner.fetch(key, size=size, sha256=sha256)


def gated(author: Author, limit: int, **kwargs: Any) -> tuple[Gate, DeltaFetcher]:
    gate = Gate(author.store, **kwargs)
    return gate, DeltaFetcher(gate, POOL, limit)


def tensors_of(rows: Iterator[Row]) -> list[str]:
    return [row.tensor for row in rows]


@pytest.mark.parametrize("limit", [1, 5000, 1 << 30])
def test_b122_rows_come_in_the_order_of_the_manifest(limit: int) -> None:
    """B122: also where the first shard is the slowest, and whatever the bound."""
    author = ten_shards()
    manifest = author.positions[1].manifest
    _, fetcher = gated(author, limit, slow="-00000-")
    assert tensors_of(fetcher.rows(manifest)) == [f"t{i}" for i in range(10)]


def test_fetches_ahead_but_not_beyond_the_bound() -> None:
    author = ten_shards()
    manifest = author.positions[1].manifest
    size = max(s.size for s in manifest.shards)
    gate, fetcher = gated(author, 3 * size)
    rows = fetcher.rows(manifest)
    seen = []
    for row in rows:
        seen.append(row.tensor)
        time.sleep(0.01)  # whatever was started has asked the store by now
        assert len(gate.calls) <= len(seen) + 2, "the shard in hand and two ahead"
    assert (len(seen), len(gate.calls)) == (10, 10)


def test_prefetch_counts_all_versions_together() -> None:
    author = ten_shards()
    size = max(s.size for p in author.positions[1:] for s in p.manifest.shards)
    gate, fetcher = gated(author, 4 * size)
    for position in author.positions[1:]:
        fetcher.prefetch(position.manifest)
    until(lambda: len(gate.calls) >= 3)
    time.sleep(0.1)
    assert len(gate.calls) <= 5
    for position in author.positions[1:]:
        assert tensors_of(fetcher.rows(position.manifest)) == [f"t{i}" for i in range(10)]
    assert len(gate.calls) == 30, "what was prefetched is not fetched again"


def test_a_shard_larger_than_the_bound_is_fetched_all_the_same() -> None:
    author = ten_shards()
    gate, fetcher = gated(author, 1)
    fetcher.prefetch(author.positions[1].manifest)
    assert gate.calls == []
    assert len(tensors_of(fetcher.rows(author.positions[1].manifest))) == 10


def test_dropping_and_stopping_early_give_the_room_back() -> None:
    author = ten_shards()
    size = max(s.size for s in author.positions[1].manifest.shards)
    gate, fetcher = gated(author, 3 * size)
    for _ in range(5):
        fetcher.prefetch(author.positions[1].manifest)
        fetcher.drop()
        rows = fetcher.rows(author.positions[2].manifest)
        assert next(rows).tensor == "t0"
        del rows  # ends the generator
    gate.calls.clear()
    fetcher.prefetch(author.positions[3].manifest)
    until(lambda: len(gate.calls) >= 3)


def test_a_missing_shard_is_not_found(tmp_path: Any) -> None:
    author = ten_shards()
    shards = author.positions[1].manifest.shards
    author.store.delete(shards[4].key)
    _, fetcher = gated(author, 1 << 20)
    seen: list[str] = []
    with pytest.raises(NotFound, match=shards[4].key):
        seen.extend(row.tensor for row in fetcher.rows(author.positions[1].manifest))
    assert len(tensors_of(fetcher.rows(author.positions[2].manifest))) == 10


def with_figures(manifest: VersionManifest, **fields: int) -> VersionManifest:
    return manifest.model_copy(update={"shards": [manifest.shards[0].model_copy(update=fields)]})


def test_figures_of_a_shard_must_be_the_manifests() -> None:
    author = ten_shards()
    _, fetcher = gated(author, 1 << 20)
    for fields in ({"rows": 2}, {"changed": 63}):
        with pytest.raises(Corrupt, match="its manifest says"):
            list(fetcher.rows(with_figures(author.positions[1].manifest, **fields)))


@pytest.mark.parametrize("at", [0, 100, -1])
def test_b128_a_flipped_bit_is_found_and_the_good_object_works_afterwards(at: int) -> None:
    author = ten_shards()
    shard = author.positions[1].manifest.shards[0]
    good = author.store.fetch(shard.key, size=shard.size, sha256=shard.sha256)
    bad = bytearray(good)
    bad[at] ^= 1
    author.store.put(shard.key, bytes(bad))
    _, fetcher = gated(author, 1 << 20)
    with pytest.raises(Corrupt, match=shard.key):
        list(fetcher.rows(author.positions[1].manifest))
    author.store.put(shard.key, good)
    assert len(list(fetcher.rows(author.positions[1].manifest))) == 10


# Applying


def two_states() -> tuple[Author, Tensors, list[Row]]:
    """An author at version 0, a next state, and the rows that lead there: several in each of two dtypes."""
    random = np.random.default_rng(1)
    author = memory_author()
    start = Tensors.of(a=("U16", random.integers(0, 9, 400)), b=("U8", random.integers(0, 9, (5, 40))))
    author.reset(start)
    bits = {n: x.copy() for n, x in start.bits.items()}
    bits["a"][::7] += 1
    bits["b"][2] = 77
    target = Tensors(bits, start.dtypes)
    return author, target, author.rows(target, row_elements=50, small=1)


def copied(author: Author) -> tuple[Geometry, Memory]:
    geometry = Geometry(author.tensors[-1].layout)
    return geometry, Memory.over(geometry, {n: x.copy() for n, x in author.tensors[-1].bits.items()})


def bits(memory: Memory) -> dict[str, bytes]:
    return {s.name: memory.tensor(s.name).tobytes() for s in memory.geometry.layout.stored}


def test_apply_directly_and_collect_agree() -> None:
    author, target, rows = two_states()
    wanted = {n: x.tobytes() for n, x in target.bits.items()}
    geometry, memory = copied(author)
    before = author.positions[0].digest
    moved = apply_directly(geometry, rows, memory, POOL)
    assert bits(memory) == wanted
    geometry, memory = copied(author)
    changes, same = collect(geometry, rows[::-1], memory, POOL, {})
    assert same == moved
    assert bits(memory) == {n: x.tobytes() for n, x in author.tensors[0].bits.items()}, "nothing is written"
    for dtype, found in changes.items():
        assert np.all(np.diff(found.positions) > 0)
        scatter(geometry[dtype], memory, found)
    assert bits(memory) == wanted
    author.publish(target)
    assert before + moved == author.positions[1].digest


def test_overlapping_rows_are_refused_in_any_order() -> None:
    author, _, rows = two_states()
    geometry, memory = copied(author)
    for order in (rows + rows[:1], [rows[0], *rows], [*rows[::-1], rows[2]], [*rows[3:], rows[1], rows[3]]):
        with pytest.raises(Corrupt, match="overlap"):
            apply_directly(geometry, order, copied(author)[1], POOL)
        with pytest.raises(Corrupt, match="overlap"):
            collect(geometry, order, memory, POOL, {})


def test_many_rows_against_the_order_are_checked_quickly() -> None:
    author = memory_author()
    count = 20_000
    author.reset(Tensors.of(a=("U8", np.zeros(count))))
    geometry, memory = copied(author)
    row = author.rows(author.tensors[0].changed("a", (0, 1)), row_elements=1, small=1)[0]
    rows = [replace(row, offset=i, digest=Digest()) for i in range(count)][::-1]
    started = time.process_time()
    apply_directly(geometry, rows, memory, POOL)
    assert time.process_time() - started < 60  # measured 2; the square of it would be many minutes
    assert memory.tensor("a").tobytes() == b"\1" * count


def test_rows_of_unknown_tensors_or_places_are_refused() -> None:
    author, _, rows = two_states()
    geometry, memory = copied(author)
    for bad in (
        replace(rows[0], dtype="F64"),
        replace(rows[0], tensor="z"),
        replace(rows[0], shape=(399,)),
        replace(rows[0], offset=380),
        replace(rows[0], offset=-1),
        replace(rows[0], tensors=2),
    ):
        with pytest.raises(Corrupt):
            apply_directly(geometry, [bad], memory, POOL)


def test_memory_of_rows_is_bounded_whatever_the_pool() -> None:
    """A slow decoder must not let rows pile up: at most eight are taken ahead."""
    author, _, rows = two_states()
    geometry, memory = copied(author)
    taken = 0
    gate = threading.Event()

    def counted() -> Iterator[Row]:
        nonlocal taken
        for row in rows:
            taken += 1
            yield row

    with ThreadPoolExecutor(1) as one:
        one.submit(gate.wait)
        runner = threading.Thread(target=apply_directly, args=(geometry, counted(), memory, one))
        runner.start()
        time.sleep(0.1)
        assert taken <= 8 < len(rows)
        gate.set()
        runner.join()
    assert taken == len(rows)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, 19), st.integers(0, 255), max_size=8), min_size=1, max_size=6))
def test_b122_folding_is_the_last_write(versions: list[dict[int, int]]) -> None:
    """Folded changes of versions in a row, against a model; the overlay gives each version the bits
    before it.
    """
    author = memory_author()
    author.reset(Tensors.of(a=("U8", np.zeros(20)), b=("U16", np.zeros(20))))
    geometry, base = copied(author)
    folded: dict[str, Any] = {}
    for edits in versions:
        target = (
            author.tensors[-1]
            .changed("a", *edits.items())
            .changed("b", *((i, v * 3) for i, v in edits.items() if v % 2))
        )
        changes, moved = collect(geometry, author.rows(target), base, POOL, folded)
        author.publish(target)
        assert author.positions[-2].digest + moved == author.positions[-1].digest
        folded = fold(folded, changes)
    for dtype, found in folded.items():
        scatter(geometry[dtype], base, found)
    assert bits(base) == {n: x.tobytes() for n, x in author.tensors[-1].bits.items()}


def test_put_shard_and_fetch_are_inverse() -> None:
    author, _, rows = two_states()
    ref = put_shard(author.store, 1, "w", 0, rows)
    manifest = author.positions[0].manifest.model_copy(update={"shards": [ref]})
    assert list(DeltaFetcher(author.store, POOL, 1).rows(manifest)) == rows
