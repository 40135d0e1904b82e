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
        self._asked: dict[int, Future[bytes | None]] = {}  # by number, in the order in which they were sent
        self._number = 0  # of the next one
        self._heard = -1  # of the newest that was answered
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
            self._version = version
            self._forget()  # what is said about another one is of no use
        self._news()
        if len(self._asked) < AT_ONCE:
            future = self._pool.submit(self._one, version)
            self._asked[self._number] = future
            self._number += 1
            future.add_done_callback(lambda _: self._ended.set())

    @property
    def waiting(self) -> bool:
        """Whether requests are on their way."""
        return any(not future.done() for future in self._asked.values())

    def wait(self, seconds: float) -> bool:
        """Wait for news of the version that was asked for: its manifest, or an error that no later answer belies.

        False if time ran out.
        """
        end = time.monotonic() + seconds
        while True:
            self._ended.clear()
            if self._news() is not None:
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._ended.wait(left)

    def get(self, version: int) -> bytes | None:
        """The manifest of `version`, or None if it is not there as of now: takes news that are there, or else asks.

        Raises:
            WeightcastError: what a request ended with.
        """
        news = self._news() if version == self._version else None
        if news is None:
            self.ask(version)
            newest = next(reversed(self._asked.values()))
            for future in as_completed(self._asked.values()):
                if self._news() is not None or future is newest:
                    break  # an older one that hangs has nothing newer to say
            news = self._news()  # an older one may have ended meanwhile, and hold it
        if news is None:
            return None
        self._forget()
        return news.result()

    def _news(self) -> Future[bytes | None] | None:
        """A request that ended with the manifest, or else with an error. Forgets those that have nothing to say: not
        there yet, or an error where one that was sent later was answered.
        """
        ended = {number: future for number, future in self._asked.items() if future.done()}
        failed = {n for n, future in ended.items() if future.cancelled() or future.exception() is not None}
        self._heard = max([self._heard, *(ended.keys() - failed)])
        manifest = error = None
        for number, future in ended.items():
            if number not in failed and future.result() is not None:
                manifest = future
            elif number in failed and number > self._heard and not future.cancelled():
                error = future
            else:
                del self._asked[number]
        return manifest or error

    def _forget(self) -> None:
        """Forget all requests; those that have no thread yet are not sent."""
        for future in self._asked.values():
            future.cancel()
        self._asked = {}
