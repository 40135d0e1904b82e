"""The background half: what fails, waits, coalesces and changes its layout meanwhile, and that nothing is lost by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from weightcast.publisher import Publisher
from weightcast.publisher.pipeline import Pipeline
from weightcast.schemas.errors import Conflict, Corrupt, StorageError, UsageError, WeightcastError
from weightcast.schemas.names import HEAD_KEY

from ..faultstore import FaultStore, Hold, refuse
from ..versions import Bits, assert_version, chain_of, changed_places, copy_of, objects_in, read, state_at


def held(store: FaultStore, publisher: Publisher, state: dict[str, torch.Tensor]) -> Hold:
    """Publish `state` and hold it at its commit."""
    hold = Hold()
    store.on("create", "versions/*", hold, times=1)
    publisher.publish(state)
    assert hold.reached.wait(10)
    return hold


def test_b067_the_baseline_stays_where_the_store_is(store: FaultStore, publisher: Publisher) -> None:
    w = torch.zeros(2, dtype=torch.bfloat16)
    publisher.publish({"w": w}).wait()
    store.on("put", "data/*", refuse)
    w[0] = 1
    with pytest.raises(StorageError, match="told to fail"):
        publisher.publish({"w": w}).wait()
    store.heal()
    w[1] = 1
    publisher.publish({"w": w}).wait()
    assert changed_places(store, 1) == {"w": [0, 1]}
    assert len(chain_of(store)) == 2


@pytest.mark.parametrize("key", ["data/*", "layouts/*", "files/*", "versions/*"])
def test_a_failed_version_is_told_once_and_made_up_for(
    store: FaultStore, publisher: Publisher, key: str
) -> None:
    state = {"w": torch.zeros(100), "x": torch.zeros(3)}
    publisher.publish(state).wait()
    store.on("*", key, refuse)
    state = {"w": torch.ones(100), "x": torch.zeros(3), "y": torch.ones(2)}
    publisher.publish(state, files={"config.json": b"{}"})
    publisher.wait_idle()
    with pytest.raises(StorageError, match="told to fail"):
        publisher.publish(state)
    store.heal()
    state["x"] += 1
    last = publisher.publish(state).wait()
    assert_version(store, last.version, copy_of(state))
    assert last.files is not None  # the files of the failed version are not lost either
    chain_of(store)
    publisher.close()


def test_waiting_for_a_version_counts_as_being_told(store: FaultStore, publisher: Publisher) -> None:
    state = {"w": torch.zeros(10)}
    publisher.publish(state).wait()
    store.on("put", "data/*", refuse, times=1)
    state["w"] += 1
    with pytest.raises(StorageError):
        publisher.publish(state).wait()
    publisher.publish(state).wait()
    publisher.close()
    assert_version(store, 1, copy_of(state))


def test_b100a_a_failure_in_the_background_is_raised_at_close(
    store: FaultStore, publisher: Publisher
) -> None:
    publisher.publish({"w": torch.zeros(10)}).wait()
    store.on("put", "data/*", refuse)
    publisher.publish({"w": torch.ones(10)})
    with pytest.raises(StorageError, match="told to fail"):
        publisher.close()
    assert len(chain_of(store)) == 1


def test_close_says_what_is_not_committed_in_time(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish({"w": torch.zeros(10)}).wait()
    hold = held(store, publisher, {"w": torch.ones(10)})
    with pytest.raises(StorageError, match=r"closed after 0\.2 s with a version not committed"):
        publisher.close(0.2)
    hold.release()
    publisher.close(10)
    assert len(chain_of(store)) == 2


def test_a_closed_publisher_says_so(store: FaultStore, publisher_at: Callable[..., Publisher]) -> None:
    for publisher in (publisher_at(), publisher_at()):
        if publisher.version is None:
            publisher.close()
        else:
            publisher.publish({"w": torch.zeros(4)}).wait()
            publisher.close()
        with pytest.raises(UsageError, match="closed"):
            publisher.publish({"w": torch.zeros(4)})
        publisher.close()


def test_b095_a_shard_that_is_refused_leaves_no_manifest(
    store: FaultStore, publisher_at: Callable[..., Publisher]
) -> None:
    publisher = publisher_at(row_elements=1 << 16, shard_bytes=1 << 16)
    w = torch.randn(1 << 18)
    publisher.publish({"w": w}).wait()
    store.on("put", "data/*", refuse, skip=1, times=1)
    w += torch.randn(1 << 18)
    with pytest.raises(StorageError, match=r"data/000000000001/\S+\.arrow"):
        publisher.publish({"w": w}).wait()
    assert len(chain_of(store)) == 1
    publisher.publish({"w": w}).wait()
    assert len(chain_of(store)[1].shards) >= 3
    assert_version(store, 1, copy_of({"w": w}))


def test_b223_at_most_one_in_flight_and_one_waiting(store: FaultStore, publisher: Publisher) -> None:
    w = torch.zeros(1 << 12)
    publisher.publish({"w": w}).wait()
    lock, flying, most = threading.Lock(), [0], [0]

    def begin(_: str) -> None:
        with lock:
            flying[0] += 1
            most[0] = max(most[0], flying[0])
        time.sleep(0.03)

    def end(_: str) -> None:
        with lock:
            flying[0] -= 1

    store.on("create", "versions/*", begin)
    store.on("create", "versions/*", end, after=True)
    pending = []
    for step in range(1, 61):
        w[step * 7 % 4096] = step
        w[3] = step
        pending.append(publisher.publish({"w": w}, step=step))
        time.sleep(0.005)
    publisher.close()
    manifests = chain_of(store)
    assert most[0] == 1
    assert 3 <= len(manifests) < 50
    assert manifests[-1].step == 60
    assert_version(store, len(manifests) - 1, copy_of({"w": w}))
    for manifest in manifests[1:]:
        step = manifest.step or 0
        wanted = torch.zeros(1 << 12)
        for k in range(1, step + 1):
            wanted[k * 7 % 4096] = k
            wanted[3] = k
        assert_version(store, manifest.version, copy_of({"w": wanted}))
    for step, version in enumerate((p.wait() for p in pending), 1):
        assert (version.step or 0) >= step  # the version that holds its changes, itself or a later one


def test_versions_that_coalesce_are_told_from_what_was_committed(
    store: FaultStore, publisher: Publisher
) -> None:
    states = [torch.randint(0, 100, (1 << 17,), dtype=torch.int16) for _ in range(5)]
    publisher.publish({"w": states[0]}).wait()
    hold = held(store, publisher, {"w": states[1]})
    waiting = [publisher.publish({"w": s}, step=k) for k, s in enumerate(states[2:])]
    hold.release()
    assert [p.wait().version for p in waiting] == [2, 2, 2]
    for version, state in enumerate([states[0], states[1], states[4]]):
        assert_version(store, version, copy_of({"w": state}))


def test_an_element_that_goes_back_while_versions_coalesce(store: FaultStore, publisher: Publisher) -> None:
    zero, one = torch.zeros(300), torch.ones(300)
    publisher.publish({"w": zero}).wait()
    hold = held(store, publisher, {"w": one})
    back = publisher.publish({"w": zero})  # no change against version 0, all against version 1
    hold.release()
    assert back.wait().totals.changed == 300
    assert_version(store, 1, copy_of({"w": one}))
    assert_version(store, 2, copy_of({"w": zero}))


LAYOUTS = {
    "grows": ({"a": (4, 4), "b": (70_000,)}, {"a": (6, 4), "b": (70_000,)}),
    "shrinks": ({"a": (6, 4), "b": (70_000,)}, {"a": (4, 4), "b": (70_000,)}),
    "gains": ({"a": (4,)}, {"a": (4,), "b": (70_000,), "c": ()}),
    "same": ({"a": (4,)}, {"a": (4,)}),
}


def filled(shapes: dict[str, tuple[int, ...]], value: int) -> dict[str, torch.Tensor]:
    """A state of tensors of these shapes that differ from each other."""
    return {n: torch.full(s, 100 * value + i, dtype=torch.int32) for i, (n, s) in enumerate(shapes.items())}


def assert_coalesced(store: FaultStore, publisher: Publisher, states: list[dict[str, torch.Tensor]]) -> None:
    """Publish the third state while the second is on its way, then the first again; all can be read."""
    publisher.publish(states[0]).wait()
    hold = held(store, publisher, states[1])
    waiting = publisher.publish(states[2])
    hold.release()
    assert waiting.wait().version == 2
    publisher.publish(states[0]).wait()
    for version, state in enumerate([*states, states[0]]):
        assert_version(store, version, copy_of(state))


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_layouts_change_while_versions_coalesce(
    store: FaultStore, publisher: Publisher, first: str, second: str
) -> None:
    (before, middle), (_, after) = LAYOUTS[first], LAYOUTS[second]
    everything = {"a": (4,), "b": (3,), "c": (2, 2)}
    states = [filled({**everything, **shapes}, k) for k, shapes in enumerate([before, middle, after])]
    assert_coalesced(store, publisher, states)


@pytest.mark.parametrize("other_way", [1, 2])
def test_a_tensor_lies_otherwise_while_versions_coalesce(
    store: FaultStore, publisher_at: Callable[..., Publisher], other_way: int
) -> None:
    """What is not contiguous is gone at once, and has rows of its own: the others' must not be cut across another's."""
    publisher = publisher_at(row_elements=1 << 18)
    states = [
        {
            "a": torch.arange(1 << 16, dtype=torch.int16).reshape(256, 256),
            "b": torch.zeros(1 << 17, dtype=torch.int16),
            "c": torch.zeros(1 << 17, dtype=torch.int16),
        }
    ]
    for k in (1, 2):
        states.append({name: tensor.clone() for name, tensor in states[-1].items()})
        for tensor in states[-1].values():
            tensor.view(-1)[k::97] += k
    states[other_way]["a"] = states[other_way]["a"].t().contiguous().t()
    assert_coalesced(store, publisher, states)


def test_ties_change_while_versions_coalesce(store: FaultStore, publisher: Publisher) -> None:
    def pair(one: int, two: int | None) -> dict[str, torch.Tensor]:
        a = torch.full((1 << 16,), one)
        return {"b": a, "a": a if two is None else torch.full((1 << 16,), two)}

    states = [pair(1, None), pair(2, 3), pair(4, None), pair(5, None), pair(6, 7)]
    publisher.publish(states[0]).wait()
    for k in (1, 3):
        hold = held(store, publisher, states[k])
        waiting = publisher.publish(states[k + 1])
        hold.release()
        waiting.wait()
    for version, state in enumerate(states):
        assert_version(store, version, copy_of(state))


def test_a_dropped_name_need_not_be_dropped_again(store: FaultStore, publisher: Publisher) -> None:
    full, less = {"w": torch.zeros(5), "x": torch.ones(5)}, {"w": torch.ones(5)}
    publisher.publish(full).wait()
    hold = Hold()
    store.on("create", "versions/*", hold, times=1)
    publisher.publish(less, drop=["x"])
    assert hold.reached.wait(10)
    threading.Timer(0.1, hold.release).start()
    less["w"] = torch.full((5,), 2.0)
    publisher.publish(less).wait()  # does not name x, which the version in flight drops
    assert_version(store, 1, copy_of({"w": torch.ones(5)}))
    assert_version(store, 2, copy_of(less))
    publisher.publish(full).wait()
    with pytest.raises(UsageError, match="'x'"):
        publisher.publish(less)


def test_a_commit_that_ends_in_an_error_nobody_foresaw_is_found_out_about(
    store: FaultStore, publisher: Publisher
) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("told to fail")

    publisher.publish({"w": torch.zeros(5)}).wait()
    store.on("create", "versions/*", fail, after=True, times=1)
    with pytest.raises(WeightcastError, match="publishing failed: RuntimeError: told to fail"):
        publisher.publish({"w": torch.ones(5)}).wait()
    assert publisher.publish({"w": torch.full((5,), 2.0)}).wait().version == 2
    assert_version(store, 1, copy_of({"w": torch.ones(5)}))
    assert_version(store, 2, copy_of({"w": torch.full((5,), 2.0)}))


def test_a_hint_that_is_lost_does_no_harm(store: FaultStore, publisher: Publisher) -> None:
    def fail(_: str) -> None:
        raise RuntimeError("an error that no store should raise")

    store.on("put", HEAD_KEY, fail)
    for version in range(3):
        assert publisher.publish({"w": torch.full((5,), float(version))}).wait().version == version
    assert HEAD_KEY in store.keys("put")


def test_what_a_reset_leaves_out_need_not_be_dropped(store: FaultStore, publisher: Publisher) -> None:
    full, less = {"w": torch.zeros(5), "x": torch.ones(5)}, {"w": torch.ones(5)}
    publisher.publish(full).wait()
    hold = Hold()
    store.on("create", "versions/*", hold, times=1)
    publisher.publish(less, reset=True)
    assert hold.reached.wait(10)
    threading.Timer(0.1, hold.release).start()
    less["w"] = torch.full((5,), 2.0)
    publisher.publish(less).wait()  # as if it came after the commit
    assert_version(store, 2, copy_of(less))


def test_a_drop_that_failed_is_not_meant_after_a_reset_that_has_the_name(
    store: FaultStore, publisher: Publisher
) -> None:
    full, less = {"w": torch.zeros(5), "x": torch.ones(5)}, {"w": torch.ones(5)}
    publisher.publish(full).wait()
    store.on("put", "layouts/*", refuse)
    with pytest.raises(StorageError):
        publisher.publish(less, drop=["x"]).wait()
    store.heal()
    publisher.publish(full, reset=True).wait()
    with pytest.raises(UsageError, match="'x'"):
        publisher.publish(less)


def test_a_drop_that_failed_is_still_meant(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish({"w": torch.zeros(5), "x": torch.ones(5)}).wait()
    store.on("put", "layouts/*", refuse)
    with pytest.raises(StorageError):
        publisher.publish({"w": torch.ones(5)}, drop=["x"]).wait()
    store.heal()
    publisher.publish({"w": torch.ones(5)}).wait()
    assert_version(store, 1, copy_of({"w": torch.ones(5)}))


def test_files_of_a_version_that_was_replaced_are_kept(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish({"w": torch.zeros(5)}, files={"config.json": b"one"}).wait()
    hold = held(store, publisher, {"w": torch.ones(5)})
    publisher.publish({"w": torch.full((5,), 2.0)}, files={"config.json": b"two"})
    last = publisher.publish({"w": torch.full((5,), 3.0)})
    hold.release()
    assert last.wait().version == 2
    publisher.snapshot()
    assert store.inner.get("snapshots/000000000002/config.json", max_bytes=100) == b"two"


def test_a_reset_while_a_version_is_in_flight(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish({"w": torch.zeros(500)}).wait()
    hold = held(store, publisher, {"w": torch.ones(500)})
    threading.Timer(0.1, hold.release).start()
    manifest = publisher.publish({"other": torch.arange(7)}, reset=True).wait()
    assert (manifest.version, manifest.reset) == (2, True)
    assert_version(store, 1, copy_of({"w": torch.ones(500)}))
    assert_version(store, 2, copy_of({"other": torch.arange(7)}))
    publisher.publish({"other": torch.arange(7) + 1}).wait()
    assert_version(store, 3, copy_of({"other": torch.arange(7) + 1}))


@pytest.mark.parametrize("same_layout", [True, False])
def test_a_version_that_waits_behind_a_reset_is_told_from_it(
    store: FaultStore, publisher: Publisher, same_layout: bool
) -> None:
    before = {"w": torch.zeros(70_000), "x": torch.zeros(3)}
    publisher.publish(before).wait()
    hold = Hold()
    store.on("create", "versions/*", hold, times=1)
    fresh = {"w": torch.full((70_000,), 5.0), "x": torch.zeros(3)} | (
        {} if same_layout else {"y": torch.ones(9)}
    )
    publisher.publish(fresh, reset=True)
    assert hold.reached.wait(10)
    after = {"w": torch.full((70_000,), 6.0), "x": torch.zeros(3)}  # told from version 0 when it is captured
    waiting = publisher.publish(after)
    hold.release()
    assert waiting.wait().version == 2
    assert_version(store, 1, copy_of(fresh))
    assert_version(store, 2, copy_of(after))
    publisher.publish(fresh).wait()
    assert_version(store, 3, copy_of(fresh))


def test_a_snapshot_stays_exact_while_twenty_versions_commit(store: FaultStore, publisher: Publisher) -> None:
    torch.manual_seed(5)
    state = {f"w{i}": torch.randint(0, 1000, (50_000 + i,), dtype=torch.int32) for i in range(4)}
    publisher.publish(state).wait()
    frozen = copy_of(state)
    hold = Hold()
    store.on("piece", "snapshots/000000000000/*", hold, skip=2)
    writer = threading.Thread(target=publisher.snapshot)
    writer.start()
    assert hold.reached.wait(10)
    for _ in range(20):
        for tensor in state.values():
            tensor[torch.randint(0, len(tensor), (300,))] += 1
        publisher.publish(state).wait()
    state["w9"] = torch.ones(5, dtype=torch.int32)  # and the layout changes under it
    publisher.publish(state).wait()
    hold.release()
    writer.join(10)
    assert len(chain_of(store)) == 22
    assert_version(store, 21, copy_of(state))
    for key in [k for k in objects_in(store) if k.startswith("snapshots/000000000000-")]:
        store.delete(key)  # so that only the late snapshot is left
    assert_version(store, 0, frozen)


def test_the_undo_of_a_slow_snapshot_is_bounded(
    store: FaultStore, publisher_at: Callable[..., Publisher]
) -> None:
    publisher = publisher_at(max_pending_bytes=1 << 20)
    w = torch.zeros(1 << 18, dtype=torch.int32)
    publisher.publish({"w": w}).wait()
    hold = Hold()
    store.on("piece", "snapshots/000000000000/*", hold, skip=1)
    writer = threading.Thread(target=publisher.snapshot)
    writer.start()
    assert hold.reached.wait(10)
    w[:1000] += 1
    publisher.publish({"w": w}).wait()  # a little undo is no reason to wait
    w += 1
    late = publisher.publish({"w": w})
    with pytest.raises(StorageError, match="within"):
        late.wait(0.5)  # its undo would be 3 MiB, over the bound
    hold.release()
    assert late.wait(10).version == 2
    writer.join(10)
    for key in [k for k in objects_in(store) if k.startswith("snapshots/000000000000-")]:
        store.delete(key)
    assert_version(store, 0, copy_of({"w": torch.zeros(1 << 18, dtype=torch.int32)}))
    assert_version(store, 2, copy_of({"w": w}))


def test_snapshots_end_while_versions_commit(
    store: FaultStore, publisher_at: Callable[..., Publisher]
) -> None:
    # A view that closes while the baseline moves: hundreds of chances for the two to meet.
    publisher = publisher_at(snapshot_every=1)
    state = {
        f"w{i}": torch.zeros(100 + i, dtype=d)
        for i, d in enumerate([torch.int8, torch.int16, torch.int32, torch.float64] * 3)
    }
    for k in range(80):
        for tensor in state.values():
            tensor[k % 100] += 1
        publisher.publish(state)
    publisher.close()
    last = chain_of(store)[-1].version
    assert_version(store, last, copy_of(state))
    for key in [k for k in objects_in(store) if k.startswith("snapshots/") and k.endswith("/manifest.json")]:
        state_at(store, int(key.split("/")[1][:12]))


def test_a_failing_snapshot_does_not_hold_up_versions(
    store: FaultStore, publisher_at: Callable[..., Publisher]
) -> None:
    publisher = publisher_at(snapshot_every=1)
    publisher.publish({"w": torch.zeros(9)}).wait()
    store.on("put_stream", "*", refuse)
    for k in range(3):
        publisher.publish({"w": torch.full((9,), float(k + 1))}).wait()
    store.heal()
    publisher.publish({"w": torch.full((9,), 9.0)}).wait()
    publisher.close()
    assert "snapshots/000000000004/manifest.json" in objects_in(store)


def test_an_unknown_outcome_that_was_a_commit(store: FaultStore, publisher: Publisher) -> None:
    w = torch.zeros(10)
    publisher.publish({"w": w}).wait()
    store.on("create", "versions/*", refuse, after=True, times=1)  # stored, but nobody is told
    w[0] = 1
    with pytest.raises(StorageError):
        publisher.publish({"w": w}, step=1).wait()
    assert len(chain_of(store)) == 2
    w[1] = 1
    manifest = publisher.publish({"w": w}, step=2).wait()
    assert (manifest.version, manifest.totals.changed) == (2, 1)
    assert changed_places(store, 1) == {"w": [0]}
    assert changed_places(store, 2) == {"w": [1]}


def test_an_unknown_outcome_that_was_none(store: FaultStore, publisher: Publisher) -> None:
    w = torch.zeros(10)
    publisher.publish({"w": w}).wait()
    store.on("create", "versions/*", refuse, times=1)
    w[0] = 1
    with pytest.raises(StorageError):
        publisher.publish({"w": w}, step=1).wait()
    assert len(chain_of(store)) == 1
    w[1] = 1
    manifest = publisher.publish({"w": w}, step=2).wait()
    assert (manifest.version, manifest.step) == (
        2,
        2,
    )  # the manifest of step 1 was sent again, and then step 2's
    assert [m.step for m in chain_of(store)] == [None, 1, 2]
    assert_version(store, 2, copy_of({"w": w}))


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("kind", ["delta", "layout", "reset"])
def test_an_unknown_outcome_and_then_anything(
    store: FaultStore, publisher: Publisher, stored: bool, kind: str
) -> None:
    state = {"w": torch.zeros(1000), "x": torch.zeros(5)}
    publisher.publish(state).wait()
    store.on("create", "versions/*", refuse, after=stored, times=2)
    state["w"] = torch.ones(1000)
    first = copy_of(state)
    publisher.publish(state)
    publisher.wait_idle()
    with pytest.raises(StorageError):
        publisher.publish(state)
    if kind == "layout":
        state = {"w": torch.ones(1001), "x": torch.zeros(5), "y": torch.ones(2)}
    state["x"] = torch.full((5,), 3.0)
    with pytest.raises(StorageError):
        publisher.publish(state, reset=kind == "reset").wait()  # the settling of the first one fails as well
    publisher.publish(state, reset=kind == "reset").wait()
    assert_version(store, 1, first)
    assert len(chain_of(store)) == 3
    assert_version(store, 2, copy_of(state))
    publisher.close()


def test_an_unknown_first_version(store: FaultStore, publisher: Publisher) -> None:
    store.on("create", "versions/*", refuse, after=True, times=1)
    with pytest.raises(StorageError):
        publisher.publish({"w": torch.zeros(10)}).wait()
    publisher.publish({"w": torch.ones(10)}).wait()
    last = chain_of(store)[-1].version
    assert_version(store, 0, copy_of({"w": torch.zeros(10)}))
    assert_version(store, last, copy_of({"w": torch.ones(10)}))


def test_a_baseline_that_cannot_follow_ends_the_publisher(
    store: FaultStore, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish({"w": torch.zeros(10)}).wait()
    hold = held(store, publisher, {"w": torch.ones(10)})
    waiting = publisher.publish({"w": torch.full((10,), 2.0)})

    def broken(*_: object, **__: object) -> object:
        raise MemoryError("no memory for the copy")

    monkeypatch.setattr("weightcast.publisher.follow.rebase_rows", broken)
    hold.release()
    with pytest.raises(
        Corrupt, match=r"version 1 is committed, but the baseline could not follow: no memory"
    ):
        waiting.wait()
    with pytest.raises(Corrupt, match="could not follow"):
        publisher.publish({"w": torch.full((10,), 3.0)})
    with pytest.raises(Corrupt, match="could not follow"):
        publisher.snapshot()
    assert len(chain_of(store)) == 2
    assert_version(store, 1, copy_of({"w": torch.ones(10)}))


def test_a_manifest_that_is_too_large_is_an_error_of_its_version_alone(
    store: FaultStore, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish({"w": torch.zeros(10)}).wait()
    monkeypatch.setattr("weightcast.manifest.commit.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(UsageError, match="at most 100"):
        publisher.publish({"w": torch.ones(10)}).wait()
    monkeypatch.undo()
    publisher.publish({"w": torch.ones(10)}).wait()
    assert_version(store, 1, copy_of({"w": torch.ones(10)}))


def test_several_threads_publish_and_take_snapshots(store: FaultStore, publisher: Publisher) -> None:
    states = {k: {"w": torch.full((3000,), k, dtype=torch.int32), "x": torch.tensor(k)} for k in range(40)}
    publisher.publish(states[0], step=0).wait()

    def work(first: int) -> None:
        for k in range(first, 40, 4):
            publisher.publish(states[k], step=k)
            if k % 10 == 0:
                with suppress(WeightcastError):
                    publisher.snapshot()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    publisher.close()
    for manifest in chain_of(store):
        assert_version(store, manifest.version, copy_of(states[manifest.step or 0]))
    for key in [k for k in objects_in(store) if k.startswith("snapshots/") and k.endswith("/manifest.json")]:
        state_at(store, int(key.split("/")[1][:12]))


def test_the_newest_state_wins_whatever_the_timing(store: FaultStore, publisher: Publisher) -> None:
    # Each publish lands at another moment of the one before: between its commit, the baseline's move, and the next take.
    w = torch.zeros(2000, dtype=torch.int32)
    publisher.publish({"w": w}).wait()
    for round_ in range(12):
        for k in range(8):
            w.fill_(round_ * 8 + k + 1)
            last = publisher.publish({"w": w}, step=round_ * 8 + k + 1)
            time.sleep(0.0007 * k)
        assert (last.wait().step or 0) == round_ * 8 + 8
    steps = [m.step or 0 for m in chain_of(store)]
    assert steps == sorted(steps)
    for version, step in enumerate(steps):
        assert read(store, version)["w"] == Bits("I32", (2000,), step.to_bytes(4, "little") * 2000)


def test_what_waits_is_not_overtaken_while_it_is_taken(
    store: FaultStore, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish({"w": torch.zeros(9)}).wait()
    hold, between = held(store, publisher, {"w": torch.ones(9)}), Hold()
    older = publisher.publish({"w": torch.full((9,), 2.0)})
    take = Pipeline._take

    def slowly(self: Pipeline) -> object:
        between("")
        return take(self)

    monkeypatch.setattr(Pipeline, "_take", slowly)
    hold.release()
    assert between.reached.wait(10)  # nothing is active, one waits, and it is about to be taken
    newer = publisher.publish({"w": torch.full((9,), 3.0)})
    between.release()
    assert older.wait().version <= newer.wait().version
    publisher.close()
    last = chain_of(store)[-1].version
    assert_version(store, last, copy_of({"w": torch.full((9,), 3.0)}))


def test_another_publisher_takes_over(store: FaultStore, publisher_at: Callable[..., Publisher]) -> None:
    first = publisher_at()
    w = torch.zeros(10)
    first.publish({"w": w}).wait()
    second = publisher_at()
    assert second.version == 1
    w[0] = 1
    with pytest.raises(Conflict, match="version 1 was committed by 'publisher' run"):
        first.publish({"w": w}).wait()
    with pytest.raises(Conflict):
        first.publish({"w": w})
    with pytest.raises(Conflict):
        first.close()
    second.publish({"w": w}).wait()
    assert changed_places(store, 2) == {"w": [0]}
    assert chain_of(store)[1].metadata == {"fence": True}
