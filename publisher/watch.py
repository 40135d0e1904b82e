"""The folder sidecar's core: publishes the checkpoints that a trainer writes into a folder it only reads.

What counts as a checkpoint of FOLDER:

- a sub-folder `checkpoint-N`, `global_step_N`, `step_N` or `iter_N` (`-` or `_`), N being its step. Where
  it has no weights at its top, those in `huggingface/` or `actor/huggingface/` are taken;
- `latest`, a folder or a symbolic link to one;
- FOLDER itself, if weights lie at its top.

A link and what it leads to are one checkpoint. Names that look temporary (`.x`, `tmp-x`, `x.tmp`,
`x-tmp-1`, `x.incomplete`, orbax's) never count; a rename to the final name makes them count.

A checkpoint is finished when

1. no file of it changed for `settle_s` (by name, inode, size and modification time, between looks), and
2. the `marker` file is there, if one is asked for, and
3. `open_checkpoint` accepts it: each file as long as its header says, the index complete.

Rule 3 fails while a file grows; rule 1 is for files that are written one after another. A trainer that
pauses for longer than `settle_s` while it saves over a complete checkpoint in place, or that reserves a
file's size before it fills the file, needs a marker that it removes first and writes last.

Finished ones are published in the order of their steps; one without a step comes after those written
before it. Of several finished ones the newest is published and the others are passed over, unless `every`
is set. What is there when the watcher starts is dealt with by `existing`: `newest` (of these, publish
one), `all`, or `ignore` until its weights are saved again.

A checkpoint that was published is published again only when its weights are saved again: a rewrite under
the same name is a new version, `latest` going back to an older checkpoint is not. A finished checkpoint
of a lower step than the last one is published too: that is what a trainer that was rolled back writes. A
version carries the step in the folder's name, never the one in `trainer_state.json`; where the two
disagree the checkpoint is refused.

A checkpoint that cannot be published is reported once and looked at again when it changes. One that goes
away or changes while it is read is not published. Where the store fails, the same or a newer checkpoint
is tried again after 1 s, then 2 s, up to a minute. Another publisher's takeover ends the watch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weightcast.schemas.errors import Conflict, Corrupt, NotFound, StorageError, UsageError, WeightcastError
from weightcast.schemas.manifest import VersionManifest

from .candidates import Candidates, Choice, Existing
from .checkpoint import Checkpoint, check_step, open_checkpoint
from .contents import Contents
from .label import Label
from .publisher import Publisher
from .sightings import Sighting, look
from .sources import Casts, Item, recast

log = logging.getLogger(__name__)

FIRST_BACKOFF_S: Final = 1.0
MAX_BACKOFF_S: Final = 60.0
LOOK_SHARE: Final = 20
"""A look is followed by a pause of at least so many times its duration: metadata servers are shared."""
_DONE_CHECK_S: Final = 0.02


@dataclass(frozen=True)
class WatchSettings:
    """How a folder is watched; see the module.

    Attributes:
        settle_s: seconds without a change after which a checkpoint may count as finished.
        poll_s: seconds between two looks.
        marker: name of a file that must be in the checkpoint folder.
        existing: what to do with the checkpoints that are there at the start.
        every: publish each of several finished checkpoints.
    """

    settle_s: float = 2.0
    poll_s: float = 0.5
    marker: str | None = None
    existing: Existing = "newest"
    every: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.settle_s <= 86_400 or not 0 < self.poll_s <= 3_600:
            raise UsageError(f"settle {self.settle_s} s or poll {self.poll_s} s is out of bounds")
        if self.marker is not None and (
            self.marker in ("", ".", "..") or "/" in self.marker or "\0" in self.marker
        ):
            raise UsageError(f"marker {self.marker!r} is not a plain file name")


@dataclass(frozen=True)
class Outcome:
    """What one step did.

    Attributes:
        path: the checkpoint that was published, or whose turn it was.
        published: the committed version, if there is one.
        seconds: from the first byte read to the commit.
        failures: what went wrong; a checkpoint that is merely not finished is no failure.
        retrying: whether the store failed and the same is tried again later.
    """

    path: Path | None = None
    published: VersionManifest | None = None
    seconds: float = 0.0
    failures: tuple[WeightcastError, ...] = ()
    retrying: bool = False


class Interrupted(Exception):
    """The watch was stopped while a checkpoint was being published."""


@dataclass
class _Backoff:
    """When to try again, in seconds of the watcher's clock."""

    not_before: float = float("-inf")
    pause_s: float = FIRST_BACKOFF_S

    def fail(self, now_s: float) -> None:
        self.not_before = now_s + self.pause_s
        self.pause_s = min(2 * self.pause_s, MAX_BACKOFF_S)

    def succeed(self) -> None:
        self.not_before, self.pause_s = float("-inf"), FIRST_BACKOFF_S


