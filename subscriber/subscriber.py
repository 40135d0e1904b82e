"""`Subscriber`: keeps a target at the head of a stream."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from weightcast.codec import Geometry
from weightcast.manifest.chain import Position
from weightcast.manifest.deltas import DeltaFetcher
from weightcast.manifest.plan import plan
from weightcast.manifest.rebuild import snapshot_choices, usable_deltas
from weightcast.manifest.store import Store, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Corrupt, Gap, NotFound, StorageError, WeightcastError
from weightcast.schemas.names import file_key
from weightcast.schemas.settings import SubscriberSettings

from .attach import attach, fetch_snapshot
from .lease import Lease
from .stage import stage, stage_relaid
from .target import Target, mark_of

log = logging.getLogger(__name__)

_WIDEN: Final = 2  # manifests asked for at once grow by this factor while a reader catches up
_MAX_AHEAD: Final = 256  # manifests read before they are applied
_SNAPSHOT_FROM: Final = 8  # versions of lag from which looking for a snapshot is worth a listing
_LOOK_AROUND: Final = (
    30  # polls without news after which it is checked that the next version is not just missing
)
_MAX_BACKOFF_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Status:
    """Where a subscriber is.

    Attributes:
        version: applied; None before the first.
        head: newest version seen.
        lag: versions between the two.
        behind_s: seconds since a version that is not applied was first seen; 0 at the head.
        checked_s: seconds since the store last answered; infinite if it never did.
        ready: a version is applied, and lag is within `max_lag`.
        error: what keeps it from moving on, or "".
    """

    version: int | None
    head: int | None
    lag: int
    behind_s: float
    checked_s: float
    ready: bool
    error: str


class Subscriber:
    """Follows one stream with one target. Close it, or use it as a context manager.

    A version is staged (fetched, verified, decoded) before anything live changes, then applied, then confirmed; versions
    that it lags behind are folded into one apply. Not thread-safe, but `status`, `version` and `wait_for` are.

    Args:
        root: URL or path of the stream.
        target: what to keep at its head.
        settings: how to work; from the environment and defaults if not given.
        store: an opened store, instead of `root`'s.
    """

    def __init__(
        self,
        root: str,
        target: Target,
        settings: SubscriberSettings | None = None,
        *,
        store: Store | None = None,
    ) -> None:
        self.settings = settings or SubscriberSettings()
        self.target = target
        self._store = store or open_store(root)
        self._pool = ThreadPoolExecutor(self.settings.threads, "weightcast-subscribe")
        self._reader: StreamReader | None = None
        self._fetcher = DeltaFetcher(self._store, self._pool, self.settings.fetch_bytes)
        self._lease = Lease(self._store, self.settings)
        self._at: Position | None = None
        self._geometry: Geometry | None = None
        self._attached = False
        self._bad: dict[int, int] = {}
        self._changed = threading.Condition()
        self._head: int | None = None
        self._behind_since: float | None = None
        self._checked: float | None = None
        self._error = ""
        self._closed = False

    @property
    def version(self) -> int | None:
        """The version applied."""
        at = self._at
        return at.version if at else None

    @property
    def position(self) -> Position | None:
        """The version applied, with its manifest: step, metadata, digest."""
        return self._at

    def status(self) -> Status:
        """Where it is, as of the last poll."""
        with self._changed:
            now, version = time.monotonic(), self.version
            lag = max(0, (self._head or 0) - version) if version is not None else (self._head or -1) + 1
            limit = self.settings.max_lag
            return Status(
                version=version,
                head=self._head,
                lag=lag,
                behind_s=now - self._behind_since if self._behind_since is not None else 0.0,
                checked_s=now - self._checked if self._checked is not None else float("inf"),
                ready=version is not None and (limit is None or lag <= limit),
                error=self._error,
            )

    def once(self) -> Position:
        """Bring the target to the head, and return it.

        Raises:
            NotFound: there is no stream, or no version in it.
            Gap: a version on the way is gone and no snapshot leads past it; the target stays where it was.
            Corrupt, Untrusted, StorageError, UsageError: as they say; the target stays at a whole version.
        """
        while self._advance(thorough=True):
            pass
        if self._at is None:
            raise NotFound(f"no version in {self._store.url} yet")
        self._lease.renew(self._at.version, force=True)
        return self._at

    def follow(self, stop: threading.Event | None = None) -> Iterator[Position]:
        """Yield each version as it is applied, until `stop` is set or the subscriber is closed.

        What may pass (the store is down, an object is not there yet or damaged) is logged, shown in `status` and tried again,
        more and more slowly. Between two polls at the head there is one small request.

        Raises:
            Untrusted, UsageError: this will not pass; the target stays at a whole version.
        """
        stop = stop or threading.Event()
        failures = idle = 0
        while not stop.is_set() and not self._closed:
            before = self._at
            try:
                moved = self._advance(thorough=failures > 0 or idle % _LOOK_AROUND == _LOOK_AROUND - 1)
                failures, idle = 0, 0 if moved else idle + 1
            except WeightcastError as error:
                if not error.retryable:
                    self._note_error(error)
                    raise
                failures, moved = failures + 1, False
                self._note_error(error)
            if self._at is not None and self._at is not before:
                self._lease.renew(self._at.version)
                yield self._at
            if not moved:
                if self._at is not None:
                    self._lease.renew(self._at.version)
                stop.wait(self._pause(failures))

    def wait_for(self, version: int, timeout: float | None = None) -> int:
        """Wait until `version` or a later one is applied (by `follow` in another thread), and return which.

        Raises:
            StorageError: time ran out; says how far it came and why.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: (self.version if self.version is not None else -1) >= version, timeout
            ):
                raise StorageError(
                    f"version {version} was not applied within {timeout} s; at {self.version}, {self._error or 'no error'}"
                )
            return self.version or 0

    def close(self) -> None:
        """Stop following and let go of threads. The target stays where it is."""
        self._closed = True
        self._fetcher.drop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self, *, thorough: bool) -> bool:
        """One step forward, if there is one: True if the target moved.

        Args:
            thorough: look behind a missing next version for newer ones.
        """
        if self._reader is None:
            self._reader = StreamReader.open(self._store)
        with self.target.exclusive():
            if self._at is None or not self._attached or self.target.mark() != mark_of(self._at):
                return self._attach(self._reader)
            run = self._read_ahead(self._reader, self._at)
            head = run[-1].version if run else self._at.version
            if not run and thorough:
                head = self._reader.head() or head
            self._note_head(head)
            if head == self._at.version:
                return False
            self._move(self._reader, self._at, run, head)
            return True

    def _attach(self, reader: StreamReader) -> bool:
        """Find out which version the target holds; fetch a snapshot if that cannot be told."""
        self.target.recover()
        position = attach(reader, self.target, self._pool)
        if position is None:
            self._at = None
            head = reader.head()
            if head is None:
                raise NotFound(f"no version in {self._store.url} yet")
            self._note_head(head)
            self._jump(reader, head)
        else:
            self._attached = True
            self._arrive(reader, position)
        return True

    def _read_ahead(self, reader: StreamReader, at: Position) -> list[Position]:
        """The versions after `at`, as far as they exist: one request if there is none."""
        chain = reader.chain(at)
        run: list[Position] = []
        width = 1
        while len(run) < _MAX_AHEAD:
            first = at.version + 1 + len(run)
            for data in list(self._pool.map(reader.manifest_bytes, range(first, first + width))):
                if data is None:
                    return run
                run.append(chain.extend(data))
            width = min(width * _WIDEN, 32)
        return run

    def _move(self, reader: StreamReader, at: Position, run: Sequence[Position], head: int) -> None:
        """Go from `at` towards `head`, by the deltas of `run` or by a snapshot, whichever costs less."""
        far = len(run) >= _SNAPSHOT_FROM
        usable = usable_deltas(run, reader.floor() if far or len(run) < head - at.version else 0)
        ready = list(itertools.takewhile(lambda p: p.version in usable, run))
        if not ready or ready[-1].version < head or (far and self._snapshot_pays(reader, at, usable, head)):
            try:
                self._jump(reader, head)
                return
            except Gap:
                if not ready:
                    raise
        self._apply_or_jump(reader, at, ready, head)

    def _snapshot_pays(self, reader: StreamReader, at: Position, usable: dict[int, int], head: int) -> bool:
        choices = [c for c in snapshot_choices(reader, head) if c.version > at.version]
        return plan(at.version, head, usable, choices).snapshot is not None

    def _apply_or_jump(self, reader: StreamReader, at: Position, run: Sequence[Position], head: int) -> None:
        """Apply; after `tries` failures at one version, go past it by a snapshot."""
        try:
            self._apply(reader, at, run)
        except (Corrupt, NotFound) as error:
            failed = (self.version if self.version is not None else at.version) + 1
            self._bad[failed] = self._bad.get(failed, 0) + 1
            if self._bad[failed] < self.settings.tries:
                raise
            log.warning(
                "version %d failed %d times (%s); looking for a snapshot past it",
                failed,
                self._bad[failed],
                error,
            )
            try:
                self._jump(reader, head)
            except Gap:
                raise error from None

    def _apply(self, reader: StreamReader, at: Position, run: Sequence[Position]) -> None:
        """Stage and apply as many versions of `run` as go together."""
        geometry = self._geometry
        if geometry is None:
            raise Corrupt("the target is not attached")
        base = self.target.memory(geometry)
        together = list(itertools.takewhile(lambda p: p.manifest.layout == at.manifest.layout, run))
        if together:
            staged = stage(geometry, base, at, together, self._fetcher, self._pool, self.settings.fold_bytes)
            self._companions(reader, staged.position)
            with self._touching():
                if staged.changes:
                    self.target.patch(geometry, staged.changes, staged.position)
                else:
                    self.target.adopt(staged.position, geometry.layout)
            self._arrive(reader, staged.position, geometry)
        else:
            position = run[0]
            layout = reader.layout(position.manifest.layout)
            after, changes = stage_relaid(geometry, base, at, position, layout, self._fetcher, self._pool)
            self._companions(reader, position)
            with self._touching():
                self.target.relay(geometry, after, changes, position)
            self._arrive(reader, position, after)

    @contextmanager
    def _touching(self) -> Iterator[None]:
        """While the target is changed: if that fails, what it holds must be proved again before it is built on."""
        self._attached = False
        yield
        self._attached = True

    def _jump(self, reader: StreamReader, head: int) -> None:
        """Start again from the snapshot that leads to `head` at the least bytes, or that leads furthest."""
        with self._touching():
            position = fetch_snapshot(
                reader,
                self.target,
                self._pool,
                head,
                newer_than=self.version,
                companions=lambda p: self._companions(reader, p),
            )
        self._arrive(reader, position)

    def _companions(self, reader: StreamReader, position: Position) -> None:
        """Hand over config and tokenizer files where they changed."""
        if self._at is not None and position.manifest.files == self._at.manifest.files:
            return
        listed = reader.files(position.manifest.files).files
        self.target.companions(
            {f.name: self._store.fetch(file_key(f.sha256), size=f.size, sha256=f.sha256) for f in listed}
        )

    def _arrive(self, reader: StreamReader, position: Position, geometry: Geometry | None = None) -> None:
        """The target holds `position`."""
        self._geometry = geometry or Geometry(reader.layout(position.manifest.layout))
        with self._changed:
            self._at = position
            self._bad = {v: n for v, n in self._bad.items() if v > position.version}
            self._error = ""
            if self._head is None or position.version >= self._head:
                self._head, self._behind_since = position.version, None
            self._changed.notify_all()
        log.info(
            "applied version %d",
            position.version,
            extra={"version": position.version, "step": position.manifest.step},
        )

    def _note_head(self, head: int) -> None:
        with self._changed:
            self._checked = time.monotonic()
            self._head = max(head, self._head or 0)
            at = self.version
            if at is not None and head <= at:
                self._behind_since, self._error = None, ""
            elif self._behind_since is None:
                self._behind_since = time.monotonic()

    def _note_error(self, error: WeightcastError) -> None:
        log.warning("not moving on from version %s: %s", self.version, error)
        with self._changed:
            self._error = str(error)

    def _pause(self, failures: int) -> float:
        """Seconds to the next poll, spread so that many subscribers do not poll at the same instant."""
        base = min(self.settings.poll_s * 2**failures, max(_MAX_BACKOFF_S, self.settings.poll_s))
        return base * random.uniform(2 / 3, 4 / 3)
