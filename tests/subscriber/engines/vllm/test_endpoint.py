"""The routes inside a vLLM server, over a fake engine that keeps vLLM's rules."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from weightcast.codec import Changes
from weightcast.schemas.engine import InstallRequest
from weightcast.schemas.errors import StorageError
from weightcast.subscriber.engines.staging import map_values
from weightcast.subscriber.engines.vllm import gate, install, ops, service
from weightcast.subscriber.engines.vllm.gate import Gate

from .fake import LAYOUT, TOKEN, Client, Server, flat, folded, held, served

ROUTES = ["/attach", "/adopt", "/read", "/install", "/load", "/verify"]


def fault(answer: tuple[int, dict[str, Any]]) -> tuple[int, str, bool]:
    return answer[0], answer[1]["kind"], answer[1]["paused"]


def fail_write(server: Server, rank: int, times: int, *, torn: bool) -> None:
    """Let the next writes of a rank fail, before anything is written or half way."""
    live, left = server.client.workers[rank].live, times
    plain = live.write

    def write(changes: dict[str, Changes], *, checked: bool) -> Any:
        nonlocal left
        if not left:
            return plain(changes, checked=checked)
        left -= 1
        if torn:
            plain({d: Changes(d, c.positions[::2], c.values[::2]) for d, c in changes.items()})
        raise StorageError("armed")

    live.write = write


# Who may ask.


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("token", [None, "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN])
def test_no_route_answers_without_the_token(server: Server, path: str, token: str | None) -> None:
    headers = {} if token is None else {"authorization": token}
    answer = server.http.post(f"/weightcast{path}", json={}, headers=headers)
    assert answer.status_code == 401
    assert "WEIGHTCAST_TOKEN" in answer.json()["hint"]
    assert server.http.get("/weightcast/state", headers=headers).status_code == 401
    assert server.client.log == []


def test_without_a_token_of_its_own_a_server_answers_nobody(
    stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEIGHTCAST_TOKEN")
    with served(stage, Client()) as server:
        answer = server.http.get("/weightcast/state", headers={"authorization": "Bearer "})
    assert answer.status_code == 401
    assert answer.json()["hint"] == "start the server with WEIGHTCAST_TOKEN in its environment"


@pytest.mark.parametrize(
    ("peer", "remote", "status"),
    [
        ("127.0.0.1", "", 200),
        ("127.8.0.9", "", 200),
        ("::1", "", 200),
        ("::ffff:127.0.0.1", "", 200),
        ("10.0.0.7", "", 403),
        ("::ffff:10.0.0.7", "", 403),
        ("localhost.example.org", "", 403),
        ("10.0.0.7", "1", 200),
        ("10.0.0.7", "yes", 403),
    ],
)
def test_only_this_host_is_answered_unless_the_operator_says_otherwise(
    stage: Path, monkeypatch: pytest.MonkeyPatch, peer: str, remote: str, status: int
) -> None:
    monkeypatch.setenv("WEIGHTCAST_VLLM_REMOTE", remote)
    with served(stage, Client(), peer) as server:
        answer = server.http.get("/weightcast/state", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == status


def test_b198_a_server_of_an_unsupported_release_says_so(
    stage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightcast.subscriber.engines.vllm import endpoint, versions

    monkeypatch.setattr(endpoint, "current", lambda: versions.supported("0.25.0"))
    with served(stage, Client()) as server:
        answer = server.http.get("/weightcast/state", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 503
    assert "vLLM 0.25.0: not supported" in answer.json()["message"]


def test_what_is_not_a_request_is_refused(server: Server) -> None:
    assert fault(server.post("/verify", surprise=1)) == (422, "usage", False)
    answer = server.http.post(
        "/weightcast/verify", content=b"{", headers={"authorization": f"Bearer {TOKEN}"}
    )
    assert answer.status_code == 422


# What goes right.


def test_state_says_what_every_rank_holds(server: Server) -> None:
    before = server.state()
    assert [row["rank"] for row in before["ranks"]] == ["dp0-pp0-tp0", "dp0-pp0-tp1"]
    assert (before["engine"], before["model"], before["weight_version"]) == (
        "vllm 0.32.0",
        "/models/tiny",
        "default",
    )
    assert not before["paused"]
    assert all(row["held"] is None and row["whole"] for row in before["ranks"])
    server.ready()
    after = server.state()
    assert all(row["held"] == server.held[0].model_dump() for row in after["ranks"])
    assert all(row["session"] == "one" and row["layout"] == LAYOUT.sha256 for row in after["ranks"])
    assert [r["process"] for r in before["ranks"]] == [r["process"] for r in after["ranks"]]
    assert before["ranks"][0]["process"] != before["ranks"][1]["process"]


def test_attach_proves_the_live_bits_and_changes_nothing(server: Server) -> None:
    report = server.attach()
    assert (report["refused"], report["tensors"]) == ({}, 4)
    assert report["digest"] == server.held[0].digest
    assert server.serves(0)


def test_read_gives_the_live_bits_of_all_ranks(server: Server) -> None:
    server.ready()
    at = {"BF16": [0, 7, 31, 32, 300, 511, 767], "F32": [0, 7]}
    status, _ = server.read(at)
    assert status == 200
    counts = {dtype: len(found) for dtype, found in at.items()}
    values = map_values(server.folder / "values", counts, writable=False)
    for dtype, positions in at.items():
        assert values[dtype].tolist() == flat(server.states[0], dtype)[positions].tolist()
    assert server.client.log == ["read"]  # without a pause


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_b185_b189_an_install_writes_between_pause_and_caches(
    stage: Path, pause: str, tp: int, dp: int
) -> None:
    with served(stage, Client(tp, dp)) as server:
        server.ready()
        status, report = server.install(0, 1, pause)
        assert status == 200, report
        resets = server.client.log[4:7]
        assert sorted(resets) == ["reset encoder", "reset mm", "reset prefix"]
        assert server.client.log[:4] == ["preflight", f"pause {pause}", "write", "label"]
        assert server.client.log[7:] == ["commit", "resume"]
        assert server.serves(1)
        assert not server.client.is_paused_now
        assert server.client.label == "1"
        assert len(report["ranks"]) == tp * dp
        assert report["written"] == sum(map(len, folded(server.states[:2]).values()))
        assert all(row["held"]["version"] == 1 and row["whole"] for row in report["ranks"])
        assert 0 <= report["drain_s"] <= report["drain_s"] + report["write_s"] <= report["paused_s"]
        assert list(stage.glob("call-*")) == []


def test_versions_follow_one_another_and_fold(server: Server) -> None:
    server.ready()
    assert server.install(0, 1)[0] == 200
    assert server.install(0, 3)[0] == 200  # from a version before the one that is held, over it
    assert server.serves(3)
    status, report = server.post("/verify")
    assert (status, report["good"], report["faults"]) == (200, True, [])
    assert report["digest"] == server.held[3].digest


def test_what_is_held_everywhere_is_not_installed_again(server: Server) -> None:
    server.ready()
    assert server.install(0, 1)[0] == 200
    server.client.log.clear()
    status, report = server.install(0, 1)
    assert (status, report["written"]) == (200, 0)
    assert server.client.log == ["preflight"]


def test_load_brings_any_engine_to_a_version(server: Server, tmp_path: Path) -> None:
    server.attach()
    server.client.log.clear()
    status, report = server.post("/load", **load_request(server, tmp_path, 2))
    assert status == 200, report
    assert server.serves(2)
    assert server.client.log[:4] == ["preload", "pause keep", "load", "label"]
    assert server.client.log[-2:] == ["commit", "resume"]
    assert server.install(2, 3)[0] == 200
    assert server.serves(3)


def load_request(server: Server, folder: Path, version: int) -> dict[str, Any]:
    """A checkpoint of a version, and the request to load it."""
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    state = server.states[version]
    tensors = {n: torch.from_numpy(b.copy()).view(kinds[LAYOUT[n].dtype]) for n, b in state.items()}
    path = folder / f"{version}.safetensors"
    safetensors.torch.save_file(tensors, path)
    return {
        "layout_sha256": LAYOUT.sha256,
        "files": [str(path)],
        "target": server.held[version].model_dump(),
    }


# What is refused, with nothing done.


def test_a_wrong_base_leaves_the_server_serving(server: Server) -> None:
    server.ready()
    assert fault(server.install(1, 2)) == (500, "corrupt", False)
    assert server.client.log == ["preflight"]
    assert server.serves(0)


def test_another_session_is_refused_until_it_attaches(server: Server) -> None:
    server.ready()
    server.session = "two"
    for path, body in (("/install", server.request(0, 1)), ("/adopt", {"held": server.held[0].model_dump()})):
        assert fault(server.post(path, **body)) == (409, "conflict", False)
    assert fault(server.read({"BF16": [1]})) == (409, "conflict", False)
    server.attach()
    assert server.install(0, 1)[0] == 200  # what is held outlives the session
    server.session = "one"
    assert fault(server.install(1, 2)) == (409, "conflict", False)
    assert server.serves(1)


def test_b193_a_server_that_nobody_attached_to_says_so(server: Server) -> None:
    assert fault(server.install(0, 1)) == (500, "storage", False)
    assert fault(server.adopt(0)) == (500, "storage", False)
    assert fault(server.post("/verify", session=None)) == (500, "storage", False)


def test_adopt_wants_the_bits_to_be_the_version(server: Server) -> None:
    server.attach()
    assert fault(server.adopt(1)) == (500, "corrupt", False)
    assert all(row["held"] is None for row in server.state()["ranks"])
    assert server.client.label == "default"


def test_an_adopted_version_is_what_outputs_say(server: Server) -> None:
    """A server that was started on the head's checkpoint: nothing is written, and rollouts carry a version all the same."""
    server.attach()
    assert server.adopt(0)[0] == 200
    assert server.client.label == "0"


