"""From the version that a target holds to a newer one: reading ahead, choosing deltas or a snapshot, applying them."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Final

from weightcast.codec import Geometry, Memory
from weightcast.manifest.chain import Position
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.rebuild import usable_deltas
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Corrupt, Gap, NotFound, StorageError, UsageError, WeightcastError
from weightcast.schemas.names import file_key
from weightcast.schemas.settings import SubscriberSettings

from .ahead import Ahead
from .attach import fetch_snapshot, snapshot_pays
from .backlog import Backlog
from .lookout import Lookout
from .progress import Progress
from .rhythm import Rhythm
from .spare import Spare
from .stage import stage, stage_relaid
from .target import Base, Target

log = logging.getLogger(__name__)

_MAX_AHEAD: Final = 256  # manifests read before they are applied
_FLOOR_FROM: Final = 8  # versions of lag from which some may be pruned: then the floor is read


class Mover:
    """Moves one target along one stream. Used by one thread, which holds the target's lock.

    Attributes:
        reader: the stream.
        attached: whether the target is known to hold what the progress says: proved, and not failed to change since.
        lookout: asks for the next manifest between two steps.
    """

    def __init__(
        self,
        reader: StreamReader,
        target: Target,
        pool: Executor,
        requests: Executor,
        polls: Executor,
        listings: Executor,
        settings: SubscriberSettings,
        progress: Progress,
        rhythm: Rhythm,
    ) -> None:
        self.reader = reader
        self.attached = False
        self.lookout = Lookout(reader.manifest_bytes, polls, progress.answered)
        self._backlog = Backlog(reader, self.lookout, requests)
        self._target = target
        self._pool = pool
        self._settings = settings
        self._progress = progress
        self._requests = requests
        self._rhythm = rhythm
        self._fetcher = DeltaFetcher(reader.store, requests, settings.fetch_bytes, settings.connections)
        self._lagging = True  # whether there may be more than the next version
        self._ahead = Ahead(reader.store, self._fetcher, pool, listings, rhythm)
        self._spare = Spare()
        self._geometry: Geometry | None = None
        self._bad: dict[int, int] = {}  # failures by version
        self._damaged: dict[str, WeightcastError] = {}  # snapshots of no use, by key of their manifest

    def attach(self, position: Position) -> None:
        """The target was proved to hold `position`."""
        self.attached = self._lagging = True
        self._damaged.clear()
        self._forget()
        self._arrive(position)

    def advance(self, at: Position, *, thorough: bool) -> bool:
        """One step forward from `at`, if there is one. `thorough`: look for newer ones behind a missing next one."""
        self._list_ahead(at)
        # Who is not known to lag takes the next one alone, and asks for more once that is applied.
        run = self._backlog.after(at, _MAX_AHEAD if thorough or self._lagging else 1)
        looked_at = time.monotonic()
        self._look_ahead(at, run)
        head = run[-1].version if run else at.version
        if len(run) >= _MAX_AHEAD or (not run and thorough):
            head = max(head, self.reader.head() or head)
        if not run and head > at.version:
            # It may have come since it was asked for: only what is still missing is a hole.
            run, looked_at = self._backlog.after(at, _MAX_AHEAD), time.monotonic()
            if run:
                self._look_ahead(at, run)
                head = max(head, run[-1].version)
        self._lagging = bool(run)  # the next poll tells
        self._progress.saw_head(head)
        self._rhythm.found(head, looked_at)
        if head == at.version:
            return False
        try:
            self._move(at, run, head)
        except BaseException:
            self._backlog.forget()  # there may be newer ones when it is tried again
            raise
        return True

    def _forget(self) -> None:
        """Forget what was read, fetched and decoded ahead."""
        self._backlog.forget()
        self._ahead.drop()
        self._fetcher.drop()

    def jump(self, head: int, *, again: bool = True) -> None:
        """Start again from the newest usable snapshot up to `head`.

        Args:
            head: newest version of interest.
            again: whether to try those that failed before: where there is another way, they are not worth it.

        Raises:
            Gap: there is none that is newer than what the target holds.
        """
        at = self._progress.at
        if again:
            self._damaged.clear()
        position = fetch_snapshot(
            self.reader,
            self._target,
            self._pool,
            self._requests,
            head,
            newer_than=at.version if at else None,
            damaged=self._damaged,
            companions=self._companions,
            touching=self._touching,
        )
        self._forget()
        self._arrive(position)

    def _look_ahead(self, at: Position, run: Sequence[Position]) -> None:
        """With cut-through: go on with what is not committed yet, or see what of it is."""
        if run:
            self._fetcher.settle(run[0].manifest)
        elif self._settings.cut_through:
            self._ahead.take(lambda: self._base(at), wait=True)

    def glance(self, at: Position) -> None:
        """Between two steps: ask for the next manifest; with cut-through, take what has come of its shards.

        Raises:
            StorageError, Corrupt: as the next step will find, too.
        """
        self.lookout.ask(at.version + 1)
        if self._settings.cut_through:
            with self._target.exclusive():
                self._ahead.take(lambda: self._base(at), wait=False)
            self._list_ahead(at)

    def _list_ahead(self, at: Position) -> None:
        """With cut-through: list the shards of the next version, if it is due."""
        if self._settings.cut_through and self._rhythm.is_due(time.monotonic()):
            self._ahead.ask(at.version + 1)

    def _move(self, at: Position, run: Sequence[Position], head: int) -> None:
        """Go from `at` towards `head`, by the deltas of `run` or by a snapshot, whichever costs less."""
        far = not run or len(run) >= _FLOOR_FROM
        usable = usable_deltas(run, self.reader.floor() if far else 0)
        ready = list(itertools.takewhile(lambda p: p.version in usable, run))
        needed = len(ready) < len(run) or not run
        if needed or snapshot_pays(self.reader, at, usable, head, avoid=self._damaged):
            try:
                self.jump(head, again=not ready)
                return
            except (Gap, Corrupt, NotFound) as error:
                if not ready or not self.attached:
                    raise
                log.warning("going on by deltas: %s", error)
        self._apply_or_jump(at, ready, head)

    def _apply_or_jump(self, at: Position, run: Sequence[Position], head: int) -> None:
        """Apply; go past a version that was pruned, or that failed `tries` times, by a snapshot."""
        if self._is_out_of_reach(at, run[0]):
            self._jump_over(run[0], head)
            return
        try:
            self._apply(at, run)
        except (Corrupt, NotFound) as error:
            self._forget()
            failed = at.version + 1
            self._bad[failed] = self._bad.get(failed, 0) + 1
            pruned = isinstance(error, NotFound) and self.reader.floor() >= failed
            if self._bad[failed] < self._settings.tries and not pruned:
                raise
            log.warning("version %d cannot be had (%s); looking for a snapshot past it", failed, error)
            try:
                self.jump(head)
            except Gap as gap:
                raise (gap if pruned else error) from error

    def _is_out_of_reach(self, at: Position, position: Position) -> bool:
        """Whether it has another layout, whose new tensors start as zeros, and the target's bits can only be read."""
        return position.manifest.layout != at.manifest.layout and not isinstance(self._base(at)[1], Memory)

    def _jump_over(self, position: Position, head: int) -> None:
        """Go past a change of layout by a snapshot."""
        try:
            self.jump(head)
        except Gap as gap:
            raise Gap(
                f"version {position.version} changes the layout, which {self._target.name} can only follow by a "
                "snapshot, and there is none yet",
                hint="have the publisher write one (weightcast snapshot)",
            ) from gap

    def _base(self, at: Position) -> tuple[Geometry, Base]:
        """What the target holds, as a base of deltas."""
        geometry = self._geometry
        if geometry is None:
            raise Corrupt("the target is not attached")
        try:
            return geometry, self._target.base(geometry)
        except (Corrupt, UsageError) as error:
            self.attached = False  # what it holds has to be found out anew
            raise Corrupt(f"{self._target.name} no longer holds version {at.version}: {error}") from error

    def _apply(self, at: Position, run: Sequence[Position]) -> None:
        """Stage and apply as many versions of `run` as go together."""
        geometry, base = self._base(at)
        together = list(itertools.takewhile(lambda p: p.manifest.layout == at.manifest.layout, run))
        if together:
            staged = stage(
                geometry,
                base,
                at,
                together,
                self._fetcher,
                self._pool,
                self._settings.fold_bytes,
                self._ahead.known,
                self._spare.take,
            )
            self._companions(staged.position)
            with self._touching():
                if staged.changes:
                    self._target.patch(geometry, staged.changes, staged.position)
                else:
                    self._target.adopt(staged.position, geometry.layout)
            self._arrive(staged.position, geometry)
        elif isinstance(base, Memory):
            position = run[0]
            layout = self.reader.layout(position.manifest.layout)
            self._target.check(layout)
            after, changes = stage_relaid(geometry, base, at, position, layout, self._fetcher, self._pool)
            self._companions(position)
            with self._touching():
                self._target.relay(geometry, after, changes, position)
            self._arrive(position, after)

    @contextmanager
    def _touching(self) -> Iterator[None]:
        """While the target is changed: if that fails, what it holds must be proved again before it is built on."""
        self.attached = False
        self._ahead.drop()
        try:
            yield
        except (StorageError, UsageError):
            self.attached = True  # nothing was changed: see `Target.patch`
            raise
        except BaseException:
            self._progress.torn()
            raise
        self.attached = True

    def _companions(self, position: Position) -> None:
        """Hand over config and tokenizer files where they changed."""
        at = self._progress.at
        same = at is not None and position.manifest.files == at.manifest.files
        listed = [] if same else self.reader.files(position.manifest.files).files
        fetch = self.reader.store.fetch
        found = {f.name: fetch(file_key(f.sha256), size=f.size, sha256=f.sha256) for f in listed}
        self._target.companions(found)

    def _arrive(self, position: Position, geometry: Geometry | None = None) -> None:
        """The target holds `position`."""
        self._geometry = geometry or Geometry(self.reader.layout(position.manifest.layout))
        self._bad = {v: n for v, n in self._bad.items() if v > position.version}
        self._progress.arrived(position)
        extra = {"version": position.version, "step": position.manifest.step}
        log.info("at version %d", position.version, extra=extra)
