"""Following a stream whose store fails, lies, loses things or takes its time."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from weightcast.manifest.retention import prune
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Corrupt, Gap, NotFound, StorageError, Untrusted, UsageError
from weightcast.schemas.names import version_key
from weightcast.subscriber import CheckpointFolder, Subscriber, Tensors

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


class Following:
    """A subscriber that follows in a thread of its own."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.stop = threading.Event()
        self.versions: list[int] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for position in self.subscriber.follow(self.stop):
                self.versions.append(position.version)
        except Exception as error:  # noqa: BLE001  shown to the test
            self.error = error

    def ended(self, within_s: float) -> bool:
        """Whether it comes to its end."""
        self._thread.join(within_s)
        return not self._thread.is_alive()


@pytest.fixture
def following(subscriber_at: SubscriberAt) -> Any:
    """Starts them, and stops them all."""
    started: list[Following] = []

    def start(*args: Any, **settings: Any) -> Following:
        started.append(Following(subscriber_at(*args, **settings)))
        return started[-1]

    yield start
    for each in started:
        each.stop.set()
        assert each.ended(30)


def shard_keys(store: FaultStore, version: int) -> list[str]:
    """Keys of a version's shards, in the manifest's order."""
    return [s.key for s in StreamReader.open(store.inner).manifest(version).shards]


def overwrite(store: FaultStore, key: str, change: Callable[[bytes], bytes]) -> bytes:
    """Replace an object; returns what it was."""
    data = store.inner.get(key, max_bytes=1 << 30)
    store.inner.put(key, change(data))
    return data


def flip(at: int) -> Callable[[bytes], bytes]:
    """One bit of the byte `at`."""

    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1
        return bytes(changed)

    return change


