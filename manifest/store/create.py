"""Create-only with a settled outcome: whatever the network does, the caller learns who made the object, or
that it is unknown.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from enum import Enum

from weightcast.schemas.errors import StorageError

from .backend import Backend
from .errors import Failure, Kind, to_error
from .retry import Retrier
from .types import StoreSettings


class Seen(Enum):
    """What lies where the object is to be."""

    ABSENT = "absent"
    OURS = "ours"
    THEIRS = "theirs"


def _again(failure: Failure) -> Failure:
    """The same failure as one that is worth another try."""
    return replace(failure, kind=Kind.TRANSIENT)


class Creator:
    """One create of one object.

    The same bytes are sent again until an answer is definite. "Exists" is not: it may be our own request
    whose answer was lost. So the object is read back, and equal bytes are ours, because every document
    carries a token of its own.
    """

    def __init__(self, retrier: Retrier, settings: StoreSettings, name: str, path: str, data: bytes) -> None:
        self._retrier = retrier
        self._settings = settings
        self._name = name
        self._path = path
        self._data = data

    def create(self) -> bool:
        """Send, settle, repeat. See `Store.create`."""
        budget, in_doubt = self._retrier.budget(), False
        while True:
            backend = self._retrier.backend()
            try:
                backend.create(self._path, self._data)
            except backend.errors as error:
                failure, cause = self._retrier.judge(backend, error), error
            else:
                return True
            if failure.kind is Kind.MISSING:
                failure = replace(failure, kind=Kind.REFUSED, hint="does the bucket or folder exist?")
            in_doubt = in_doubt or failure.kind in (Kind.TRANSIENT, Kind.DAMAGED)
            # Even a refusal may answer a repetition: HTTP clients resend a PUT when a kept connection breaks.
            seen = None if failure.kind is Kind.EXPIRED else self._see(backend)
            if seen in (Seen.OURS, Seen.THEIRS):
                return seen is Seen.OURS
            if failure.kind is Kind.REFUSED:
                in_doubt = in_doubt or seen is None
            elif budget.wait(failure if failure.kind is Kind.EXPIRED else _again(failure), attempts=0):
                continue
            if in_doubt or failure.kind is Kind.EXISTS:
                raise self._unknown(failure, budget.story) from cause
            raise to_error(failure, f"create {self._name}", budget.story) from cause

    def single(self) -> bool:
        """For a store without create-only and a user who states that there is one writer: look, then
        write.
        """
        seen = self._retrier.run(f"read {self._name}", self._look)
        if seen is not Seen.ABSENT:
            return seen is Seen.OURS
        self._retrier.write(f"create {self._name}", lambda backend: backend.write(self._path, self._data))
        return True

    def _see(self, backend: Backend) -> Seen | None:
        """One look; None if the store does not answer it."""
        try:
            return self._look(backend)
        except backend.errors as error:
            self._retrier.judge(backend, error)
            return None

    def _look(self, backend: Backend) -> Seen:
        """One read of at most one piece more than our own bytes."""
        found = bytearray()
        try:
            with closing(backend.read(self._path, 0)) as stream:
                for piece in stream:
                    found += piece
                    if len(found) > len(self._data):
                        return Seen.THEIRS
        except backend.errors as error:
            if backend.classify(error).kind is Kind.MISSING:
                return Seen.ABSENT
            raise
        return Seen.OURS if found == self._data else Seen.THEIRS

    def _unknown(self, failure: Failure, story: str) -> StorageError:
        return StorageError(
            f"cannot settle whether {self._name} was created, outcome unknown: "
            f"expected an answer, found {failure.found}{story}",
            hint=failure.hint
            or "delete nothing; try the same again, or start anew, which reads what is there",
        )
