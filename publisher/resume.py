"""Taking up an existing stream: prove a baseline against the head, or rebuild it from the store."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from weightcast.codec import Geometry, Memory
from weightcast.manifest.rebuild import State, proved, read_chain, rebuild, snapshot_choices
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Gap, Untrusted, WeightcastError

log = logging.getLogger(__name__)

FENCE_TRIES: Final = 5
"""Empty versions tried. A predecessor commits at most its one version in flight; more is somebody else at work."""


class Keeper:
    """Keeps the baseline in a file from run to run, if there is one to keep it in (`storage`)."""

    def __init__(self, storage: Path | None) -> None:
        self.storage = storage

    def note(self, state: State) -> None:
        """Write down which version the file holds. The digest decides; this only says what to compare it with."""
        if self.storage is not None:
            manifest = state.position.manifest
            note = {"stream": manifest.stream, "version": manifest.version, "sha256": state.position.sha256}
            temporary = _note_path(self.storage).with_suffix(".tmp")
            try:
                temporary.write_text(json.dumps(note))
                temporary.replace(_note_path(self.storage))
            except OSError as error:
                # the next run finds that the note does not fit, and rebuilds from the store
                log.warning("cannot note the version of the kept baseline: %s", error)

    def settle(self, state: State) -> State:
        """Move a state's memory into the file, if there is one."""
        if self.storage is None:
            return state
        fresh = self.storage.with_name(self.storage.name + ".new")
        memory = Memory.allocate(state.geometry, fresh)
        for spec in state.layout.stored:
            memory.tensor(spec.name)[...] = state.memory.tensor(spec.name)
        fresh.replace(self.storage)
        return State(state.position, state.geometry, memory)

    def kept(self, reader: StreamReader, pool: Executor) -> State | None:
        """What an earlier run left, if it is what it says."""
        if self.storage is None:
            return None
        try:
            note = json.loads(_note_path(self.storage).read_text())
            version, sha256 = int(note["version"]), str(note["sha256"])
            if note["stream"] != reader.stream.stream or not self.storage.is_file():
                return None
            position = reader.position(version)
            if position.sha256 != sha256:
                raise Untrusted(
                    f"version {version} has SHA-256 {position.sha256}, the baseline was kept for {sha256}"
                )
            geometry = Geometry(reader.layout(position.manifest.layout))
            return proved(State(position, geometry, Memory.allocate(geometry, self.storage, keep=True)), pool)
        except (OSError, ValueError, KeyError, TypeError, WeightcastError) as error:
            log.info("no usable baseline in %s: %s", self.storage, error)
            return None


def load_baseline(reader: StreamReader, head: int, pool: Executor, keeper: Keeper) -> State:
    """The head's state, proved by digest: from the file of an earlier run if that helps, else from the store.

    Raises:
        Gap: the store no longer holds what leads to the head.
        Corrupt: it does not lead there.
    """
    kept = keeper.kept(reader, pool)
    state = kept
    if kept is None or kept.position.version != head:
        try:
            state = rebuild(reader, head, pool, start=kept)
        except WeightcastError as error:
            if kept is None:
                raise
            log.warning(
                "the kept baseline of version %d does not lead to the head: %s", kept.position.version, error
            )
            state = rebuild(reader, head, pool)
    if state is None:
        raise Gap(f"nothing leads to version {head}")
    if kept is None or state.memory is not kept.memory:
        state = keeper.settle(state)
    keeper.note(state)
    return state


def _note_path(storage: Path) -> Path:
    return storage.with_name(storage.name + ".json")


def newest_snapshot(reader: StreamReader, head: int, pool: Executor) -> tuple[int | None, int]:
    """The version of the newest snapshot at or below `head`, and the bytes of the deltas from there to `head`."""
    newest = max((choice.version for choice in snapshot_choices(reader, head)), default=None)
    if newest is None:
        return None, 0
    return newest, sum(p.manifest.totals.bytes for p in read_chain(reader, newest, head, pool)[1:])
