"""What the README shows works as it stands: its code blocks are run, with a local store in place of the bucket."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

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


def run(line: str, cwd: Path, environment: dict[str, str]) -> str:
    """Run a line of the README; a sidecar is given three seconds and then asked to stop."""
    arguments: Any = [Path(sys.executable).parent / "weightcast", *line.split("#")[0].split()[1:]]
    process = subprocess.Popen(
        arguments, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    sidecar = "--watch" in line or ("subscribe" in line and "--once" not in line)
    timer = threading.Timer(6 if sidecar else 100, process.terminate)
    timer.start()
    out, err = process.communicate(timeout=110)
    timer.cancel()
    assert process.returncode in ((0, 143) if sidecar else (0,)), (
        f"{line}: {process.returncode}\n{out}\n{err}"
    )
    assert "Traceback" not in err, err
    return out


def test_shell_blocks(checkpoints: Path, tmp_path: Path) -> None:
    """Every `weightcast` line of the README succeeds, in the README's order. The engine is a fake here."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTCAST_")}
    environment |= {"WEIGHTCAST_TOKEN": TOKEN, "WEIGHTCAST_STAGE": str(tmp_path / "stage")}
    engine = Engine({"w": torch.zeros((64, 64), dtype=torch.bfloat16)})
    server = FakeServer(engine)
    lines = [line for block in blocks("sh") for line in block.strip().splitlines()]
    assert len(lines) >= 10
    for line in lines:
        assert line.startswith("weightcast "), line
        run(line.replace(ROOT, "store").replace("http://127.0.0.1:8000", server.url), tmp_path, environment)
    server.down()
    assert engine.serving()["w"].data == b"\xf0\x41" * 64 * 64  # 30 as bf16: the newest checkpoint
    assert not engine.violations
    assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    assert (tmp_path / "model-v0" / "config.json").read_text() == "{}"
