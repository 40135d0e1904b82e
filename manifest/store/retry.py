"""The one retry loop: exponential back-off with full jitter, bounded by attempts and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from weightcast.schemas.errors import NotFound, StorageError

from .backend import Backend
from .errors import Failure, Kind, Redactor, to_error
from .types import Pacing, StoreSettings

T = TypeVar("T")

FIRST_DELAY_S: Final = 0.1
MAX_DELAY_S: Final = 5.0
"""Ceiling of the n-th wait: min(5 s, 0.1 s * 2^n); the wait is uniform below it, and never less than
Retry-After.
"""

ONCE: Final = frozenset({Kind.EXPIRED, Kind.DAMAGED})
"""Tried again once: with a new session, or with a fresh request."""

RETRIED: Final = ONCE | {Kind.TRANSIENT}


class Budget:
    """Attempts and time that one call has left."""

    def __init__(self, settings: StoreSettings, pacing: Pacing) -> None:
        self._settings = settings
        self._pacing = pacing
        self._start = pacing.now()
        self.attempts = 0
        self._seen: set[Kind] = set()

    @property
    def spent_s(self) -> float:
        """Seconds since the call, or its last progress, began."""
        return self._pacing.now() - self._start

    def progress(self) -> None:
        """Start counting anew: something came in."""
        self.attempts = 0
        self._start = self._pacing.now()

    def wait(self, failure: Failure, *, attempts: int | None = None) -> bool:
        """Sleep before the next try. False, without sleeping, if there is to be none.

        Args:
            failure: of the try that just ended.
            attempts: limit of tries; None takes the settings'. 0 means: bounded by time alone.
        """
        self.attempts += 1
        limit = self._settings.max_attempts if attempts is None else attempts
        if failure.kind not in RETRIED or (limit and self.attempts >= limit):
            return False
        if failure.kind in ONCE:
            if failure.kind in self._seen:
                return False
            self._seen.add(failure.kind)
        ceiling = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self.attempts - 1, 10))
        delay = max(ceiling * self._pacing.random(), failure.retry_after_s)
        if self.spent_s + delay > self._settings.deadline_s:
            return False
        self._pacing.sleep(delay)
        return True

    @property
    def story(self) -> str:
        """For messages: how hard it was tried."""
        return f" after {self.attempts} tries in {self.spent_s:.1f} s" if self.attempts > 1 else ""


class Retrier:
    """Runs operations that may be repeated, and turns what they raise into this package's errors.

    Args:
        backend: gives the backend for the next try; after `renew` a new one.
        renew: called when credentials turn out to have expired.
    """

    def __init__(
        self,
        settings: StoreSettings,
        pacing: Pacing,
        backend: Callable[[], Backend],
        renew: Callable[[], None],
        redact: Redactor,
    ) -> None:
        self._settings = settings
        self._pacing = pacing
        self.backend = backend
        self._renew = renew
        self._redact = redact

    def budget(self) -> Budget:
        """A full one."""
        return Budget(self._settings, self._pacing)

    def judge(self, backend: Backend, error: Exception) -> Failure:
        """Classify, with secrets taken out; expired credentials are dropped."""
        failure = backend.classify(error)
        if failure.kind is Kind.EXPIRED:
            self._renew()
        return replace(failure, found=self._redact(failure.found))

    def run(self, what: str, operation: Callable[[Backend], T], *, attempts: int | None = None) -> T:
        """Repeat `operation` while its failures are worth it.

        Raises:
            NotFound: the object is missing.
            Corrupt: damaged again after one fresh try.
            StorageError: refused, or out of attempts or time.
        """
        budget = self.budget()
        while True:
            backend = self.backend()
            try:
                return operation(backend)
            except backend.errors as error:
                failure = self.judge(backend, error)
                if not budget.wait(failure, attempts=attempts):
                    raise to_error(failure, what, budget.story) from error

    def write(self, what: str, operation: Callable[[Backend], T], *, attempts: int | None = None) -> T:
        """Like `run`, for an operation that cannot find anything missing but the place to write to.

        Raises:
            StorageError: as `run`.
        """
        try:
            return self.run(what, operation, attempts=attempts)
        except NotFound as error:
            raise StorageError(error.message, hint="does the bucket or folder exist?") from error
