"""Changes are coded after `publish()` has returned: from their own memory, against a baseline that holds still."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from weightcast.codec import Interval, code
from weightcast.publisher import Publisher, coder
from weightcast.publisher.rows import Rows
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import StorageError, WeightcastError
from weightcast.schemas.shard import Row

from ..codings import trained, weights
from ..faultstore import FaultStore, Hold
from ..versions import assert_version, chain_of, copy_of, rows_of

At = Callable[..., Publisher]
WAIT_S = 20
ROW = Row("w", 1, "BF16", (4,), 0, 1, 1, 0, "gap", 0, 1, b"\0", b"", b"\2", b"", Digest())


class SlowCoder:
    """Stands for `code`: waits until it is let go, or fails."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None
        self.calls = 0

    def __call__(self, *args: Any, **options: Any) -> Row:
        self.calls += 1
        if not self.go.wait(WAIT_S):
            raise TimeoutError("nobody let the coder go")
        if self.error is not None:
            raise self.error
        return code(*args, **options)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCoder]:
    """A coder that holds, from here to the test's end at most."""
    held = SlowCoder()
    monkeypatch.setattr(coder, "code", held)
    yield held
    held.go.set()


@pytest.mark.parametrize("codec", ["gap", "class"])
def test_publish_returns_before_anything_is_coded_and_the_trainer_may_go_on(
    codec: str, store: FaultStore, publisher_at: At, slow: SlowCoder
) -> None:
    publisher, model = publisher_at(codec=codec), weights()
    publisher.publish(model).wait()
    model = trained(model, 1)
    model["norm"] = torch.rand(300).bfloat16()  # nearly all of it: coded whole, or a step an element
    expected = copy_of(model)
    pending = publisher.publish(model)
    assert not pending.done
    for tensor in model.values():
        tensor.fill_(7.0)
    slow.go.set()
    manifest = pending.wait(WAIT_S)
    assert_version(store, 1, expected)
    assert len({row.coding for row in rows_of(store, manifest)}) > 1 or codec == "gap"


def test_rows_that_cannot_be_coded_fail_their_version_alone(
    store: FaultStore, publisher: Publisher, slow: SlowCoder
) -> None:
    slow.go.set()
    publisher.publish(weights()).wait()
    slow.error = MemoryError("no memory for the planes")
    pending = publisher.publish(trained(weights(), 1))
    with pytest.raises(WeightcastError, match="no memory for the planes"):
        pending.wait(WAIT_S)
    slow.error = None
    last = trained(weights(), 2)
    publisher.publish(last).wait()
    assert_version(store, 1, copy_of(last))
    assert len(chain_of(store)) == 2


def test_a_waiting_version_that_cannot_be_coded_is_told_so_and_the_publisher_goes_on(
    store: FaultStore, publisher: Publisher, slow: SlowCoder
) -> None:
    slow.go.set()
    publisher.publish(weights()).wait()
    hold = Hold()
    store.on("create", "versions/*", hold, times=1)
    first = publisher.publish(trained(weights(), 1))
    assert hold.reached.wait(WAIT_S)
    slow.error = MemoryError("no memory for the planes")
    waiting = publisher.publish(trained(weights(), 2))
    hold.release()
    with pytest.raises(WeightcastError, match="no memory for the planes"):
        waiting.wait(WAIT_S)
    first.wait(WAIT_S)
    slow.error = None
    last = trained(weights(), 3)
    publisher.publish(last).wait()
    assert_version(store, 1, copy_of(trained(weights(), 1)))
    assert_version(store, 2, copy_of(last))


def test_the_baseline_holds_still_until_a_waiting_version_is_coded(
    store: FaultStore, publisher_at: At, slow: SlowCoder
) -> None:
    publisher, states = publisher_at(codec="class"), [weights()]
    for seed in (1, 2):
        states.append(trained(states[-1], seed))
    slow.go.set()
    publisher.publish(states[0]).wait()
    hold = Hold()
    store.on("create", "versions/*", hold, times=1)
    first = publisher.publish(states[1])
    assert hold.reached.wait(WAIT_S)
    slow.go.clear()
    second = publisher.publish(states[2])
    hold.release()
    with pytest.raises(StorageError, match="not committed within"):
        first.wait(0.3)  # committed, but its bits may not be taken yet
    slow.go.set()
    first.wait(WAIT_S)
    second.wait(WAIT_S)
    for version, state in enumerate(states):
        assert_version(store, version, copy_of(state))


def test_rows_that_nobody_wants_any_more_are_not_coded() -> None:
    rows, futures, told = Rows(), [Future[Row](), Future[Row]()], list[str]()
    for number, future in enumerate(futures):
        rows.add(Interval("BF16", number, 1), future)
    rows.when_coded(lambda: told.append("coded"))
    assert futures[0].set_running_or_notify_cancel()
    rows.finish(failed=True)
    assert futures[1].cancelled()
    assert told == []  # one of them still reads the baseline
    futures[0].set_result(ROW)
    assert told == ["coded"]
    assert list(rows) == []
    assert str(rows.error) == "the capture failed"


def test_rows_come_in_order_whichever_is_coded_first() -> None:
    rows, futures, told = Rows(), [Future[Row](), Future[Row]()], list[str]()
    for number, future in enumerate(futures):
        rows.add(Interval("BF16", number, 1), future)
    rows.finish()
    rows.when_coded(lambda: told.append("coded"))
    second = dataclasses.replace(ROW, offset=1)
    futures[1].set_result(second)
    assert told == []
    threading.Timer(0.1, futures[0].set_result, [ROW]).start()
    assert list(rows) == [ROW, second]
    assert told == ["coded"]
    assert rows.error is None


def test_where_too_many_changes_would_wait_they_are_coded_at_once(
    store: FaultStore, publisher: Publisher, slow: SlowCoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(weights()).wait()
    monkeypatch.setattr(coder, "LEAST_FOUND_BYTES", 2000)
    monkeypatch.setattr(coder, "FOUND_SHARE", 1 << 30)
    model = trained(weights(), 1)
    done = threading.Event()
    pending: list[Any] = []

    def publish() -> None:
        pending.append(publisher.publish(model))
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    assert not done.wait(0.3)
    slow.go.set()
    assert done.wait(WAIT_S)
    thread.join()
    pending[0].wait(WAIT_S)
    assert_version(store, 1, copy_of(model))


def test_a_capture_that_fails_lets_the_baseline_go(
    store: FaultStore, publisher: Publisher, slow: SlowCoder
) -> None:
    slow.go.set()
    publisher.publish(weights()).wait()
    model = trained(weights(), 1)

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(model.items())[:2]
        raise OSError("the gather failed")

    with pytest.raises(OSError, match="gather failed"):
        publisher.publish(torn())
    publisher.publish(model).wait(WAIT_S)
    assert_version(store, 1, copy_of(model))
