"""Entry point `vllm.general_plugins`: gives vLLM's workers two more methods. Runs in every process of a server.

Nothing here may import the codec: vLLM's CPU platform looks through all loaded modules when a worker starts, and fails
on numba's.
"""

from __future__ import annotations

import logging
from pathlib import Path

from weightcast.schemas.engine import RankRow
from weightcast.schemas.errors import UsageError

from . import ops
from .versions import ASLEEP_METHOD, WORKER_METHOD, current, memory_asleep
from .warmup import ready

log = logging.getLogger("vllm.weightcast")  # below vLLM's own logger, so that its handlers show it


def register() -> None:
    """Let workers answer `collective_rpc("weightcast", args=(op, request, call_dir))`.

    On a release of vLLM that is not supported it logs an error and leaves the server as it is. Calling it again
    does nothing.
    """
    try:
        current()
    except UsageError as error:
        log.error("weightcast is not installed into this server: %s", error)
        return
    from vllm.v1.worker.worker_base import WorkerBase  # every worker class of every platform derives from it

    for name, method in ((WORKER_METHOD, _answer), (ASLEEP_METHOD, _asleep)):
        if getattr(WorkerBase, name, method) is not method:
            log.error(
                "weightcast is not installed into this server: its workers have a %r of their own", name
            )
            return
        setattr(WorkerBase, name, method)


def _answer(worker: object, op: str, request: str, call_dir: str) -> None:
    """Do `op` in this worker and leave the answer in `call_dir`. Raises nothing: that might end the engine."""
    fault = None
    try:
        if ready():
            from .rank import answer  # loaded by now; it brings pyarrow, numba and the codec

            return answer(worker, op, request, call_dir)
    except UsageError as error:
        fault = ops.fault_of(error)
    row = RankRow(rank=ops.name_of(worker), process="")
    ops.leave(Path(call_dir), ops.Reply(row=row, fault=fault, loading=fault is None))


def _asleep(worker: object) -> bool:
    """Whether memory of this worker's process was given back."""
    return memory_asleep()
