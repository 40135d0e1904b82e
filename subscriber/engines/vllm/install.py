"""From one version to another while a server serves: what happens, and in which order.

    preflight   on all ranks; a refusal leaves the server as it is, serving
    pause       on all engines
    write       on all ranks, each reads back what it wrote
    confirm     holders of the same bits agree; the sum of all parts is the target's digest
    label       the engine's own
    caches      what was computed from the old weights is forgotten
    commit      on all ranks: from here on they say that they hold the target
    resume

A failure after the pause leaves the engine paused and its ranks not whole, since they may hold different weights. The
same request, another one that covers it, or a load heals it. Commit comes last, so that an engine which is paused by a
failure can be told from one that serves: its ranks are not whole, or it only needs to be resumed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weightcast.schemas.digest import Digest
from weightcast.schemas.engine import Held, InstallReport, InstallRequest, LoadRequest, PauseMode
from weightcast.schemas.errors import Corrupt, StorageError, UsageError, WeightcastError

from .ops import Commit, Op, Reply
from .ranks import Ranks, ask, known, total
from .sources import digest_of, read_ahead, weight_files
from .versions import Engine

log = logging.getLogger("vllm.weightcast")

RESET_WAIT_S: Final = 2.0
"""How long a cache that cannot be reset at once is tried again (blocks of a request that is about to end)."""

_RESET_POLL_S: Final = 0.05


@dataclass
class Clock:
    """Seconds of a run, from when the pause was asked for."""

    began: float = 0.0
    drained: float = 0.0
    written: float = 0.0

    def start(self) -> None:
        self.began = self.drained = self.written = time.perf_counter()


class Installer:
    """Brings the ranks behind `engine` to versions. One run at a time: the caller sees to that."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks

    async def install(self, request: InstallRequest) -> InstallReport:
        """Write absolute values.

        Raises:
            Conflict: another session drives the ranks; nothing was done.
            Corrupt: they hold another version than `base`, and nothing was done; or what was written does not prove
                to be the target, and the engine stays paused.
            StorageError: the engine failed, or the staged file cannot be read.
        """
        before = await self._ranks.call("preflight", request)
        if all(reply.row.whole for reply in before):
            if all(reply.row.held == request.target for reply in before):
                return await self._already(request.target, before)
            _check_parts(before)
        files = await asyncio.to_thread(weight_files, Path(request.mirror)) if request.mirror else []
        unread = await asyncio.to_thread(_unread, before, files)
        return await self._run("write", request, before, unread)

    async def load(self, request: LoadRequest) -> InstallReport:
        """Write whole tensors, whatever the ranks hold.

        Raises:
            As `install`; and UsageError, NotFound if the files do not hold the layout's tensors.
        """
        before = await self._ranks.call("preload", request)
        files = [Path(name) for name in request.files]
        await asyncio.to_thread(read_ahead, files)
        unread = await asyncio.to_thread(_unread, before, files)
        return await self._run("load", request, before, unread)

    async def finish(self, session: str, held: Held, unread: Digest = Digest()) -> list[Reply]:
        """After a proof that the live bits are `held`: go on where a run ended too early, and resume."""
        await self._settle(held)
        commit = Commit(session=session, held=held, unread=unread.hex)
        replies = await self._ranks.call("commit", commit)
        await self._resume()
        return replies

    async def _run(
        self, op: Op, request: InstallRequest | LoadRequest, before: Sequence[Reply], unread: Digest
    ) -> InstallReport:
        target, clock = request.target, Clock()
        clock.start()
        await self._pause(request.pause, torn=not all(reply.row.whole for reply in before))
        clock.drained = time.perf_counter()
        written = await self._ranks.call(op, request)
        check_digest(total(written) + unread, target)
        clock.written = time.perf_counter()
        replies = await self.finish(request.session, target, unread)
        return _report(target, replies, max(reply.elements for reply in written), clock)

    async def _already(self, target: Held, replies: list[Reply]) -> InstallReport:
        """Every rank holds the target: nothing to write. A run may have ended just before it resumed."""
        clock = Clock()
        clock.start()
        if await ask("tell whether it is paused", self._engine.paused()):
            await self._settle(target)
            await self._resume()
        return _report(target, replies, 0, clock)

    async def _pause(self, mode: PauseMode, *, torn: bool) -> None:
        """Return once nothing runs on any engine; if that fails, generation goes on unless it must not."""
        try:
            await ask("pause", self._engine.pause(mode))
            if not await ask("tell whether it is paused", self._engine.paused()):
                raise StorageError("the engine said that it paused, but not all of it did")
        except WeightcastError:
            if not torn:
                await ask("resume", self._engine.resume())
            raise

    async def _resume(self) -> None:
        await ask("resume", self._engine.resume())
        if await ask("tell whether it is paused", self._engine.paused()):
            raise StorageError("the engine did not resume", hint="install again")

    async def _settle(self, target: Held) -> None:
        """What must be true of an engine before it generates with new weights."""
        await ask("set its weight version", self._engine.label(str(target.version)))
        until = time.perf_counter() + RESET_WAIT_S
        while failed := await ask("reset its caches", self._engine.reset_caches()):
            if time.perf_counter() > until:
                raise StorageError(
                    f"the engine did not reset its caches within {RESET_WAIT_S:g} s: {'; '.join(failed)}",
                    hint="it stays paused, as it would answer from the old weights; install again",
                )
            await asyncio.sleep(_RESET_POLL_S)


def _check_parts(replies: Sequence[Reply]) -> None:
    """That what the ranks know of their bits is the version that they say they hold, before it is built on."""
    held = replies[0].row.held
    if held is None or any(reply.row.held != held for reply in replies):
        raise Corrupt("the ranks do not hold one version", hint="attach again, then load a whole version")
    check_digest(known(replies), held)


def check_digest(found: Digest, wanted: Held) -> None:
    """That these are the bits of a version.

    Raises:
        Corrupt: they are not.
    """
    if found.hex != wanted.digest:
        raise Corrupt(
            f"the ranks hold bits with digest {found}; version {wanted.version} of {wanted.stream} "
            f"has {wanted.digest}",
            hint="load a whole version",
        )


def _unread(replies: Sequence[Reply], files: Sequence[Path]) -> Digest:
    """Digest of the target's tensors that are reloaded, from the files they come from: live, they cannot be read."""
    return digest_of(files, replies[0].dense, replies[0].mix) if replies[0].dense else Digest()


def _report(target: Held, replies: Sequence[Reply], written: int, clock: Clock) -> InstallReport:
    return InstallReport(
        held=target,
        written=written,
        drain_s=clock.drained - clock.began,
        write_s=clock.written - clock.drained,
        paused_s=time.perf_counter() - clock.began,
        ranks=[reply.row for reply in replies],
    )


def check_files(names: Sequence[str]) -> None:
    """That every name is the absolute path of a file.

    Raises:
        UsageError: one is not.
    """
    for name in names:
        if not Path(name).is_absolute() or not Path(name).is_file():
            raise UsageError(f"{name!r} is not the absolute path of a file on the server's host")
