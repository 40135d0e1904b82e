"""What the endpoint asks of each rank and what a rank answers: documents between the processes of one server.

A question travels as an argument of vLLM's `collective_rpc`, an answer as a file in a folder of that call, because
with data parallelism `collective_rpc` returns the rows of the first engine only.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from weightcast.schemas import errors
from weightcast.schemas.digest import Digest
from weightcast.schemas.engine import Fault, Held, RankReport, RankRow

from .versions import rank_name

log = logging.getLogger("vllm.weightcast")

ASSIGNMENT: Final = "assignment"
"""Stem of the file in a call's folder that holds an `Assignment`: it may be too large for an argument."""

Op = Literal[
    "state",
    "warm",
    "attach",
    "assign",
    "parts",
    "read",
    "preflight",
    "write",
    "preload",
    "load",
    "commit",
    "verify",
]


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(_Document):
    """What one rank answers to any op."""

    row: RankRow  # after the op
    fault: Fault | None = None  # the op failed here
    report: RankReport | None = None  # attach
    parts: dict[int, str] = {}  # class -> hex digest of the bits of it that this rank holds
    reloadable: dict[
        str, str
    ] = {}  # attach: tensors whose layers can be reloaded whole here -> why they are not patched
    loading: bool = False  # nothing was done, since this process is not ready yet: ask again
    dense: list[str] = []  # tensors that are reloaded, as the last assignment says
    mix: int = 1  # of the plan's layout
    unread: str | None = None  # digest of these in the version committed last
    elements: int = 0  # read here; or of the whole version that were to be written, here or elsewhere


class Question(_Document):
    """An op that needs nothing but the session that asks; None: anybody may."""

    session: str | None = None


class Commit(_Document):
    """The write is confirmed on all ranks."""

    session: str
    held: Held
    unread: str = Digest().hex  # digest of the version's tensors that are reloaded


class Assignment(_Document):
    """What the survey of all ranks decided."""

    session: str
    layout_sha256: str
    classes: dict[
        str, list[tuple[int, bool]]
    ]  # rank -> (class, whether it leads) for each region it reported
    dense: list[str]  # tensors that are not patched, but reloaded whole


def name_of(worker: Any) -> str:
    """The name of the rank that `worker` is, as `rank_name`; context-parallel ranks count as tensor-parallel ones."""
    parallel = worker.vllm_config.parallel_config
    stage = int(parallel.world_size) // int(parallel.pipeline_parallel_size)
    pp, tp = divmod(worker.rank % int(parallel.world_size), stage)
    return rank_name(parallel, tp=tp, pp=pp)


def check_leads(held: Held | None, base: Held, target: Held) -> None:
    """That values which lead from `base`, or any version between, to `target` lead there from `held`.

    Raises:
        Corrupt: they do not.
    """
    ends = {base.version: base, target.version: target}
    if (
        held is None
        or held.stream != base.stream
        or not base.version <= held.version <= target.version
        or held != ends.get(held.version, held)
    ):
        found = f"version {held.version} of {held.stream}" if held else "no known version"
        raise errors.Corrupt(
            f"the rank holds {found}; the values lead from version {base.version} of {base.stream} "
            f"to {target.version}",
            hint="attach again",
        )


def leave(folder: Path, reply: Reply) -> None:
    """Put a rank's reply where the endpoint looks for it. Raises nothing: the endpoint misses what is not there."""
    try:
        write_document(folder / f"{reply.row.rank}.json", reply)
    except OSError as error:
        log.error("weightcast: rank %s cannot answer in %s: %s", reply.row.rank, folder, error)


def write_document(path: Path, document: BaseModel) -> None:
    """Put a document at `path`, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(document.model_dump_json(), encoding="utf-8")
    temporary.replace(path)


def fault_of(error: errors.WeightcastError, *, paused: bool = False) -> Fault:
    """An error as it travels."""
    return Fault(kind=error.kind, message=error.message, hint=error.hint, paused=paused)


def error_of(fault: Fault, where: str = "") -> errors.WeightcastError:
    """The error that a fault stands for; `where` says whose it is."""
    return errors.KINDS.get(fault.kind, errors.StorageError)(
        f"{where}: {fault.message}" if where else fault.message, hint=fault.hint
    )
