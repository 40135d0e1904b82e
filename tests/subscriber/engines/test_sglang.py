"""An SGLang server kept at the head of a stream, through a checkpoint folder and its own routes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightcast.schemas.errors import Conflict, Corrupt, StorageError, UsageError
from weightcast.subscriber import CheckpointFolder, Subscriber
from weightcast.subscriber.engines.sglang import SglangServer
from weightcast.subscriber.engines.sglang_http import Answer, SglangApi

from ...faultstore import FaultStore
from ...waiting import until
from ..conftest import Trainer
from ..kit import Model, bits, loaded, stir
from .fake_sglang import FakeSglang, hash_of

SubscriberAt = Callable[..., Subscriber]
TargetAt = Callable[..., SglangServer]
LOAD, PAUSE, FLUSH, CONTINUE = (
    "/update_weights_from_disk", "/pause_generation", "/flush_cache", "/continue_generation",
)  # fmt: skip


def weights(number: int) -> Model:
    """Weights number 0 are what servers are started with; the stream's version 0 has number 1, and so on."""
    model: Model = {
        "embed": torch.zeros((64, 8), dtype=torch.bfloat16),
        "layer.w": torch.zeros((8, 4), dtype=torch.bfloat16),
        "norm": torch.zeros((5,)),
    }
    for seed in range(number):
        model = stir(model, seed + 1)
    return model


@pytest.fixture(autouse=True)
def _stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_STAGE", str(tmp_path / "stage"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeSglang]:
    """Started with version 0."""
    base = tmp_path / "base"
    base.mkdir()
    save_file(weights(0), base / "model.safetensors")
    found = FakeSglang(base)
    yield found
    found.stop()


@pytest.fixture
def target_at(tmp_path: Path, server: FakeSglang) -> Iterator[TargetAt]:
    """Opens targets on `server`; all have the folder `kept`, unless another is named."""
    opened: list[SglangServer] = []

    def make(folder: str = "kept", **options: Any) -> SglangServer:
        opened.append(SglangServer(server.url, tmp_path / folder, **options))
        return opened[-1]

    yield make
    for target in opened:
        target.close()


@contextmanager
def following(subscriber: Subscriber) -> Iterator[list[int]]:
    """Follow in a thread; gives the versions that were told."""
    stop, told = threading.Event(), list[int]()

    def run() -> None:
        for position in subscriber.follow(stop):
            told.append(position.version)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run)
        try:
            yield told
        finally:
            stop.set()
            ended.result(30)


def generate(server: FakeSglang, text: str = "prompt", tokens: int = 1) -> dict[str, Any]:
    """What a client of the server gets."""
    return (
        SglangApi(server.url, server.key, load_s=30)
        ._call("/generate", {"text": text, "tokens": tokens}, 30)
        .body
    )


def test_a_server_serves_each_version_from_a_path_of_its_own(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    target = target_at()
    subscriber = subscriber_at(store, target)
    for number in range(4):
        trainer.publish(weights(number + 1), files={"config.json": b"{}"})
        assert subscriber.once().version == number
        assert server.serves() == bits(weights(number + 1)) == loaded(target.folder)
        assert server.label == str(number)
        assert server.paused is None
        assert target.paused_s is not None
        assert 0 < target.paused_s < 10
    paths = [load["model_path"] for load in server.loads()]
    assert len(set(paths)) == 4
    assert [p.name for p in (target.folder / ".weightcast" / "versions").iterdir()] == [Path(paths[-1]).name]
    assert (Path(paths[-1]) / "config.json").read_bytes() == b"{}"


def test_b185_the_cache_of_the_old_weights_is_gone_before_generation_goes_on(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at())
    trainer.publish(weights(1))
    subscriber.once()
    assert generate(server)["prefill"] == hash_of(bits(weights(1)))
    trainer.publish(weights(2))
    server.calls.clear()
    subscriber.once()
    assert server.routes() == [PAUSE, LOAD, FLUSH, CONTINUE]
    assert server.loads()[0]["flush_cache"] is True
    assert generate(server)["prefill"] == hash_of(bits(weights(2)))


def test_b189_abort_every_answer_is_of_one_version(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at(pause="abort"))
    trainer.publish(weights(1))
    subscriber.once()
    trainer.publish(weights(2))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, server, "long", 100_000)
        until(lambda: bool(server._requests))
        subscriber.once()
        found = answer.result(10)
    assert found["meta_info"]["finish_reason"] == {"type": "abort"}
    assert set(found["text"]) <= {hash_of(bits(weights(1)))}
    assert server.loads()[-1]["abort_all_requests"] is True