def test_b104_nothing_is_written_before_all_is_verified(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    sharded.publish(model_of(0))
    subscriber.once()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    sharded.publish(stir(model_of(0), 1, 0.5))
    keys = shard_keys(store, 1)
    assert len(keys) >= 4
    overwrite(store, keys[3], flip(-9))
    with pytest.raises(Corrupt, match=keys[3]):
        subscriber.once()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert (subscriber.status().version, subscriber.status().ready) == (0, True)


@pytest.mark.parametrize("at", [0, 100, 40_000, -1])
def test_b128_one_flipped_bit_is_refused_after_one_more_try(
    at: int, local_store: FaultStore, trainer_at: Callable[..., Trainer], subscriber_at: SubscriberAt
) -> None:
    trainer = trainer_at(local_store)
    live = blank(model_of(0))
    subscriber = subscriber_at(local_store, Tensors(live), tries=1)
    trainer.publish(model_of(0))
    subscriber.once()
    model = stir(model_of(0), 1, 0.5)
    trainer.publish(model)
    (key,) = shard_keys(local_store, 1)
    whole = overwrite(local_store, key, flip(at))
    with pytest.raises(Corrupt, match=key):
        subscriber.once()
    assert bits(live) == bits(model_of(0))
    local_store.inner.put(key, whole)
    assert subscriber.once().version == 1
    assert bits(live) == bits(model)


def test_b126_a_missing_shard_is_waited_for(store: FaultStore, sharded: Trainer, following: Any) -> None:
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    here = following(store, Tensors(live))
    here.subscriber.wait_for(0, 10)
    hold = Hold()
    store.on("get", version_key(1), hold)
    model = stir(model_of(0), 1, 0.5)
    sharded.publish(model)
    key = shard_keys(store, 1)[1]
    data = store.inner.get(key, max_bytes=1 << 30)
    store.inner.delete(key)
    hold.release()
    with pytest.raises(StorageError, match=f"version 1 was not applied within 1 s; at 0, .*{key}"):
        here.subscriber.wait_for(1, 1)
    assert bits(live) == bits(model_of(0))
    store.inner.put(key, data)
    assert here.subscriber.wait_for(1, 20) == 1
    assert bits(live) == bits(model)


@pytest.mark.parametrize("damage", ["hash", "frame", "outcome"])
@pytest.mark.parametrize("full", [1, 2])
def test_b123_after_so_many_tries_a_bad_delta_is_passed_by_a_snapshot(
    damage: str, full: int, store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    live = blank(model_of(0))
    subscriber = subscriber_at(store, Tensors(live), tries=3)
    sharded.publish(model_of(0))
    subscriber.once()
    model = model_of(0)
    for version in (1, 2):
        model = stir(model, version, 0.1)  # few changes: a snapshot is not taken for its bytes
        sharded.publish(model)
        if version == full:
            sharded.publisher.snapshot()
    if damage == "hash":
        overwrite(store, shard_keys(store, 1)[0], flip(50))
    else:  # a delta that was bad before it was hashed
        from weightcast.manifest import fetch

        decode = fetch.decode_shard

        def bad(data: bytes, where: str) -> Any:
            rows = decode(data, where)
            if where in shard_keys(store, 1)[:1]:
                row = rows[0]
                steps = bytes(len(row.steps)) if damage == "frame" else row.steps
                values = row.escapes[:-1] + bytes([row.escapes[-1] ^ 1]) if row.escapes else row.escapes
                rows[0] = row.__class__(
                    **{f: getattr(row, f) for f in row.__dataclass_fields__}
                    | {"steps": steps, "escapes": values}
                )
            return rows

        monkeypatch.setattr(fetch, "decode_shard", bad)
    with caplog.at_level(logging.WARNING):
        assert subscriber.once().version == 2
    assert bits(live) == bits(model)
    assert sum("not moving on" in r.message for r in caplog.records) == 2
    assert "looking for a snapshot past it" in caplog.text


def test_a_bad_version_does_not_keep_the_good_ones_before_it_away(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt
) -> None:
    live = blank(model_of(0))
    subscriber = subscriber_at(store, Tensors(live))
    sharded.publish(model_of(0))
    subscriber.once()
    models = [model_of(0)]
    for version in range(1, 5):
        models.append(stir(models[-1], version, 0.01))
        sharded.publish(models[-1])
    store.inner.delete(shard_keys(store, 3)[0])
    with pytest.raises(NotFound):
        subscriber.once()
    assert subscriber.version == 2
    assert bits(live) == bits(models[2])


def test_a_damaged_snapshot_is_passed_over_for_an_older_one(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    for version in range(4):
        sharded.publish(model_of(version))
        if version in (1, 3):
            sharded.publisher.snapshot()
    weights = sorted(e.key for e in store.list("snapshots/") if e.key.endswith(".safetensors"))
    for key in weights[1:]:
        overwrite(store, key, flip(-1))
    assert weights[-1].startswith("snapshots/000000000003/")
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    assert subscriber.once().version == 3
    assert loaded(tmp_path) == bits(model_of(3))
    overwrite(store, weights[0], flip(-1))
    with pytest.raises(Corrupt, match="snapshots/000000000003"):
        subscriber_at(store, CheckpointFolder(tmp_path / "late")).once()


@pytest.mark.parametrize("fold_bytes", [1 << 26, 1 << 20])
def test_a_snapshot_that_pays_but_is_damaged_does_not_stop_the_deltas(
    fold_bytes: int, store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt
) -> None:
    """It is tried once, however many steps the deltas take."""
    live = blank(model_of(0))
    subscriber = subscriber_at(store, Tensors(live), fold_bytes=fold_bytes)
    sharded.publish(model_of(0))
    subscriber.once()
    for version in range(1, 11):
        sharded.publish(model_of(version))
    sharded.publisher.snapshot()
    for entry in list(store.list("snapshots/")):
        if entry.key.endswith(".safetensors"):
            overwrite(store, entry.key, flip(-1))
    store.calls.clear()
    assert subscriber.once().version == 10
    assert bits(live) == bits(model_of(10))
    downloads = [key for key in store.keys("download") if key.startswith("snapshots/000000000010/")]
    assert len(downloads) == len(set(downloads)) == 1
    read = [key for key in store.keys("get") if key.startswith("versions/")]
    assert max(read.count(version_key(version)) for version in range(1, 10)) <= 3, "not anew for each step"


def raise_floor(store: FaultStore, keep: int) -> None:
    """Prune at once, sparing nothing for its age."""
    reader = StreamReader.open(store.inner)
    prune(
        reader,
        keep=keep,
        grace_s=0,
        orphan_age_s=86400,
        lease_age_s=0,
        clock=lambda: store.inner.clock() + timedelta(days=2),
    )


def test_b111_a_slow_subscriber_jumps_over_what_was_pruned(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    for version in range(4):
        sharded.publish(model_of(version))
    subscriber.once()
    for version in range(4, 13):
        sharded.publish(stir(model_of(3), version, 0.01))
        if version == 10:
            sharded.publisher.snapshot()
    raise_floor(store, keep=3)
    assert StreamReader.open(store).floor() == 10
    assert subscriber.once().version == 12
    assert loaded(tmp_path) == bits(stir(model_of(3), 12, 0.01))


def test_b111_without_a_snapshot_the_gap_is_named_and_the_weights_stay(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt
) -> None:
    live = blank(model_of(0))
    subscriber = subscriber_at(store, Tensors(live))
    for version in range(4):
        sharded.publish(model_of(version))
    subscriber.once()
    for version in range(4, 13):
        sharded.publish(stir(model_of(3), version, 0.01))
    sharded.publisher.snapshot()
    raise_floor(store, keep=1)
    for entry in list(store.list("snapshots/")):
        store.inner.delete(entry.key)
    with pytest.raises(
        Gap, match="version 4 is no longer available as a delta, and there is no snapshot after it"
    ):
        subscriber.once()
    assert bits(live) == bits(model_of(3))
    assert subscriber.version == 3


@pytest.mark.parametrize("hint", ["there", "deleted"])
def test_a_version_committed_while_the_head_is_looked_up_is_no_gap(
    hint: str, store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt
) -> None:
    """It was not there when it was asked for, and is there for whoever looks behind it: no snapshot is needed."""
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    subscriber = subscriber_at(store, Tensors(live))
    subscriber.once()
    if hint == "deleted":
        store.inner.delete("head.json")
    model = stir(model_of(0), 1, 0.01)

    def commit(_: str) -> None:
        sharded.publish(model)

    committed = store.on("get", "head.json", commit, times=1)
    store.calls.clear()
    assert subscriber.once().version == 1
    assert committed.met >= 1
    assert bits(live) == bits(model)
    assert store.keys("download") == []


def test_b116_a_version_is_pruned_while_it_is_fetched(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path), threads=1, connections=1)
    models = [{**model_of(0), **{f"more.{name}": tensor for name, tensor in model_of(1).items()}}]
    sharded.publish(models[0])
    subscriber.once()
    for version in range(1, 5):
        models.append(stir(models[-1], version, 0.1))
        sharded.publish(models[-1])
        if version == 3:
            sharded.publisher.snapshot()
    pruned: list[str] = []

    def prune_now(key: str) -> None:
        if not pruned:
            pruned.append(key)
            raise_floor(store, keep=2)

    store.on("fetch", "data/000000000001/*", prune_now, after=True)
    assert subscriber.once().version == 4
    assert pruned
    assert loaded(tmp_path) == bits(models[4])
    assert not [k for k in store.keys("fetch") if k.startswith("data/000000000003")]


@pytest.mark.parametrize("hint", ["stale", "beyond", "empty", "deleted"])
def test_b118_hints_of_any_kind_lead_to_the_head(
    hint: str, store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    for version in range(9):
        sharded.publish(stir(model_of(0), version, 0.001))
    if hint == "deleted":
        store.inner.delete("head.json")
    else:
        text = {"stale": '{"kind":"head","version":7}', "beyond": '{"kind":"head","version":9}', "empty": ""}[
            hint
        ]
        store.inner.put("head.json", text.encode())
    assert subscriber_at(store, CheckpointFolder(tmp_path)).once().version == 8


def test_b107_a_missing_hint_changes_nothing_for_one_who_follows(
    store: FaultStore, sharded: Trainer, following: Any
) -> None:
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    here = following(store, Tensors(live))
    here.subscriber.wait_for(0, 10)
    store.calls.clear()

    def gone(key: str) -> None:
        raise NotFound(f"{key} is not there")

    store.on("get", "head.json", gone)
    time.sleep(1)
    assert (here.subscriber.status().version, here.subscriber.status().ready) == (0, True)
    sharded.publish(model_of(1))
    assert here.subscriber.wait_for(1, 10) == 1
    assert bits(live) == bits(model_of(1))
    assert not store.keys("download")


def test_b120_each_shard_is_fetched_once(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    live = blank(model_of(0))
    subscriber = subscriber_at(store, Tensors(live))
    model = model_of(0)
    trainer.publish(model)
    subscriber.once()
    store.calls.clear()
    for version in range(1, 16):
        model = stir(model, version, 0.001)
        trainer.publish(model)
        subscriber.once()
    fetched = [key for key in store.keys("fetch") if key.startswith("data/")]
    assert sorted(int(key.split("/")[1]) for key in fetched) == list(range(1, 16))
    assert not store.keys("download")
    assert bits(live) == bits(model)


def test_b122_versions_count_not_arrivals(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    live = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    subscriber = subscriber_at(store, Tensors(live))
    for value in (0.0, 2.0, 3.0):
        trainer.publish({"w": torch.tensor([value, 0, 0, 0], dtype=torch.bfloat16)})
        if not value:
            subscriber.once()
    store.on("fetch", "data/000000000001/*", lambda _: time.sleep(0.5))
    assert subscriber.once().version == 2
    assert live["w"][0].view(torch.int16).item() == 0x4040


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_b136_a_poller_sees_a_version_of_another_process_within_a_poll(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store: FaultStore = request.getfixturevalue("store" if kind == "memory" else "local_store")
    sharded = request.getfixturevalue("trainer_at")(store)
    following = request.getfixturevalue("following")
    sharded.publish(model_of(0))
    if kind == "memory":
        here = following(store, Tensors(blank(model_of(0))), poll_s=0.2)
        here.subscriber.wait_for(0, 10)
        sharded.publish(model_of(1))
        assert here.subscriber.wait_for(1, 2) == 1
        return
    script = (
        "import sys; from weightcast.subscriber import *\n"
        "settings = SubscriberSettings(poll_s=0.2, lease=False)\n"
        "subscriber = Subscriber(sys.argv[1], CheckpointFolder(sys.argv[2]), settings)\n"
        "for position in subscriber.follow():\n    print(position.version, flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "store"), str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as poller:
        assert poller.stdout is not None
        assert poller.stdout.readline() == "0\n"
        time.sleep(1)
        sharded.publish(model_of(1))
        began = time.monotonic()
        assert poller.stdout.readline() == "1\n"
        assert time.monotonic() - began < 10  # 0.27 by the clock of the poller; a busy machine takes longer
        poller.kill()


def test_b152_an_idle_poll_is_one_request_and_no_listing(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt
) -> None:
    model: Model = {"w": torch.zeros(10)}
    for version in range(50):
        model["w"][0] = version
        trainer.publish(model)
    subscriber = subscriber_at(store, Tensors(blank(model)), poll_s=0.001)
    subscriber.once()
    store.calls.clear()
    stop = threading.Event()
    polls = 0
    inner = subscriber._advance

    def counted(*, thorough: bool) -> bool:
        nonlocal polls
        polls += 1
        if polls == 100:
            stop.set()
        return inner(thorough=thorough)

    subscriber._advance = counted  # type: ignore[method-assign]
    assert [p.version for p in subscriber.follow(stop)] == [49]
    assert [key for kind, key in store.calls if kind != "get"] == []
    assert store.keys("get").count(version_key(50)) >= 100
    assert len(store.calls) <= 100 + 4 * 3  # every 30th looks at the hint as well


def test_it_survives_an_outage_and_says_so(store: FaultStore, sharded: Trainer, following: Any) -> None:
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    here = following(store, Tensors(live), max_lag=0)
    here.subscriber.wait_for(0, 10)
    until(lambda: here.subscriber.status().checked_s < 0.3)
    fault = store.on("*", "*", refuse)
    until(lambda: here.subscriber.status().checked_s > 0.4)
    until(lambda: "told to fail" in here.subscriber.status().error)
    status = here.subscriber.status()
    assert (status.version, status.ready) == (0, True)
    store.faults.remove(fault)
    sharded.publish(model_of(1))
    assert here.subscriber.wait_for(1, 20) == 1
    assert here.versions == [0, 1]
    until(lambda: not here.subscriber.status().error)
    status = here.subscriber.status()
    assert (status.lag, status.behind_s, status.ready) == (0, 0.0, True)


def test_status_counts_from_version_0_and_ready_heeds_the_lag(
    store: FaultStore, sharded: Trainer, following: Any
) -> None:
    sharded.publish(model_of(0))
    hold = Hold()
    store.on("download", "*", hold)
    here = following(store, Tensors(blank(model_of(0))), max_lag=1)
    assert hold.reached.wait(10)
    status = here.subscriber.status()
    assert (status.version, status.head, status.lag, status.ready) == (None, 0, 1, False)
    assert status.behind_s > 0
    hold.release()
    here.subscriber.wait_for(0, 10)
    second = Hold()
    store.on("fetch", "data/*", second)
    for version in (1, 2):
        sharded.publish(model_of(version))
    assert second.reached.wait(10)
    time.sleep(0.1)
    status = here.subscriber.status()
    assert (status.version, status.ready) == (0, status.lag <= 1)
    second.release()
    here.subscriber.wait_for(2, 10)


def test_b219_status_answers_while_a_fetch_hangs(store: FaultStore, sharded: Trainer, following: Any) -> None:
    sharded.publish(model_of(0))
    here = following(store, Tensors(blank(model_of(0))))
    here.subscriber.wait_for(0, 10)
    hold = Hold()
    store.on("fetch", "data/*", hold)
    sharded.publish(model_of(1))
    assert hold.reached.wait(10)
    for _ in range(20):
        began = time.monotonic()
        status = here.subscriber.status()
        assert time.monotonic() - began < 5
        assert (status.version, status.head, status.lag) == (0, 1, 1)
        time.sleep(0.01)
    with pytest.raises(StorageError, match=r"within 0\.1 s; at 0"):
        here.subscriber.wait_for(1, 0.1)
    hold.release()
    assert here.subscriber.wait_for(1, 10) == 1


def test_an_edited_manifest_ends_the_following(
    store: FaultStore, sharded: Trainer, following: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightcast.subscriber.subscriber._SETTLE_S", 0.3)
    live = blank(model_of(0))
    sharded.publish(model_of(0))
    here = following(store, Tensors(live))
    here.subscriber.wait_for(0, 10)
    hold = Hold()
    store.on("get", version_key(1), hold)
    sharded.publish(model_of(1))
    overwrite(store, version_key(1), lambda data: data.replace(b'"digest_before":"', b'"digest_before":"0'))
    hold.release()
    with pytest.raises(Untrusted, match=version_key(1)):
        here.subscriber.wait_for(1, 30)
    assert here.ended(10)
    assert isinstance(here.error, Untrusted)
    assert bits(live) == bits(model_of(0))
    assert version_key(1) in here.subscriber.status().error


def test_a_rewritten_history_ends_the_following_of_a_folder(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    sharded.publish(model_of(0))
    subscriber_at(store, CheckpointFolder(tmp_path)).once()
    overwrite(store, version_key(0), lambda data: data.replace(b'"publisher"', b'"publisheR"'))
    with pytest.raises(Untrusted, match="the history was rewritten"):
        list(subscriber_at(store, CheckpointFolder(tmp_path)).follow())
    assert loaded(tmp_path) == bits(model_of(0))


def test_b099_a_manifest_that_is_still_being_written_is_waited_for(
    store: FaultStore, sharded: Trainer, following: Any
) -> None:
    sharded.publish(model_of(0))
    here = following(store, Tensors(blank(model_of(0))))
    here.subscriber.wait_for(0, 10)
    hold = Hold()
    store.on("get", version_key(1), hold, times=1)
    assert hold.reached.wait(10)
    sharded.publish(model_of(1))
    whole = overwrite(store, version_key(1), lambda data: data[:200])
    hold.release()
    until(lambda: version_key(1) in here.subscriber.status().error)
    assert here.subscriber.version == 0
    store.inner.put(version_key(1), whole)
    assert here.subscriber.wait_for(1, 10) == 1


@pytest.mark.parametrize("how", ["stop", "close"])
@pytest.mark.parametrize("state", ["idle", "backing off"])
def test_b231_it_stops_at_once(
    how: str, state: str, store: FaultStore, sharded: Trainer, following: Any
) -> None:
    sharded.publish(model_of(0))
    here = following(store, Tensors(blank(model_of(0))), poll_s=100)
    here.subscriber.wait_for(0, 10)
    if state == "backing off":
        store.on("*", "*", refuse)
    time.sleep(0.2)
    began = time.monotonic()
    if how == "stop":
        here.stop.set()
    else:
        here.subscriber.close()
    assert here.ended(5)
    assert time.monotonic() - began < 5
    assert here.error is None


def test_it_ends_well_if_it_is_closed_while_a_version_is_used(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt
) -> None:
    sharded.publish(model_of(0))
    subscriber = subscriber_at(store, Tensors(blank(model_of(0))))
    seen = []
    for position in subscriber.follow():
        seen.append(position.version)
        closing = threading.Thread(target=subscriber.close)
        closing.start()
        closing.join()
    assert seen == [0]


def test_a_closed_subscriber_says_so(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt
) -> None:
    sharded.publish(model_of(0))
    subscriber = subscriber_at(store, Tensors(blank(model_of(0))))
    subscriber.once()
    subscriber.close()
    with pytest.raises(UsageError, match="closed"):
        subscriber.once()
    assert list(subscriber.follow()) == []
    assert subscriber.wait_for(0) == 0
    with pytest.raises(UsageError, match="closed"):
        subscriber.wait_for(1)


def test_no_stream_and_no_version_are_waited_for(
    store: FaultStore, trainer: Trainer, following: Any, subscriber_at: SubscriberAt
) -> None:
    live = {"w": torch.zeros(3)}
    with pytest.raises(NotFound, match="no stream at"):
        subscriber_at(store, Tensors(live)).once()
    here = following(store, Tensors(live))
    until(lambda: "no stream at" in here.subscriber.status().error)
    trainer.publish({"w": torch.ones(3)})
    assert here.subscriber.wait_for(0, 10) == 0
    assert live["w"].tolist() == [1, 1, 1]


def test_a_patch_that_keeps_failing_is_tried_more_and_more_slowly_and_told_once(
    store: FaultStore, sharded: Trainer, following: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded.publish(model_of(0))
    target = CheckpointFolder(tmp_path)
    tried = []

    def fail(*_: Any) -> None:
        tried.append(time.monotonic())
        raise Corrupt("the disk is failing")

    monkeypatch.setattr(target, "patch", fail)
    here = following(store, target, poll_s=0.05, tries=100)
    here.subscriber.wait_for(0, 10)
    sharded.publish(model_of(1))
    until(lambda: len(tried) == 6)
    assert tried[-1] - tried[0] > 1, "0.05 s and more after each"
    assert tried[-1] - tried[-2] > tried[1] - tried[0]
    assert here.versions == [0]
    assert here.subscriber.status().error == "the disk is failing"


def test_a_lease_says_what_is_held_and_survives_an_outage(
    store: FaultStore, sharded: Trainer, following: Any
) -> None:
    sharded.publish(model_of(0))
    fault = store.on("put", "readers/*", refuse, times=3)
    here = following(store, Tensors(blank(model_of(0))), lease=True, lease_s=0.05)
    here.subscriber.wait_for(0, 10)
    sharded.publish(model_of(1))
    here.subscriber.wait_for(1, 10)
    for _ in range(100):
        if [r.version for r in StreamReader.open(store).readers()] == [1]:
            break
        time.sleep(0.05)
    assert [r.version for r in StreamReader.open(store).readers()] == [1]
    assert fault.met > 3
    assert here.error is None


def test_b068_the_version_after_a_failed_apply_does_not_land_on_the_wrong_base(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [model_of(seed) for seed in range(3)]
    live = blank(models[0])
    target = Tensors(live)
    subscriber = subscriber_at(store, target, tries=100)
    sharded.publish(models[0])
    subscriber.once()
    sharded.publish(models[1])
    with monkeypatch.context() as broken:
        broken.setattr(target, "patch", lambda *_: (_ for _ in ()).throw(StorageError("not applied")))
        with pytest.raises(StorageError, match="not applied"):
            subscriber.once()
        sharded.publish(models[2])
        with pytest.raises(StorageError, match="not applied"):
            subscriber.once()
    assert (subscriber.version, bits(live)) == (0, bits(models[0]))
    assert subscriber.once().version == 2
    assert bits(live) == bits(models[2])


def test_b050_what_the_stream_does_not_carry_is_left_alone(
    store: FaultStore, sharded: Trainer, subscriber_at: SubscriberAt
) -> None:
    """An engine's own tensor keeps what its load hook set, through a snapshot and three deltas."""
    live = blank(model_of(0)) | {"attn.k_scale": torch.tensor(1.0)}
    subscriber = subscriber_at(store, Tensors(live, ignore=["*.k_scale"]))
    for seed in range(4):
        sharded.publish(model_of(seed))
        subscriber.once()
        assert live["attn.k_scale"].item() == 1.0
        assert {n: b for n, b in bits(live).items() if n != "attn.k_scale"} == bits(model_of(seed))


def test_who_waits_is_told_when_following_ends_by_an_unforeseen_error(
    store: FaultStore, sharded: Trainer, following: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded.publish(model_of(0))
    target = Tensors(blank(model_of(0)))
    here = following(store, target)
    here.subscriber.wait_for(0, 10)
    told: list[Exception] = []

    def wait() -> None:
        try:
            here.subscriber.wait_for(1)
        except Exception as error:  # noqa: BLE001  shown to the test
            told.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    monkeypatch.setattr(target, "mark", lambda: 1 // 0)
    assert here.ended(10)
    assert isinstance(here.error, ZeroDivisionError)
    waiting.join(5)
    assert not waiting.is_alive()
    assert len(told) == 1
    assert isinstance(told[0], UsageError)
    assert "ZeroDivisionError" in str(told[0])
