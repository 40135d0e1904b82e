"""The entry points, and what loading them costs a server."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from types import ModuleType

import pytest

from weightcast.subscriber.engines.vllm import plugin, rank, versions, warmup

from .fake import TOKEN, Server


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's worker class, in a vLLM of release 0.32.0."""
    kind = type("WorkerBase", (), {})
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.worker_base", "vllm.version"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.worker.worker_base"].__dict__["WorkerBase"] = kind
    sys.modules["vllm.version"].__dict__["__version__"] = "0.32.0+cpu"
    return kind


def test_workers_get_the_methods_once(worker: type) -> None:
    plugin.register()
    found = {name: vars(worker)[name] for name in (versions.WORKER_METHOD, versions.ASLEEP_METHOD)}
    plugin.register()
    assert {name: vars(worker)[name] for name in found} == found
    assert vars(type("Worker", (worker,), {})()) == {}
    assert type("Worker", (worker,), {})().weightcast_asleep() is False


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0.0", "dev"])
def test_b198_other_releases_are_left_alone(
    worker: type, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setitem(sys.modules["vllm.version"].__dict__, "__version__", version)
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert not hasattr(worker, versions.WORKER_METHOD)
    (record,) = caplog.records
    assert f"vLLM {version}: not supported, weightcast works with 0.26 to 0.33" in record.getMessage()


def test_a_method_of_that_name_is_not_replaced(worker: type, caplog: pytest.LogCaptureFixture) -> None:
    setattr(worker, versions.WORKER_METHOD, print)
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert vars(worker)[versions.WORKER_METHOD] is print
    assert "a 'weightcast' of their own" in caplog.text


def test_loading_the_plugin_loads_nothing_heavy() -> None:
    """Every process of a server loads it, those included that never see an op."""
    heavy = "{'torch', 'numba', 'pyarrow', 'fsspec', 's3fs', 'zstandard', 'fastapi'}"
    code = f"import sys, weightcast.subscriber.engines.vllm.plugin; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_ops_wait_until_everything_is_compiled(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds, and an op keeps the engine from generating."""
    asked: list[frozenset[int]] = []

    def ready(widths: Iterable[int] = ()) -> bool:
        asked.append(frozenset(widths))
        return asked.count(asked[-1]) > 4

    monkeypatch.setattr(plugin, "ready", ready)
    monkeypatch.setattr(rank, "ready", ready)
    server.attach()
    assert server.client.log.count("warm") > 2
    assert server.client.log.count("attach") == 1
    assert asked.count(frozenset({2, 4})) > 4


def test_a_server_without_the_dependencies_says_so(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "_runs", {})
    monkeypatch.setattr(warmup, "_load", lambda widths: importlib.import_module("no_such_module"))
    answer = server.http.get("/weightcast/state", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 422
    fault = answer.json()
    assert fault["kind"] == "usage"
    assert "ModuleNotFoundError: No module named 'no_such_module'" in fault["message"]
    assert "pip install weightcast" in fault["hint"]


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.endpoint_plugins"])
def test_vllm_finds_the_plugins(group: str) -> None:
    (point,) = metadata.entry_points(group=group, name="weightcast")
    assert callable(point.load())
