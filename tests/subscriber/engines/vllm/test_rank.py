"""One rank of a server, asked as vLLM's collective_rpc asks it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightcast.subscriber.engines.vllm import plan, rank
from weightcast.subscriber.engines.vllm.copies import Copies
from weightcast.subscriber.engines.vllm.dense import Judgement
from weightcast.subscriber.engines.vllm.ops import Reply

from .fake import LAYOUT, Client, Server, Worker, bits, expected, fill, save, served


def ask(worker: Worker, folder: Path, op: str, **request: Any) -> Reply:
    """The one reply to an op."""
    rank.answer(worker, op, json.dumps(request), str(folder))
    (path,) = folder.glob("*.json")
    reply = Reply.model_validate_json(path.read_bytes())
    assert path.stem == reply.row.rank
    path.unlink()
    return reply


def reads_all(server: Server) -> bool:
    """Whether what every rank keeps of its parts is what a full read finds."""
    plans = [worker.state._plan for worker in server.client.workers]
    return all(found is not None and found.parts == found.live.parts() for found in plans)


@pytest.mark.parametrize(
    ("number", "world", "pipeline", "dp", "name"),
    [
        (0, 1, 1, 0, "dp0-pp0-tp0"),
        (3, 4, 1, 2, "dp2-pp0-tp3"),
        (5, 8, 2, 0, "dp0-pp1-tp1"),
        (6, 4, 2, 1, "dp1-pp1-tp0"),  # a launcher that counts over all replicas
    ],
)
def test_a_rank_is_called_by_its_place(number: int, world: int, pipeline: int, dp: int, name: str) -> None:
    worker = Worker(number, 1, dp)
    worker.vllm_config.parallel_config = SimpleNamespace(
        world_size=world, pipeline_parallel_size=pipeline, data_parallel_index=dp
    )
    assert rank.Rank(worker).name == name


def test_each_process_has_a_name_that_a_restart_changes(tmp_path: Path) -> None:
    worker = Worker(0, 1, 0)
    rows = [ask(worker, tmp_path, "state").row for _ in range(2)] + [
        ask(Worker(0, 1, 0), tmp_path, "state").row
    ]
    assert rows[0].process == rows[1].process != rows[2].process


@pytest.mark.parametrize("op", ["attach", "read", "write", "no such op"])
def test_whatever_fails_is_a_reply(tmp_path: Path, op: str) -> None:
    reply = ask(Worker(0, 1, 0), tmp_path, op, surprise=1)
    assert reply.fault is not None
    assert reply.fault.kind == "storage"
    assert reply.fault.message.startswith(f"{op}: ")


def test_a_folder_that_is_gone_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        rank.answer(Worker(0, 1, 0), "state", "{}", str(tmp_path / "gone"))
    assert "cannot answer in" in caplog.text


def test_a_write_needs_its_preflight(server: Server, tmp_path: Path) -> None:
    server.ready()
    worker = server.client.workers[0]
    reply = ask(worker, tmp_path, "write", **server.request(0, 1))
    assert reply.fault is not None
    assert (reply.fault.kind, reply.row.whole) == ("storage", True)
    assert bits(worker) == expected(worker, server.states[0])


def test_parts_follow_what_is_written(server: Server) -> None:
    server.ready()
    assert reads_all(server)
    assert server.install(0, 1)[0] == 200
    assert reads_all(server)


def test_parts_are_read_anew_after_a_write_of_unknown_outcome(server: Server) -> None:
    server.ready()
    worker = server.client.workers[0]
    live = worker.live
    plain = live.write

    def write(changes: Any, **_: Any) -> Any:
        plain(changes)
        raise RuntimeError("after the last byte")

    live.write = write
    assert server.install(0, 1)[0] == 500
    live.write = plain
    assert server.install(0, 1)[0] == 200  # moves nothing on this rank, and the part is still right
    assert reads_all(server)


def test_attach_leaves_what_is_known_of_the_weights(server: Server, tmp_path: Path) -> None:
    server.ready()
    server.session = "two"
    server.attach()
    assert all(row["held"] == server.held[0].model_dump() for row in server.state()["ranks"])


def test_an_attach_that_fails_leaves_the_plan_before(server: Server) -> None:
    server.ready()
    path = server.folder / "layout.arrow"
    status, fault = server.post("/attach", session="two", layout=str(path), layout_sha256="0" * 64)
    assert (status, fault["kind"]) == (500, "corrupt")
    assert server.install(0, 1)[0] == 200


def test_an_engine_that_moves_experts_is_refused(server: Server) -> None:
    for worker in server.client.workers:
        worker.vllm_config.parallel_config.enable_eplb = True
    path = server.folder / "layout.arrow"
    path.write_bytes(LAYOUT.encoded)
    status, fault = server.post("/attach", layout=str(path), layout_sha256=LAYOUT.sha256)
    assert (status, fault["kind"], fault["hint"]) == (422, "usage", "start it without --enable-eplb")


# Tensors that cannot be patched where they lie.


@pytest.fixture
def repacking(stage: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's side: the kernel of `down` has a copy of its own, which a reload renews."""
    seen: dict[str, Any] = {"kernel": {}, "reloads": 0}

    def judge(model: Any, config: Any, refused: Any, source: Any) -> Judgement:
        dense = {name: why for name, why in refused.items() if name == "down.weight"}
        assert all(source(name).shape == LAYOUT[name].shape for name in refused)
        return Judgement(dense, {n: f"{w}; no" for n, w in refused.items() if n not in dense}, ())

    def reload(model: Any, config: Any, names: Any, source: Any) -> None:
        assert names == ["down.weight"]
        columns = source("down.weight").narrow(1, model.tp * model.rows, model.rows)
        seen["kernel"][id(model)] = columns.clone()
        seen["reloads"] += 1

    monkeypatch.setattr(
        plan, "find_copies", lambda model: Copies((), {"down": "the kernel has a copy of it"})
    )
    monkeypatch.setattr(plan, "judge", judge)
    monkeypatch.setattr(plan, "reload", reload)
    return seen


