"""Fresh engines on what `weightcast pull` writes: the truth that a live server is compared with."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from weightcast.cli.main import run

from .server import Rows, environment

_PROGRAM: Final = Path(__file__).with_name("reference.py")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep the other workers of this test run out."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def made(path: Path, make: Callable[[], None]) -> Path:
    """`path`, which `make` makes if no worker of this run did."""
    with alone(path.parent / f".{path.name}"):
        if not path.exists():
            make()
    return path


def pull(root: Path, version: int, folder: Path) -> Path:
    """The checkpoint folder of a version."""

    def make() -> None:
        status = run(
            ["pull", str(root), str(folder), "--version", str(version)]
        )  # without a process's imports
        if status:
            raise RuntimeError(f"weightcast pull --version {version} ended with {status}")

    return made(folder, make)


class References:
    """Starts a fresh engine for each question that no worker of this run asked before.

    Args:
        folder: for answers and logs.
        core: that single ranks are bound to.
    """

    def __init__(self, folder: Path, core: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._core = core
        self._log = folder / f"engines-{core}.log"
        self._program: subprocess.Popen[str] | None = None

    def of(self, model: Path, *, layout: str = "all", ranks: int = 1, nth: int = 0, **options: Any) -> Rows:
        """The probe's answers of the nth engine that was started on the checkpoint `model`."""
        flags = sorted(name for name, value in options.items() if value)
        path = (
            self._folder
            / f"{'-'.join([model.parent.name, model.name, layout, str(ranks), str(nth), *flags])}.json"
        )
        if ranks > 1:
            options["tensor_parallel_size"] = ranks
        cores = "|".join(map(str, range(ranks))) if ranks > 1 else str(self._core)
        request = {
            "model": str(model),
            "options": options,
            "result": str(path),
            "environment": environment(layout, threads=cores),
        }
        rows: Rows = json.loads(made(path, lambda: self._ask(request)).read_text())
        return rows

    def _ask(self, request: dict[str, Any]) -> None:
        if self._program is None:
            self._program = self._start()
        stdin, stdout = self._program.stdin, self._program.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the program has no pipes")
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        if '"status": 0' not in stdout.readline():
            raise RuntimeError(f"no fresh engine on {request['model']}; see {self._log}")

    def _start(self) -> subprocess.Popen[str]:
        """The program that forks engines."""
        given = environment() | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "LD_PRELOAD": gomp(),
        }
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)],
                env=given,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def close(self) -> None:
        """End the program."""
        if self._program is not None:
            self._program.communicate(timeout=60)


def gomp() -> str:
    """torch's OpenMP library, which vLLM preloads into its workers."""
    import torch

    return str(next((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")))
