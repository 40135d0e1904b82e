"""Which releases are served, and the adapter over a fake client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcast.schemas.errors import UsageError
from weightcast.subscriber.engines.vllm import versions
from weightcast.subscriber.engines.vllm.versions import Engine, supported


class Core:
    """vLLM's client of several engines: each answers for itself."""

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.core_engines = [b"0", b"1"]
        self._answers = answers
        self.asked: list[tuple[str, tuple[Any, ...], bytes]] = []

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        self.asked.append((method, args, engine))
        return self._answers[method][int(engine)]


class Client:
    """vLLM's engine client. Answers are values, or errors to raise."""

    def __init__(self, answers: dict[str, Any], core: Core | None = None) -> None:
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=4))
        self.engine_core = core
        self.calls: list[tuple[str, Any, Any]] = []
        self._given = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            answer = self._given.get(name)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return call


@pytest.mark.parametrize(
    ("text", "minor"),
    [("0.26.0", 26), ("0.32.0", 32), ("0.32.1+cpu", 32), ("0.33.0rc1", 33), ("0.29.0.post1", 29)],
)
def test_supported_releases(text: str, minor: int) -> None:
    assert supported(text) == versions.SUPPORTED[minor]
    assert supported(text).name == f"0.{minor}"


@pytest.mark.parametrize("text", ["0.25.1", "0.34.0", "0.3.0", "0.260.0", "1.32.0", "dev", ""])
def test_others_are_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"not supported, weightcast works with 0\.26 to 0\.33") as caught:
        supported(text)
    assert text in caught.value.message


def test_table() -> None:
    rows = versions.SUPPORTED
    assert list(rows) == list(range(26, 34))
    assert [minor for minor, row in rows.items() if row.label] == list(range(27, 34))
    assert [minor for minor, row in rows.items() if row.all_answer] == [32, 33]
    assert [minor for minor, row in rows.items() if row.refuses_while_paused] == [33]


def test_current_is_that_of_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.version"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(vars(sys.modules["vllm.version"]), "__version__", "0.27.1")
    assert versions.current().minor == 27


def test_a_pause_keeps_caches_for_an_explicit_reset() -> None:
    client = Client({})
    asyncio.run(Engine(client, supported("0.32.0")).pause("wait"))
    assert client.calls == [("pause_generation", (), {"mode": "wait", "clear_cache": False})]


@pytest.mark.parametrize(
    ("release", "answers", "paused"), [("0.31.0", [True, False], False), ("0.31.0", [True, True], True)]
)
def test_old_releases_every_engine_is_asked_itself(release: str, answers: list[bool], paused: bool) -> None:
    core = Core({"is_scheduler_paused": answers})
    client = Client({"is_paused": True}, core)
    assert asyncio.run(Engine(client, supported(release)).paused()) is paused
    assert core.asked == [("is_scheduler_paused", (), b"0"), ("is_scheduler_paused", (), b"1")]
    assert client.calls == []


def test_new_releases_the_client_speaks_for_all() -> None:
    core = Core({})
    assert asyncio.run(Engine(Client({"is_paused": False}, core), supported("0.32.0")).paused()) is False
    assert core.asked == []


@pytest.mark.parametrize(
    ("asleep", "rows", "expected"),
    [(False, [True], False), (True, [False, True], True), (True, [False, False], False)],
)
def test_a_paused_engine_does_not_sleep(asleep: bool, rows: list[bool], expected: bool) -> None:
    client = Client({"is_sleeping": asleep, "collective_rpc": rows})
    assert asyncio.run(Engine(client, supported("0.32.0")).sleeping()) is expected


def test_memory_asleep_counts_any_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.memory_asleep() is False
    module = ModuleType("vllm.device_allocator.cumem")
    awake, asleep = SimpleNamespace(is_asleep=False), SimpleNamespace(is_asleep=True)
    allocator = SimpleNamespace(pointer_to_data={1: awake, 2: awake})
    vars(module)["CuMemAllocator"] = SimpleNamespace(instance=None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert versions.memory_asleep() is False
    vars(module)["CuMemAllocator"].instance = allocator
    assert versions.memory_asleep() is False
    allocator.pointer_to_data[3] = asleep
    assert versions.memory_asleep() is True


def test_label() -> None:
    old, new = Client({}), Client({"get_weight_version": "7"})
    asyncio.run(Engine(old, supported("0.26.0")).label("7"))
    assert asyncio.run(Engine(old, supported("0.26.0")).get_label()) is None
    assert old.calls == []
    asyncio.run(Engine(new, supported("0.27.0")).label("7"))
    assert new.calls == [("update_weight_version", ("7",), {})]
    assert asyncio.run(Engine(new, supported("0.27.0")).get_label()) == "7"


@pytest.mark.parametrize(("labels", "expected"), [(["7", "7"], "7"), (["7", "6"], None)])
def test_labels_that_differ_are_none(labels: list[str], expected: str | None) -> None:
    client = Client({}, Core({"get_weight_version": labels}))
    assert asyncio.run(Engine(client, supported("0.31.0")).get_label()) == expected


def test_all_caches_are_reset() -> None:
    client = Client({"reset_prefix_cache": True})
    assert asyncio.run(Engine(client, supported("0.32.0")).reset_caches()) == []
    assert sorted(client.calls) == [
        ("reset_encoder_cache", (), {}),
        ("reset_mm_cache", (), {}),
        ("reset_prefix_cache", (True, True), {}),  # of running requests too, and the connector's
    ]


def test_a_reset_that_did_not_happen_is_named() -> None:
    client = Client(
        {
            "reset_prefix_cache": False,
            "reset_encoder_cache": RuntimeError("busy"),
            "reset_mm_cache": RuntimeError(),
        }
    )
    assert asyncio.run(Engine(client, supported("0.32.0")).reset_caches()) == [
        "prefix cache and connector: the engine answered that it did not",
        "multimodal cache: RuntimeError",
        "encoder cache: busy",
    ]


def test_old_releases_the_second_engine_is_heard() -> None:
    core = Core({"reset_prefix_cache": [True, False]})
    failed = asyncio.run(Engine(Client({}, core), supported("0.30.0")).reset_caches())
    assert failed == ["prefix cache and connector: the engine answered that it did not"]
    assert [args for _, args, _ in core.asked] == [(True, True), (True, True)]


def test_workers_are_counted_over_the_engines_that_calls_reach() -> None:
    assert Engine(Client({}), supported("0.32.0")).workers == 4
    assert Engine(Client({}, Core({})), supported("0.32.0")).workers == 8


def test_rpc() -> None:
    client = Client({})
    asyncio.run(Engine(client, supported("0.32.0")).rpc("read", "{}", "/dev/shm/x", timeout=3.0))
    assert client.calls == [
        ("collective_rpc", ("weightcast",), {"timeout": 3.0, "args": ("read", "{}", "/dev/shm/x")})
    ]


def test_ranks_of_dense_replicas_have_names_of_their_own() -> None:
    replica = SimpleNamespace(data_parallel_index=1, data_parallel_rank=0)
    assert versions.rank_name(replica, tp=2, pp=0) == "dp1-pp0-tp2"
