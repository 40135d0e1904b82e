"""What the README shows works as it stands: its code blocks are run, with a local store in place of the bucket."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast.cli.main import run
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader

from ..subscriber.engines.fake_vllm import TOKEN, Engine, FakeServer

README = Path(__file__).parents[2] / "README.md"
ROOTS = "s3://bucket/runs/"
ROOT = ROOTS + "policy-a"


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


class Enough(Exception):
    """Ends the README's endless loop."""


def test_python_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's block publishes three versions; the rollout side's follows them, bit for bit."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    publish, group, follow = (
        block.replace(ROOT, str(tmp_path / "store")).replace(ROOTS, f"{tmp_path}/")
        for block in blocks("python")
    )
    model, copy = torch.nn.Linear(64, 64, dtype=torch.bfloat16), torch.nn.Linear(64, 64, dtype=torch.bfloat16)

    def train_one_step(policy: torch.nn.Linear) -> None:
        with torch.no_grad():
            policy.weight[0, :8] += 1

    exec(publish, {"model": model, "train_one_step": train_one_step})
    exec(group, {"model": model})
    assert StreamReader.open(open_store(str(tmp_path / "policy-b"))).head() == 0
    seen: list[int] = []

    def generate_rollouts(policy: torch.nn.Linear, version: int) -> None:
        seen.append(version)
        if version == 2:
            raise Enough

    with pytest.raises(Enough):
        exec(follow, {"model": copy, "generate_rollouts": generate_rollouts})
    assert seen[-1] == 2
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.int16), copy.state_dict()[name].view(torch.int16))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder as a trainer leaves it: three finished checkpoints."""
    for step in (10, 20, 30):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file(
            {"w": torch.full((64, 64), float(step), dtype=torch.bfloat16)}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text("{}")
    return tmp_path / "checkpoints"


HEAD = 2
"""The newest checkpoint's version: the oldest one's is 0, and 1 is the fence of the sidecar that watches them."""


def in_a_process(words: list[str], cwd: Path, environment: dict[str, str], *, sidecar: bool) -> None:
    """Run a command as a process; a sidecar until it says that it has come to the head."""
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "weightcast"), *words],
        cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    timer = threading.Timer(60, process.kill)
    timer.start()
    assert process.stderr is not None
    said = ""
    for text in process.stderr:
        said += text
        if sidecar and f"version {HEAD}" in text:
            process.terminate()
    process.wait()
    timer.cancel()
    assert process.returncode in ((0, 143) if sidecar else (0,)), f"{words}: {process.returncode}\n{said}"
    assert "Traceback" not in said


def test_shell_blocks(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `weightcast` line of the README succeeds, in the README's order. The engine is a fake here.

    What publishes or subscribes is a process; what reads runs in this one, as each process takes a second.
    """
    monkeypatch.chdir(tmp_path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTCAST_")}
    environment |= {"WEIGHTCAST_TOKEN": TOKEN, "WEIGHTCAST_STAGE": str(tmp_path / "stage")}
    engine = Engine({"w": torch.zeros((64, 64), dtype=torch.bfloat16)})
    server = FakeServer(engine)
    lines = [line for block in blocks("sh") for line in block.strip().splitlines()]
    assert len(lines) >= 10
    for line in lines:
        assert line.startswith("weightcast "), line
        words = (
            line.replace(ROOT, "store").replace("http://127.0.0.1:8000", server.url).split("#")[0].split()[1:]
        )
        if words[0] in ("publish", "subscribe"):
            sidecar = "--watch" in words or ("subscribe" in words and "--once" not in words)
            in_a_process(words, tmp_path, environment, sidecar=sidecar)
        else:
            assert run(words) == 0, line
    server.down()
    assert engine.serving()["w"].data == b"\xf0\x41" * 64 * 64  # 30 as bf16: the newest checkpoint
    assert not engine.violations
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    assert (tmp_path / "model-v0" / "config.json").read_text() == "{}"
