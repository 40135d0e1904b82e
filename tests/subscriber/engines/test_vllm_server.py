"""A vLLM server as a target, against a fake that follows the plugin's rules over real HTTP."""

from __future__ import annotations

import json
import logging
import os
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

from weightcast.schemas.engine import Held
from weightcast.schemas.errors import (
    Conflict,
    Corrupt,
    Gap,
    StorageError,
    UsageError,
    WeightcastError,
)
from weightcast.subscriber import Subscriber, VllmServer
from weightcast.subscriber.engines.staging import Staging

from ...faultstore import FaultStore
from ...waiting import until
from ..conftest import Trainer
from ..kit import Model, bits, every_dtype, stir
from .fake_vllm import TOKEN, Engine, FakeServer

INSTALL = ["install", "pause", "write 0", "write 1", "confirm", "label", "caches", "commit", "resume"]

At = Callable[..., Subscriber]
Open = Callable[..., VllmServer]


@pytest.fixture
def model() -> Model:
    """Version 0, which the engine is started with."""
    return every_dtype()


@pytest.fixture
def engine(model: Model) -> Engine:
    """Two ranks."""
    return Engine(model)


@pytest.fixture
def server(engine: Engine) -> Iterator[FakeServer]:
    """It answers."""
    fake = FakeServer(engine)
    yield fake
    fake.down()
    assert engine.violations == []  # in no test may it generate with weights that are no version


@pytest.fixture
def stage(tmp_path: Path) -> Path:
    """What both sides see."""
    return tmp_path / "stage"


