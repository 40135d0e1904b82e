"""A publisher that starts on a stream with a history: it goes on from the head, on bits that it has proved."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from weightcast.manifest.retention import prune
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.schemas.errors import Conflict, Corrupt, StorageError

from ..faultstore import FaultStore, refuse
from ..versions import assert_version, chain_of, changed_places, copy_of, read

Open = Callable[..., Publisher]


def history(publisher_at: Open, versions: int, **settings: object) -> torch.Tensor:
    """Versions 0 to `versions` - 1, of which version k changes element k; the last state."""
    w = torch.zeros(400, dtype=torch.bfloat16)
    with publisher_at(**settings) as publisher:
        for k in range(versions):
            w[k] += 1
            publisher.publish({"w": w}).wait()
    return w


@pytest.mark.parametrize("fence", [True, False])
def test_b072_an_empty_machine_goes_on_after_the_head(
    store: FaultStore, publisher_at: Open, fence: bool
) -> None:
    w = history(publisher_at, 58)
    before = [m.token for m in chain_of(store)]
    publisher = publisher_at(fence=fence)
    w[399] += 1
    manifest = publisher.publish({"w": w}).wait()
    assert manifest.version == (59 if fence else 58)
    assert [m.token for m in chain_of(store)][:58] == before
    assert changed_places(store, manifest.version) == {"w": [399]}
    assert_version(store, manifest.version, copy_of({"w": w}))


def test_b069_a_pruned_history_and_a_trainer_that_went_back(store: FaultStore, publisher_at: Open) -> None:
    w = history(publisher_at, 9, snapshot_every=3)
    reader = StreamReader.open(store)
    prune(reader, keep=3, grace_s=0, orphan_age_s=60, clock=lambda: store.clock() + timedelta(days=1))
    assert reader.floor() > 0
    w[6:] = 0  # the state of version 5
    publisher = publisher_at(fence=False)
    assert publisher.publish({"w": w}).wait().version == 9
    assert changed_places(store, 9) == {"w": [6, 7, 8]}
    assert_version(store, 9, copy_of({"w": w}))


def test_b071_differences_to_what_receivers_have_are_in_the_delta(
    store: FaultStore, publisher_at: Open
) -> None:
    checkpoint = {"w": torch.randn(300).bfloat16(), "embed": torch.randn(10, 4)}
    with publisher_at() as publisher:
        base = publisher.publish(checkpoint).wait()
    trained = {"w": checkpoint["w"].float().bfloat16(), "embed": checkpoint["embed"][:9].clone()}
    trained["w"][5] = 99
    with publisher_at(fence=False) as publisher:
        first = publisher.publish(trained).wait()
    assert first.digest_before == base.digest_after
    assert_version(store, 1, copy_of(trained))


@pytest.mark.parametrize(
    "other", ["behind", "damaged", "another layout", "another stream", "no note", "not a file"]
)
def test_b078_a_kept_baseline_is_proved_or_not_used(
    store: FaultStore, publisher_at: Open, tmp_path: Path, other: str
) -> None:
    kept = tmp_path / "baseline"
    w = history(publisher_at, 21, baseline=kept)
    note, data = (tmp_path / "baseline.json").read_bytes(), kept.read_bytes()
    if other == "behind":
        with publisher_at(fence=False) as elsewhere:  # on another machine, five more versions
            for k in range(5):
                w[100 + k] += 1
                elsewhere.publish({"w": w}).wait()
    elif other == "damaged":
        kept.write_bytes(b"\x01" + data[1:])
    elif other == "another layout":
        kept.write_bytes(data[:100])
    elif other == "another stream":
        (tmp_path / "baseline.json").write_bytes(note.replace(b'"stream": "', b'"stream": "f'))
    elif other == "no note":
        (tmp_path / "baseline.json").unlink()
    else:
        kept.unlink()
    head = len(chain_of(store)) - 1
    for k in range(2):
        publisher = publisher_at(baseline=kept, fence=False)
        w[200 + k] += 1
        assert publisher.publish({"w": w}).wait().version == head + 1 + k
        publisher.close()
        assert changed_places(store, head + 1 + k) == {"w": [200 + k]}
        assert_version(store, head + 1 + k, copy_of({"w": w}))


def test_a_kept_baseline_spares_the_store(store: FaultStore, publisher_at: Open, tmp_path: Path) -> None:
    history(publisher_at, 6, baseline=tmp_path / "baseline")
    store.calls.clear()
    assert publisher_at(baseline=tmp_path / "baseline").version == 6
    assert [
        k for op, k in store.calls if op in ("fetch", "download") and k.startswith(("data", "snapshots"))
    ] == []


def test_a_kept_baseline_follows_through_every_kind_of_version(
    store: FaultStore, publisher_at: Open, tmp_path: Path
) -> None:
    states = [
        {"w": torch.zeros(70_000)},
        {"w": torch.ones(70_000)},
        {"w": torch.ones(70_001), "x": torch.ones(2)},
        {"w": torch.full((70_001,), 2.0), "x": torch.ones(2)},
    ]
    version = -1
    for k, state in enumerate(states):
        with publisher_at(baseline=tmp_path / "baseline", fence=False) as publisher:
            for reset in (False, True):
                version += 1
                assert publisher.publish(state, reset=reset and k > 0).wait().version == version
                assert_version(store, version, copy_of(state))


def test_b081_a_reader_needs_no_new_step(store: FaultStore, publisher_at: Open) -> None:
    w = history(publisher_at, 8)
    publisher_at()
    assert_version(store, 8, copy_of({"w": w}))  # the fence: version 7's bits


def test_opening_without_the_history_starts_afresh_after_the_head(
    store: FaultStore, publisher_at: Open
) -> None:
    history(publisher_at, 3)
    for key in [e.key for e in store.list("snapshots/")]:
        store.delete(key)
    with pytest.raises(Exception, match="snapshot"):
        publisher_at()
    publisher = publisher_at(resume=False)
    manifest = publisher.publish({"v": torch.ones(5)}).wait()
    assert (manifest.version, manifest.reset) == (3, True)
    assert read(store, 3) == copy_of({"v": torch.ones(5)})
    publisher.publish({"v": torch.zeros(5)}).wait()
    assert_version(store, 4, copy_of({"v": torch.zeros(5)}))


def test_a_store_that_fails_while_a_publisher_opens_leaves_no_thread(
    store: FaultStore, publisher_at: Open
) -> None:
    w = history(publisher_at, 3)
    before = {t.name for t in threading.enumerate() if t.name == "weightcast-publisher"}
    store.on("create", "versions/*", refuse, after=True)
    with pytest.raises(StorageError):
        publisher_at()
    store.heal()
    for thread in threading.enumerate():
        if thread.name == "weightcast-publisher" and thread.name not in before:
            thread.join(5)
            assert not thread.is_alive()
    assert len(chain_of(store)) == 4  # the fence was stored all the same
    assert_version(store, 3, copy_of({"w": w}))
    assert publisher_at().version == 4


def test_a_predecessor_that_commits_while_its_successor_opens(store: FaultStore, publisher_at: Open) -> None:
    first = publisher_at()
    w = torch.zeros(50)
    first.publish({"w": w}).wait()
    w[0] = 1
    store.on("create", "versions/000000000001.json", lambda _: first.publish({"w": w}).wait(), times=1)
    second = publisher_at()  # its fence finds version 1 taken, and becomes version 2
    assert second.version == 2
    assert changed_places(store, 1) == {"w": [0]}
    with pytest.raises(Conflict):
        first.publish({"w": w}).wait()
    second.publish({"w": torch.full((50,), 3.0)}).wait()
    assert_version(store, 3, copy_of({"w": torch.full((50,), 3.0)}))


def test_a_damaged_history_is_refused(store: FaultStore, publisher_at: Open) -> None:
    history(publisher_at, 3)
    for entry in list(store.list("snapshots/")):
        if not entry.key.startswith("snapshots/000000000000-"):
            store.delete(entry.key)
    key = next(e.key for e in store.list("data/000000000002"))
    data = bytearray(store.get(key, max_bytes=1 << 20))
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(Corrupt, match=r"data/000000000002"):
        publisher_at()
    assert StreamReader.open(store).listed_versions() == [0, 1, 2]
