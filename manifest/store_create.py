"""Create-only with a settled outcome: whatever the network does, the caller learns who made the object, or
that it is unknown.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from weightcast.schemas.errors import StorageError

from .store_backend import Backend
from .store_errors import Failure, Kind, to_error
from .store_retry import Retrier
from .store_types import StoreSettings


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
            if failure.kind is Kind.REFUSED and not in_doubt:
                raise to_error(failure, f"create {self._name}") from cause
            in_doubt = in_doubt or failure.kind in (Kind.TRANSIENT, Kind.DAMAGED)
            if failure.kind in (Kind.EXISTS, Kind.TRANSIENT):
                owner = self._is_ours(backend)
                if owner is not None:
                    return owner
                failure = replace(failure, kind=Kind.TRANSIENT)
            if not budget.wait(failure, attempts=0):
                raise self._unknown(failure, budget.story) from cause

    def single(self) -> bool:
        """For a store without create-only and a user who states that there is one writer: look, then
        write.
        """
        there = self._retrier.run(f"read {self._name}", self._look)
        if there is not None:
            return there
        self._retrier.write(f"create {self._name}", lambda backend: backend.write(self._path, self._data))
        return True

    def _is_ours(self, backend: Backend) -> bool | None:
        """Whether the object has our bytes; None if there is none, or no answer."""
        try:
            return self._look(backend)
        except backend.errors as error:
            self._retrier.judge(backend, error)
            return None

    def _look(self, backend: Backend) -> bool | None:
        """One read: whether the object has our bytes; None if there is none."""
        found = bytearray()
        try:
            with closing(backend.read(self._path, 0)) as stream:
                for piece in stream:
                    found += piece
                    if len(found) > len(self._data):
                        return False
        except backend.errors as error:
            if backend.classify(error).kind is Kind.MISSING:
                return None
            raise
        return found == self._data

    def _unknown(self, failure: Failure, story: str) -> StorageError:
        return StorageError(
            f"cannot settle whether {self._name} was created, outcome unknown: "
            f"expected an answer, found {failure.found}{story}",
            hint=failure.hint
            or "delete nothing; try the same again, or start anew, which reads what is there",
        )
