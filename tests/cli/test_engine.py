"""`subscribe --engine vllm` and `verify --engine vllm`, against a fake engine over real HTTP."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .. import sample
from ..subscriber.engines.fake_vllm import TOKEN, Engine, FakeServer
from ..versions import bits_of
from .conftest import Outcome, finish, spawn
from .test_json import check
from .test_sidecar import figures, free_port, get

Cli = Callable[..., Outcome]


def stored(version: int) -> dict[str, object]:
    """The tensors of the sample's version that carry bytes of their own."""
    return {name: tensor for name, tensor in sample.states()[version].items() if name != "lm_head.weight"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """An engine that was started with the tensors of version 3, and so has the layout of the newest version."""
    monkeypatch.setenv("WEIGHTCAST_TOKEN", TOKEN)
    monkeypatch.setenv("WEIGHTCAST_STAGE", str(tmp_path / "stage"))
    fake = FakeServer(Engine(stored(3)))  # type: ignore[arg-type]
    yield fake
    fake.down()
    assert fake.engine.violations == []


def served(server: FakeServer) -> bool:
    """Whether it generates with the newest version."""
    return server.engine.serving() == {name: bits_of(tensor) for name, tensor in stored(4).items()}


def test_once_brings_the_engine_to_the_head(copy: Path, server: FakeServer, cli: Cli, tmp_path: Path) -> None:
    outcome = cli("subscribe", copy, "--engine", "vllm", "--url", server.url, "--once", "--json")
    mirrored = cli(
        "subscribe",
        copy,
        "--engine",
        "vllm",
        "--url",
        server.url,
        "--mirror",
        tmp_path / "m",
        "--once",
        "--json",
    )
    check(
        "subscribe",
        outcome.json,
        mirrored.json,
        cli("subscribe", copy, "--into", tmp_path / "f", "--once", "--json").json,
    )
    assert (outcome.code, outcome.json["version"], outcome.json["folder"]) == (0, 4, None)
    assert (outcome.json["engine"], outcome.json["paused_s"]) == (f"vllm at {server.url}", 0.001)
    assert (mirrored.code, mirrored.json["folder"]) == (0, str(tmp_path / "m"))
    assert served(server)


def test_verify_proves_the_live_weights(copy: Path, server: FakeServer, cli: Cli) -> None:
    arguments = ("verify", copy, "--engine", "vllm", "--url", server.url, "--json")
    assert (cli(*arguments).code, cli(*arguments).json["error"]["kind"]) == (10, "not_found")
    cli("subscribe", copy, "--engine", "vllm", "--url", server.url, "--once")
    good = cli(*arguments)
    server.engine.ranks[1].parts["embed.weight"].bits[3] ^= 1
    bad = cli(*arguments)
    check("verify_engine", good.json, bad.json)
    assert (good.code, good.json["ok"], good.json["live_digest"]) == (0, True, good.json["digest"])
    assert (bad.code, bad.json["ok"], bad.json["problems"]) == (
        13,
        False,
        ["the live bits are another version"],
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--into DIR or --engine NAME"),
        (["--engine", "vllm"], "--engine needs --url"),
        (["--engine", "vllm", "--url", "http://127.0.0.1:1", "--into", "x"], "--mirror may be meant"),
        (["--into", "x", "--url", "http://127.0.0.1:1"], "--url goes with --engine"),
        (["--engine", "other", "--url", "http://127.0.0.1:1"], "'vllm'"),
    ],
)
def test_options_that_do_not_go_together(root: Path, cli: Cli, arguments: list[str], said: str) -> None:
    outcome = cli("subscribe", root, *arguments)
    assert outcome.code == 2
    assert said in outcome.err


def test_b198_a_server_without_the_plugin_ends_with_2_and_a_hint(
    copy: Path, server: FakeServer, cli: Cli
) -> None:
    server.absent = 404
    outcome = cli("subscribe", copy, "--engine", "vllm", "--url", server.url, "--once")
    assert outcome.code == 2
    assert "VLLM_PLUGINS=weightcast" in outcome.err
    assert "Traceback" not in outcome.err


def test_an_engine_that_is_down_ends_once_with_15(copy: Path, server: FakeServer, cli: Cli) -> None:
    server.down()
    outcome = cli("subscribe", copy, "--engine", "vllm", "--url", server.url, "--once")
    assert outcome.code == 15
    assert "does not answer" in outcome.err


def test_the_sidecar_tells_health_and_pauses(copy: Path, server: FakeServer) -> None:
    port = free_port()
    process = spawn(
        "subscribe", copy, "--engine", "vllm", "--url", server.url, "--json", "--poll", 0.05,
        "--http", f"127.0.0.1:{port}",
    )  # fmt: skip
    try:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert [(line["version"], line["paused_s"]) for line in lines] == [(3, None), (4, 0.001)]
        assert get(port, "/readyz") == (200, "ok\n")
        found = figures(port)
        assert found["weightcast_subscriber_engine_pause_seconds_count"] >= 1
        assert found["weightcast_subscriber_version"] == 4
        server.down()
        limit = time.monotonic() + 20
        while get(port, "/readyz")[0] == 200:
            assert time.monotonic() < limit
            time.sleep(0.05)
        assert "does not answer" in get(port, "/readyz")[1]
        assert get(port, "/healthz")[0] == 200
    finally:
        process.send_signal(signal.SIGTERM)
        outcome = finish(process)
    assert outcome.code == 0
    assert served(server)
