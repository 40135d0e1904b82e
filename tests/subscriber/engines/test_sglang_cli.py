"""`weightcast subscribe --engine sglang`: the options, and the sidecar as a process that is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from weightcast.cli.main import run

from ...faultstore import FaultStore
from ..conftest import Trainer
from ..kit import Model, bits, every_dtype, loaded, stir
from .fake_sglang import FakeSglang

BASE = {name: tensor for name, tensor in every_dtype().items() if tensor.dim() < 3}
FIRST = stir(BASE, 1)
SECOND = stir(FIRST, 2)


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTCAST_STAGE", str(tmp_path / "stage"))
    monkeypatch.setenv("WEIGHTCAST_TOKEN", "secret")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeSglang]:
    """Has another model's bits, and wants the key."""
    (tmp_path / "base").mkdir()
    save_file(BASE, tmp_path / "base" / "model.safetensors")
    found = FakeSglang(tmp_path / "base", key="secret")
    yield found
    found.stop()


@pytest.fixture
def publish(local_store: FaultStore, trainer_at: Callable[..., Trainer]) -> Callable[[Model], object]:
    """Publishes to the folder `store`."""
    return trainer_at(local_store).publish


def line(server: FakeSglang, tmp_path: Path, *more: str) -> list[str]:
    """The command."""
    where = ["--url", server.url, "--into", str(tmp_path / "kept")]
    return ["subscribe", str(tmp_path / "store"), "--engine", "sglang", *where, "--no-lease", "--json", *more]


def test_once(
    server: FakeSglang,
    publish: Callable[[Model], object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    publish(FIRST)
    assert run(line(server, tmp_path, "--once")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == 0
    assert told["engine"] == f"sglang at {server.url}"
    assert told["folder"] == str(tmp_path / "kept")
    assert told["paused_s"] > 0
    assert server.serves() == bits(FIRST)
    assert ("/pause_generation", {"mode": "retract"}) in server.calls


def test_pause_abort(server: FakeSglang, publish: Callable[[Model], object], tmp_path: Path) -> None:
    publish(FIRST)
    assert run(line(server, tmp_path, "--once", "--pause", "abort")) == 0
    assert ("/pause_generation", {"mode": "abort"}) in server.calls


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pause", "wait"], "SGLang cannot finish requests"),
        (["--mirror", "m"], "--mirror does not go with --engine sglang"),
    ],
)
def test_options_that_do_not_go_together(
    server: FakeSglang, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line(server, tmp_path, "--once", *options)) == 2
    assert said in capsys.readouterr().err


def test_the_folder_is_needed(server: FakeSglang, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["subscribe", str(tmp_path / "store"), "--engine", "sglang", "--url", server.url]) == 2
    assert "needs --into DIR" in capsys.readouterr().err


def test_b198_a_url_without_the_routes(
    server: FakeSglang, publish: Callable[[Model], object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(FIRST)
    server.missing["/update_weights_from_disk"] = 404
    assert run(line(server, tmp_path, "--once")) == 2
    err = capsys.readouterr().err
    assert "has no /update_weights_from_disk: it answers 404" in err
    assert "sglang.launch_server" in err


def test_b196_a_second_sidecar_ends_with_conflict_and_a_killed_one_is_followed(
    server: FakeSglang, publish: Callable[[Model], object], tmp_path: Path
) -> None:
    command = [str(Path(sys.executable).with_name("weightcast")), *line(server, tmp_path)]

    def once() -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=60, check=False)

    publish(FIRST)
    assert once().returncode == 0
    publish(SECOND)
    server.load_s = 8.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sidecar:
        end = time.monotonic() + 60
        while not server._loads_open:
            assert sidecar.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        second = once()
        assert server._loads_open == 1
        sidecar.kill()
    assert second.returncode == 11
    assert "has a subscriber on this host already" in second.stderr
    assert loaded(tmp_path / "kept") == bits(SECOND)
    assert server.paused == "retract"
    server.load_s = 0.0
    third = once()
    assert third.returncode == 0
    assert json.loads(third.stdout)["version"] == 1
    assert server.most_loads_open == 1
    assert server.paused is None
    assert server.serves() == bits(SECOND)
