"""The background half of a publisher: one version in flight, one waiting, snapshots beside them.

The trainer's thread captures (and then is free); this thread uploads and commits, and moves the baseline only after
the commit. A version that waits while a newer one is captured is replaced by it: versions coalesce rather than queue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace

from weightcast.manifest.chain import Position
from weightcast.manifest.rebuild import State
from weightcast.schemas.errors import Conflict, Corrupt, StorageError, UsageError, WeightcastError
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.settings import PublisherSettings
from weightcast.schemas.shard import Codec

from .baseline import Baseline
from .capture import Capture
from .follow import Follower
from .job import Job, announce
from .label import Label
from .resume import Keeper
from .snapshots import Snapshots
from .upload import Uploader

log = logging.getLogger(__name__)


class Pipeline:
    """See the module.

    `baseline` is None until a version was committed that starts the chain; `parent` is the head that it then follows.
    """

    def __init__(
        self,
        uploader: Uploader,
        baseline: Baseline | None,
        settings: PublisherSettings,
        pool: Executor,
        keeper: Keeper,
        parent: Position | None = None,
    ) -> None:
        self.baseline = baseline
        self._parent = parent
        self._uploader = uploader
        self._keeper = keeper
        self._follower = Follower(settings, pool, keeper)
        self._changed = threading.Condition()
        self._active: Job | None = None
        self._waiting: Job | None = None
        self._unsettled: tuple[Job, VersionManifest] | None = None
        self._files: Mapping[str, bytes] | None = None  # given with a version that is not committed
        self._error: WeightcastError | None = None
        self._dead: WeightcastError | None = None
        self._closing = False
        self.snapshots = Snapshots(uploader, settings)
        self._thread = self._started()

    def _started(self) -> threading.Thread:
        # Not a daemon: a trainer that returns from main with a version in flight has it committed first.
        thread = threading.Thread(target=self._run, name="weightcast-publisher", daemon=False)
        self._running = True
        thread.start()
        return thread

    @property
    def codec(self) -> Codec:
        """What the next version is to be coded with; never `auto`."""
        return self._uploader.choice.codec

    def check(self) -> None:
        """Raise what went wrong in the background since the last call, once; what is final, each time."""
        with self._changed:
            error, self._error = self._error, None
            if self._dead or error:
                raise self._dead or error  # type: ignore[misc]

    @property
    def dead(self) -> WeightcastError | None:
        """What makes this pipeline useless for good, if something did."""
        return self._dead

    def check_alive(self) -> None:
        """Raise what ended this publisher, if something did."""
        with self._changed:
            if self._dead is not None:
                raise self._dead

    def told(self, error: BaseException) -> None:
        """Note that somebody who waited was told of `error`: `check` need not raise it as well."""
        with self._changed:
            if self._error is error:
                self._error = None

    def fence(self, label: Label) -> None:
        """Commit an empty version on top of the baseline. Call before anything is published.

        Raises:
            Conflict: another publisher committed that version.
        """
        baseline = self.baseline
        if baseline is None:
            raise UsageError("there is no version to fence")
        position = self._uploader.commit(self._uploader.prepare_empty(baseline.position, label))
        with baseline.gate.changing():
            baseline.replace(State(position, baseline.geometry, baseline.state.memory))
        self._keeper.note(baseline.state)

    def offer(self, job: Job) -> bool:
        """Make `job` active before its capture has begun, so that uploads overlap it. False if one is active."""
        with self._changed:
            # One that waits goes first: what it holds is older.
            if self._active is not None or self._waiting is not None or self._unsettled is not None:
                return False
            self._admit(job)
            self._active = job
            self._changed.notify_all()
            return True

    def queue(self, job: Job) -> None:
        """Put a finished capture behind the active one, in place of one that waits there already."""
        with self._changed:
            self._admit(job)
            if self._waiting is not None:
                job.futures += self._waiting.futures
                self._waiting.capture.rows.finish(failed=True)  # nobody wants them any more
            self._waiting = job
            self._changed.notify_all()

    def _admit(self, job: Job) -> None:
        """See that `job` will be worked on, and carries the files of versions that it replaces or that failed."""
        if self._closing:
            raise UsageError("this publisher is closed", hint="open a new one")
        if not self._running:  # it had ended with the main thread, when another one published
            self._thread = self._started()
        label = job.capture.label
        if label.files is None:
            job.capture.label = replace(label, files=self._files)
        self._files = job.capture.label.files

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing is active or waiting; False if time ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._active and not self._waiting, timeout)

    def close(self, timeout: float | None) -> None:
        """Finish what is on its way, then stop.

        Raises:
            StorageError: time ran out; names what is not committed.
            WeightcastError: what went wrong in the background and was not raised before.
        """
        finished = self.wait_idle(timeout)
        self.stop()
        if not finished:
            raise StorageError(
                f"closed after {timeout} s with a version not committed",
                hint="the store is slow or down; publish again",
            )
        self._thread.join(timeout)
        self.snapshots.join(timeout)
        self.check()

    def stop(self) -> None:
        """Take no more work; the thread ends once it has nothing left."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Whether there is a job; False when there will be no more."""
        with self._changed:
            while self._active is None and self._waiting is None:
                if self._closing or not threading.main_thread().is_alive():
                    self._running = False
                    return False
                self._changed.wait(0.5)
            return True

    def _take(self) -> Job:
        with self._changed:
            if self._active is None:
                self._active, self._waiting = self._waiting, None
            if self._active is None:
                raise UsageError("there is no job to take")
            return self._active

    def _run(self) -> None:
        while self._wait_for_work():
            job: Job | None = None
            try:
                self._settle_unknown()
                job = self._take()
                self._process(job)
            except WeightcastError as error:
                self._report(job, error)
            except Exception as error:  # noqa: BLE001 - must reach the trainer, whatever it is
                self._report(job, WeightcastError(f"publishing failed: {type(error).__name__}: {error}"))
            finally:
                with self._changed:
                    self._active = None
                    self._changed.notify_all()

    def _report(self, job: Job | None, error: WeightcastError) -> None:
        """Pass `error` to those who wait for `job`, or for the one that waits for its turn."""
        log.error("version not committed: %s", error)
        with self._changed:
            if job is None:
                job, self._waiting = self._waiting, None
            if job is not None:
                job.fail(error)
            self._error = error
            if isinstance(error, Conflict):
                self._dead = error

    def _process(self, job: Job) -> None:
        if self._dead is not None:
            raise self._dead
        capture, manifest = job.capture, None
        parent = self.baseline.position if self.baseline else self._parent
        if capture.fresh is not None:
            manifest = self._uploader.prepare_reset(capture, parent)
        elif parent is None:
            raise UsageError("a stream's first version must be a whole one")
        else:
            manifest = self._uploader.prepare_delta(capture, parent)
        if manifest is None:
            job.fail(UsageError("the capture failed"))  # its own error was raised where the capture ran
            return
        if capture.fresh is None and (parent is None or capture.base != parent.sha256):
            raise Corrupt(
                f"the changes captured for version {manifest.version} are told from another version "
                "than the one before it"
            )
        self._commit(job, manifest)

    def _settle_unknown(self) -> None:
        """Find out about a commit whose outcome was unknown, while what was captured since still waits."""
        if self._unsettled is not None:
            job, manifest = self._unsettled
            self._commit(job, manifest)

    def _commit(self, job: Job, manifest: VersionManifest) -> None:
        self._unsettled = job, manifest  # until its outcome is known, whatever happens
        try:
            position = self._uploader.commit(manifest)
        except WeightcastError as error:
            if not isinstance(error, StorageError):
                self._unsettled = None
            raise
        self._unsettled = None
        try:
            self._move(job.capture, position)
        except Exception as error:  # noqa: BLE001 - whatever it was, the baseline's bits are not known any more
            self._dead = Corrupt(
                f"version {position.version} is committed, but the baseline could not follow: {error}",
                hint="restart the publisher",
            )
        announce(manifest)
        with self._changed:
            self._error = None  # what failed before is made up for
            if self._files is job.capture.label.files:
                self._files = None
        job.succeed(position)
        if self.baseline is not None and self._dead is None:
            self._keeper.note(self.baseline.state)
            self.snapshots.after(position, self.baseline)

    def _move(self, capture: Capture, position: Position) -> None:
        """Take the committed bits for the baseline, and tell a waiting capture from there."""
        baseline = self.baseline
        if baseline is None:
            self.baseline = Baseline(self._follower.fresh(capture, position))
            return
        if capture.fresh is None:
            baseline.wait_for_view(position.manifest.totals.changed)
        with baseline.gate.changing():  # and so nobody captures, and what waits stays
            waiting = self._still_waiting()
            # A whole state that waits is told from nothing.
            follows = waiting if waiting is not None and waiting.capture.fresh is None else None
            moved = self._follower.move(baseline, capture, position, follows.capture if follows else None)
            if follows is not None and moved is not None:
                follows.capture = moved

    def _still_waiting(self) -> Job | None:
        """The job that waits, unless its changes could not be coded: then those who wait for it are told."""
        waiting = self._waiting
        error = waiting.capture.rows.error if waiting is not None else None
        if waiting is None or error is None:
            return waiting
        with self._changed:
            self._waiting, self._error = None, error
        waiting.fail(error)
        return None