@pytest.mark.parametrize("how", ["outside", "link", "relative", "missing"])
def test_only_files_of_the_stage_folder_are_opened(server: Server, tmp_path: Path, how: str) -> None:
    server.ready()
    request = server.request(0, 1)
    staged, outside = Path(request["staged"]), tmp_path / "outside.arrow"
    outside.write_bytes(staged.read_bytes())
    link = server.folder / "link.arrow"
    link.symlink_to(outside)
    paths = {"outside": outside, "link": link, "relative": Path("staged"), "missing": server.folder / "none"}
    request["staged"] = str(paths[how])
    assert fault(server.post("/install", **request)) == (422, "usage", False)
    assert server.client.log == []


def test_a_load_of_files_that_lack_a_tensor_writes_nothing(server: Server, tmp_path: Path) -> None:
    server.ready()
    request = load_request(server, tmp_path, 1)
    safetensors.torch.save_file({"norm.weight": torch.ones(8)}, request["files"][0])
    answer = server.post("/load", **request)
    assert fault(answer) == (422, "usage", False)
    assert "down.weight" in answer[1]["message"]
    assert server.client.log == ["preload"]
    assert fault(server.post("/load", **(request | {"files": ["x.safetensors"]}))) == (422, "usage", False)
    assert server.serves(0)