def attach(server: Server, **more: Any) -> dict[str, Any]:
    path = server.folder / "layout.arrow"
    path.write_bytes(LAYOUT.encoded)
    status, report = server.post("/attach", layout=str(path), layout_sha256=LAYOUT.sha256, **more)
    assert status == 200, report
    return report


def test_a_kernels_copy_is_refused_by_name(stage: Path, repacking: dict[str, Any]) -> None:
    with served(stage, Client(tp=2)) as server:
        report = attach(server)
        assert report["refused"] == {"down.weight": "dp0-pp0-tp0: down: the kernel has a copy of it"}
        assert report["dense"] == {}
        assert server.serves(0)


def test_without_a_checkpoint_nothing_is_tried(stage: Path, repacking: dict[str, Any]) -> None:
    with served(stage, Client()) as server:
        (server.model / "model.safetensors").unlink()
        report = attach(server, dense=True)
        assert list(report["refused"]) == ["down.weight"]


def test_layers_that_are_reloaded_come_from_the_mirror(
    stage: Path, repacking: dict[str, Any], tmp_path: Path
) -> None:
    with served(stage, Client(tp=2)) as server:
        mirror = tmp_path / "mirror"
        save(server.states[0], mirror)
        report = attach(server, dense=True, mirror=str(mirror))
        assert report["refused"] == {}
        assert list(report["dense"]) == ["down.weight"]
        files = {"layout_sha256": LAYOUT.sha256, "files": [str(mirror / "model.safetensors")]}
        status, fault = server.adopt(0)  # live bits that cannot be read cannot be proved
        assert (status, fault["kind"]) == (500, "corrupt")
        assert not server.post("/verify")[1]["good"]
        status, answer = server.post("/load", **files, target=server.held[0].model_dump())
        assert status == 200, answer
        assert server.post("/verify")[1]["good"]
        save(server.states[1], mirror)
        request = server.request(0, 1) | {"mirror": str(mirror)}
        assert server.post("/install", **request)[0] == 200
        assert repacking["reloads"] == 4  # on two ranks, by the load and the install
        for worker in server.client.workers:
            kernel = repacking["kernel"][id(worker.model)]
            fresh = Worker(worker.rank, 2, 0)
            fill(fresh, server.states[1])
            assert kernel.view(torch.int16).equal(fresh.model.down.data.view(torch.int16))
            assert bits(worker)["gate_up"] == bits(fresh)["gate_up"]
        assert server.post("/verify")[1]["good"]


