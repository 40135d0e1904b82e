"""Faults inside a server, armed by a test from outside while it runs.

The folder `WEIGHTCAST_TESTING_FAULTS` holds a file for each armed fault, named `{point}.{rank}.{action}.{number}`:

    point   write: a rank writes changes to its live weights · load: whole tensors (fail alone) ·
            reset, resume: the API process, between its steps
    rank    a part of a rank's name, such as tp1 or dp0; any
    action  fail: before the first byte · torn: half is written, then it fails · sleep: before ·
            after: sleep when it is done · kill: half is written, then SIGKILL
    number  so that a fault can be armed for several times; a file is used up by its removal

The file's content is seconds, for sleeps. A fault that strikes leaves the file `struck.{point}` behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("WEIGHTCAST_TESTING_FAULTS", "/nonexistent"))

_rank = "api"


def install() -> None:
    """Hook in below the plugin's own code: where it writes, and where it talks to the engine."""
    from vllm.v1.worker.worker_base import WorkerBase

    from weightcast.subscriber.engines.vllm.versions import Engine

    if getattr(WorkerBase.__init__, "faulty", False):
        return
    _hook_worker(WorkerBase)
    _hook_step(Engine, "reset_caches", "reset")
    _hook_step(Engine, "resume", "resume")


def take(point: str, *actions: str) -> tuple[str, float] | None:
    """Use up one armed fault of this process: its action and its seconds."""
    for path in sorted(FOLDER.glob(f"{point}.*")):
        _, rank, action, _ = path.name.split(".")
        if action in actions and (rank == "any" or rank in _rank.split("-")):
            seconds = float(path.read_text() or 0)
            try:
                path.unlink()
            except FileNotFoundError:  # another rank was faster
                continue
            (FOLDER / f"struck.{point}").touch()
            return action, seconds
    return None


def _hook_worker(worker: Any) -> None:
    """The hook below the write comes with the worker: vLLM cannot start one where llvmlite is imported already."""
    plain = worker.__init__

    def init(self: Any, vllm_config: Any, local_rank: int, rank: int, *args: Any, **kwargs: Any) -> None:
        global _rank
        _rank = f"dp{vllm_config.parallel_config.data_parallel_index}-tp{rank}"
        plain(self, vllm_config, local_rank, rank, *args, **kwargs)
        _hook_live()

    init.faulty = True  # type: ignore[attr-defined]
    worker.__init__ = init


def _hook_live() -> None:
    from weightcast.schemas.errors import StorageError
    from weightcast.subscriber.engines.live import LiveWeights

    plain, plain_load = LiveWeights.write, LiveWeights.load

    def write(self: Any, changes: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        fault = take("write", "fail", "torn", "sleep", "kill")
        action, seconds = fault or ("", 0.0)
        if action == "sleep":
            time.sleep(seconds)
        elif action in ("torn", "kill"):
            plain(self, {name: _half(change) for name, change in changes.items()}, *args, **kwargs)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action in ("fail", "torn"):
            raise StorageError(f"a fault that a test armed ({action})")
        done = plain(self, changes, *args, **kwargs)
        if late := take("write", "after"):
            time.sleep(late[1])
        return done

    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if take("load", "fail"):
            raise StorageError("a fault that a test armed (load)")
        return plain_load(self, *args, **kwargs)

    LiveWeights.write = write  # type: ignore[method-assign]
    LiveWeights.load = load  # type: ignore[method-assign]


def _half(changes: Any) -> Any:
    keep = len(changes.positions) // 2
    return type(changes)(changes.dtype, changes.positions[:keep], changes.values[:keep])


def _hook_step(engine: Any, name: str, point: str) -> None:
    plain = getattr(engine, name)

    async def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        fault = take(point, "fail", "sleep")
        if fault and fault[0] == "sleep":
            await asyncio.sleep(fault[1])
        if fault and fault[0] == "fail":
            return ["prefix cache"] if point == "reset" else None
        done = await plain(self, *args, **kwargs)
        if late := take(point, "after"):
            await asyncio.sleep(late[1])
        return done

    setattr(engine, name, step)
