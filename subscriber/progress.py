"""Where a subscriber is, for whoever asks from another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from weightcast.manifest.chain import Position
from weightcast.schemas.errors import StorageError, UsageError, WeightcastError

_LOOK_S: Final = 0.5  # a target that is well is looked at in less; one that takes longer is being healed


@dataclass(frozen=True, slots=True)
class Status:
    """Where a subscriber is.

    Attributes:
        version: applied; None before the first.
        head: newest version seen.
        lag: versions between the two.
        behind_s: seconds since a version that is not applied was first seen; 0 at the head.
        checked_s: seconds since the store last answered; infinite if it never did.
        ready: a version is applied, the target can be had and is whole, and lag is within `max_lag`.
        error: what keeps it from moving on, or "".
    """

    version: int | None
    head: int | None
    lag: int
    behind_s: float
    checked_s: float
    ready: bool
    error: str


class Progress:
    """What `Status` is made of. Thread-safe, and never holds its lock for longer than it takes to write a number."""

    def __init__(self, max_lag: int | None) -> None:
        self._max_lag = max_lag
        self._changed = threading.Condition()
        self._at: Position | None = None
        self._head: int | None = None
        self._behind_since: float | None = None
        self._checked: float | None = None
        self._error = ""
        self._torn = False
        self._unwell = False
        self._looking_since: float | None = None
        self._ended: WeightcastError | None = None

    @property
    def at(self) -> Position | None:
        """The version applied."""
        return self._at

    def status(self) -> Status:
        """All of it, now."""
        with self._changed:
            now = time.monotonic()
            at = self._at.version if self._at else None
            head = self._head
            lag = 0 if head is None else max(0, head - at) if at is not None else head + 1
            return Status(
                version=at,
                head=head,
                lag=lag,
                behind_s=now - self._behind_since if self._behind_since is not None else 0.0,
                checked_s=now - self._checked if self._checked is not None else float("inf"),
                ready=at is not None
                and self._is_well(now)
                and (self._max_lag is None or lag <= self._max_lag),
                error=self._error,
            )

    def saw_head(self, head: int) -> None:
        """The store answered: `head` is the newest version."""
        with self._changed:
            self._checked = time.monotonic()
            self._head = max(head, self._head or 0)
            if self._at is not None and head <= self._at.version:
                self._behind_since, self._error = None, ""
            elif self._behind_since is None:
                self._behind_since = time.monotonic()

    def answered(self) -> None:
        """The store answered that there is nothing new."""
        with self._changed:
            self._checked = time.monotonic()

    def arrived(self, position: Position) -> None:
        """`position` is applied."""
        with self._changed:
            moved = self._at is None or self._at.version != position.version
            self._at, self._torn = position, False
            if moved:
                self._error = ""
            if self._head is None or position.version >= self._head:
                self._head, self._behind_since = position.version, None
            self._changed.notify_all()

    def lost(self) -> None:
        """The target turned out to hold no version."""
        with self._changed:
            self._at = None

    def torn(self) -> None:
        """The target may be between two versions."""
        with self._changed:
            self._torn = True

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While the target is looked at, and healed if need be. If that fails, it is not ready until it succeeds."""
        with self._changed:
            self._looking_since = time.monotonic()
        try:
            yield
        except BaseException:
            self._looked(unwell=True)
            raise
        self._looked(unwell=False)

    def _looked(self, *, unwell: bool) -> None:
        with self._changed:
            self._looking_since, self._unwell = None, unwell

    def _is_well(self, now: float) -> bool:
        long = self._looking_since is not None and now - self._looking_since > _LOOK_S
        return not (self._torn or self._unwell or long)

    def failed(self, error: WeightcastError) -> None:
        """`error` keeps it from moving on."""
        with self._changed:
            self._error = str(error)

    def ended(self, error: WeightcastError) -> None:
        """It will not move any more: whoever waits is told."""
        with self._changed:
            self._ended = self._ended or error
            self._changed.notify_all()

    @contextmanager
    def ending(self) -> Iterator[None]:
        """While the target is kept at the head: whatever error ends that, whoever waits is told."""
        try:
            yield
        except GeneratorExit:
            raise  # who used the versions wants no more; that is no error
        except WeightcastError as error:
            self.ended(error)
            raise
        except BaseException as error:
            self.ended(UsageError(f"following ended by an unforeseen error: {error!r}"))
            raise

    def wait_for(self, version: int, timeout: float | None) -> int:
        """Wait until `version` or a later one is applied, and return which.

        Raises:
            StorageError: time ran out.
            WeightcastError: what `ended` was told.
        """

        def at() -> int:
            return self._at.version if self._at else -1

        with self._changed:
            self._changed.wait_for(lambda: at() >= version or self._ended is not None, timeout)
            if at() >= version:
                return at()
            if self._ended is not None:
                raise self._ended
            where = f"at {at()}" if self._at else "at none"
            raise StorageError(
                f"version {version} was not applied within {timeout} s; {where}, {self._error or 'no error'}"
            )
