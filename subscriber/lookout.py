"""Requests for the next manifest, several on their way at once.

Whoever asks again only once an answer is there sees a version late by up to a round trip and a pause. Here requests
leave at the pace that the rhythm says, whatever a round trip takes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, as_completed

from .rhythm import AT_ONCE


class Lookout:
    """Used by one thread.

    Args:
        read: gives the manifest of a version, or None if there is none; called in any thread.
        pool: where requests run.
        answered: called, in any thread, when the store said that a version is not there yet.

    Attributes:
        request_s: seconds that the last request took.
    """

    def __init__(
        self, read: Callable[[int], bytes | None], pool: Executor, answered: Callable[[], None]
    ) -> None:
        self._read = read
        self._pool = pool
        self._answered = answered
        self._ended = threading.Event()  # some request has
        self._version = -1
        self._asked: list[Future[bytes | None]] = []
        self.request_s = 0.0

    def _one(self, version: int) -> bytes | None:
        began = time.monotonic()
        found = self._read(version)
        self.request_s = time.monotonic() - began
        if found is None:
            self._answered()
        return found

    def ask(self, version: int) -> None:
        """Ask for the manifest of `version`, unless enough requests for it are on their way."""
        if version != self._version:
            self._version, self._asked = version, []  # what is said about another one is of no use
        self._asked = [future for future in self._asked if not future.done() or _is_news(future)]
        if len(self._asked) < AT_ONCE:
            future = self._pool.submit(self._one, version)
            self._asked.append(future)
            future.add_done_callback(lambda _: self._ended.set())

    @property
    def waiting(self) -> bool:
        """Whether requests are on their way."""
        return any(not future.done() for future in self._asked)

    def wait(self, seconds: float) -> bool:
        """Wait for news of the version that was asked for: its manifest, or an error. False if time ran out."""
        end = time.monotonic() + seconds
        while True:
            self._ended.clear()
            if any(_is_news(future) for future in self._asked):
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._ended.wait(left)

    def get(self, version: int) -> bytes | None:
        """The manifest of `version`, or None if it is not there as of now: asks, and takes the first answer with news.

        Raises:
            WeightcastError: what a request ended with.
        """
        self.ask(version)
        newest = self._asked[-1]
        for future in as_completed(self._asked):
            if _is_news(future):
                self._asked = []
                return future.result()
            if future is newest:  # an older one that hangs has nothing newer to say
                break
        return None


def _is_news(future: Future[bytes | None]) -> bool:
    """Whether a request has ended with more than: not there yet."""
    ended = future.done() and not future.cancelled()
    return ended and (future.exception() is not None or future.result() is not None)