def test_a_rank_that_does_not_answer_is_missed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.ready()
    server.client.vllm_config.parallel_config.world_size = 3
    answer = server.install(0, 1)
    assert fault(answer) == (500, "storage", False)
    assert "2 of 3 ranks answered" in answer[1]["message"]


def test_b194_a_sleeping_engine_is_left_alone(server: Server, tmp_path: Path) -> None:
    server.ready()
    server.client.workers[1].asleep = True
    for answer in (
        server.install(0, 1),
        server.read({"BF16": [1]}),
        server.post("/load", **load_request(server, tmp_path, 1)),
    ):
        assert fault(answer) == (500, "storage", False)
        assert "sleeps" in answer[1]["message"]
    assert server.state()["sleeping"]
    assert server.client.log == ["state"]


@pytest.mark.parametrize(("level", "kept"), [(1, True), (2, False)])
def test_b194_weights_that_sleep_throws_away_are_no_version(server: Server, level: int, kept: bool) -> None:
    server.ready()
    server.client.workers[1].sleep(level)
    assert server.client.workers[1].slept == [level]
    assert (server.state()["ranks"][1]["held"] is not None) == kept
    assert (server.install(0, 1)[0] == 200) == kept


def test_bits_that_changed_behind_the_plugin_are_found(server: Server) -> None:
    server.ready()
    server.client.workers[1].model.norm.data[3] = 1.5
    status, report = server.post("/verify", session=None)
    assert (status, report["good"]) == (200, False)
    assert "dp0-pp0-tp0 and dp0-pp0-tp1 hold different bits" in report["faults"][0]
    assert fault(server.install(0, 1)) == (500, "corrupt", False)  # and nothing is built on them
    assert server.client.log == ["verify", "preflight"]


def test_bits_that_all_ranks_changed_are_found(server: Server) -> None:
    server.ready()
    for worker in server.client.workers:
        worker.model.norm.data[3] = 1.5
    _, report = server.post("/verify", session=None)
    assert not report["good"]
    assert report["faults"] == [
        f"the live bits have digest {report['digest']}, version 0 has {server.held[0].digest}"
    ]


# What goes wrong after the pause began.


