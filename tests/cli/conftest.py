"""A sample stream and checkpoints for command tests, and ways to run commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from weightcast.cli.main import run

from .. import sample


class Outcome:
    """What a command line did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        """stdout as one JSON document in one line."""
        assert self.out.endswith("\n")
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample stream; not to be changed."""
    folder = tmp_path_factory.mktemp("cli") / "stream"
    sample.publish_sample(folder)
    return folder


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the sample stream, to change."""
    return sample.copied(root, tmp_path / "stream")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders checkpoint-0, checkpoint-10, … with the tensors of the sample's versions."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for i, state in enumerate(sample.states()):
        write_checkpoint(folder / f"checkpoint-{10 * i}", state)
    return folder


def write_checkpoint(folder: Path, state: dict[str, Any]) -> Path:
    """A Hugging Face checkpoint of one file, with a config and a tokenizer."""
    folder.mkdir(parents=True)
    save_file({n: t.clone() for n, t in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(b'{"a": 1}')
    (folder / "tokenizer.json").write_bytes(b"{}")
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command line in this process."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


def command() -> list[str]:
    """The installed command."""
    script = Path(sys.executable).with_name("weightcast")
    return (
        [str(script)]
        if script.exists()
        else [sys.executable, "-P", "-c", "from weightcast.cli.main import main; main()"]
    )


def spawn(*arguments: object, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Start the installed command."""
    return subprocess.Popen(
        [*command(), *map(str, arguments)],
        env=os.environ | (env or {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 60) -> Outcome:
    """Wait for a started command."""
    out, err = process.communicate(timeout=timeout_s)
    return Outcome(process.returncode, out, err)