@pytest.mark.parametrize("mirror", [None, "old"])
def test_an_install_without_the_targets_mirror_is_refused(
    stage: Path, repacking: dict[str, Any], tmp_path: Path, mirror: str | None
) -> None:
    with served(stage, Client(tp=2)) as server:
        folder = tmp_path / "old"
        save(server.states[0], folder)
        attach(server, dense=True, mirror=str(folder))
        files = {"layout_sha256": LAYOUT.sha256, "files": [str(folder / "model.safetensors")]}
        assert server.post("/load", **files, target=server.held[0].model_dump())[0] == 200
        request = server.request(0, 1) | {"mirror": mirror and str(folder)}
        status, fault = server.post("/install", **request)
        if mirror is None:
            assert (status, fault["kind"], fault["paused"]) == (422, "usage", False)
            assert "--mirror" in fault["hint"]
        else:  # only the sum of all parts shows it
            assert (status, fault["kind"], fault["paused"]) == (500, "corrupt", True)


def test_copies_are_packed_again_after_every_write(
    stage: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packed: list[dict[str, bytes]] = []
    monkeypatch.setattr(plan, "find_copies", lambda model: Copies(("layer",), {}))

    def refresh(model: Any, layers: Any) -> None:
        assert layers == ("layer",)
        packed.append(bits(SimpleNamespace(model=model)))  # type: ignore[arg-type]

    monkeypatch.setattr(plan, "refresh", refresh)
    with served(stage, Client()) as server:
        server.ready()
        assert packed == []
        assert server.install(0, 1)[0] == 200
        assert packed == [expected(server.client.workers[0], server.states[1])]
        save(server.states[2], tmp_path)
        files = {"layout_sha256": LAYOUT.sha256, "files": [str(tmp_path / "model.safetensors")]}
        assert server.post("/load", **files, target=server.held[2].model_dump())[0] == 200
        assert packed[1:] == [expected(server.client.workers[0], server.states[2])]


def fault_of(answer: tuple[int, dict[str, Any]]) -> tuple[int, str]:
    return answer[0], answer[1]["kind"]


def repack(server: Server) -> None:
    """As a kernel does that wants its weights in another order, in the same shape."""
    for worker in server.client.workers:
        worker.model.down.data.copy_(worker.model.down.data.flip(0))


def test_a_kernel_that_repacks_into_the_same_shape_is_found(server: Server) -> None:
    """Written as they are in a checkpoint, its weights would read back right and mean something else."""
    repack(server)
    for session in ("one", "two"):  # the second one cannot compare any more, and must not forget
        server.session = session
        report = server.attach()
        assert list(report["refused"]) == ["down.weight"]
        assert "a kernel repacked it" in report["refused"]["down.weight"]
        assert fault_of(server.adopt(0)) == (500, "corrupt")


def test_what_was_never_proved_is_not_overwritten(server: Server, tmp_path: Path) -> None:
    (server.model / "model.safetensors").unlink()  # as if it had come from a hub
    repack(server)
    report = server.attach()
    assert report["refused"] == {}
    save(server.states[1], tmp_path)
    files = {"layout_sha256": LAYOUT.sha256, "files": [str(tmp_path / "model.safetensors")]}
    answer = server.post("/load", **files, target=server.held[1].model_dump())
    assert fault_of(answer) == (422, "usage")
    assert "weightcast pull" in answer[1]["hint"]
    assert not server.client.is_paused_now
    for worker in server.client.workers:
        fill(worker, server.states[0])
    server.attach()
    assert server.adopt(0)[0] == 200  # a proof, too
    assert server.post("/load", **files, target=server.held[1].model_dump())[0] == 200
    assert server.serves(1)
