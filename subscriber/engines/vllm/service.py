"""What the routes do: one method each, over all ranks of the server."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from weightcast.schemas.digest import Digest
from weightcast.schemas.engine import (
    PROTOCOL,
    AdoptRequest,
    AttachReport,
    AttachRequest,
    InstallReport,
    InstallRequest,
    LoadRequest,
    Pulse,
    RankReport,
    ReadReport,
    ReadRequest,
    ServerState,
    VerifyReport,
    VerifyRequest,
)
from weightcast.schemas.errors import Corrupt, StorageError, UsageError, WeightcastError

from ..staging import read_layout
from ..survey import survey
from .gate import Gate
from .install import Installer, check_digest, check_files
from .ops import Assignment, Commit, Question, Reply
from .ranks import Ranks, ask, known, total
from .versions import Engine

STATE_WAIT_S: Final = 8.0
"""How long `state` waits for ranks that are at work: a subscriber waits 10 s for it."""


class Service:
    """The engines behind one API server process.

    Args:
        engine: all of them.
        name: of vLLM and its release.
        model: what the server was started with.
        stage: folder that the subscriber and all processes of the server see; files elsewhere are not opened.
        lock: file that all API server processes of this server lock.
    """

    def __init__(self, engine: Engine, *, name: str, model: str, stage: Path, lock: Path) -> None:
        self._engine = engine
        self._name = name
        self._model = model
        self._stage = stage
        self._gate = Gate(lock)
        self._ranks = Ranks(engine, stage)
        self._process = secrets.token_hex(8)
        self._installer = Installer(engine, self._ranks)

    async def pulse(self) -> Pulse:
        """Whether this is still the same server, and generates."""
        resting = await ask("tell whether it sleeps", self._engine.resting())
        return Pulse(process=self._process, resting=resting)

    async def state(self) -> ServerState:
        """What every rank holds. Does not wait for an op that runs, but its ranks may be busy.

        Raises:
            StorageError: they were, for too long.
        """
        look = asyncio.ensure_future(self._ranks.call("state", Question()))
        try:
            replies = await asyncio.wait_for(asyncio.shield(look), STATE_WAIT_S)
        except TimeoutError as error:
            look.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks any more
            raise StorageError(f"the ranks have been busy for {STATE_WAIT_S:g} s") from error
        return await self._state(replies)

    async def attach(self, request: AttachRequest) -> AttachReport:
        """Let every rank record a plan; judge them together. The session drives the server from here on.

        Raises:
            UsageError, Corrupt, StorageError: the layout's file is not as it should be, or a rank failed.
        """
        began = time.perf_counter()
        self._check_staged(request.layout)
        async with self._gate.hold():
            await self._check_awake()
            await self._ranks.call("warm", request)
            replies = await self._ranks.call("attach", request)
            report, assignment = await asyncio.to_thread(_judge, request, replies)
            replies = await self._ranks.call("assign", Question(session=request.session), assignment)
        return report.model_copy(
            update={"ranks": [r.row for r in replies], "seconds": time.perf_counter() - began}
        )

    async def adopt(self, request: AdoptRequest) -> ServerState:
        """Let the ranks say that they hold a version, if what they know of their bits agrees.

        Raises:
            Corrupt: it does not.
            Conflict: another session drives the server.
        """
        held = request.held
        async with self._gate.hold():
            before = await self._ranks.call("parts", Question(session=request.session))
            check_digest(total(before), held)
            paused = await ask("tell whether it is paused", self._engine.paused())
            if paused and not all(reply.row.whole for reply in before):
                replies = await self._installer.finish(request.session, held)
            else:
                # Same bits, so nothing is stale, but what is made from now on shall say from which version.
                await ask("set its weight version", self._engine.label(str(held.version)))
                replies = await self._ranks.call("commit", Commit(session=request.session, held=held))
        return await self._state(replies)

    async def read(self, request: ReadRequest) -> ReadReport:
        """Fill a file with the live bits at positions; each comes from one rank.

        Raises:
            Corrupt: a write began and was not confirmed, or the ranks do not hold all positions.
            Conflict: another session drives the server.
        """
        began = time.perf_counter()
        self._check_staged(request.positions, request.values)
        async with self._gate.hold():
            await self._check_awake()
            replies = await self._ranks.call("read", request)
        found, wanted = sum(reply.elements for reply in replies), sum(request.counts.values())
        if found != wanted:
            raise Corrupt(f"{found} of {wanted} positions were read", hint="attach again")
        return ReadReport(seconds=time.perf_counter() - began)

    async def install(self, request: InstallRequest) -> InstallReport:
        """See `Installer.install`."""
        self._check_staged(request.staged)
        async with self._gate.hold():
            await self._check_awake()
            return await self._installer.install(request)

    async def load(self, request: LoadRequest) -> InstallReport:
        """See `Installer.load`."""
        await asyncio.to_thread(check_files, request.files)
        async with self._gate.hold():
            await self._check_awake()
            return await self._installer.load(request)

    async def verify(self, request: VerifyRequest) -> VerifyReport:
        """Read and digest all that the ranks hold. Generation goes on, slower.

        Raises:
            Conflict: another session drives the server.
            StorageError: no plan was made yet.
        """
        began = time.perf_counter()
        async with self._gate.hold():
            await self._check_awake()
            replies = await self._ranks.call("verify", Question(session=request.session))
        return _verdict(replies, time.perf_counter() - began)

    async def paused(self) -> bool:
        """Whether the engine was left paused; True if it cannot tell."""
        try:
            return await asyncio.wait_for(
                ask("tell whether it is paused", self._engine.paused()), STATE_WAIT_S
            )
        except (StorageError, TimeoutError):
            return True

    async def _state(self, replies: Sequence[Reply]) -> ServerState:
        return ServerState(
            protocol=PROTOCOL,
            weightcast=metadata.version("weightcast"),
            engine=self._name,
            model=self._model,
            weight_version=await ask("tell its weight version", self._engine.get_label()),
            paused=await ask("tell whether it is paused", self._engine.paused()),
            sleeping=await ask("tell whether it sleeps", self._engine.sleeping()),
            ranks=[reply.row for reply in replies],
        )

    async def _check_awake(self) -> None:
        if await ask("tell whether it sleeps", self._engine.sleeping()):
            raise StorageError(
                "the engine sleeps: its memory was given back",
                hint="wake it up; its weights are then proved anew",
            )

    def _check_staged(self, *names: str) -> None:
        """That every file lies below the stage folder, wherever links lead."""
        root = self._stage.resolve()
        for name in names:
            path = Path(name)
            if not path.is_absolute() or not path.is_file() or not path.resolve().is_relative_to(root):
                raise UsageError(
                    f"{name!r} is not a file below {root}",
                    hint="subscriber and server need the same WEIGHTCAST_STAGE",
                )


def _judge(request: AttachRequest, replies: Sequence[Reply]) -> tuple[AttachReport, Assignment]:
    """What can be kept at a version, of what all ranks found."""
    layout = read_layout(Path(request.layout), request.layout_sha256)
    reports = {reply.row.rank: reply.report for reply in replies if reply.report is not None}
    digest = None
    if not all(reply.row.whole for reply in replies):
        reports, equal = _as_equal(reports)
        digest = None if equal else secrets.token_hex(16)  # of no version: these bits are none
    judged = survey(layout, reports)
    dense = {name: why for name, why in judged.refused.items() if _is_reloadable(name, replies)}
    report = AttachReport(
        tensors=len(layout.stored),
        dense=dense,
        refused={name: why for name, why in judged.refused.items() if name not in dense},
        digest=digest or judged.digest.hex,
        seconds=0.0,
        ranks=[],
    )
    assignment = Assignment(
        session=request.session,
        layout_sha256=request.layout_sha256,
        classes=judged.assignment,
        dense=sorted(dense),
    )
    return report, assignment


def _is_reloadable(name: str, replies: Sequence[Reply]) -> bool:
    """Whether every rank that has a tensor can reload its layer."""
    having = [reply for reply in replies if reply.report and name not in reply.report.absent]
    return bool(having) and all(name in reply.reloadable for reply in having)


def _as_equal(reports: Mapping[str, RankReport]) -> tuple[dict[str, RankReport], bool]:
    """The reports as if all holders of a part had the same bits; and whether they have.

    After a write that was cut short they differ without anything being wrong with the plan.
    """
    first: dict[tuple[object, ...], str] = {}
    equal, leveled = True, {}
    for rank, report in reports.items():
        regions = []
        for region in report.regions:
            key = (region.tensor, region.offset, *region.shape, *region.strides)
            digest = first.setdefault(key, region.digest)
            equal = equal and digest == region.digest
            regions.append(region.model_copy(update={"digest": digest}))
        leveled[rank] = report.model_copy(update={"regions": regions})
    return leveled, equal


def _verdict(replies: Sequence[Reply], seconds: float) -> VerifyReport:
    rows = [reply.row for reply in replies]
    held = rows[0].held if rows else None
    faults = [f"rank {row.rank}: a write was not confirmed" for row in rows if not row.whole]
    faults += [
        f"rank {row.rank} says it holds {row.held and row.held.version}, rank {rows[0].rank} says "
        f"{held and held.version}"
        for row in rows
        if row.held != held
    ]
    try:
        digest = known(replies).hex
    except WeightcastError as error:
        faults.append(error.message)
        digest = Digest().hex
    if held is None:
        faults.append("the ranks do not know which version they hold")
    elif not faults and digest != held.digest:
        faults.append(f"the live bits have digest {digest}, version {held.version} has {held.digest}")
    return VerifyReport(digest=digest, held=held, good=not faults, faults=faults, seconds=seconds, ranks=rows)
