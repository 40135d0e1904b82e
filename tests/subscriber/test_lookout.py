"""Polls on their way at once: the first answer that is news ends the wait, whatever the others do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import pytest

from weightcast.schemas.errors import StorageError
from weightcast.subscriber.lookout import Lookout
from weightcast.subscriber.rhythm import AT_ONCE

from ..waiting import until


@dataclass
class Far:
    """A store at the other end of a long link: what is there is told half a round trip later."""

    round_trip_s: float
    there: dict[int, bytes] = field(default_factory=dict)
    error: Exception | None = None
    asked: list[tuple[int, float]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    answered: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, version: int) -> bytes | None:
        with self.lock:
            self.asked.append((version, time.monotonic()))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        half_s = self.round_trip_s / 2
        time.sleep(half_s)
        found, error = self.there.get(version), self.error
        time.sleep(half_s)
        with self.lock:
            self.under_way -= 1
        if error is not None:
            raise error
        return found

    def note(self) -> None:
        self.answered += 1


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * AT_ONCE) as made:
        yield made


def test_a_version_is_seen_half_a_round_trip_and_a_pause_after_its_commit(pool: ThreadPoolExecutor) -> None:
    far = Far(2.0)
    lookout = Lookout(far.read, pool, far.note)
    committed = threading.Timer(1.5, far.there.update, [{1: b"manifest"}])
    committed.start()
    began = time.monotonic()
    while not lookout.wait(0.3):
        lookout.ask(1)
    seen = time.monotonic() - began
    assert lookout.get(1) == b"manifest"
    assert seen < 1.5 + 2.0, "whoever asks again only after each answer sees it in the second, after 4 s"
    assert far.answered >= 1
    assert lookout.request_s == pytest.approx(2.0, abs=0.5)


def test_no_more_are_on_their_way_than_were_agreed(pool: ThreadPoolExecutor) -> None:
    far = Far(0.2)
    lookout = Lookout(far.read, pool, far.note)
    for _ in range(3 * AT_ONCE):
        lookout.ask(1)
    assert lookout.waiting
    assert not lookout.wait(0.5)
    assert (far.most, len(far.asked)) == (AT_ONCE, AT_ONCE)
    assert not lookout.waiting
    lookout.ask(1)
    assert lookout.waiting


def test_an_answer_about_another_version_is_no_news(pool: ThreadPoolExecutor) -> None:
    far = Far(0.1, {1: b"one"})
    lookout = Lookout(far.read, pool, far.note)
    lookout.ask(1)
    lookout.ask(2)
    assert not lookout.wait(0.3)
    lookout.ask(1)
    assert lookout.wait(5)
    assert lookout.get(2) is None, "asked for by itself"
    assert [version for version, _ in far.asked] == [1, 2, 1, 2]


def test_an_error_is_news_and_told_once(pool: ThreadPoolExecutor) -> None:
    far = Far(0.0, error=StorageError("down"))
    lookout = Lookout(far.read, pool, far.note)
    lookout.ask(1)
    assert lookout.wait(5)
    far.error = None
    with pytest.raises(StorageError, match="down"):
        lookout.get(1)
    assert lookout.get(1) is None


def test_a_step_takes_the_first_answer_that_is_news(pool: ThreadPoolExecutor) -> None:
    """Also of a request that left before it: then it need not wait for its own."""
    far = Far(2.0, {1: b"one"})
    lookout = Lookout(far.read, pool, far.note)
    lookout.ask(1)
    time.sleep(1.5)
    began = time.monotonic()
    assert lookout.get(1) == b"one"
    assert time.monotonic() - began < 1.5


def test_an_old_request_that_hangs_is_not_waited_for(pool: ThreadPoolExecutor) -> None:
    far = Far(4.0)
    lookout = Lookout(far.read, pool, far.note)
    lookout.ask(1)
    until(lambda: far.under_way == 1)
    far.round_trip_s = 0.01
    began = time.monotonic()
    assert lookout.get(1) is None
    assert time.monotonic() - began < 3


def test_requests_that_were_cancelled_with_their_pool_are_no_news() -> None:
    far = Far(0.3)
    pool = ThreadPoolExecutor(1)
    lookout = Lookout(far.read, pool, far.note)
    lookout.ask(1)
    lookout.ask(1)
    pool.shutdown(wait=True, cancel_futures=True)
    assert not lookout.wait(0.05)


@dataclass
class Scripted:
    """Answers each request, by its number, when the test says so."""

    gates: list[threading.Event] = field(default_factory=lambda: [threading.Event() for _ in range(AT_ONCE)])
    outcomes: dict[int, bytes | Exception] = field(default_factory=dict)
    asked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, version: int) -> bytes | None:
        with self.lock:
            number, self.asked = self.asked, self.asked + 1
        assert self.gates[number].wait(20)
        outcome = self.outcomes.get(number)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def ask(self, lookout: Lookout, requests: int) -> None:
        """Send that many, in order."""
        for number in range(requests):
            lookout.ask(1)
            while self.asked <= number:
                time.sleep(0.001)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_an_error_that_is_older_than_an_answer_is_no_news(
    order: tuple[int, ...], pool: ThreadPoolExecutor
) -> None:
    store = Scripted(outcomes={0: StorageError("reset")})
    lookout = Lookout(store.read, pool, lambda: None)
    store.ask(lookout, 3)
    for number in order:
        store.gates[number].set()
        time.sleep(0.05)
        if number:
            assert not lookout.wait(0.05)
    assert not lookout.waiting
    assert not lookout.wait(0.05)
    store.gates[3].set()
    assert lookout.get(1) is None


def test_an_error_that_is_newer_than_all_answers_is_news(pool: ThreadPoolExecutor) -> None:
    store = Scripted(outcomes={1: StorageError("down")})
    lookout = Lookout(store.read, pool, lambda: None)
    store.ask(lookout, 2)
    store.gates[0].set()
    store.gates[1].set()
    assert lookout.wait(5)
    with pytest.raises(StorageError, match="down"):
        lookout.get(1)


def test_an_older_request_that_found_the_manifest_is_not_passed_over(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have ended when they are looked at, and the newest, which found nothing, is looked at first."""
    store = Scripted(outcomes={0: b"one"})
    lookout = Lookout(store.read, pool, lambda: None)
    store.ask(lookout, 2)

    def newest_first(futures: Iterable[Future[bytes | None]]) -> Iterator[Future[bytes | None]]:
        for gate in store.gates:
            gate.set()
        given = list(futures)
        wait(given)
        yield from reversed(given)

    monkeypatch.setattr("weightcast.subscriber.lookout.as_completed", newest_first)
    assert lookout.get(1) == b"one"


def test_what_is_forgotten_is_not_sent_any_more() -> None:
    """Requests for a version that has come need no thread, if they had none yet."""
    store = Scripted()
    versions = []

    def read(version: int) -> bytes | None:
        versions.append(version)
        return store.read(version)

    with ThreadPoolExecutor(1) as pool:
        lookout = Lookout(read, pool, lambda: None)
        for _ in range(AT_ONCE):
            lookout.ask(1)
        lookout.ask(2)
        for gate in store.gates:
            gate.set()
    assert versions == [1, 2]
