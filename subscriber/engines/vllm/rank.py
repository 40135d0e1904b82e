"""One worker process of a vLLM server: its plan, its parts of the state, and the ops that the endpoint asks for.

Everything that is known about a rank's weights is kept here and nowhere else: API server processes come in any
number, and each sees the same.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from weightcast.codec import Changes
from weightcast.schemas import engine
from weightcast.schemas.digest import Digest
from weightcast.schemas.engine import Held, RankRow
from weightcast.schemas.errors import Conflict, Corrupt, StorageError, UsageError, WeightcastError

from ..staging import map_positions, map_values, read_layout, read_staged
from . import ops, sources
from .cores import bound_cores, on_cores
from .ops import Reply
from .plan import Plan, make_plan
from .sources import Bytes
from .warmup import ready

log = logging.getLogger("vllm.weightcast")

_STATE: Final = "_weightcast_rank"  # attribute of the worker that holds its `Rank`

_SLEEP_DISCARDS: Final = 2  # level of vLLM's sleep mode from which on weights are not kept elsewhere


class Worker(Protocol):
    """What is used of vLLM's worker."""

    rank: int
    vllm_config: Any

    def get_model(self) -> torch.nn.Module: ...


class Rank:
    """The rank that `worker` is.

    Attributes:
        name: as `ops.name_of`.
        held: the version that its weights are, or were before the write that `whole` tells of.
        whole: False from the first store of a write until it is confirmed on all ranks.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._config = worker.vllm_config
        self.name = ops.name_of(worker)
        self._process = secrets.token_hex(8)
        self._session: str | None = None
        self._plan: Plan | None = None
        self._changes: Mapping[str, Changes] | None = None
        self._tensors: Mapping[str, Bytes] | None = None
        self._proved: str | None = (
            None  # layout whose tensors were seen to lie as in a checkpoint, but for `_packed`
        )
        self._packed: dict[str, str] = {}
        self.held: Held | None = None
        self.whole = True
        self._watch_sleep()

    def _watch_sleep(self) -> None:
        """Forget plan and version when vLLM throws the weights away: what is there after the wake-up is nothing."""
        sleep: Callable[..., object] | None = getattr(self._worker, "sleep", None)
        if sleep is None:
            return

        def watched(level: int = 1, *args: object, **kwargs: object) -> object:
            if level >= _SLEEP_DISCARDS:
                self.held = self._plan = self._session = None
            return sleep(level, *args, **kwargs)

        vars(self._worker)["sleep"] = watched

    def row(self) -> RankRow:
        """What this rank says of itself."""
        return RankRow(
            rank=self.name,
            process=self._process,
            session=self._session,
            held=self.held,
            layout=self._plan.sha256 if self._plan else None,
            whole=self.whole,
        )

    def reply(self, op: str, request: str, call_dir: Path) -> Reply:
        """Do an op. An error becomes a reply's fault: whatever it is, it must not end the engine."""
        try:
            with torch.no_grad(), on_cores(bound_cores()):
                return self._ops[op](request, call_dir)
        except WeightcastError as error:
            fault = ops.fault_of(error)
        except Exception as error:  # raised further, it would end the engine
            log.exception("weightcast: op %s failed on rank %s", op, self.name)
            fault = ops.fault_of(StorageError(f"{op}: {type(error).__name__}: {error}"))
        return Reply(row=self.row(), fault=fault)

    @cached_property
    def _ops(self) -> Mapping[str, Callable[[str, Path], Reply]]:
        return {
            "state": lambda _, __: Reply(row=self.row()),
            "warm": self._warm,
            "attach": self._attach,
            "assign": self._assign,
            "parts": self._parts,
            "read": self._read,
            "preflight": self._preflight,
            "write": self._write,
            "preload": self._preload,
            "load": self._load,
            "commit": self._commit,
            "verify": self._verify,
        }

    def _warm(self, text: str, _: Path) -> Reply:
        request = engine.AttachRequest.model_validate_json(text)
        layout = read_layout(Path(request.layout), request.layout_sha256)
        return Reply(row=self.row(), loading=not ready(spec.width for spec in layout.stored))

    def _attach(self, text: str, _: Path) -> Reply:
        request = engine.AttachRequest.model_validate_json(text)
        layout = read_layout(Path(request.layout), request.layout_sha256)
        if getattr(self._config.parallel_config, "enable_eplb", False):
            raise UsageError(
                "the engine balances experts: it moves them while it runs, away from where a plan has them",
                hint="start it without --enable-eplb",
            )
        proved = self._proved == request.layout_sha256
        own = (
            None
            if proved and not request.dense
            else sources.checkpoint(self._config.model_config.model, layout)
        )
        plan = make_plan(
            self._worker.get_model(),
            self._config,
            layout,
            request.layout_sha256,
            reloads=sources.checkpoint(request.mirror, layout) or own if request.dense else None,
            loaded=None if proved else own,
            packed=self._packed,
        )
        self._plan, self._session, self._packed = plan, request.session, plan.packed
        self._changes = self._tensors = None
        if own is not None:
            self._proved = request.layout_sha256
        return Reply(row=self.row(), report=plan.report, reloadable=plan.reloadable)

    def _assign(self, _: str, call_dir: Path) -> Reply:
        text = (call_dir / f"{ops.ASSIGNMENT}.json").read_text(encoding="utf-8")
        request = ops.Assignment.model_validate_json(text)
        plan = self._planned(request.session, request.layout_sha256)
        classes = request.classes[self.name]
        plan.live.assign(classes)
        plan.parts = plan.live.by_class(plan.found) if self.whole else {}
        plan.dense = tuple(request.dense)
        return self._answer(plan)

    def _parts(self, text: str, _: Path) -> Reply:
        plan = self._planned(ops.Question.model_validate_json(text).session)
        if not self.whole:
            plan.parts = plan.live.parts()
        return self._answer(plan)

    def _read(self, text: str, _: Path) -> Reply:
        request = engine.ReadRequest.model_validate_json(text)
        plan = self._planned(request.session, request.layout_sha256)
        self._check_whole()
        positions = map_positions(Path(request.positions), request.counts)
        values = map_values(Path(request.values), request.counts, writable=True)
        filled = 0
        for dtype, wanted in positions.items():
            index, bits = plan.live.gather(dtype, wanted)
            values[dtype][index] = bits
            filled += len(index)
        return self._answer(plan, elements=filled)

    def _preflight(self, text: str, _: Path) -> Reply:
        """Everything that can be found out before generation stops."""
        request = engine.InstallRequest.model_validate_json(text)
        plan = self._planned(request.session, request.layout_sha256)
        ops.check_leads(self.held, request.base, request.target)
        changes = plan.patched(read_staged(Path(request.staged)))
        plan.live.check(changes)
        files = sources.weight_files(Path(request.mirror)) if plan.dense and request.mirror else []
        tensors = sources.open_tensors(files, plan.live.geometry.layout) if files else {}
        plan.check_dense(tensors)
        self._changes, self._tensors = changes, tensors
        return self._answer(plan)

    def _write(self, text: str, _: Path) -> Reply:
        request = engine.InstallRequest.model_validate_json(text)
        plan = self._planned(request.session, request.layout_sha256)
        changes, tensors = self._changes, self._tensors
        if changes is None or tensors is None:
            raise StorageError("no preflight came before the write")
        self._changes = self._tensors = None
        sound, self.whole = self.whole, False
        moved = plan.write(self._worker.get_model(), self._config, changes, tensors)
        if sound:
            plan.parts = {c: digest + moved.get(c, Digest()) for c, digest in plan.parts.items()}
        else:  # what was there before is not known
            plan.parts = plan.live.parts()
        return self._answer(plan, elements=sum(map(len, changes.values())))

    def _preload(self, text: str, _: Path) -> Reply:
        """As `_preflight`, for a load."""
        request = engine.LoadRequest.model_validate_json(text)
        plan = self._planned(request.session, request.layout_sha256)
        if self._proved != plan.sha256:
            raise UsageError(
                "it was never seen that the engine keeps these tensors as checkpoints have them: its bits are no known "
                "version, and what it was loaded from is no folder with this layout",
                hint="start it on a version of the stream: weightcast pull",
            )
        self._tensors = sources.open_tensors(map(Path, request.files), plan.live.geometry.layout)
        return self._answer(plan)

    def _load(self, text: str, _: Path) -> Reply:
        request = engine.LoadRequest.model_validate_json(text)
        plan = self._planned(request.session, request.layout_sha256)
        if self._tensors is None:
            raise StorageError("no preflight came before the load")
        tensors, self._tensors = self._tensors, None
        self.whole = False
        plan.load(self._worker.get_model(), self._config, tensors)
        plan.parts = plan.live.parts()
        return self._answer(plan, elements=plan.live.geometry.layout.elements)

    def _commit(self, text: str, _: Path) -> Reply:
        request = ops.Commit.model_validate_json(text)
        plan = self._planned(request.session)
        self.held, self.whole, plan.unread = request.held, True, Digest.from_hex(request.unread)
        self._proved = plan.sha256
        return self._answer(plan)

    def _verify(self, text: str, _: Path) -> Reply:
        session = ops.Question.model_validate_json(text).session
        plan = self._planned(session or self._session)
        plan.parts = plan.live.parts()
        return self._answer(plan)

    def _answer(self, plan: Plan, *, elements: int = 0) -> Reply:
        parts = {number: digest.hex for number, digest in plan.parts.items()}
        unread = None if plan.unread is None else plan.unread.hex
        return Reply(
            row=self.row(),
            parts=parts,
            dense=list(plan.dense),
            mix=plan.live.geometry.layout.mix,
            unread=unread,
            elements=elements,
        )

    def _planned(self, session: str | None, layout_sha256: str | None = None) -> Plan:
        """The plan, for whoever made it.

        Raises:
            StorageError: there is none: nobody attached since the process started, or lost its weights in a sleep.
            Conflict: somebody else attached since.
            Corrupt: it is for another layout.
        """
        if self._plan is None or self._session is None:
            raise StorageError("nobody has attached since the process started or slept", hint="attach first")
        if session != self._session:
            raise Conflict(
                f"the server is driven by session {self._session}, not {session}",
                hint="a server has one subscriber at a time: stop one of them",
            )
        if layout_sha256 not in (None, self._plan.sha256):
            raise Corrupt(
                f"the plan is for layout {self._plan.sha256}, expected {layout_sha256}", hint="attach again"
            )
        return self._plan

    def _check_whole(self) -> None:
        if not self.whole:
            raise Corrupt(
                "a write began here and was not confirmed: the weights are no version",
                hint="install it again, or load a whole version",
            )


def answer(worker: Any, op: str, request: str, call_dir: str) -> None:
    """Do `op` on the rank that `worker` is and leave the reply in `call_dir`. Raises nothing."""
    began = time.perf_counter()
    rank: Rank | None = getattr(worker, _STATE, None)
    if rank is None:
        rank = Rank(worker)
        setattr(worker, _STATE, rank)
    reply = rank.reply(op, request, Path(call_dir))
    ops.leave(Path(call_dir), reply)
    log.debug("weightcast: %s on rank %s took %.4f s", op, rank.name, time.perf_counter() - began)