class Watcher:
    """Publishes finished checkpoints of a folder, one at a time. Used by one thread.

    Args:
        folder: the folder to watch; it may be made later.
        publisher: where to; stays the caller's to close.
        settings: how to watch.
        clock: a monotonic clock, in seconds.
        wait: waits for the event, at most so many seconds.
    """

    def __init__(
        self,
        folder: Path,
        publisher: Publisher,
        settings: WatchSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self.folder = folder
        self.settings = settings or WatchSettings()
        self._publisher = publisher
        self._casts = Casts(publisher.settings.cast)
        self._clock = clock
        self._wait = wait
        self._stop = threading.Event()
        self._candidates = Candidates(
            self.settings.settle_s, self.settings.existing, every=self.settings.every
        )
        self._published: dict[Path, int] = {}
        self._later: dict[Path, float] = {}
        self._backoff = _Backoff()
        self._noted = ""

    def run(self, stop: threading.Event, report: Callable[[Outcome], None] = lambda outcome: None) -> None:
        """Look and publish until `stop` is set; tell `report` about each step.

        A version that is in flight when `stop` is set is left to the publisher, whose `close` waits for it.

        Raises:
            Conflict: another publisher has taken over the stream.
            WeightcastError: this publisher cannot go on; open another.
        """
        self._stop = stop
        while not stop.is_set():
            start = self._clock()
            outcome = self.step()
            report(outcome)
            if outcome.published is None:
                self._wait(stop, max(self.settings.poll_s, LOOK_SHARE * (self._clock() - start)))

    def step(self) -> Outcome:
        """Look once, and publish at most one checkpoint.

        Raises:
            Conflict: another publisher has taken over the stream.
            WeightcastError: this publisher cannot go on; open another.
        """
        now = self._clock()
        try:
            self._candidates.see(look(self.folder, self.settings.marker), now)
        except NotFound as error:
            self._note(f"nothing to watch yet: {error.message}")
            return Outcome()
        except WeightcastError as error:
            self._note(str(error))
            return Outcome(failures=(error,))
        if now < self._backoff.not_before:
            return Outcome(retrying=True)
        return self._take_turns(now)

    def _take_turns(self, now_s: float) -> Outcome:
        """Publish the first choice that can be opened."""
        failures: list[WeightcastError] = []
        while not self._stop.is_set():
            aside = {path for path, until in self._later.items() if now_s < until}
            choice = self._candidates.choose(now_s, aside)
            if choice is None:
                break
            seen = choice.sighting
            try:
                checkpoint = _open(seen)
            except NotFound as error:
                log.info("%s is not finished: %s", seen.path, error)
                self._candidates.refuse(seen)
            except StorageError as error:
                failures.append(self._fail(seen, error))
                self._later[seen.path] = now_s + MAX_BACKOFF_S
            except WeightcastError as error:
                failures.append(self._fail(seen, error))
                self._candidates.refuse(seen)
            else:
                if self._published.get(seen.path) != hash(checkpoint.fingerprint):
                    return self._publish(choice, checkpoint, failures)
                self._candidates.refuse(seen)  # a file came or went that is not of the weights
        return Outcome(failures=tuple(failures))

    def _publish(self, choice: Choice, checkpoint: Checkpoint, failures: list[WeightcastError]) -> Outcome:
        seen, start, first = choice.sighting, self._clock(), self._publisher.version is None
        _warn_of_order(choice)
        try:
            manifest = self._send(seen, checkpoint)
        except Interrupted:
            return Outcome(seen.path, failures=tuple(failures))
        except WeightcastError as error:
            if isinstance(error, Conflict) or self._publisher.broken is not None:
                raise
            if isinstance(error, UsageError):
                if first:
                    raise  # no fault of a whole checkpoint: it is the stream or the settings
                self._candidates.refuse(seen)
                return Outcome(seen.path, failures=(*failures, self._fail(seen, error)))
            if isinstance(error, (NotFound, Corrupt)) and not checkpoint.is_unchanged():
                log.info("%s was not published: %s", seen.path, error)
                return Outcome(seen.path, failures=tuple(failures))
            self._backoff.fail(self._clock())
            return Outcome(seen.path, failures=(*failures, self._fail(seen, error)), retrying=True)
        self._backoff.succeed()
        self._candidates.settle(choice)
        self._published[seen.path] = hash(checkpoint.fingerprint)
        return Outcome(seen.path, manifest, self._clock() - start, tuple(failures))

    def _send(self, seen: Sighting, checkpoint: Checkpoint) -> VersionManifest:
        """Publish, and wait for the commit.

        Raises:
            NotFound, Corrupt: the files are gone or changed; or the store said so.
            Interrupted: the watch was stopped.
        """
        label = Label(seen.step, {"checkpoint": seen.path.name}, checkpoint.companions())
        with checkpoint.items() as contents:
            pending = self._publisher.publish_items(self._items(contents), label)
        while not pending.done:
            if self._stop.wait(_DONE_CHECK_S):
                raise Interrupted
        return pending.wait()

    def _items(self, contents: Contents) -> Iterator[Item]:
        """The tensors, read one by one. Ends with the contents' own check that they are of one save."""
        for item in contents.values():
            if self._stop.is_set():
                raise Interrupted
            yield recast(item, self._casts)

    def _fail(self, seen: Sighting, error: WeightcastError) -> WeightcastError:
        log.warning(
            "%s was not published: %s",
            seen.path,
            error,
            extra={"checkpoint": str(seen.path), "kind": error.kind},
        )
        return error

    def _note(self, message: str) -> None:
        """Log something that will be found again at the next look, once."""
        if message != self._noted:
            self._noted = message
            log.warning("%s", message)


def _open(seen: Sighting) -> Checkpoint:
    if seen.step is not None:
        check_step(seen.path, seen.step)
    checkpoint = open_checkpoint(seen.weights)
    if not set(checkpoint.fingerprint + checkpoint.aside) <= set(seen.files):
        raise NotFound(f"{seen.path} changed since the last look")
    return checkpoint


def _warn_of_order(choice: Choice) -> None:
    """A trainer that was rolled back leaves higher steps behind; which ones count is for people to say."""
    later = [s.path.name for s in choice.replaced if s.modified_ns > choice.sighting.modified_ns]
    if later:
        log.warning(
            "%s is published instead of %s, which were written later; if it is left over from before a "
            "rollback, remove it",
            choice.sighting.path,
            ", ".join(later),
        )
