"""Stamps, the version of a step, and how far subscribers lag."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime

import pytest
import torch

from weightcast.manifest.commit import create_stream
from weightcast.manifest.inspect import lags
from weightcast.manifest.staleness import Stamp, version_of
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.schemas.errors import UsageError
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