@pytest.fixture
def target(server: FakeServer, stage: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Open:
    """Opens targets."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make(**options: Any) -> VllmServer:
        return VllmServer(server.url, **{"token": TOKEN, "stage": stage, **options})

    return make


def weights_read(store: FaultStore) -> int:
    """How often a file with weights was fetched: shards, and files of snapshots."""
    keys = [*store.keys("fetch"), *store.keys("download")]
    return sum(key.startswith("data/") or key.endswith(".safetensors") for key in keys)


class Following:
    """A subscriber that follows in a thread."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.stop = threading.Event()
        self.seen: list[int] = []
        self.error: WeightcastError | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            for position in self.subscriber.follow(self.stop):
                self.seen.append(position.version)
        except WeightcastError as error:
            self.error = error

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_every_version_comes_into_the_live_weights(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    assert subscriber.once().version == 0  # its own bits were recognised, nothing was written
    assert "load" not in engine.calls
    for version in range(1, 4):
        model = stir(model, version)
        trainer.publish(model)
        assert subscriber.once().version == version
        assert engine.serving() == bits(model)
        assert (engine.label, engine.paused) == (str(version), False)
    assert engine.calls.count("install") == 3
    assert engine.calls.count("attach") == 1


def test_versions_in_a_row_go_together_in_one_pause(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    for version in range(1, 6):
        model = stir(model, version, 0.3)
        trainer.publish(model)
    assert subscriber.once().version == 5
    assert engine.serving() == bits(model)
    assert engine.steps.count("pause") == 1
    assert engine.calls.count("read") == 5  # one a version, of what the ones before it had not


def test_a_version_without_changes_needs_no_pause(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    trainer.publish(model)
    assert subscriber.once().version == 1
    assert engine.state().held == _held(subscriber)
    assert "pause" not in engine.steps


def test_an_engine_of_other_weights_is_given_a_snapshot(
    store: FaultStore, trainer: Trainer, subscriber_at: At, server: FakeServer, target: Open, model: Model
) -> None:
    server.engine.model = bits(stir(model, 77))
    server.engine.restart()
    trainer.publish(model)
    model = stir(model, 1)
    trainer.publish(model)
    assert subscriber_at(store, target()).once().version == 1
    assert server.engine.serving() == bits(model)
    assert "load" in server.engine.calls


def test_b185_caches_are_reset_after_the_weights_are_in_and_before_generation_goes_on(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    trainer.publish(stir(model, 1))
    subscriber.once()
    assert engine.steps[engine.steps.index("install") :] == INSTALL


def test_b185_b191_a_reset_that_fails_keeps_the_engine_paused_until_it_succeeds(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    engine.fail("caches", 4)
    trainer.publish(stir(model, 1))
    with Following(subscriber) as following:
        until(lambda: engine.steps.count("caches") >= 2)
        until(lambda: not subscriber.status().ready)
        until(lambda: subscriber.version == 1)
    assert engine.serving() == bits(stir(model, 1))
    assert (engine.steps.count("caches"), engine.steps.count("resume")) == (5, 1)
    assert following.error is None
    assert subscriber.status().ready


def test_b187_one_rank_that_fails_twice_is_healed_and_never_serves_beside_the_other(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    engine.fail("write 1", 2)
    trainer.publish(stir(model, 1))
    with pytest.raises(Corrupt, match="version 1 is not confirmed"):
        subscriber._advance(thorough=True)
    assert (engine.paused, subscriber.version, subscriber.status().ready) == (True, 0, False)
    assert [rank.whole for rank in engine.ranks] == [False, False]
    reads = engine.calls.count("read")
    assert subscriber.once().version == 1
    assert engine.serving() == bits(stir(model, 1))
    assert (engine.paused, engine.calls.count("read"), "load" in engine.calls) == (False, reads, False)


def test_one_failure_is_healed_at_once_from_the_same_staged_file(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    engine.fail("write 0", 1, Corrupt)
    trainer.publish(stir(model, 1))
    assert subscriber._advance(thorough=True)
    assert engine.calls.count("install") == 2
    assert engine.serving() == bits(stir(model, 1))


def test_a_refusal_before_the_pause_leaves_the_engine_serving(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    engine.fail("install", 2)
    trainer.publish(stir(model, 1))
    with pytest.raises(StorageError, match="told to fail"):
        subscriber._advance(thorough=True)
    assert (engine.paused, subscriber.status().ready) == (False, True)
    assert subscriber.once().version == 1


def test_installs_that_fail_for_good_end_in_a_snapshot(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    model = stir(model, 1)
    trainer.publish(model)
    trainer.publisher.snapshot()
    engine.fail("write 1", 4)
    with Following(subscriber):
        until(lambda: subscriber.version == 1)
    assert engine.serving() == bits(model)
    assert engine.calls.count("load") == 1
    assert [r for r in caplog.records if r.levelno == logging.ERROR and "failed 3 times" in r.message]


@pytest.mark.parametrize("with_mirror", [False, True], ids=["", "mirror"])
def test_b193_a_restarted_engine_is_brought_back_within_a_poll(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    tmp_path: Path,
    with_mirror: bool,
) -> None:
    trainer.publish(model)
    options = {"mirror": tmp_path / "mirror"} if with_mirror else {}
    subscriber = subscriber_at(store, target(**options), poll_s=0.2)
    model = stir(model, 1)
    trainer.publish(model)
    subscriber.once()
    engine.model = bits(stir(model, 50))  # bits of no version
    if not with_mirror:
        trainer.publisher.snapshot()
    with Following(subscriber):
        until(lambda: subscriber.status().ready)
        fetched = weights_read(store)
        engine.delay["load"] = 1.0
        before = len(engine.calls)
        engine.restart()
        until(lambda: "load" in engine.calls)
        assert engine.calls[before : engine.calls.index("load")].count("pulse") <= 2
        until(lambda: not subscriber.status().ready)
        until(lambda: subscriber.status().ready)
    assert engine.serving() == bits(model)
    if with_mirror:
        assert weights_read(store) == fetched


def test_b194_weights_that_are_gone_after_a_sleep_are_loaded_again(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    with Following(subscriber) as following:
        until(lambda: subscriber.version == 0)
        engine.sleep()
        until(lambda: not subscriber.status().ready)
        assert "sleeps" in subscriber.status().error
        installs = engine.calls.count("install")
        trainer.publish(stir(model, 1))
        engine.sleeping = False
        until(lambda: subscriber.version == 1 and subscriber.status().ready)
    assert engine.serving() == bits(stir(model, 1))
    assert engine.calls.index("load") < len(engine.calls)
    assert (
        engine.calls[engine.calls.index("load") :].count("install")
        == engine.calls.count("install") - installs
    )
    assert following.error is None


def test_b194_after_a_sleep_the_bits_are_proved_whatever_the_ranks_say(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    engine.sleeping = True
    with pytest.raises(StorageError, match="sleeps"):
        subscriber.once()
    engine.ranks[1].parts["bf16.big"].bits[7] ^= 1
    engine.sleeping = False
    assert subscriber.once().version == 0
    assert engine.serving() == bits(model)


def test_a_calm_engine_is_not_asked_for_its_ranks_at_every_poll(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    """vLLM's workers spin for a second after each question."""
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    subscriber.once()
    del engine.calls[:]
    for _ in range(5):
        subscriber.once()
    assert engine.calls.count("state") == 0
    engine.restart()
    subscriber.once()
    assert engine.calls.count("state") > 0


def test_b196_the_later_of_two_subscribers_drives_the_engine_and_the_other_ends(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    first, second = subscriber_at(store, target()), subscriber_at(store, target())
    with Following(first) as following:
        until(lambda: first.version == 0)
        for version in range(1, 4):
            trainer.publish(stir(model, version))
        assert second.once().version == 3
        until(lambda: following.error is not None)
    assert isinstance(following.error, Conflict)
    assert "another subscriber" in str(following.error)
    assert engine.serving() == bits(stir(model, 3))


@pytest.mark.parametrize("status", [404, 405])
def test_b198_a_server_without_the_plugin_is_an_error_that_says_what_to_do(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    server: FakeServer,
    target: Open,
    model: Model,
    status: int,
) -> None:
    trainer.publish(model)
    server.absent = status
    with pytest.raises(UsageError, match=r"no route /weightcast/pulse.*VLLM_PLUGINS=weightcast"):
        subscriber_at(store, target()).once()


def test_b198_a_stub_that_answers_and_does_nothing_is_found_out(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    engine.stub = True
    trainer.publish(stir(model, 1))
    subscriber._advance(thorough=True)
    engine.stub = False
    assert engine.serving() == bits(model)  # it claims version 1, and the next look shows that it is not
    assert subscriber.once().version == 1
    assert engine.serving() == bits(stir(model, 1))


def test_a_wrong_token_is_an_error_that_names_it(server: FakeServer, stage: Path) -> None:
    wrong = VllmServer(server.url, token="wrong", stage=stage)
    with wrong.exclusive(), pytest.raises(UsageError, match="WEIGHTCAST_TOKEN"):
        wrong.recover()


def test_no_token_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTCAST_TOKEN", raising=False)
    with pytest.raises(UsageError, match="WEIGHTCAST_TOKEN"):
        VllmServer("http://127.0.0.1:1")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://", "http://u:p@h:1", "http://h:99999999"]
)
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        VllmServer(url, token=TOKEN)


@pytest.mark.parametrize("when", ["before", "after"])
def test_b199_a_connection_that_breaks_during_an_install_does_no_harm(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    server: FakeServer,
    target: Open,
    model: Model,
    when: str,
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    trainer.publish(stir(model, 1))
    server.hang_up["install"] = (when, 1)
    assert subscriber.once().version == 1
    assert server.engine.serving() == bits(stir(model, 1))
    assert server.engine.steps.count("pause") == 1


def test_b199_an_engine_that_is_gone_is_waited_for_without_a_fast_loop(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    server: FakeServer,
    target: Open,
    model: Model,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    with Following(subscriber) as following:
        until(lambda: subscriber.version == 0)
        server.down()
        until(lambda: not subscriber.status().ready)
        caplog.clear()
        time.sleep(4)
        tries = [r for r in caplog.records if "does not answer" in r.message]
        trainer.publish(stir(model, 1))
        server.engine.restart()
        server.up()
        until(lambda: subscriber.version == 1)
    assert 2 <= len(tries) <= 10  # twice the pause each time, from 0.02 s on
    assert following.error is None
    assert server.engine.serving() == bits(stir(model, 1))


def test_b106_the_local_copy_and_the_engine_are_two_things(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    tmp_path: Path,
) -> None:
    trainer.publish(model)
    mirrored = target(mirror=tmp_path / "mirror")
    subscriber = subscriber_at(store, mirrored)
    subscriber.once()
    model = stir(model, 1)
    trainer.publish(model)
    engine.fail("write 1", 5)
    with pytest.raises(Corrupt, match="version 1 is not confirmed"):
        subscriber._advance(thorough=True)
    mark = mirrored.mark()
    assert mark is not None
    assert (mark.version, engine.state().held, subscriber.version) == (1, None, 0)
    assert not subscriber.status().ready
    fetched = weights_read(store)
    with Following(subscriber):
        until(lambda: subscriber.version == 1)
    assert subscriber.status().ready
    assert engine.serving() == bits(model)
    assert weights_read(store) == fetched


def test_a_mirror_that_was_left_behind_by_a_killed_subscriber_catches_the_engine_up(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    tmp_path: Path,
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target(mirror=tmp_path / "mirror"))
    subscriber.once()
    subscriber.close()
    engine.model = bits(stir(model, 9))
    engine.restart()
    fetched = weights_read(store)
    again = subscriber_at(store, target(mirror=tmp_path / "mirror"))
    assert again.once().version == 0
    assert engine.serving() == bits(model)
    assert weights_read(store) == fetched


def test_a_damaged_mirror_is_never_given_to_the_engine(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    tmp_path: Path,
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target(mirror=tmp_path / "mirror"))
    subscriber.once()
    subscriber.close()
    (weights,) = (tmp_path / "mirror").glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    engine.restart()
    loads = engine.calls.count("load")
    assert subscriber_at(store, target(mirror=tmp_path / "mirror")).once().version == 0
    assert engine.serving() == bits(model)
    assert engine.calls.count("load") <= loads + 1


def test_what_an_engine_cannot_hold_is_refused_by_name_before_anything_is_fetched_or_written(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    engine.refused = {"bf16.big": "the kernel repacked it"}
    before = engine.serving()
    with pytest.raises(UsageError, match=r"1 of 16 tensors: 'bf16.big' \(the kernel repacked it\)"):
        subscriber_at(store, target()).once()
    assert engine.serving() == before
    assert {"install", "load"}.isdisjoint(engine.calls)
    assert weights_read(store) == 0


def test_a_change_of_layout_is_followed_by_a_snapshot(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    smaller = {name: tensor for name, tensor in stir(model, 1).items() if name != "bool"}
    trainer.publish(smaller, drop=["bool"])
    with pytest.raises(Gap, match="changes the layout"):
        subscriber.once()
    assert subscriber.version == 0
    trainer.publisher.snapshot()
    assert subscriber.once().version == 1
    served = engine.serving()
    assert {name: served[name] for name in smaller} == bits(smaller)


def test_a_change_of_layout_goes_through_a_mirror(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    tmp_path: Path,
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target(mirror=tmp_path / "mirror"))
    subscriber.once()
    smaller = {name: tensor for name, tensor in stir(model, 1).items() if name != "bool"}
    trainer.publish(smaller, drop=["bool"])
    assert subscriber.once().version == 1
    served = engine.serving()
    assert {name: served[name] for name in smaller} == bits(smaller)


def test_every_few_versions_the_live_bits_are_proved_in_full(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    vllm = target(verify_every=2)
    reports: list[Any] = []
    vllm.observe(reports.append)
    subscriber = subscriber_at(store, vllm)
    subscriber.once()
    model = stir(model, 1)
    trainer.publish(model)
    trainer.publisher.snapshot()
    subscriber.once()
    assert "verify" not in engine.calls
    engine.ranks[0].parts["f16"].bits[:] ^= 1  # somebody writes into the engine
    engine.blind = True
    trainer.publish(model | {"bf16.small": torch.ones(7, dtype=torch.bfloat16)})
    assert subscriber.once().version == 2
    assert engine.serving() == bits(model | {"bf16.small": torch.ones(7, dtype=torch.bfloat16)})
    assert [r.good for r in reports if hasattr(r, "good")][:1] == [False]
    assert "load" in engine.calls


def test_pauses_are_told(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    vllm = target()
    subscriber = subscriber_at(store, vllm)
    subscriber.once()
    assert vllm.paused_s is None
    trainer.publish(stir(model, 1))
    subscriber.once()
    assert vllm.paused_s == 0.001
    trainer.publish(stir(model, 1))
    subscriber.once()
    assert vllm.paused_s is None


def test_a_changed_config_is_warned_of(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    target: Open,
    model: Model,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer.publish(model, files={"config.json": b"{}"})
    subscriber = subscriber_at(store, target())
    subscriber.once()
    trainer.publish(stir(model, 1), files={"config.json": b'{"layers": 2}'})
    subscriber.once()
    trainer.publish(stir(model, 2), files={"config.json": b'{"layers": 3}'})
    subscriber.once()
    assert "config.json of the stream changed" in caplog.text


def test_nothing_is_left_in_the_stage_folder(
    store: FaultStore, trainer: Trainer, subscriber_at: At, target: Open, model: Model, stage: Path
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    trainer.publish(stir(model, 1))
    subscriber.once()
    left = sorted(p.name.split("-")[0] for p in stage.rglob("*") if p.is_file())
    assert left == ["layout", "lock"]


def test_what_a_killed_subscriber_left_is_swept(server: FakeServer, target: Open, stage: Path) -> None:
    staging = Staging(server.url, stage)
    with staging.exclusive():
        for name in ("positions", "values", "staged.arrow", ".staged.arrow.tmp"):
            (staging.folder / name).write_bytes(b"x")
    vllm = target()
    with vllm.exclusive():
        vllm.recover()
    assert [p.name for p in staging.folder.iterdir()] == ["lock"]


def test_a_full_stage_folder_leaves_the_engine_as_it_is(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    trainer.publish(stir(model, 1))

    def full(folder: Path, needed: int) -> None:
        raise StorageError(f"{folder} needs {needed} bytes, 0 are free")

    with monkeypatch.context() as patch:
        patch.setattr("weightcast.subscriber.journal.check_room", full)
        with pytest.raises(StorageError, match="0 are free"):
            subscriber.once()
    assert engine.serving() == bits(model)
    assert subscriber.status().ready
    assert subscriber.once().version == 1


@pytest.mark.parametrize("step", ["pause", "write 1", "confirm", "caches", "commit", "resume"])
def test_b109_a_subscriber_that_is_killed_while_the_engine_is_paused(
    local_store: FaultStore,
    trainer_at: Callable[..., Trainer],
    subscriber_at: At,
    server: FakeServer,
    target: Open,
    model: Model,
    stage: Path,
    tmp_path: Path,
    step: str,
) -> None:
    trainer = trainer_at(local_store)
    trainer.publish(model)
    engine = server.engine
    subscriber_at(local_store, target()).once()
    model = stir(model, 1)
    trainer.publish(model)
    engine.at_step[step], engine.delay[step] = threading.Event(), 0.5
    engine.fail(step)  # the run that the killed one began does not get further
    child = _sidecar(tmp_path / "store", server, stage, tmp_path)
    try:
        assert engine.at_step[step].wait(60)
    finally:
        child.kill()
        child.communicate(timeout=20)
    assert child.returncode == -signal.SIGKILL
    assert engine.paused or step == "pause"
    engine.delay.clear()
    again = subscriber_at(local_store, target())
    with Following(again):
        until(lambda: again.version == 1)
    assert engine.serving() == bits(model)
    assert not engine.paused
    held = engine.state().held
    assert held is not None
    assert (held.version, engine.label) == (1, "1")


def _sidecar(root: Path, server: FakeServer, stage: Path, temporary: Path) -> subprocess.Popen[str]:
    """`weightcast subscribe` as a process of its own."""
    code = "from weightcast.cli.main import main; main()"
    command = [
        sys.executable,
        "-P",
        "-c",
        code,
        "subscribe",
        str(root),
        "--engine",
        "vllm",
        "--url",
        server.url,
    ]
    env = os.environ | {"WEIGHTCAST_TOKEN": TOKEN, "WEIGHTCAST_STAGE": str(stage), "TMPDIR": str(temporary)}
    return subprocess.Popen(
        [*command, "--json"], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_an_install_of_an_engine_that_is_no_more_is_forgotten(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    stage: Path,
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    subscriber.once()
    engine.fail("write 0", 2)
    trainer.publish(stir(model, 1))
    with pytest.raises(Corrupt):
        subscriber._advance(thorough=True)
    engine.restart()
    installs = engine.calls.count("install")
    assert subscriber.once().version == 1
    assert (
        engine.calls.count("install") == installs + 1
    )  # of version 1, decoded anew against what it started with
    assert engine.serving() == bits(stir(model, 1))


def test_a_plan_is_kept_over_many_versions_and_another_layout_needs_another(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    stage: Path,
) -> None:
    trainer.publish(model)
    vllm = target()
    subscriber = subscriber_at(store, vllm)
    subscriber.once()
    smaller = {name: tensor for name, tensor in model.items() if name != "bool"}
    trainer.publish(smaller, drop=["bool"])
    trainer.publisher.snapshot()
    subscriber.once()
    assert engine.calls.count("attach") == 2
    assert len(list(stage.rglob("layout-*.arrow"))) == 1


def _held(subscriber: Subscriber) -> Held:
    position = subscriber.position
    assert position is not None
    manifest = position.manifest
    return Held(
        stream=manifest.stream,
        version=manifest.version,
        sha256=position.sha256,
        digest=manifest.digest_after,
    )


def test_a_kept_request_of_another_release_is_ignored(tmp_path: Path) -> None:
    staging = Staging("http://h:1", tmp_path)
    with staging.exclusive():
        (staging.folder / "install.json").write_text(json.dumps({"from": "the future"}))
        assert staging.kept() is None
        staging.sweep()
        assert not (staging.folder / "install.json").exists()


def test_the_lock_is_one_for_each_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcast.subscriber.engines.staging._LOCK_WAIT_S", 0.1)
    with Staging("http://h:1", tmp_path).exclusive():
        with Staging("http://h:2", tmp_path).exclusive():
            pass
        with (
            pytest.raises(StorageError, match="another subscriber"),
            Staging("http://h:1", tmp_path).exclusive(),
        ):
            pass