@pytest.mark.parametrize("torn", [False, True])
def test_b187_a_rank_that_fails_twice_leaves_the_engine_paused_until_it_is_healed(
    server: Server, torn: bool
) -> None:
    server.ready()
    fail_write(server, rank=1, times=2, torn=torn)
    for _ in range(2):
        answer = server.install(0, 1)
        assert fault(answer) == (500, "storage", True)
        assert "rank dp0-pp0-tp1: armed" in answer[1]["message"]
        assert server.client.is_paused_now
        state = server.state()
        assert state["paused"]
        assert not any(row["whole"] for row in state["ranks"])
        assert server.client.label == "0"
    assert server.install(0, 1)[0] == 200  # the same once more
    assert server.serves(1)
    assert not server.client.is_paused_now
    assert server.install(1, 2)[0] == 200
    assert server.serves(2)


def test_a_torn_engine_is_healed_by_a_later_version(server: Server) -> None:
    server.ready()
    fail_write(server, rank=0, times=1, torn=True)
    assert server.install(0, 1)[0] == 500
    assert server.install(0, 3)[0] == 200
    assert server.serves(3)


def test_a_torn_engine_is_healed_by_a_load(server: Server, tmp_path: Path) -> None:
    server.ready()
    fail_write(server, rank=0, times=1, torn=True)
    assert server.install(0, 1)[0] == 500
    assert fault(server.read({"BF16": [1]})) == (500, "corrupt", True)
    server.session = "two"
    report = server.attach()
    assert report["refused"] == {}  # the plan is sound, the bits are not
    assert report["digest"] not in {found.digest for found in server.held}
    assert fault(server.adopt(1)) == (500, "corrupt", True)
    assert server.post("/load", **load_request(server, tmp_path, 2))[0] == 200
    assert server.serves(2)
    assert not server.client.is_paused_now


def test_what_was_written_must_be_the_target(server: Server) -> None:
    server.ready()
    request = server.request(0, 1) | {"target": server.held[2].model_dump()}
    answer = server.post("/install", **request)
    assert fault(answer) == (500, "corrupt", True)
    assert "reset prefix" not in server.client.log
    assert server.client.label == "0"
    assert server.install(0, 2)[0] == 200
    assert server.serves(2)


@pytest.mark.parametrize("call", ["reset prefix", "reset mm", "reset encoder"])
def test_b191_a_cache_that_cannot_be_reset_is_an_error(
    server: Server, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "RESET_WAIT_S", 0.1)
    server.ready()
    failure: Exception | bool = False if call == "reset prefix" else Exception("busy")
    server.client.failures[call] = [failure] * 1000
    answer = server.install(0, 1)
    assert fault(answer) == (500, "storage", True)
    assert "did not reset its caches" in answer[1]["message"]
    assert server.client.log[-1] != "resume"
    assert not any(row["whole"] for row in server.state()["ranks"])
    server.client.failures.clear()
    assert server.install(0, 1)[0] == 200
    assert server.serves(1)
    assert not server.client.is_paused_now


def test_b191_a_reset_is_tried_again(server: Server) -> None:
    server.ready()
    server.client.failures["reset prefix"] = [False, False]
    assert server.install(0, 1)[0] == 200
    assert server.client.log.count("reset prefix") == 3


def test_a_pause_that_fails_ends_with_generation_running(server: Server) -> None:
    server.ready()
    server.client.failures["pause keep"] = [Exception("no")]
    answer = server.install(0, 1)
    assert fault(answer) == (500, "storage", False)
    assert server.client.log == ["preflight", "pause keep", "resume"]
    assert server.serves(0)
    assert server.install(0, 1)[0] == 200


def test_a_torn_engine_stays_paused_when_another_pause_fails(server: Server) -> None:
    server.ready()
    fail_write(server, rank=0, times=1, torn=True)
    assert server.install(0, 1)[0] == 500
    server.client.failures["pause keep"] = [Exception("no")]
    assert fault(server.install(0, 1)) == (500, "storage", True)
    assert "resume" not in server.client.log


def test_b109_an_engine_that_did_not_resume_is_resumed_by_the_same_request(server: Server) -> None:
    server.ready()
    server.client.failures["resume"] = [False]
    assert fault(server.install(0, 1)) == (500, "storage", True)
    server.client.log.clear()
    assert server.install(0, 1)[0] == 200
    assert not server.client.is_paused_now
    assert "write" not in server.client.log
    assert "reset prefix" in server.client.log
    assert server.serves(1)


def test_b109_a_new_session_may_adopt_what_was_written_and_resume(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "RESET_WAIT_S", 0.0)
    server.ready()
    server.client.failures["reset prefix"] = [False] * 3
    assert server.install(0, 1)[0] == 500
    server.client.failures.clear()
    server.session = "two"
    assert server.attach()["digest"] == server.held[1].digest
    server.client.log.clear()
    assert server.adopt(1)[0] == 200
    assert "reset prefix" in server.client.log
    assert not server.client.is_paused_now
    assert server.state()["ranks"][0]["held"]["version"] == 1


