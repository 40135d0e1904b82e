"""One publish as a rank goes through it, and small helpers around it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from weightcast.manifest.chain import Position
from weightcast.manifest.stream import StreamReader
from weightcast.publisher.label import Label
from weightcast.publisher.resume import FENCE_TRIES
from weightcast.publisher.upload import Uploader
from weightcast.schemas.errors import Conflict, UsageError
from weightcast.schemas.manifest import VersionManifest, decode

from .chair import Wish
from .tables import Held

T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A publish's arguments, looked at; but for `slices` they count on rank 0 alone."""

    label: Label
    drop: frozenset[str]
    slices: Held


class Turn:
    """What a rank was asked to publish, and under which number. Wrong arguments show when they are looked at.

    Args:
        number: of the publish; the same on all ranks.
        asked: the arguments, or what is wrong with them.
        reset, wait: as asked.
    """

    def __init__(self, number: int, asked: Future[Asked], reset: bool, wait: bool) -> None:
        self.number = number
        self._asked: Future[Asked] | None = asked
        self._reading = threading.Lock()
        wrong = asked.exception() is not None
        label, drop = (Label(), frozenset[str]()) if wrong else (asked.result().label, asked.result().drop)
        self.wish = Wish(number, label, drop, reset, wait)

    @property
    def held(self) -> Held:
        """The slices.

        Raises:
            WeightcastError: the arguments were wrong.
            UsageError: they were forgotten.
        """
        if self._asked is None:
            raise UsageError("the trainer's tensors are not at hand any more")
        return self._asked.result().slices

    @contextmanager
    def reading(self) -> Iterator[Held]:
        """The slices, for another thread that reads them; `forget` waits for its end.

        Raises:
            UsageError: they were forgotten.
        """
        with self._reading:
            yield self.held

    def forget(self) -> None:
        """Let go of the trainer's tensors: from here on nobody reads them."""
        with self._reading:
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


def fenced(reader: StreamReader, uploader: Uploader, tries: int = FENCE_TRIES) -> Position | None:
    """Commit an empty version on top of the head, so that a predecessor can commit nothing more.

    Raises:
        Conflict: another publisher goes on committing.
    """
    head = head_of(reader)
    if head is None:
        return None
    try:
        return uploader.commit(uploader.prepare_empty(head, Label(metadata={"fence": True})))
    except Conflict:
        if tries == 1:
            raise
    return fenced(reader, uploader, tries - 1)
