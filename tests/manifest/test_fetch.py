"""Shards in parts: cut, fetched in any order, hashed in theirs, and fetched anew where they differ."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.parts import LEAST_PART_BYTES, MOST_PART_BYTES, Part, cut
from weightcast.manifest.store import Store, StoreSettings, open_store
from weightcast.schemas.errors import Corrupt, NotFound
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.shard import Row

from ..faultproxy import Fault, FaultProxy
from .author import POOL, Author, CountingStore, Tensors

MIB = 1 << 20


@given(st.integers(1, 1 << 30), st.integers(0, 1 << 32), st.integers(1, 64))
def test_parts_are_the_shard(size: int, more: int, connections: int) -> None:
    parts = cut(size, size + more, connections)
    assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])]
    assert parts[-1].stop == size
    lengths = [p.stop - p.start for p in parts]
    assert max(lengths) < 2 * MOST_PART_BYTES
    assert len(parts) == 1 or min(lengths) >= LEAST_PART_BYTES


@pytest.mark.parametrize(
    ("size", "total", "connections", "parts"),
    [
        (MIB, 100 * MIB, 16, 1),
        (100_000, 100_000, 16, 1),
        (MIB // 2, MIB // 2, 16, 4),
        (2 * MIB, 2 * MIB, 16, 16),
        (MIB, 8 * MIB, 16, 2),
        (8 * MIB, 8 * MIB, 16, 16),
        (16 * MIB, 128 * MIB, 16, 8),
        (16 * MIB, 1024 * MIB, 16, 2),
        (512 * MIB, 512 * MIB, 16, 64),
        (16 * MIB, 16 * MIB, 1, 4),
    ],
)
def test_a_version_is_spread_over_the_connections(
    size: int, total: int, connections: int, parts: int
) -> None:
    assert len(cut(size, total, connections)) == parts


def large(store: Store) -> Author:
    """Version 1 has one shard of about 3 MiB, and two small ones."""
    author = Author(store)
    generator = np.random.default_rng(1)
    start = Tensors.of(
        None, a=("U8", np.zeros(3 * MIB, np.uint8)), b=("U8", [0]), c=("U8", np.zeros(70_000, np.uint8))
    )
    author.reset(start)
    bits = {name: generator.integers(1, 256, x.shape).astype(np.uint8) for name, x in start.bits.items()}
    author.publish(Tensors(bits, start.dtypes), row_elements=4 * MIB, small=1 << 16, rows_a_shard=1)
    return author


def fresh() -> Store:
    return open_store(f"memory://{uuid.uuid4().hex}")


@dataclass
class Parts(CountingStore):
    """Deals with each part as told by its number."""

    late: dict[int, float] = field(default_factory=dict)
    spoil: Callable[[int, bytes], bytes] = lambda _, data: data
    parts: list[Part] = field(default_factory=list)

    def fetch_part(self, key: str, *, start: int, stop: int) -> bytes:
        self.calls.append(("fetch_part", key))
        self.parts.append(Part(start, stop))
        number = round(start / (stop - start))
        time.sleep(self.late.get(number, 0))
        return self.spoil(number, self.inner.fetch_part(key, start=start, stop=stop))


def manifest_of(author: Author) -> VersionManifest:
    return author.positions[1].manifest


def rows(store: Any, manifest: VersionManifest, connections: int = 4) -> list[Row]:
    with ThreadPoolExecutor(connections) as pool:
        return list(DeltaFetcher(store, pool, 1 << 30, connections).rows(manifest))


def expected(author: Author) -> list[Row]:
    """The rows, each shard in one piece."""
    return rows(author.store, manifest_of(author), 1 << 20)


@pytest.mark.parametrize("late", [{}, {0: 0.2}, {1: 0.2}, {2: 0.2}, {0: 0.2, 1: 0.1}])
def test_parts_in_any_order_are_the_same_rows(late: dict[int, float]) -> None:
    author = large(fresh())
    store = Parts(author.store, late=late)
    assert rows(store, manifest_of(author)) == expected(author)
    shards, total = manifest_of(author).shards, manifest_of(author).totals.bytes
    biggest = max(shards, key=lambda s: s.size)
    assert sorted(store.parts, key=lambda p: p.start) == cut(biggest.size, total, 4)
    assert [key for kind, key in store.calls if kind == "fetch"] == [
        s.key for s in shards if s is not biggest
    ]


def flipped(_: int, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_b128_a_part_that_differs_has_the_shard_fetched_once_more(number: int) -> None:
    author = large(fresh())
    store = Parts(author.store, spoil=lambda n, data: flipped(n, data) if n == number else data)
    assert rows(store, manifest_of(author)) == expected(author)
    biggest = max(manifest_of(author).shards, key=lambda s: s.size)
    assert [key for kind, key in store.calls if kind == "fetch"].count(biggest.key) == 1


def test_b128_one_that_stays_wrong_is_refused() -> None:
    author = large(fresh())
    biggest = max(manifest_of(author).shards, key=lambda s: s.size)
    whole = author.store.get(biggest.key, max_bytes=1 << 30)
    author.store.put(biggest.key, flipped(0, whole))
    with pytest.raises(Corrupt, match=biggest.key):
        rows(author.store, manifest_of(author))
    author.store.put(biggest.key, whole[:-1])
    with pytest.raises(Corrupt, match=biggest.key):
        rows(author.store, manifest_of(author))


def test_a_store_that_cannot_do_ranges_is_asked_for_the_whole() -> None:
    author = large(fresh())

    def refuse(number: int, data: bytes) -> bytes:
        raise Corrupt("another part than was asked for")

    assert rows(Parts(author.store, spoil=refuse), manifest_of(author)) == expected(author)


def test_a_missing_shard_in_parts_is_not_found() -> None:
    author = large(fresh())
    biggest = max(manifest_of(author).shards, key=lambda s: s.size)
    author.store.delete(biggest.key)
    with pytest.raises(NotFound, match=biggest.key):
        rows(author.store, manifest_of(author))


def test_what_is_held_is_given_back_however_it_ends() -> None:
    author = large(fresh())
    fetcher = DeltaFetcher(author.store, POOL, 1 << 30, 4)
    fetcher.prefetch(manifest_of(author))
    fetcher.drop()
    list(fetcher.rows(manifest_of(author)))
    found = fetcher.rows(manifest_of(author))
    next(found)
    found.close()
    fetcher.expect(manifest_of(author).shards[0].key, manifest_of(author).shards[0].size)
    fetcher.settle(None)
    assert (fetcher._held_bytes, fetcher._ahead) == (0, {})


@dataclass
class Broken(CountingStore):
    """The first requests end with what no store should raise."""

    error: type[BaseException] = RuntimeError
    times: int = 1

    def __getattr__(self, name: str) -> Any:
        if name in ("fetch", "fetch_part") and self.times:
            self.times -= 1
            raise self.error("told to fail")
        return super().__getattr__(name)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("connections", [4, 1 << 20])
def test_whatever_a_request_ends_with_reaches_who_waits_for_its_rows(
    error: type[BaseException], connections: int
) -> None:
    """In parts, and in one piece: a request that ends otherwise than stores do is not waited for for ever."""
    author = large(fresh())
    store = Broken(author.store, error=error)
    with pytest.raises(error, match="told to fail"):
        rows(store, manifest_of(author), connections)
    assert rows(store, manifest_of(author), connections) == expected(author)


def test_an_expected_shard_that_no_memory_was_left_for_is_fetched_for_its_manifest() -> None:
    author = large(fresh())
    manifest = manifest_of(author)
    fetcher = DeltaFetcher(Broken(author.store, error=MemoryError, times=1 << 30), POOL, 1 << 30, 4)
    for ref in manifest.shards:
        assert fetcher.expect(ref.key, ref.size)
    with pytest.raises(MemoryError):
        list(fetcher.rows(manifest))
    fetcher = DeltaFetcher(Broken(author.store, error=MemoryError, times=3), POOL, 1 << 30, 4)
    for ref in manifest.shards:
        assert fetcher.expect(ref.key, ref.size)
    while not all(shard.rows.done() for shard in fetcher._ahead.values()):
        time.sleep(0.01)
    assert list(fetcher.rows(manifest)) == expected(author)


class NoThreads(ThreadPoolExecutor):
    """Has no thread for one of its jobs."""

    left = 2

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("can't start new thread")
        return super().submit(*args, **kwargs)


def test_a_shard_that_could_not_be_asked_for_is_not_waited_for() -> None:
    author = large(fresh())
    with NoThreads(4) as pool:
        fetcher = DeltaFetcher(author.store, pool, 1 << 30, 4)
        with pytest.raises(RuntimeError, match="thread"):
            list(fetcher.rows(manifest_of(author)))
        fetcher.drop()
        assert (fetcher._held_bytes, fetcher._ahead) == (0, {})
        assert list(fetcher.rows(manifest_of(author))) == expected(author)


def test_an_expected_shard_is_handed_out_for_its_manifest_alone() -> None:
    author = large(fresh())
    manifest = manifest_of(author)
    store = CountingStore(author.store)
    fetcher = DeltaFetcher(store, POOL, 1 << 30, 4)
    for ref in manifest.shards:
        assert fetcher.expect(ref.key, ref.size)
    while any(fetcher.expected(ref.key) is None for ref in manifest.shards):
        time.sleep(0.01)
    store.calls.clear()
    others = [ref.model_copy(update={"sha256": "0" * 64}) for ref in manifest.shards]
    with pytest.raises(Corrupt):
        list(fetcher.rows(manifest.model_copy(update={"shards": others})))
    assert store.calls, "fetched anew, by the hash of that manifest"
    assert list(fetcher.rows(manifest)) == expected(author)


def test_an_expected_shard_comes_in_fewer_parts() -> None:
    author = large(fresh())
    store, ref = Parts(author.store), manifest_of(author).shards[0]
    with ThreadPoolExecutor(8) as pool:
        fetcher = DeltaFetcher(store, pool, 1 << 30, 8)
        assert list(fetcher.rows(manifest_of(author))) == expected(author)
        assert len(store.parts) == 7
        store.parts.clear()
        assert fetcher.expect(ref.key, ref.size)
    assert len(store.parts) == 3
    assert sum(part.stop - part.start for part in store.parts) == ref.size


# Real stores


RANGES = [(0, 1), (0, 100_000), (99_999, 100_000), (1, 99_999), (12_345, 12_346), (50_000, 100_000)]


@pytest.mark.parametrize(("start", "stop"), RANGES)
def test_every_store_gives_the_part_that_was_asked_for(
    start: int, stop: int, make_store: Callable[..., Store]
) -> None:
    store = make_store()
    data = np.random.default_rng(1).integers(0, 256, 100_000).astype(np.uint8).tobytes()
    store.put("data/1", data)
    assert store.fetch_part("data/1", start=start, stop=stop) == data[start:stop]


def test_every_store_says_what_is_not_there(make_store: Callable[..., Store]) -> None:
    store = make_store()
    store.put("data/1", bytes(100))
    with pytest.raises(Corrupt, match="data/1"):
        store.fetch_part("data/1", start=50, stop=101)
    with pytest.raises(Corrupt, match="data/1"):
        store.fetch_part("data/1", start=100, stop=101)
    with pytest.raises(NotFound):
        store.fetch_part("data/2", start=0, stop=1)


def test_large_shards_over_http(make_store: Callable[..., Store]) -> None:
    author = large(make_store())
    assert rows(author.store, manifest_of(author)) == expected(author)


@pytest.fixture
def faulty(s3_url: str, fault_proxy: FaultProxy) -> Store:
    """The test's root through the proxy."""
    settings = StoreSettings(endpoint_url=fault_proxy.endpoint_url, read_timeout_s=2)
    return open_store(s3_url, settings=settings)


@pytest.mark.parametrize("action", ["reset", "truncate", "stall", "flip", "status", "replace"])
def test_b125_parts_through_a_proxy_that_fails(
    action: Any, s3_url: str, faulty: Store, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    """B125, B128: cut, stalled, changed or refused on the way, one of the parts comes whole in the end."""
    author = large(open_store(s3_url))
    fault_proxy.clear()
    fault = fault_proxy.add(Fault(action, match="^range: bytes=[1-9]", times=1, after=300_000, body=b"no"))
    assert rows(faulty, manifest_of(author)) == expected(author)
    assert fault.hits == 1
    again = [line for line in fault_proxy.requests if line.startswith("GET")]
    assert 6 <= len(again) <= 7, "five requests, one of them twice or one shard whole"
