"""One publish as a rank goes through it, and small helpers around it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Final, TypeVar

from weightcast.manifest.chain import Position
from weightcast.manifest.stream import StreamReader
from weightcast.publisher.label import Label
from weightcast.publisher.upload import Uploader
from weightcast.schemas.errors import Conflict, UsageError
from weightcast.schemas.manifest import VersionManifest, decode

from .chair import Wish
from .tables import Held

T = TypeVar("T")

_FENCE_TRIES: Final = 5
"""A predecessor commits at most its one version in flight; more is somebody else at work."""


class Turn:
    """What a rank was asked to publish, and under which number. Wrong arguments show when they are looked at.

    Args:
        number: of the publish; the same on all ranks.
        asked: label and slices, or why there are none.
        drop, reset, wait: as asked.
    """

    def __init__(
        self,
        number: int,
        asked: Future[tuple[Label, Held]],
        drop: Collection[str],
        reset: bool,
        wait: bool,
    ) -> None:
        self.number = number
        self._asked: Future[tuple[Label, Held]] | None = asked
        self._error = asked.exception()
        self._label = Label() if self._error is not None else asked.result()[0]
        self.wish = Wish(number, self._label, frozenset(drop), reset, wait)

    @property
    def held(self) -> Held:
        """The slices.

        Raises:
            WeightcastError: the arguments were wrong.
            UsageError: they were forgotten.
        """
        if self._asked is None:
            raise UsageError("the trainer's tensors are not at hand any more")
        return self._asked.result()[1]

    def forget(self) -> None:
        """Let go of the trainer's tensors."""
        self._asked = None


def attempt(call: Callable[[], T]) -> Future[T]:
    """The outcome of a call made now. An error is kept: the other ranks must be told of it before it is raised."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:  # noqa: BLE001 - raised on all ranks once they were told
        future.set_exception(error)
    return future


def position_of(text: str) -> Position:
    """A version, from the text of its manifest as rank 0 committed it."""
    data = text.encode()
    return Position(
        decode(VersionManifest, data, "the manifest that rank 0 committed"), hashlib.sha256(data).hexdigest()
    )


def head_of(reader: StreamReader) -> Position | None:
    """The newest version of a stream."""
    head = reader.head()
    return reader.position(head) if head is not None else None


def fenced(reader: StreamReader, uploader: Uploader) -> Position | None:
    """Commit an empty version on top of the head, so that a predecessor can commit nothing more.

    Raises:
        Conflict: another publisher goes on committing.
    """
    for attempt_left in reversed(range(_FENCE_TRIES)):
        head = head_of(reader)
        if head is None:
            return None
        try:
            return uploader.commit(uploader.prepare_empty(head, Label(metadata={"fence": True})))
        except Conflict:
            if not attempt_left:
                raise
    return None