def test_b189_retract_requests_go_on_with_a_new_cache(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at(pause="retract"))
    trainer.publish(weights(1))
    subscriber.once()
    trainer.publish(weights(2))
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, server, "long", 200)
        until(lambda: bool(server._requests) and server._requests[0].kv is not None)
        subscriber.once()
        found = answer.result(30)
    assert found["meta_info"]["finish_reason"] == {"type": "length"}
    assert len(found["text"]) == 200
    assert found["text"][-1] == found["prefill"] == hash_of(bits(weights(2)))
    assert server.loads()[-1]["abort_all_requests"] is False


def test_b189_a_pause_that_keeps_the_cache_is_no_choice(target_at: TargetAt) -> None:
    with pytest.raises(UsageError, match=r"'in_place' cannot be used.*abort or retract"):
        target_at(pause="in_place")


def test_b191_a_refused_flush_is_tried_until_it_succeeds(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at())
    trainer.publish(weights(1))
    subscriber.once()
    generate(server)
    trainer.publish(weights(2))
    server.calls.clear()
    server.refuse_flush_until = time.monotonic() + 1.5
    assert subscriber.once().version == 1
    assert time.monotonic() > server.refuse_flush_until
    assert server.routes().count(FLUSH) >= 4
    assert server.routes()[-1] == CONTINUE
    assert generate(server)["prefill"] == hash_of(bits(weights(2)))


def test_b191_when_time_is_up_it_is_an_error_and_the_server_stays_paused(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    server: FakeSglang,
    target_at: TargetAt,
    caplog: pytest.LogCaptureFixture,
) -> None:
    subscriber = subscriber_at(store, target_at(flush_s=0.3))
    trainer.publish(weights(1))
    subscriber.once()
    trainer.publish(weights(2))
    server.refuse_flush_until = time.monotonic() + 3600
    with following(subscriber) as told:
        until(lambda: "did not drop the cache" in subscriber.status().error)
        assert server.paused == "retract"
        assert not subscriber.status().ready
        until(lambda: told == [0])  # the error is shown first
        assert any(r.levelno == logging.ERROR and "stays paused" in r.message for r in caplog.records)
        server.refuse_flush_until = 0
        until(lambda: told == [0, 1])
    assert server.paused is None
    assert server.serves() == bits(weights(2))


