"""A training run whose rollouts come from the server that it keeps up to date, and what was seen of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from weightcast.cli.main import run
from weightcast.schemas.engine import TOKEN_VARIABLE, ServerState

from .server import TOKEN, Rows, Server, wait_for
from .sidecar import Sidecar

ROOT: Final = Path(__file__).parents[2]
TRAINER_VARIABLE: Final = "WEIGHTCAST_TESTING_TRAINER"
"""Names the Python that has TRL and this package; `make test-vllm` sets it, vLLM's own has no TRL."""

STEP_S: Final = 240.0
"""For one step, and for the imports of the trainer and its child, on a busy machine."""


@dataclass(frozen=True)
class Look:
    """The server at one version, which the trainer waited at.

    Attributes:
        state: what the server says of itself.
        verified: exit code of `weightcast verify --engine vllm`.
    """

    state: ServerState
    verified: int


@dataclass(frozen=True)
class Rollout:
    """An answer of the server's, as TRL's worker got it.

    Attributes:
        live: the versions that TRL took for live when it asked, and when it had the answer; counted from 1.
        prompt, tokens: token ids.
        logprobs: of the tokens, as the server said.
        spans: first token, last token + 1, and the stamp of the weights that made them.
    """

    live: tuple[int, int]
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[int, int, dict[str, Any]]]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        root: the stream.
        trainer: folder with the trainer's own tensors, by version.
        looks: at the server, by version.
        rollouts: all of them.
        first, last: the probe's answers before the first rollout and when training was over.
    """

    root: Path
    trainer: Path
    looks: list[Look]
    rollouts: list[Rollout]
    first: Rows
    last: Rows


def train(model: Path, server: Server, folder: Path, steps: int) -> Run:
    """Train for `steps` steps on a server that is starting on `model`; look at it at each version."""
    root, out = folder / "stream", folder / "trainer"
    out.mkdir(parents=True)
    with _trainer([str(model), server.url, str(root), str(out), str(steps)], out / "log") as alive:
        server.wait_ready()
        _wait(root / "versions" / f"{0:012d}.json", alive)
        with Sidecar(root, server, folder / "sidecar"):
            _wait(out / "0.safetensors", alive)
            looks, first = [], server.probe()
            for version in range(steps + 1):
                _wait(out / f"{version}.safetensors", alive)
                looks.append(_look(root, server))
                (out / f"{version}.go").touch()
            wait_for(lambda: alive() is not None, STEP_S, "the end of training")
            if alive():
                raise RuntimeError(f"the trainer ended with {alive()}: {_tail(out / 'log')}")
            lines = (out / "rollouts.jsonl").read_text().splitlines()
            rollouts = [Rollout(**json.loads(line)) for line in lines]
            return Run(root, out, looks, rollouts, first, server.probe())


def _look(root: Path, server: Server) -> Look:
    with patch.dict(os.environ, {TOKEN_VARIABLE: TOKEN}):
        verified = run(["verify", str(root), "--engine", "vllm", "--url", server.url, "--json"])
    return Look(server.state(), verified)


def _wait(path: Path, alive: Callable[[], int | None]) -> None:
    def there() -> bool:
        if alive() is not None:
            raise RuntimeError(f"the trainer ended with {alive()} before {path.name}")
        return path.exists()

    wait_for(there, STEP_S, path.name)


@contextmanager
def _trainer(arguments: list[str], log: Path) -> Iterator[Callable[[], int | None]]:
    """The trainer's process; gives what asks it for its exit code."""
    python = os.environ.get(TRAINER_VARIABLE)
    if not python:
        raise RuntimeError(f"{TRAINER_VARIABLE} is not set: run make test-vllm")
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [python, "-m", "tests.vllm.trainer", *arguments],
            cwd=ROOT,
            env=environment | quiet | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process.poll
    except BaseException:
        print(_tail(log))
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the child that asks the server
        process.wait()


def _tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
