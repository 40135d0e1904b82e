"""`Subscriber`: keeps a target at the head of a stream."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

from weightcast.manifest.chain import Position
from weightcast.manifest.store import Store, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Corrupt, NotFound, Unsupported, Untrusted, UsageError, WeightcastError
from weightcast.schemas.settings import SubscriberSettings

from .ahead import LISTINGS
from .attach import attach
from .lease import Lease
from .lookout import Lookout
from .mover import Mover
from .progress import Progress, Status
from .rhythm import AT_ONCE, Rhythm, backoff_s, spread_s
from .target import Target, mark_of

log = logging.getLogger(__name__)

_LOOK_AROUND: Final = 30
"""Polls without news after which it is checked that the next version is not just missing."""

_PUT_OFF_S: Final = 2.0
"""So long a step waits, but no longer than a poll, while the next version is due and asked for without it."""

_SETTLE_S: Final = 5.0
"""A document that is not valid may still be in the writing, on file systems that show that."""

_SLICE_S: Final = 0.2  # how often a pause looks whether the subscriber was closed


class Subscriber:
    """Follows one stream with one target. Close it, or use it as a context manager.

    A version is staged (fetched, verified, decoded) before anything live changes, then applied, then confirmed;
    versions that it lags behind are folded into one apply. `once` and `follow` belong to one thread; everything else
    may be called from any.

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
        self._requests = ThreadPoolExecutor(self.settings.connections, "weightcast-fetch")
        # As many again: those for a version that has come may hang.
        self._polls = ThreadPoolExecutor(2 * AT_ONCE, "weightcast-poll")
        self._listings = ThreadPoolExecutor(LISTINGS, "weightcast-list")
        self._progress = Progress(self.settings.max_lag)
        self._mover: Mover | None = None
        self._lease = Lease(self._store, self.settings)
        self._renewal: Future[None] | None = None
        self._rhythm = Rhythm()
        self._working = threading.RLock()
        self._closed = False

    @property
    def version(self) -> int | None:
        """The version applied."""
        at = self._progress.at
        return at.version if at else None

    @property
    def position(self) -> Position | None:
        """The version applied, with its manifest: step, metadata, digest."""
        return self._progress.at

    def status(self) -> Status:
        """Where it is, as of the last poll. Never waits."""
        return self._progress.status()

    def once(self) -> Position:
        """Bring the target to the head, and return it.

        Raises:
            NotFound: there is no stream, or no version in it.
            Gap: a version on the way is gone and no snapshot leads past it; the target stays where it was.
            Corrupt, Untrusted, StorageError, UsageError: as they say; the target stays at a whole version.
        """
        tries = 1
        while True:
            try:
                if not self._advance(thorough=True):
                    break
            except (Corrupt, NotFound) as error:
                if self.version is None or tries >= self.settings.tries:
                    raise
                log.warning("not moving on from version %s yet: %s", self.version, error)
                tries += 1
        at = self._progress.at
        if at is None:
            raise NotFound(f"no version in {self._store.url} yet")
        self._lease.renew(at.version, force=True)
        return at

    def follow(self, stop: threading.Event | None = None) -> Iterator[Position]:
        """Yield each version as it is applied, until `stop` is set or the subscriber is closed.

        The first one yielded may be what the target held before this began. What may pass (the store is down, an object
        is not there yet or damaged) is logged, shown in `status` and tried again, more and more slowly. A poll at the
        head is one small request; how often it is sent follows the versions' rhythm, see `rhythm`.

        Raises:
            Untrusted, UsageError: this will not pass; the target stays at a whole version.
        """
        with self._progress.ending():
            yield from self._follow(stop or threading.Event())

    def _follow(self, stop: threading.Event) -> Iterator[Position]:
        failures, idle = 0, _LOOK_AROUND  # the first poll looks around
        failing_since, looked = time.monotonic(), -math.inf
        told: Position | None = None
        while not stop.is_set() and not self._closed:
            began = time.monotonic()
            around = idle >= _LOOK_AROUND and began - looked >= _LOOK_AROUND * self.settings.poll_s
            if around:
                idle, looked = 0, began
            try:
                moved = self._advance(thorough=failures > 0 or around)
            except WeightcastError as error:
                failing_since = failing_since if failures else time.monotonic()
                self._note(error, time.monotonic() - failing_since)
                failures, moved = failures + 1, False
            else:
                news = self._progress.at != told
                idle = 0 if moved else idle + 1
                if news or not moved:  # proving the same version again is no success
                    failures = 0
            at = self._progress.at
            if at is not None and at != told:
                told = at
                yield at
            if at is not None:  # only now: who is told may yet have to load it
                self._renew(at.version)
            if not moved:
                self._rest(stop, failures)

    def wait_for(self, version: int, timeout: float | None = None) -> int:
        """Wait until `version` or a later one is applied (by `follow` in another thread), and return which.

        Raises:
            StorageError: time ran out; says how far it came and why.
            Untrusted, UsageError: `follow` ended with this, or because of an unforeseen error.
        """
        return self._progress.wait_for(version, timeout)

    def close(self) -> None:
        """Stop following and let go of threads, after the step under way. The target stays where it is."""
        self._closed = True
        with self._working:
            self._progress.ended(UsageError("the subscriber was closed"))
            for pool in (self._polls, self._listings, self._requests, self._pool):
                pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self, *, thorough: bool) -> bool:
        """One step forward, if there is one: True if the target moved, or was proved to be at some version.

        Args:
            thorough: look behind a missing next version for newer ones.
        """
        with self._working:
            if self._closed:
                raise UsageError("this subscriber is closed", hint="open a new one")
            with self.target.exclusive():
                with self._progress.looking():
                    # Each time: another process may have died half way, and then the bits are no base.
                    self.target.recover()
                    mark = self.target.mark()
                mover = self._mover or self._open()
                at = self._progress.at
                if at is None or not mover.attached or mark != mark_of(at):
                    if mark is None:
                        self._progress.torn()  # it had one: what it holds now is anybody's guess
                    return self._attach(mover)
                return mover.advance(at, thorough=thorough)

    def _open(self) -> Mover:
        reader = StreamReader.open(self._store)
        self._mover = Mover(
            reader,
            self.target,
            self._pool,
            self._requests,
            self._polls,
            self._listings,
            self.settings,
            self._progress,
            self._rhythm,
        )
        return self._mover

    def _attach(self, mover: Mover) -> bool:
        """Find out which version the target holds; fetch a snapshot if that cannot be told."""
        position = attach(mover.reader, self.target, self._pool)
        if position is not None:
            mover.attach(position)
            return True
        self._progress.lost()
        head = mover.reader.head()
        if head is None:
            raise NotFound(f"no version in {self._store.url} yet")
        self._progress.saw_head(head)
        mover.jump(head)
        return True

    def _note(self, error: WeightcastError, failing_s: float) -> None:
        """Show what went wrong; raise it if it will not pass."""
        self._progress.failed(error)
        settling = (
            isinstance(error, Untrusted) and not isinstance(error, Unsupported) and self.version is not None
        )
        if not error.retryable and not (settling and failing_s < _SETTLE_S):
            raise error
        log.warning("not moving on from version %s: %s", self.version, error)

    def _rest(self, stop: threading.Event, failures: int) -> None:
        """Pause until the next step. Meanwhile the next manifest alone is asked for, as often as the rhythm says; as
        soon as it is there the pause ends.
        """
        poll_s, mover, at = self.settings.poll_s, self._mover, self._progress.at
        most_s = spread_s(backoff_s(poll_s, failures), random.random())
        if failures or mover is None or at is None:
            self._sleep(stop, most_s)
            return
        until, lookout = time.monotonic() + most_s, mover.lookout
        while not (stop.is_set() or self._closed):
            left = until - time.monotonic()
            pause = self._rhythm.pause_s(poll_s, time.monotonic(), lookout.request_s)
            due_now = pause < lookout.request_s and left > -min(_PUT_OFF_S, poll_s)
            if pause >= poll_s or (pause >= left and not due_now):
                self._sleep(stop, left, lookout)
                return
            if self._sleep(stop, spread_s(pause, random.random()), lookout) or not self._glance(mover, at):
                return

    def _sleep(self, stop: threading.Event, seconds: float, lookout: Lookout | None = None) -> bool:
        """Sleep, unless told to stop. True, at once, if `lookout` has news."""
        until = time.monotonic() + seconds
        while not (self._closed or stop.is_set()):
            left = max(0.0, min(until - time.monotonic(), _SLICE_S))
            waiting = lookout is not None and lookout.waiting
            if lookout is not None and lookout.wait(left if waiting else 0.0):
                return True
            if left <= 0 or (not waiting and stop.wait(left)):
                break
        return False

    def _glance(self, mover: Mover, at: Position) -> bool:
        """See what there is of the next version. False if the next step has to find out why that failed."""
        with self._working:  # which `close` holds while it ends the threads
            if self._closed:
                return False
            try:
                mover.glance(at)
            except WeightcastError:
                return False
        return True

    def _renew(self, version: int) -> None:
        """Renew the lease while versions are waited for: its request keeps nobody up."""
        with self._working:  # which `close` holds while it ends the threads
            if not self._closed and (self._renewal is None or self._renewal.done()):
                self._renewal = self._requests.submit(self._lease.renew, version)