def test_b106_a_failed_load_is_tried_again_from_the_folder_without_a_download(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    target = target_at()
    subscriber = subscriber_at(store, target)
    trainer.publish(weights(1))
    subscriber.once()
    trainer.publish(weights(2))
    server.fail_loads = 3
    with pytest.raises(Corrupt, match="does not load"):
        subscriber._advance(thorough=True)
    assert loaded(target.folder) == bits(weights(2))
    assert (server.serves(), server.label) == (bits(weights(1)), "0")
    assert (subscriber.status().version, subscriber.status().ready) == (0, False)
    store.calls.clear()
    assert subscriber.once().version == 1
    assert server.serves() == bits(weights(2))
    assert not [call for call in store.calls if "shard" in str(call) or "snapshot" in str(call)]


def test_a_load_that_stops_half_way_is_done_again_before_anything_is_generated(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at())
    trainer.publish(weights(1))
    subscriber.once()
    trainer.publish(weights(2))
    server.calls.clear()
    server.torn_loads = 1
    subscriber.once()
    assert server.routes() == [PAUSE, LOAD, FLUSH, LOAD, FLUSH, CONTINUE]
    assert server.serves() == bits(weights(2))


def test_a_server_that_keeps_refusing_stays_paused_and_generates_nothing(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    target = target_at()
    subscriber = subscriber_at(store, target)
    trainer.publish(weights(1))
    subscriber.once()
    trainer.publish(weights(2))
    server.torn_loads = 1_000_000
    with following(subscriber) as told, ThreadPoolExecutor(1) as pool:
        until(lambda: len(server.loads()) >= 5)
        answer = pool.submit(generate, server)
        until(lambda: len({load["model_path"] for load in server.loads()}) >= 7)
        assert len(list((target.folder / ".weightcast" / "versions").iterdir())) <= 5
        assert not answer.done()
        assert not subscriber.status().ready
        assert "Rolling back" in subscriber.status().error
        server.torn_loads = 0
        until(lambda: 1 in told)
        assert answer.result(10)["text"] == [hash_of(bits(weights(2)))]


def test_b193_a_restarted_server_is_loaded_again(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at())
    for number in (1, 2):
        trainer.publish(weights(number))
        subscriber.once()
    with following(subscriber):
        server.restart()
        until(lambda: server.serves() == bits(weights(2)) and server.paused is None)
        until(lambda: subscriber.status().ready)
    assert server.label == "1"


def test_b194_a_server_that_woke_up_without_weights_is_loaded_again(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    """SGLang says nowhere that it slept: whoever wakes it moves the label."""
    subscriber = subscriber_at(store, target_at())
    trainer.publish(weights(1))
    subscriber.once()
    api = SglangApi(server.url, None, load_s=30)
    api._call("/release_memory_occupation", {}, 10)
    api._call("/resume_memory_occupation", {}, 10)
    assert server.serves() != bits(weights(1))
    api._call("/update_weight_version", {"new_version": "none", "abort_all_requests": False}, 10)
    subscriber.once()
    assert server.serves() == bits(weights(1))
    assert server.label == "0"


def test_b196_loads_never_overlap_and_the_newest_version_wins(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at())
    other = subscriber_at(store, target_at("elsewhere"))
    trainer.publish(weights(1))
    subscriber.once()
    server.load_s = 0.5
    trainer.publish(weights(2))
    with following(subscriber) as told:
        until(lambda: server._loads_open == 1)
        trainer.publish(weights(3))
        with pytest.raises(Conflict, match="has a subscriber on this host already"):
            other.once()
        until(lambda: told[-1:] == [2])
    assert server.most_loads_open == 1
    assert server.serves() == bits(weights(3))


def test_b196_a_subscriber_elsewhere_is_noticed(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    server: FakeSglang,
    target_at: TargetAt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subscriber = subscriber_at(store, target_at())
    trainer.publish(weights(1))
    subscriber.once()
    monkeypatch.setenv("WEIGHTCAST_STAGE", str(tmp_path / "stage of another host"))
    subscriber_at(store, target_at("elsewhere")).once()
    with pytest.raises(Conflict, match="another subscriber's"):
        subscriber.once()


def test_b196_a_load_whose_caller_gave_up_is_waited_for(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    target = target_at(load_s=0.4)
    subscriber = subscriber_at(store, target)
    trainer.publish(weights(1))
    subscriber.once()
    trainer.publish(weights(2))
    server.load_s = 1.0
    with pytest.raises(Corrupt, match="does not answer /update_weights_from_disk: timed out"):
        subscriber._advance(thorough=True)
    with pytest.raises(StorageError, match="does not answer /server_info: timed out"):
        subscriber._advance(thorough=True)
    server.load_s = 0.0
    until(lambda: server._loads_open == 0)
    assert subscriber.once().version == 1
    assert server.most_loads_open == 1
    assert server.serves() == bits(weights(2))


@pytest.mark.parametrize(
    ("route", "status"),
    [("/model_info", 404), ("/model_info", 405), (LOAD, 404), (LOAD, 405), (PAUSE, 404), (CONTINUE, 404)],
)
def test_b198_a_missing_route_is_named_at_the_start(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    server: FakeSglang,
    target_at: TargetAt,
    route: str,
    status: int,
) -> None:
    trainer.publish(weights(1))
    server.missing[route] = status
    with pytest.raises(UsageError, match=rf"has no (/get)?.*answers {status}.*sglang.launch_server"):
        subscriber_at(store, target_at()).once()
    assert server.loads() == []
    assert server.paused is None


def test_b198_a_route_that_takes_no_post_is_named_before_anything_is_loaded(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    """A route that exists answers the first probe with 405, too."""
    trainer.publish(weights(1))
    server.missing[PAUSE] = 405
    with pytest.raises(UsageError, match=r"has no /pause_generation: it answers 405"):
        subscriber_at(store, target_at()).once()
    assert server.loads() == []


def test_b198_something_that_takes_an_update_without_a_path_is_no_server(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    trainer.publish(weights(1))
    server.careless = True
    with pytest.raises(UsageError, match="without a path with success"):
        subscriber_at(store, target_at()).once()


def test_b198_success_without_effect_is_found_by_the_servers_own_checksums(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at())
    trainer.publish(weights(1))
    subscriber.once()
    trainer.publish(weights(2))
    server.stub = True
    for _ in range(3):  # also when it is tried again
        with pytest.raises(Corrupt, match="by its own checksums no weight changed"):
            subscriber._advance(thorough=True)
    assert server.paused is not None
    server.stub = False
    assert subscriber.once().version == 1
    assert server.serves() == bits(weights(2))


def test_b198_success_without_a_new_label_is_no_success(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    trainer.publish(weights(1))
    server.mute = True
    with pytest.raises(Corrupt, match=r"says that it serves .*base as 'default'"):
        subscriber_at(store, target_at()).once()
    assert server.paused is not None


def test_b199_a_server_that_dies_in_a_load_is_waited_for(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    server: FakeSglang,
    target_at: TargetAt,
    caplog: pytest.LogCaptureFixture,
) -> None:
    subscriber = subscriber_at(store, target_at())
    trainer.publish(weights(1))
    subscriber.once()
    server.deadly_loads = 1
    with following(subscriber) as told:
        trainer.publish(weights(2))
        until(lambda: server._http is None)
        time.sleep(2.5)
        assert not subscriber.status().ready
        trainer.publish(weights(3))
        tries = sum("not moving on" in record.message for record in caplog.records)
        assert 2 <= tries <= 12  # 0.02 s, doubled each time
        server.start()
        until(lambda: 2 in told)
    assert server.serves() == bits(weights(3))
    assert server.label == "2"


def test_b200_a_server_with_shapes_of_its_own_takes_version_after_version(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at())
    for number in (2, 3):
        trainer.publish(weights(number))
        subscriber.once()
        assert server._weights["layer.w"].shape == (4, 8)
        assert server.serves() == bits(weights(number))


def test_b202_a_version_without_changes_is_an_update_as_any_other(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    subscriber = subscriber_at(store, target_at())
    trainer.publish(weights(1))
    subscriber.once()
    server.calls.clear()
    trainer.publish(weights(1), files={"adapter_config.json": b"{}"})
    subscriber.once()
    assert server.routes() == [PAUSE, LOAD, FLUSH, CONTINUE]
    assert server.label == "1"


def test_b201_a_cache_outside_the_servers_memory_is_dropped_as_well(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    server.storage = {}
    subscriber = subscriber_at(store, target_at())
    for number in (1, 2):
        trainer.publish(weights(number))
        subscriber.once()
        assert generate(server)["prefill"] == hash_of(bits(weights(number)))
    assert server.routes()[-5:] == [PAUSE, LOAD, FLUSH, "/hicache/storage-backend/clear", CONTINUE]


@pytest.mark.parametrize("left_open", [False, True])
def test_a_server_that_asks_for_a_session_gets_one(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    server: FakeSglang,
    target_at: TargetAt,
    left_open: bool,
) -> None:
    server.needs_session = True
    if left_open:
        SglangApi(server.url, None, load_s=30).begin()
        server.torn_loads = 1  # the first load takes place in the session of another
    trainer.publish(weights(1))
    subscriber_at(store, target_at()).once()
    assert server.serves() == bits(weights(1))
    assert server._session is left_open


def test_the_key_of_the_server(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    server.key = "right"
    trainer.publish(weights(1))
    wrong = target_at(key="wrong")
    with pytest.raises(UsageError, match=r"refuses the key: 401.*--admin-api-key"):
        subscriber_at(store, wrong).once()
    wrong.close()
    subscriber_at(store, target_at(key="right")).once()
    assert server.serves() == bits(weights(1))


def test_a_subscriber_that_starts_again_leaves_a_server_alone_that_is_where_it_should_be(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    trainer.publish(weights(1))
    first = target_at()
    subscriber_at(store, first).once()
    first.close()
    server.calls.clear()
    subscriber = subscriber_at(store, target_at())
    assert subscriber.once().version == 0
    assert server.routes() == []
    trainer.publish(weights(2))
    subscriber.once()
    assert server.serves() == bits(weights(2))


def test_a_subscriber_killed_in_an_install_leaves_work_that_the_next_one_finishes(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    trainer.publish(weights(1))
    first = target_at()
    subscriber = subscriber_at(store, first)
    subscriber.once()
    trainer.publish(weights(2))
    server.deadly_loads = 1
    with pytest.raises(Corrupt, match="the folder is at version 1, the server is not"):
        subscriber._advance(thorough=True)
    until(lambda: server._http is None)
    first.close()
    server.start()
    server.paused = "retract"
    assert subscriber_at(store, target_at()).once().version == 1
    assert server.serves() == bits(weights(2))
    assert server.paused is None


def test_a_folder_is_proved_before_the_server_reads_it(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    trainer.publish(weights(1))
    trainer.publisher.snapshot()
    first = target_at()
    subscriber_at(store, first).once()
    first.close()
    (file,) = first._folder.weights()
    data = bytearray(file.read_bytes())
    data[-3] ^= 0x40
    with file.open("r+b") as torn:  # as after a power loss
        torn.write(data)
    server.restart()
    served: list[str] = []
    load = server._load

    def watched(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = load(body)
        served.append(hash_of(server.serves()))
        return answer

    server._load = watched  # type: ignore[method-assign]
    subscriber_at(store, target_at()).once()
    assert served == [hash_of(bits(weights(1)))]


def test_the_folder_that_the_server_was_started_with_can_be_the_kept_one(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    trainer.publish(weights(0))
    subscriber = subscriber_at(store, target_at("base"))
    subscriber.once()
    trainer.publish(weights(1))
    subscriber.once()
    assert server.serves() == bits(weights(1)) == loaded(server.base)
    server.restart()
    subscriber.once()
    assert server.label == "1"


def test_files_that_no_index_names_are_not_given_to_the_server(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    target = target_at()
    subscriber = subscriber_at(store, target)
    trainer.publish(weights(1))
    subscriber.once()
    save_file(weights(0), target.folder / "consolidated.safetensors")
    trainer.publish(weights(2))
    subscriber.once()
    names = {p.name for p in Path(server.path).iterdir()}
    assert "consolidated.safetensors" not in names
    assert {p.name for p in target._folder.weights()} <= names


def test_a_folder_kept_before_is_taken_over(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    server: FakeSglang,
    target_at: TargetAt,
    tmp_path: Path,
) -> None:
    trainer.publish(weights(1))
    subscriber_at(store, CheckpointFolder(tmp_path / "kept")).once()
    subscriber_at(store, target_at()).once()
    assert server.serves() == bits(weights(1))


@pytest.mark.parametrize(
    "url", ["127.0.0.1:30000", "ftp://host", "http://", "http://host:port", "http://host/?a=b"]
)
def test_what_is_no_url(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no URL of a server"):
        SglangServer(url, tmp_path)


def test_a_key_in_the_url_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds a password") as refused:
        SglangServer("http://user:s3cret@127.0.0.1:1", tmp_path)
    assert "s3cret" not in str(refused.value)


def test_a_server_that_is_not_there_yet(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, server: FakeSglang, target_at: TargetAt
) -> None:
    trainer.publish(weights(1))
    server.stop()
    with following(subscriber_at(store, target_at())) as told:
        time.sleep(0.3)
        assert told == []
        server.start()
        until(lambda: told == [0])
    assert server.serves() == bits(weights(1))


def test_an_answer_is_good_only_if_status_and_body_say_so() -> None:
    assert Answer(200, {}, "").good
    assert Answer(200, {"success": True}, "").good
    assert not Answer(200, {"success": False, "message": "no"}, "").good
    assert not Answer(400, {"success": True}, "").good
    assert Answer(400, {}, "why\n").reason == "why"
    assert Answer(500, {}, "").reason == "status 500"