def test_the_death_of_the_engine_is_a_storage_error(server: Server) -> None:
    server.ready()
    server.client.failures["write"] = [RuntimeError("EngineCore encountered an issue")]
    answer = server.install(0, 1)
    assert fault(answer) == (500, "storage", True)
    assert "RuntimeError: EngineCore encountered an issue" in answer[1]["message"]


# Time and order.


def test_b196_two_installs_never_run_at_once(server: Server) -> None:
    server.ready()
    requests = [server.request(0, 1), server.request(0, 2)]
    running, most = 0, 0

    async def slow(call: str) -> None:
        nonlocal running, most
        if call == "pause keep":
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.05)
        elif call == "resume":
            running -= 1

    server.client.before = slow
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda r: server.post("/install", **r), requests))
    assert most == 1
    assert 200 in [status for status, _ in answers]
    assert server.serves(max(r["held"]["version"] for r in server.state()["ranks"]))


def test_b196_the_gate_keeps_other_processes_out(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        order: list[str] = []
        one, other = Gate(tmp_path / "lock"), Gate(tmp_path / "lock")

        async def work(gate: Gate, name: str) -> None:
            async with gate.hold():
                order.append(name)
                await asyncio.sleep(0.1)
                order.append(name)

        await asyncio.gather(work(one, "a"), work(other, "b"))
        return order

    order = asyncio.run(scenario())
    assert order in (["a", "a", "b", "b"], ["b", "b", "a", "a"])


def test_the_gate_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def scenario() -> None:
        one, other = Gate(tmp_path / "lock"), Gate(tmp_path / "lock", wait_s=0.1)
        async with one.hold():
            with pytest.raises(StorageError, match=r"did not end within 0\.1 s"):
                async with other.hold():
                    pass
        async with other.hold():
            pass

    asyncio.run(scenario())
    assert gate.WAIT_S > install.RESET_WAIT_S


def test_an_install_ends_when_the_one_who_asked_has_hung_up(server: Server) -> None:
    server.ready()
    request = InstallRequest.model_validate(server.request(0, 1))

    async def scenario() -> None:
        found = server.endpoint._service
        assert found is not None
        fresh = service.Service(
            found._engine, name="vllm", model="m", stage=found._stage, lock=found._stage / "lock"
        )
        paused = asyncio.Event()

        async def tell(call: str) -> None:
            if call == "pause keep":
                paused.set()

        server.client.before = tell
        asked = asyncio.ensure_future(server.endpoint._finish(fresh, fresh.install(request)))
        await paused.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        while server.endpoint._running:
            await asyncio.sleep(0.01)

    asyncio.run(scenario())
    assert server.client.log[-1] == "resume"
    assert server.serves(1)


def test_b219_other_requests_are_answered_while_ranks_and_files_are_slow(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.ready()
    request = server.request(0, 1)
    plain = ops.write_document

    def slow_write(path: Path, document: Any) -> None:
        time.sleep(3)
        plain(path, document)

    monkeypatch.setattr(ops, "write_document", slow_write)
    longest = 0.0
    done = threading.Event()

    def knock() -> None:
        nonlocal longest
        while not done.is_set():
            began = time.perf_counter()
            server.http.get("/weightcast/state")  # refused, by the same loop
            longest = max(longest, time.perf_counter() - began)
            time.sleep(0.01)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        assert server.post("/install", **request)[0] == 200
    finally:
        done.set()
        thread.join()
    assert 0 < longest < 2.5


def test_state_answers_in_time_whatever_the_ranks_do(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STATE_WAIT_S", 0.1)

    async def hang(call: str) -> None:
        if call == "state":
            await asyncio.sleep(5)

    server.client.before = hang
    began = time.perf_counter()
    answer = server.http.get("/weightcast/state", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 500
    assert answer.json()["kind"] == "storage"
    assert time.perf_counter() - began < 4


def test_bits_that_are_no_numbers_arrive_as_they_are(server: Server) -> None:
    """B001, B002: NaN payloads, -0.0 and subnormals."""
    odd = np.array([0x7FC1, 0xFFFF, 0x8000, 0x0001, 0x7F80, 0xFF81], np.uint16)
    changed = {name: bits.copy() for name, bits in server.states[0].items()}
    for name in ("down.weight", "gate.weight", "up.weight"):
        changed[name].reshape(-1)[:6] = odd
    changed["norm.weight"][:2] = [0x7FA00001, 0x80000000]
    server.states[1] = changed
    server.held[1] = held(changed, 1)
    server.ready()
    assert server.install(0, 1)[0] == 200
    assert server.serves(1)
