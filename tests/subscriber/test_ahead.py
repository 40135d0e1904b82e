"""Cut-through: shards are fetched before their version is committed, and used only once its manifest names them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightcast.codec import FlatSpace, decode
from weightcast.manifest import deltas
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.schemas.errors import Conflict
from weightcast.schemas.names import version_key
from weightcast.schemas.shard import Row, decode_shard
from weightcast.subscriber import CheckpointFolder, Subscriber, Tensors, ahead, rhythm

from ..faultstore import FaultStore, Hold, refuse
from ..waiting import until
from .conftest import Trainer
from .kit import Model, bits, blank, loaded, random_like, stir

SubscriberAt = Callable[..., Subscriber]


def model_of(seed: int) -> Model:
    """Enough random bits for several shards."""
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": random_like(torch.empty(70_000, dtype=torch.bfloat16), generator) for i in range(3)}


@pytest.fixture
def sharded(store: FaultStore, trainer_at: Callable[..., Trainer]) -> Trainer:
    """A trainer whose deltas have several shards."""
    return trainer_at(store, shard_bytes=1 << 16, row_elements=1 << 16)


@pytest.fixture
def follow(subscriber_at: SubscriberAt) -> Iterator[Callable[..., Subscriber]]:
    """Subscribers that follow, each in a thread of its own."""
    started: list[tuple[threading.Event, threading.Thread]] = []

    def start(*args: Any, **settings: Any) -> Subscriber:
        subscriber = subscriber_at(*args, **{"cut_through": True, **settings})
        stop = threading.Event()
        thread = threading.Thread(target=lambda: list(subscriber.follow(stop)))
        started.append((stop, thread))
        thread.start()
        subscriber.wait_for(0, 10)
        return subscriber

    yield start
    for stop, thread in started:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def early(store: FaultStore, version: int = 1) -> list[str]:
    """Shards of a version that were asked for without a manifest."""
    return [key for key in store.keys("fetch_part") if key.startswith(f"data/{version:012d}/")]


def early_rows(store: FaultStore, version: int = 1) -> list[Row]:
    """All rows below a version, committed or not."""
    keys = [e.key for e in store.inner.list(f"data/{version:012d}/")]
    return [row for key in keys for row in decode_shard(store.inner.get(key, max_bytes=1 << 30), key)]


def named(store: FaultStore, version: int = 1) -> list[str]:
    """Shards of a version that were asked for by a manifest."""
    return [key for key in store.keys("fetch") if key.startswith(f"data/{version:012d}/")]


def shards(store: FaultStore, version: int = 1) -> list[str]:
    return [s.key for s in StreamReader.open(store.inner).manifest(version).shards]


@pytest.mark.parametrize("kind", ["tensors", "folder"])
def test_shards_are_had_before_the_commit_and_not_used_before_it(
    kind: str, store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber], tmp_path: Path
) -> None:
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    subscriber = follow(store, Tensors(live) if kind == "tensors" else CheckpointFolder(tmp_path))

    def held() -> dict[str, bytes]:
        return bits(live) if kind == "tensors" else loaded(tmp_path)

    model = stir(model_of(0), 1, 0.5)
    commit = Hold()
    store.on("create", version_key(1), commit)
    pending = sharded.publisher.publish(model)
    assert commit.reached.wait(10)
    until(lambda: len(early(store)) >= 4)
    time.sleep(0.3)
    assert held() == bits(model_of(0))
    assert (subscriber.status().version, subscriber.status().head) == (0, 0)
    commit.release()
    pending.wait(10)
    subscriber.wait_for(1, 10)
    assert held() == bits(model)
    assert sorted(early(store)) == sorted(shards(store)), "each once"
    assert named(store) == []


def test_shards_of_a_writer_that_lost_are_dropped(
    store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber]
) -> None:
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    settings = PublisherSettings(threads=2, shard_bytes=1 << 16, row_elements=1 << 16, snapshot_every=0)
    other = Publisher("", settings, store=store, fence=False)
    subscriber = follow(store, Tensors(live))
    commit = Hold()
    store.on("create", version_key(1), commit, times=1)
    lost = other.publish(stir(model_of(0), 7, 0.5))
    assert commit.reached.wait(10)
    until(lambda: len(early(store)) >= 4)
    losers = set(early(store))
    model = stir(model_of(0), 1, 0.5)
    sharded.publish(model)
    subscriber.wait_for(1, 10)
    assert bits(live) == bits(model)
    assert losers.isdisjoint(shards(store))
    commit.release()
    with pytest.raises(Conflict):
        lost.wait(10)
    assert subscriber._mover is not None
    assert subscriber._mover._fetcher._ahead == {}
    assert subscriber._mover._fetcher._held_bytes == 0
    with pytest.raises(Conflict):
        other.close(10)


@pytest.mark.parametrize("damage", ["flipped", "longer", "no table", "gone"])
def test_what_differs_from_the_manifest_is_fetched_again(
    damage: str, store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber]
) -> None:
    """A shard that was other bytes, or not to be had, while it was fetched ahead."""
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    subscriber = follow(store, Tensors(live))
    spoil, commit = Hold(), Hold()
    store.on("list", "data/000000000001/", spoil)
    store.on("create", version_key(1), commit)
    model = stir(model_of(0), 1, 0.5)
    pending = sharded.publisher.publish(model)
    assert commit.reached.wait(10)
    (key, size), *_ = sorted((e.key, e.size) for e in store.inner.list("data/000000000001/"))
    whole = store.inner.get(key, max_bytes=1 << 30)
    spoilt = {
        "flipped": whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:],
        "longer": whole + b"x",
        "no table": bytes(size),
        "gone": b"",
    }[damage]
    store.inner.put(key, spoilt)
    spoil.release()
    until(lambda: len(early(store)) >= 4)
    time.sleep(0.1)
    store.inner.put(key, whole)
    commit.release()
    pending.wait(10)
    subscriber.wait_for(1, 10)
    assert bits(live) == bits(model)
    assert named(store) == [key]


def test_what_does_not_fit_is_fetched_after_the_commit(
    store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber], trainer_at: Callable[..., Trainer]
) -> None:
    model = {"w": torch.zeros(1_500_000, dtype=torch.bfloat16)}
    live = blank(model)
    trainer = trainer_at(store, shard_bytes=1 << 18, row_elements=1 << 16)
    trainer.publish(model)
    subscriber = follow(store, Tensors(live), fetch_bytes=1 << 20)
    commit = Hold()
    store.on("create", version_key(1), commit)
    model = {"w": random_like(model["w"], torch.Generator().manual_seed(1))}
    pending = trainer.publisher.publish(model)
    assert commit.reached.wait(20)
    until(lambda: early(store))
    time.sleep(0.3)
    total = {e.key: e.size for e in store.inner.list("data/000000000001/")}
    assert sum(total[key] for key in set(early(store))) <= 1 << 20 < sum(total.values())
    commit.release()
    pending.wait(20)
    subscriber.wait_for(1, 20)
    assert bits(live) == bits(model)
    assert {*early(store), *named(store)} == set(shards(store))


def test_a_change_of_layout_is_not_decoded_against_the_old_one(
    store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber], tmp_path: Path
) -> None:
    """`a` comes before all others, so that every element of the old tensors gets another place."""
    sharded.publish(model_of(0))
    subscriber = follow(store, CheckpointFolder(tmp_path))
    model = {**stir(model_of(0), 1, 0.5), "a": torch.ones(70_000, dtype=torch.bfloat16)}
    commit = Hold()
    store.on("create", version_key(1), commit)
    pending = sharded.publisher.publish(model)
    assert commit.reached.wait(10)
    until(lambda: len(early(store)) >= 4)
    time.sleep(0.2)
    commit.release()
    pending.wait(10)
    subscriber.wait_for(1, 10)
    assert loaded(tmp_path) == bits(model)
    assert named(store) == []


def test_what_was_decoded_ahead_is_not_decoded_again(
    store: FaultStore,
    sharded: Trainer,
    follow: Callable[..., Subscriber],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    subscriber = follow(store, Tensors(live))
    decoded: dict[str, list[Row]] = {"before": [], "after": []}

    def noted(which: str) -> Any:
        def decode_one(space: FlatSpace, row: Row, *rest: Any) -> Any:
            if threading.current_thread().name.startswith("weightcast-subscribe"):
                decoded[which].append(row)  # the publisher follows what it published, too
            return decode(space, row, *rest)

        return decode_one

    monkeypatch.setattr(ahead, "decode", noted("before"))
    monkeypatch.setattr(deltas, "decode", noted("after"))
    model = stir(model_of(0), 1, 0.5)
    commit = Hold()
    store.on("create", version_key(1), commit)
    pending = sharded.publisher.publish(model)
    assert commit.reached.wait(10)
    total = len(early_rows(store))
    until(lambda: len(decoded["before"]) == total >= 4)
    commit.release()
    pending.wait(10)
    subscriber.wait_for(1, 10)
    assert bits(live) == bits(model)
    assert (len(decoded["before"]), decoded["after"]) == (total, [])


def test_polls_and_listings_do_not_stand_behind_downloads(
    store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber]
) -> None:
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    subscriber = follow(store, Tensors(live), connections=1)
    download, commit = Hold(), Hold()
    store.on("fetch_part", "*", download)
    store.on("create", version_key(1), commit)
    model = stir(model_of(0), 1, 0.5)
    pending = sharded.publisher.publish(model)
    assert commit.reached.wait(10)
    assert download.reached.wait(10)
    listed, asked = (len(store.keys(kind)) for kind in ("list", "get"))
    until(lambda: len(store.keys("list")) > listed + 3 and len(store.keys("get")) > asked + 3)
    commit.release()
    until(lambda: subscriber.status().head == 1 or pending.wait(10).version == 1)
    download.release()
    subscriber.wait_for(1, 10)
    assert bits(live) == bits(model)


def test_a_stream_that_rests_is_not_listed(
    store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rhythm, "_UNKNOWN_S", 0.2)
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    subscriber = follow(store, Tensors(live))
    until(lambda: store.keys("list"))
    time.sleep(0.4)
    store.calls.clear()
    until(lambda: len(store.keys("get")) >= 5)  # and yet it is asked for
    assert store.keys("list") == []
    model = stir(model_of(0), 1, 0.5)
    sharded.publish(model)
    subscriber.wait_for(1, 10)
    assert bits(live) == bits(model)


def test_shards_of_a_publisher_that_was_killed_before_its_commit_are_never_used(
    local_store: FaultStore, trainer_at: Callable[..., Trainer], follow: Callable[..., Subscriber]
) -> None:
    live = blank(model_of(0))
    first = trainer_at(local_store)
    first.publish(model_of(0))
    first.publisher.close(10)
    subscriber = follow(local_store, Tensors(live))
    script = (
        "import sys; from tests.faultstore import FaultStore, die\n"
        "from tests.subscriber.test_ahead import model_of, stir\n"
        "from weightcast.manifest.store import open_store\n"
        "from weightcast.publisher import Publisher, PublisherSettings\n"
        "store = FaultStore(open_store(sys.argv[1]))\n"
        "store.on('create', 'versions/000000000001.json', die)\n"
        "settings = PublisherSettings(threads=1, shard_bytes=1 << 16, row_elements=1 << 16)\n"
        "publisher = Publisher('', settings, store=store, fence=False)\n"
        "publisher.publish(stir(model_of(0), 1, 0.5)).wait()\n"
    )
    command = [sys.executable, "-c", script, local_store.url]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    left = [e.key for e in local_store.inner.list("data/000000000001/")]
    assert len(left) >= 4
    until(lambda: sorted(early(local_store)) == sorted(left))
    time.sleep(0.3)
    assert bits(live) == bits(model_of(0))
    assert subscriber.status().version == 0
    model = stir(model_of(0), 2, 0.5)
    trainer_at(local_store, shard_bytes=1 << 16, row_elements=1 << 16).publish(model)
    subscriber.wait_for(1, 10)
    assert bits(live) == bits(model)
    assert set(left).isdisjoint(shards(local_store))


def test_without_the_setting_nothing_is_listed(
    store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber]
) -> None:
    sharded.publish(model_of(0))
    subscriber = follow(store, Tensors(blank(model_of(0))), cut_through=False)
    store.calls.clear()
    sharded.publish(model_of(1))
    subscriber.wait_for(1, 10)
    assert not [key for key in store.keys("list") if key.startswith("data/")]
    assert early(store) == []


def test_listings_that_hang_keep_no_version_away(
    store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber]
) -> None:
    """Those of versions that have come since count towards what may be under way, too."""
    model = model_of(0)
    live = blank(model)
    sharded.publish(model)
    subscriber = follow(store, Tensors(live))
    until(lambda: len(store.keys("list")) >= 2)
    hold = Hold()
    store.on("list", "data/*", hold)
    store.calls.clear()
    try:
        for version in range(1, 6):
            asked = len(store.keys("get"))
            until(lambda asked=asked: len(store.keys("get")) > asked + 3)  # type: ignore[misc]
            model = stir(model, version, 0.1)
            sharded.publish(model)
            subscriber.wait_for(version, 10)
        assert hold.reached.is_set()
        assert len(store.keys("list")) <= ahead.LISTINGS
    finally:
        hold.release()
    assert bits(live) == bits(model)


def test_listings_that_fail_keep_no_version_away(
    store: FaultStore, sharded: Trainer, follow: Callable[..., Subscriber], caplog: pytest.LogCaptureFixture
) -> None:
    """A listing is advice: that it failed is said once, and polls go on at their pace."""
    model = model_of(0)
    live = blank(model)
    sharded.publish(model)
    subscriber = follow(store, Tensors(live))
    store.on("list", "data/*", refuse)
    for version in range(1, 6):
        listed = len(store.keys("list"))
        until(lambda listed=listed: len(store.keys("list")) > listed + 1)  # type: ignore[misc]
        model = stir(model, version, 0.1)
        sharded.publish(model)
        began = time.monotonic()
        subscriber.wait_for(version, 10)
        assert time.monotonic() - began < 5
    assert subscriber.status().error == ""
    assert sum("cannot list" in record.message for record in caplog.records) == 1
    assert not [r for r in caplog.records if "not moving on" in r.message]
    assert bits(live) == bits(model)
