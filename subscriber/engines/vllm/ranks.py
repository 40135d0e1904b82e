"""All ranks of a server, asked as one."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, StorageError, WeightcastError

from .ops import ASSIGNMENT, Assignment, Op, Reply, error_of, write_document
from .versions import Engine

CALL_PREFIX: Final = "call-"
"""Of the folders in the stage folder that replies go to."""

LOADING_WAIT_S: Final = 300.0
"""How long ranks may take to load and compile; on a machine without a cache of compiled code it is some ten seconds."""

_LOADING_POLL_S: Final = 0.1

T = TypeVar("T")


async def ask(what: str, call: Awaitable[T]) -> T:
    """Wait for a call to the engine.

    Raises:
        StorageError: whatever vLLM raised. What fails on the engine's side comes as a bare `Exception`.
    """
    (result,) = await asyncio.gather(call, return_exceptions=True)
    if isinstance(result, Exception):
        text = str(result).splitlines()
        raise StorageError(
            f"the engine failed to {what}: {type(result).__name__}: {text[0] if text else ''}"
        ) from result
    if isinstance(result, BaseException):
        raise result
    return result


class Ranks:
    """The worker processes behind `engine`; each leaves its reply in a folder below `stage`."""

    def __init__(self, engine: Engine, stage: Path) -> None:
        self._engine = engine
        self._stage = stage

    async def call(self, op: Op, question: BaseModel, assignment: Assignment | None = None) -> list[Reply]:
        """Do an op on every rank at the same time: one reply each, ordered by rank.

        Raises:
            StorageError: a rank did not answer, or the engine failed.
            WeightcastError: of the class of the first rank that reports a fault; the message names the ranks.
        """
        until = time.monotonic() + LOADING_WAIT_S
        while True:
            replies = await self._once(op, question, assignment)
            if not any(reply.loading for reply in replies):
                return replies
            if time.monotonic() > until:
                raise StorageError(f"{op}: the ranks were not ready within {LOADING_WAIT_S:g} s")
            await asyncio.sleep(_LOADING_POLL_S)

    async def _once(self, op: Op, question: BaseModel, assignment: Assignment | None) -> list[Reply]:
        folder = await asyncio.to_thread(self._open, assignment)
        try:
            await ask(f"{op} on its ranks", self._engine.rpc(op, question.model_dump_json(), str(folder)))
            replies = await asyncio.to_thread(_collect, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        failed = [reply for reply in replies if reply.fault]
        if failed:
            raise _first_error(failed, len(replies))
        if len(replies) != self._engine.workers:
            raise StorageError(
                f"{op}: {len(replies)} of {self._engine.workers} ranks answered in {self._stage}",
                hint="all processes of the server must see this folder, and find weightcast in VLLM_PLUGINS",
            )
        return replies

    def _open(self, assignment: Assignment | None) -> Path:
        try:
            folder = Path(tempfile.mkdtemp(prefix=CALL_PREFIX, dir=self._stage))
            if assignment is not None:
                write_document(folder / f"{ASSIGNMENT}.json", assignment)
        except OSError as error:
            raise StorageError(f"{self._stage} cannot be written: {error.strerror}") from error
        return folder


def _collect(folder: Path) -> list[Reply]:
    files = sorted(path for path in folder.glob("*.json") if path.stem != ASSIGNMENT)
    try:
        return [Reply.model_validate_json(path.read_bytes()) for path in files]
    except (OSError, ValidationError) as error:
        raise StorageError(f"a rank's answer in {folder} cannot be read: {error}") from error


def _first_error(failed: Sequence[Reply], asked: int) -> WeightcastError:
    names = ", ".join(reply.row.rank for reply in failed[:8])
    where = f"rank {names}" if len(failed) == 1 else f"{len(failed)} of {asked} ranks ({names})"
    fault = failed[0].fault
    return error_of(fault, where) if fault else StorageError(where)


def known(replies: Sequence[Reply]) -> Digest:
    """Digest of the version that the ranks hold, as far as they know: what they read, and what was reloaded.

    Raises:
        Corrupt: as `total`; or it is not known what was reloaded.
    """
    unread = {reply.unread for reply in replies} if replies[0].dense else {Digest().hex}
    if len(unread) != 1 or None in unread:
        raise Corrupt("the layers that are reloaded whole were not loaded since the attach")
    return total(replies) + sum((Digest.from_hex(hexed) for hexed in unread if hexed), Digest())


def total(replies: Sequence[Reply]) -> Digest:
    """Digest of all that the ranks hold: of each class once.

    Raises:
        Corrupt: two holders of a class have different bits.
    """
    seen: dict[int, tuple[str, str]] = {}
    for reply in replies:
        for number, part in reply.parts.items():
            first, rank = seen.setdefault(number, (part, reply.row.rank))
            if first != part:
                raise Corrupt(
                    f"ranks {rank} and {reply.row.rank} hold different bits of the same tensors (class {number}): "
                    f"digests {first} and {part}"
                )
    return sum((Digest.from_hex(part) for part, _ in seen.values()), Digest())
