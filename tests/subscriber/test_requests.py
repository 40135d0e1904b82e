"""What following and catching up ask of the store: requests over HTTP, and bytes."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from weightcast.manifest.plan import Route, plan
from weightcast.manifest.rebuild import snapshot_choices
from weightcast.manifest.store import StoreSettings, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.names import version_key
from weightcast.subscriber import Subscriber, Tensors

from ..faultproxy import FaultProxy
from ..faultstore import FaultStore
from .conftest import Trainer
from .kit import Model, bits, blank, random_like, stir

SubscriberAt = Callable[..., Subscriber]


def model_of(seed: int) -> Model:
    """Enough random bits for several shards."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": random_like(torch.empty(70_000, dtype=torch.bfloat16), generator) for i in range(3)}


def test_a_followed_version_is_one_manifest_and_its_shards(
    s3_url: str, fault_proxy: FaultProxy, trainer_at: Callable[..., Trainer], subscriber_at: SubscriberAt
) -> None:
    """And polls that find nothing: no HEAD, no listing, nothing asked for twice, and connections that are kept."""
    trainer = trainer_at(open_store(s3_url), shard_bytes=1 << 16, row_elements=1 << 16)
    model = model_of(0)
    trainer.publish(model)
    through = open_store(s3_url, settings=StoreSettings(endpoint_url=fault_proxy.endpoint_url))
    live = blank(model)
    subscriber = subscriber_at(through, Tensors(live), poll_s=0.05)
    stop = threading.Event()
    thread = threading.Thread(target=lambda: list(subscriber.follow(stop)))
    thread.start()
    subscriber.wait_for(0, 20)
    fault_proxy.clear()
    shards = 0
    for version in range(1, 9):
        model = stir(model, version, 0.3)
        shards += len(trainer.publish(model).shards)
        subscriber.wait_for(version, 20)
        while not any(version_key(version + 1) in line for line in fault_proxy.requests):
            time.sleep(0.01)  # it has seen that there is no more
    stop.set()
    thread.join(20)
    assert bits(live) == bits(model)
    lines = [
        re.match(r"(\S+) \S*?/((?:versions|data|head|snapshots)\S*) ", line) for line in fault_proxy.requests
    ]
    found = Counter((m[1], m[2].split("/")[0].split("?")[0]) for m in lines if m)
    assert found.keys() <= {("GET", "versions"), ("GET", "data"), ("GET", "head.json")}
    assert found["GET", "data"] == shards >= 16
    manifests = Counter(m[2] for m in lines if m and m[2].startswith("versions"))
    assert set(manifests) == {version_key(v) for v in range(1, 10)}, "nobody looks further than the next one"


def sizes(store: FaultStore) -> dict[str, int]:
    return {e.key: e.size for e in store.inner.list("")}


def fetched(store: FaultStore) -> int:
    """Bytes of shards and snapshots that were asked for, whole or in parts."""
    known = sizes(store)
    asked = [*store.keys("fetch"), *store.keys("download"), *set(store.keys("fetch_part"))]
    return sum(known[key] for key in asked)


def cheapest(store: FaultStore, at: int, head: int) -> Route:
    """The way that has the fewest bytes, of all there are."""
    reader = StreamReader.open(store.inner)
    deltas = {v: reader.manifest(v).totals.bytes for v in range(1, head + 1)}
    return plan(at, head, deltas, snapshot_choices(reader, head))


def test_100_versions_behind_small_deltas_cost_their_bytes_and_no_listing(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    states = [{"w": torch.zeros(300_000, dtype=torch.bfloat16)}]
    for version in range(1, 101):
        states.append(stir(states[-1], version, 0.001))
    live = blank(states[0])
    subscriber = subscriber_at(store, Tensors(live))
    trainer.publish(states[0])
    subscriber.once()
    for state in states[1:]:
        trainer.publish(state)
    trainer.publisher.snapshot()
    deltas = sum(StreamReader.open(store.inner).manifest(v).totals.bytes for v in range(1, 101))
    store.calls.clear()
    assert subscriber.once().version == 100
    assert bits(live) == bits(states[-1])
    assert fetched(store) == deltas < 600_000
    assert store.keys("list") == []


def test_versions_too_large_to_be_folded_have_their_manifests_read_once(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    states: list[Model] = [{"w": torch.zeros(2_000_000, dtype=torch.bfloat16)}]
    for version in range(1, 6):
        states.append(stir(states[-1], version, 0.07))  # 1.4 MB of changes, at 10 bytes each
    live = blank(states[0])
    subscriber = subscriber_at(store, Tensors(live), fold_bytes=1 << 20)
    trainer.publish(states[0])
    subscriber.once()
    for state in states[1:]:
        trainer.publish(state)
    store.calls.clear()
    assert subscriber.once().version == 5
    assert bits(live) == bits(states[-1])
    read = Counter(key for key in store.keys("get") if key.startswith("versions/"))
    assert [read[version_key(version)] for version in range(1, 5)] == [1] * 4
    assert (
        sum(read.values()) <= 11
    )  # with the head, which is looked up at the end, and some that are not there


@pytest.mark.parametrize(
    ("lag", "share", "full"), [(5, 0.9, [3]), (100, 0.1, [98]), (12, 0.2, [1]), (100, 0.01, [50])]
)
def test_being_behind_costs_the_bytes_of_the_cheapest_way(
    lag: int, share: float, full: list[int], store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    """However few the versions are: what counts is bytes. `full`: versions with a snapshot, beside those that
    publishers write by themselves.
    """
    states = [model_of(0)]
    for version in range(1, lag + 1):
        states.append(stir(states[-1], version, share))
    live = blank(states[0])
    subscriber = subscriber_at(store, Tensors(live))
    trainer.publish(states[0])
    subscriber.once()
    for version, state in enumerate(states[1:], 1):
        trainer.publish(state)
        if version in full:
            trainer.publisher.snapshot()
    best = cheapest(store, 0, lag)
    store.calls.clear()
    assert subscriber.once().version == lag
    assert bits(live) == bits(states[-1])
    assert fetched(store) == pytest.approx(best.bytes, rel=0.01)
    assert (best.snapshot is None) == (not store.keys("download"))
