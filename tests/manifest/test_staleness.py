"""Stamps, the version of a step, and how far subscribers lag."""

from __future__ import annotations

import json
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta

import pytest
import torch

from weightcast.manifest.commit import create_stream
from weightcast.manifest.inspect import lags
from weightcast.manifest.staleness import Stamp, version_of, wait_held
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.schemas.errors import NotFound, StorageError, UsageError
from weightcast.schemas.manifest import Reader
from weightcast.subscriber import Subscriber, Tensors


@pytest.fixture
def root() -> str:
    return f"memory://{uuid.uuid4().hex}"


def publish(root: str, *steps: int | None) -> StreamReader:
    """A version a step, in one run."""
    with Publisher(root) as publisher:
        for k, step in enumerate(steps):
            publisher.publish({"w": torch.full((4,), float(k))}, step=step).wait()
    return StreamReader.open(open_store(root))


def held(reader: StreamReader, step: int) -> int | None:
    found = version_of(reader, step)
    return found.version if found is not None else None


def test_the_version_of_a_step(root: str) -> None:
    reader = publish(root, 0, 2, None, 5)
    assert [held(reader, step) for step in range(7)] == [0, 1, 1, 3, 3, 3, None]


def test_what_came_before_going_back_to_an_earlier_step_does_not_count(root: str) -> None:
    publish(root, 1, 2, 3)
    reader = publish(root, 2, 3)  # version 3 is the takeover's, 4 holds step 2 again, 5 step 3
    assert [held(reader, step) for step in (1, 2, 3, 4)] == [4, 4, 5, None]


def test_a_step_that_was_undone_is_held_by_no_version(root: str) -> None:
    reader = publish(root, 10, 20, 12)
    assert [held(reader, step) for step in (12, 13, 20)] == [2, None, None]


def test_of_two_versions_of_one_step_the_newer(root: str) -> None:
    reader = publish(root, 1, 2, 2)
    assert held(reader, 2) == 2


def test_a_stream_without_versions_holds_no_step(root: str) -> None:
    assert version_of(create_stream(open_store(root)), 0) is None


def test_a_stamp_travels_and_says_the_same_on_both_sides(root: str) -> None:
    engine = {"w": torch.zeros(4)}
    with Publisher(root) as publisher, Subscriber(root, Tensors(engine)) as subscriber:
        manifest = publisher.publish({"w": torch.ones(4)}, step=3).wait()
        position = subscriber.once()
    stamp = Stamp.of(position)
    assert Stamp.of_manifest(manifest) == stamp
    assert (stamp.version, stamp.step, stamp.sha256) == (0, 3, position.sha256)
    assert Stamp.from_dict(json.loads(json.dumps(stamp.to_dict()))) == stamp


def test_versions_between_two_stamps(root: str) -> None:
    reader = publish(root, 1, 2, 3)
    first, last = Stamp.of(reader.position(0)), Stamp.of(reader.position(2))
    assert (first.behind(last), last.behind(first)) == (2, -2)
    other = Stamp(uuid.uuid4().hex, 2, 3, last.sha256)
    with pytest.raises(UsageError, match="cannot be compared"):
        first.behind(other)


@pytest.mark.parametrize(
    "change",
    [{"sha256": "0"}, {"stream": "x"}, {"version": "1"}, {"version": True}, {"step": 1.0}, {"more": 1}],
)
def test_what_is_no_stamp_is_refused(change: dict[str, object]) -> None:
    good = {"stream": "0" * 32, "version": 1, "step": None, "sha256": "0" * 64}
    assert Stamp.from_dict(good).to_dict() == good
    with pytest.raises(UsageError, match="is not a stamp"):
        Stamp.from_dict({**good, **change})


def test_lag_of_every_known_subscriber(root: str) -> None:
    publish(root, 1)
    with Subscriber(root, Tensors({"w": torch.zeros(4)})) as slow:
        slow.once()
        reader = publish(root, 2, 3)  # and version 1, the takeover's
        with Subscriber(root, Tensors({"w": torch.zeros(4)})) as fast:
            fast.once()
            found = lags(reader, datetime.now(UTC))
    assert [(r.version, r.lag) for r in found] == [(0, 3), (3, 0)]
    assert all(r.age_s is not None and 0 <= r.age_s < 60 for r in found)


def lease(reader: StreamReader, version: int, age_s: float = 0.0) -> str:
    """A subscriber of which nothing but its lease is known."""
    name = uuid.uuid4().hex
    then = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat()
    reader.store.put(f"readers/{name}.json", Reader(reader=name, version=version, time=then).encode())
    return name


def test_waiting_for_subscribers_says_who_holds_the_version(root: str) -> None:
    reader = publish(root, 1, 2, 3)
    behind, ahead = lease(reader, 1), lease(reader, 2)
    assert [one.reader for one in wait_held(reader, 2, subscribers=1, timeout=5)] == [ahead]
    assert [one.reader for one in wait_held(reader, 2, subscribers=2, max_lag=1, timeout=5)] == [
        behind,
        ahead,
    ]


def test_waiting_for_a_subscriber_that_is_behind_runs_out_of_time(root: str) -> None:
    reader = publish(root, 1, 2)
    lease(reader, 0)
    lease(reader, 1)
    with pytest.raises(StorageError, match=r"1 of 2 subscribers came to version 1 .* at \[0, 1\]"):
        wait_held(reader, 1, subscribers=2, timeout=0.3)


def test_a_lease_that_is_not_renewed_counts_for_nobody(root: str) -> None:
    reader = publish(root, 1)
    lease(reader, 0, age_s=181)
    with pytest.raises(StorageError, match=r"0 of 1 .* at \[\]"):
        wait_held(reader, 0, subscribers=1, timeout=0)
    assert len(wait_held(reader, 0, subscribers=1, timeout=0, alive_s=3600)) == 1


@pytest.mark.parametrize("wrong", [{"subscribers": 0}, {"subscribers": 1, "max_lag": -1}])
def test_bounds_that_make_no_sense_are_refused(root: str, wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="expected at least 1"):
        wait_held(publish(root, 1), 0, timeout=0, **wrong)


def test_a_publisher_waits_for_those_that_follow_it(root: str) -> None:
    """With the default settings: a lease is renewed with each version, not only once a minute."""
    engine, stop, loaded = {"w": torch.zeros(4)}, threading.Event(), []
    with Publisher(root) as publisher, Subscriber(root, Tensors(engine)) as subscriber:
        publisher.publish({"w": torch.ones(4)}, step=10).wait()

        def follow() -> None:
            for position in subscriber.follow(stop):
                time.sleep(0.2)  # stands for an engine's own reload
                loaded.append(position.version)

        follower = threading.Thread(target=follow)
        follower.start()
        try:
            for step in (11, 12, 13):
                publisher.publish({"w": torch.full((4,), float(step))}, step=step)
                version = step - 10
                (held,) = publisher.wait_for(version, subscribers=1, timeout=30)
                assert (held.version, loaded[-1]) == (version, version)
                assert torch.equal(engine["w"], torch.full((4,), float(step)))
                found = publisher.version_of(step)
                assert found is not None
                assert Stamp.of(found) == Stamp.of(subscriber.position or found)
                assert [one.lag for one in publisher.lags()] == [0]
        finally:
            stop.set()
            follower.join()


def test_a_publisher_of_nothing_has_no_readers(root: str) -> None:
    with Publisher(root) as publisher:
        assert (publisher.version_of(0), publisher.lags()) == (None, ())
        with pytest.raises(NotFound, match="no stream"):
            publisher.wait_for(0, subscribers=1, timeout=0)
