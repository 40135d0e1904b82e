"""Pruning never takes what a kept version or a living reader needs, wherever it is stopped."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.manifest.commit import new_token, now, put_shard
from weightcast.manifest.inspect.verify import verify
from weightcast.manifest.rebuild import rebuild
from weightcast.manifest.retention import (
    Candidate,
    Lease,
    PrunePlan,
    PruneResult,
    Survey,
    plan_prune,
    prune,
    survey_store,
)
from weightcast.manifest.store import Entry, StoreSettings, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Conflict, Gap, StorageError, UsageError
from weightcast.schemas.manifest import Floor, Reader
from weightcast.schemas.names import FLOOR_KEY, shard_key, snapshot_folder

from .author import POOL, Author, CountingStore, Tensors, check_state

START = Tensors.of(w=("BF16", [1, 2, 3, 4]))
NOW = datetime(2026, 1, 2, tzinfo=UTC)
CHILD = Path(__file__).with_name("prune_child.py")


@pytest.fixture(params=["memory", "local"])
def author(request: pytest.FixtureRequest, tmp_path: Path) -> Author:
    return Author(
        open_store(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "store"))
    )


def extend(author: Author, head: int, snapshots: tuple[int, ...] = (), resets: tuple[int, ...] = ()) -> None:
    while author.head < head:
        tensors = (
            author.tensors[-1].changed("w", (author.head % 4, 100 + author.head))
            if author.positions
            else START
        )
        if not author.positions or author.head + 1 in resets:
            author.reset(tensors)
        else:
            author.publish(tensors)
        if author.head in snapshots:
            author.snapshot()


def keys(author: Author) -> set[str]:
    return {e.key for e in author.store.list("")}


def versions(author: Author, prefix: str) -> list[int]:
    """Versions that still have objects below `prefix`."""
    return sorted({int(k[len(prefix) : len(prefix) + 12]) for k in keys(author) if k.startswith(prefix)})


def lease(author: Author, version: int) -> str:
    token = new_token()
    author.store.put(f"readers/{token}.json", Reader(reader=token, version=version, time=now()).encode())
    return token


def quick(author: Author, keep: int, **kwargs: Any) -> PruneResult:
    """Prune without waiting, and without sweeping what is young."""
    return prune(author.reader, keep=keep, **{"grace_s": 0, **kwargs})


def check_sound(author: Author, *, deep: bool = False, broken: tuple[str, ...] = ()) -> None:
    """Every version from the floor on rebuilds, every manifest is there; `verify` finds what is `broken`, no more."""
    floor = author.reader.floor()
    for version in range(floor, author.head + 1):
        check_state(rebuild(author.reader, version, POOL), author.tensors[version])
    for version in range(author.head + 1):
        assert author.reader.position(version) == author.positions[version], "version manifests stay"
    report = verify(author.reader, deep=deep)
    assert tuple(p.object for p in report.problems) == broken


# Planning


def survey(**changes: Any) -> Survey:
    """Versions 0 to 9, snapshots at 0, 3 and 7, one shard a version."""
    entries = [entry(shard_key(v, "w", 0, "0" * 32), 10) for v in range(1, 10)]
    for v in (0, 3, 7):
        folder = snapshot_folder(v)
        entries += [
            entry(f"{folder}/model-00001-of-00001.safetensors", 100),
            entry(f"{folder}/manifest.json", 1),
        ]
    named = {v: frozenset([shard_key(v, "w", 0, "0" * 32)]) for v in range(1, 10)}
    standard: dict[str, Any] = {
        "head": 9,
        "floor": 0,
        "snapshots": [Candidate(v, snapshot_folder(v)) for v in (0, 3, 7)],
        "named": {0: frozenset(), **named},
        "leases": [],
        "entries": entries,
    }
    return Survey(**{**standard, **changes})


def entry(key: str, size: int = 1, age_s: float | None = 0) -> Entry:
    return Entry(key, size, None if age_s is None else NOW - timedelta(seconds=age_s))


def planned(found: Survey, keep: int = 1, **kwargs: Any) -> PrunePlan:
    return plan_prune(found, keep=keep, now=NOW, **kwargs)


@pytest.mark.parametrize(
    ("keep", "floor"), [(1, 7), (2, 7), (3, 7), (4, 3), (7, 3), (8, 0), (10, 0), (1000, 0)]
)
def test_the_floor_is_the_newest_snapshot_that_keeps_the_last_versions(keep: int, floor: int) -> None:
    found = planned(survey(), keep)
    assert found.floor == floor
    gone = {int(d.key.split("/")[1][:12]) for d in found.deletions if d.key.startswith("data/")}
    assert gone == set(range(1, floor + 1))
    gone = {int(d.key.split("/")[1][:12]) for d in found.deletions if d.key.startswith("snapshots/")}
    assert gone == {v for v in (0, 3, 7) if v < floor}
    assert found.bytes == 10 * floor + 101 * len(gone)


def test_a_snapshots_manifest_goes_first() -> None:
    found = [d.key for d in planned(survey()).deletions if d.key.startswith("snapshots/")]
    assert [k.rpartition("/")[2] for k in found] == ["manifest.json", "model-00001-of-00001.safetensors"] * 2


def test_it_says_what_holds_the_floor() -> None:
    assert (
        planned(survey(), 4).held_by
        == "the last 4 versions are kept, and there is no usable snapshot from version 4 to 6"
    )
    assert planned(survey(), 3).held_by == "the last 3 versions are kept"
    assert planned(survey(leases=[Lease("r", 3, NOW)])).held_by == "reader r holds version 3"


@pytest.mark.parametrize(
    ("leases", "floor"),
    [
        ([(5, 0)], 3),
        ([(7, 0)], 7),
        ([(8, 0), (2, 0)], 0),
        ([(2, 3599)], 0),
        ([(2, 3600)], 7),
        ([(2, 99999)], 7),
        ([(2, None)], 0),
        ([(99, 0)], 7),
    ],
)
def test_living_readers_hold_the_floor_and_dead_ones_do_not(
    leases: list[tuple[int, float | None]], floor: int
) -> None:
    found = [Lease("r", v, None if age is None else NOW - timedelta(seconds=age)) for v, age in leases]
    assert planned(survey(leases=found)).floor == floor


def test_a_reader_below_the_floor_holds_nothing() -> None:
    assert planned(survey(floor=3, leases=[Lease("r", 2, NOW)])).floor == 7


def test_the_floor_only_rises() -> None:
    assert planned(survey(floor=7), keep=9).floor == 7
    assert planned(survey(floor=8, snapshots=[])).floor == 8
    assert planned(survey(snapshots=[])).floor == 0


def test_orphans_go_by_age() -> None:
    young, old = entry(shard_key(8, "w", 1, "1" * 32)), entry(shard_key(8, "w", 2, "2" * 32), age_s=90_000)
    ahead_young, ahead_old = (
        entry(shard_key(10, "w", 0, "3" * 32)),
        entry(shard_key(12, "w", 0, "4" * 32), age_s=90_000),
    )
    timeless = entry(shard_key(11, "w", 0, "5" * 32), age_s=None)
    base = survey()
    found = planned(survey(entries=[*base.entries, young, old, ahead_young, ahead_old, timeless]), keep=1000)
    assert {d.key: d.reason for d in found.deletions} == {
        old.key: "never committed",
        ahead_old.key: "never committed",
    }


def test_shards_of_a_version_whose_manifest_cannot_be_read_stay() -> None:
    base = survey()
    named = {v: k for v, k in base.named.items() if v != 8}
    old = entry(shard_key(8, "w", 1, "1" * 32), age_s=90_000)
    assert planned(survey(named=named, entries=[*base.entries, old]), keep=1000).deletions == ()


def files_of(version: int, token: str | None, *, complete: bool, age_s: float) -> list[Entry]:
    folder = snapshot_folder(version, token)
    names = ["model-00001-of-00001.safetensors"] + ["manifest.json"] * complete
    return [entry(f"{folder}/{n}", age_s=age_s) for n in names]


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("token", [None, "a" * 32])
@pytest.mark.parametrize("version", [8, 10])
@pytest.mark.parametrize("age_s", [10, 90_000])
def test_snapshots_without_a_version_go_by_age(
    version: int, token: str | None, complete: bool, age_s: float
) -> None:
    files = files_of(version, token, complete=complete, age_s=age_s)
    found = planned(survey(entries=files))
    useless = age_s > 86_400 and (token is not None or not complete)
    assert {d.key for d in found.deletions} == ({e.key for e in files} if useless else set())


def test_a_snapshot_whose_newest_file_is_young_stays() -> None:
    files = [
        *files_of(8, None, complete=False, age_s=90000),
        entry(f"{snapshot_folder(8)}/config.json", age_s=5),
    ]
    assert planned(survey(entries=files)).deletions == ()


def test_the_snapshot_that_a_reset_names_stays() -> None:
    files = files_of(8, "a" * 32, complete=True, age_s=90_000) + files_of(
        8, "b" * 32, complete=True, age_s=90_000
    )
    found = planned(survey(entries=files, named={8: frozenset([snapshot_folder(8, "a" * 32)])}))
    assert {d.key for d in found.deletions} == {e.key for e in files[2:]}


@pytest.mark.parametrize(
    "key",
    [
        "versions/000000000001.json",
        "layouts/" + "0" * 64 + ".arrow",
        "files/" + "0" * 64,
        "stream.json",
        "head.json",
        "floor.json",
        "README.md",
        "data/README.md",
        "data/000000000001/notes.txt",
        "data/000000000001/x.arrow",
        "data/000000000001/w-00000-" + "0" * 32 + ".arrow.bak",
        "data/1/w-00000-" + "0" * 32 + ".arrow",
        "data/000000000001/sub/w-00000-" + "0" * 32 + ".arrow",
        "snapshots/000000000001/sub/x",
        "snapshots/x/manifest.json",
        "snapshots/000000000001-x/manifest.json",
        "probe/x",
        "probe/" + "0" * 32 + "x",
        "readers/x.json",
        "other/x",
        "data/٠٠٠٠٠٠٠٠٠٠٠١/w-00000-" + "0" * 32 + ".arrow",
    ],
)
def test_what_is_not_ours_to_delete_stays(key: str) -> None:
    assert planned(survey(entries=[entry(key, age_s=10**7)]), keep=1).deletions == ()


def test_left_overs_of_probes_and_dead_leases_go() -> None:
    old = [
        entry(k, age_s=90_000)
        for k in (f"probe/{'0' * 32}", f"probe/{'1' * 32}/large/a", f"readers/{'2' * 32}.json")
    ]
    young = [entry(k, age_s=60) for k in (f"probe/{'3' * 32}", f"readers/{'4' * 32}.json")]
    assert {d.key for d in planned(survey(entries=old + young)).deletions} == {e.key for e in old}


def test_impossible_figures() -> None:
    for kwargs in ({"keep": 0}, {"keep": 1, "orphan_age_s": -1}, {"keep": 1, "lease_age_s": -1}):
        with pytest.raises(UsageError):
            plan_prune(survey(), now=NOW, **kwargs)


# Pruning


def test_what_is_kept_is_whole(author: Author) -> None:
    extend(author, 12, snapshots=(4, 8))
    before = keys(author)
    dry = quick(author, 4, dry_run=True)
    assert (dry.plan.floor, dry.deleted, dry.dry_run) == (8, 0, True)
    assert keys(author) == before
    result = quick(author, 4)
    assert (result.plan.floor, author.reader.floor()) == (8, 8)
    assert (
        result.deleted == len(result.plan.deletions) == len(dry.plan.deletions) == len(before - keys(author))
    )
    assert result.deleted_bytes == dry.plan.bytes > 0
    assert (versions(author, "data/"), versions(author, "snapshots/")) == ([9, 10, 11, 12], [8])
    check_sound(author, deep=True)
    with pytest.raises(Gap):
        rebuild(author.reader, 7, POOL)
    assert quick(author, 4).deleted == 0


def test_a_reset_on_the_way(author: Author) -> None:
    extend(author, 9, snapshots=(3,), resets=(6,))
    quick(author, 5)
    assert author.reader.floor() == 3
    check_sound(author)
    quick(author, 3)
    assert author.reader.floor() == 6
    check_sound(author)


def test_a_broken_snapshot_is_no_floor(author: Author) -> None:
    extend(author, 9, snapshots=(3, 6))
    key = f"{snapshot_folder(6)}/model-00001-of-00001.safetensors"
    good = author.store.get(key, max_bytes=1 << 20)
    for bad in (None, good[:-1], good + b"x"):
        author.store.delete(key) if bad is None else author.store.put(key, bad)
        assert quick(author, 1, dry_run=True).plan.floor == 3
    author.store.put(key, good)
    author.store.put(f"{snapshot_folder(6)}/manifest.json", b"{}")
    assert quick(author, 1).plan.floor == 3
    check_sound(author, broken=(f"{snapshot_folder(6)}/manifest.json",))


def test_b116_leases_of_living_readers_hold(author: Author) -> None:
    extend(author, 9, snapshots=(3, 6))
    token = lease(author, 4)
    assert quick(author, 1).plan.floor == 3
    held = rebuild(author.reader, 4, POOL)
    for version in range(5, 10):
        held = rebuild(author.reader, version, POOL, start=held)
    check_state(held, author.tensors[9])
    author.store.put(f"readers/{token}.json", Reader(reader=token, version=9, time=now()).encode())
    assert quick(author, 1).plan.floor == 6


def test_b116_an_old_lease_holds_nothing(author: Author) -> None:
    extend(author, 9, snapshots=(3, 6))
    lease(author, 4)
    later = author.store.clock() + timedelta(hours=2)
    assert quick(author, 1, clock=lambda: later).plan.floor == 6
    check_sound(author)


def test_broken_leases_and_foreign_objects_disturb_nothing(author: Author) -> None:
    extend(author, 5, snapshots=(3,))
    author.store.put(f"readers/{new_token()}.json", b"broken")
    foreign = {
        "data/000000000001/notes.txt",
        "snapshots/000000000001/a/b",
        "snapshots/000000000001/x+y.txt",
        "readers/x",
    }
    for key in foreign - {"snapshots/000000000001/x+y.txt"}:
        author.store.put(key, b"mine")
    assert quick(author, 1, orphan_age_s=0).plan.floor == 3
    assert {k for k in keys(author) if k in foreign} == foreign - {"snapshots/000000000001/x+y.txt"}
    check_sound(author)


def test_an_empty_stream(author: Author) -> None:
    author.store.put(shard_key(0, "w", 0, new_token()), b"an attempt")
    assert quick(author, 1).deleted == 0
    time.sleep(0.02)
    assert quick(author, 1, orphan_age_s=0).deleted == 1


def test_attempts_that_lost_are_swept_and_young_ones_spared(author: Author) -> None:
    extend(author, 5, snapshots=(3,))
    lost = [shard_key(v, "w", 0, new_token()) for v in (4, 5, 6)]
    lost += [
        f"{snapshot_folder(6, new_token())}/manifest.json",
        f"{snapshot_folder(5)}/model-00001-of-00001.safetensors",
    ]
    for key in lost:
        author.store.put(key, b"lost")
    assert quick(author, 1000).deleted == 0
    later = author.store.clock() + timedelta(days=2)
    result = quick(author, 1000, clock=lambda: later)
    assert {d.key for d in result.plan.deletions} == set(lost)
    assert not keys(author) & set(lost)
    check_sound(author)


def test_the_grace_is_kept_by_the_stores_clock(author: Author) -> None:
    """Nothing goes before the floor is `grace_s` old; a second run does not wait again."""
    extend(author, 5, snapshots=(3,))
    skew, before, slept = timedelta(0), keys(author), list[float]()

    def sleep(seconds: float) -> None:
        nonlocal skew
        assert keys(author) == before | {FLOOR_KEY}
        assert author.reader.floor() == 3
        slept.append(seconds)
        skew += timedelta(seconds=seconds)

    def clock() -> datetime:
        return author.store.clock() + skew

    assert quick(author, 1, grace_s=150, sleep=sleep, clock=clock).deleted > 0
    assert 149 < sum(slept) <= 151
    slept.clear()
    extend(author, 6)
    author.store.put(shard_key(2, "w", 0, new_token()), b"late")
    assert quick(author, 1, grace_s=150, sleep=sleep, clock=clock).deleted == 1
    assert slept == []


def test_what_is_committed_during_the_grace_is_kept(author: Author) -> None:
    """An attempt that was old enough to be swept, and is committed while the pruner waits."""
    extend(author, 5, snapshots=(3,))
    target = author.tensors[-1].changed("w", (0, 999))
    shard = put_shard(author.store, 6, "w", 0, author.rows(target))
    time.sleep(0.02)
    assert shard.key in {d.key for d in quick(author, 1, dry_run=True, orphan_age_s=0).plan.deletions}
    skew = timedelta(0)

    def sleep(seconds: float) -> None:
        nonlocal skew
        skew += timedelta(seconds=seconds)
        if author.head == 5:
            author.commit(target, shards=[shard])

    result = quick(
        author, 1, grace_s=60, sleep=sleep, clock=lambda: author.store.clock() + skew, orphan_age_s=0
    )
    assert author.head == 6
    assert result.deleted > 0
    assert shard.key in keys(author)
    check_sound(author)


def test_another_pruner_is_noticed(author: Author) -> None:
    extend(author, 5, snapshots=(3,))
    before = keys(author)

    def sleep(seconds: float) -> None:
        author.store.put(FLOOR_KEY, Floor(version=1, time=now()).encode())

    times = itertools.count()
    with pytest.raises(Conflict, match=r"floor\.json is 1, but 3 was written here"):
        quick(
            author,
            1,
            grace_s=60,
            sleep=sleep,
            clock=lambda: author.store.clock() + timedelta(seconds=50 * next(times)),
        )
    assert keys(author) == before | {FLOOR_KEY}


def test_the_floor_is_not_lowered(author: Author) -> None:
    extend(author, 9, snapshots=(3, 6))
    quick(author, 1)
    assert author.reader.floor() == 6
    assert quick(author, 9).plan.floor == 6
    assert author.reader.floor() == 6


def test_a_store_that_fails_midway(author: Author) -> None:
    extend(author, 9, snapshots=(3, 6))

    class Failing(CountingStore):
        def delete(self, key: str) -> None:
            if len(self.keys("deleted")) == 3:
                raise StorageError("no")
            self.calls.append(("delete", "deleted"))
            self.inner.delete(key)

    failing = StreamReader(Failing(author.store), author.reader.stream)
    with pytest.raises(StorageError):
        prune(failing, keep=1, grace_s=0)
    check_sound(author)
    quick(author, 1)
    assert (versions(author, "data/"), versions(author, "snapshots/")) == ([7, 8, 9], [6])
    check_sound(author)


def test_impossible_grace(author: Author) -> None:
    with pytest.raises(UsageError, match="grace"):
        quick(author, 1, grace_s=-1)


@pytest.mark.parametrize("page", [1000, 7])
def test_b141_pages_of_a_listing(moto_server: Any, aws: Any, page: int) -> None:
    """B141: over pages: what is pruned does not depend on them, nor on the store's order."""
    aws(moto_server)
    author = Author(
        open_store(f"s3://{moto_server.bucket}/{uuid.uuid4().hex}", settings=StoreSettings(list_page=page))
    )
    extend(author, 14, snapshots=(10,))
    result = quick(author, 3)
    assert {int(d.key.split("/")[1][:12]) for d in result.plan.deletions if d.key.startswith("data/")} == set(
        range(1, 11)
    )
    check_sound(author)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_no_history_is_broken(data: st.DataObject) -> None:
    """Random histories, pruned at any time with any `keep` and readers anywhere: what is kept is whole,
    readers go on.
    """
    author = Author(open_store(f"memory://{uuid.uuid4().hex}"))
    held = None
    for _ in range(data.draw(st.integers(2, 14))):
        action = data.draw(
            st.sampled_from(["publish", "publish", "snapshot", "reset", "prune", "lose", "lease"])
        )
        if action == "reset" or not author.positions:
            author.reset(START if not author.positions else author.tensors[-1].changed("w", (1, author.head)))
        elif action == "publish":
            author.publish(author.tensors[-1].changed("w", (author.head % 4, 500 + author.head)))
        elif action == "snapshot":
            author.snapshot(data.draw(st.integers(author.reader.floor(), author.head)))
        elif action == "lose":
            version = data.draw(st.integers(0, author.head + 2))
            author.store.put(shard_key(version, "w", 0, new_token()), b"lost")
            author.store.put(f"{snapshot_folder(version, new_token())}/model.safetensors", b"lost")
        elif action == "lease":
            held = rebuild(author.reader, data.draw(st.integers(author.reader.floor(), author.head)), POOL)
            for e in author.store.list("readers/"):
                author.store.delete(e.key)
            lease(author, held.position.version)
        else:
            keep = data.draw(st.integers(1, 6))
            before = author.reader.floor()
            result = quick(author, keep, orphan_age_s=data.draw(st.sampled_from([0, 86_400])))
            floor = author.reader.floor()
            assert before <= floor == result.plan.floor <= max(before, author.head - keep + 1)
            assert held is None or floor <= max(before, held.position.version)
            check_sound(author)
    check_sound(author)
    if held is not None:
        check_state(rebuild(author.reader, author.head, POOL, start=held), author.tensors[author.head])


@pytest.mark.parametrize("when", ["before", "after"])
def test_p9_b092_killed_at_each_deletion(tmp_path: Path, when: str) -> None:
    """P9, B092: SIGKILL around each deletion in turn, on one store: always sound; then run to the end."""
    author = Author(open_store(str(tmp_path / "store")))
    extend(author, 6, snapshots=(2, 4), resets=(1,))
    author.store.put(shard_key(6, "w", 0, new_token()), b"lost")
    time.sleep(0.02)
    full = tmp_path / "full"
    shutil.copytree(tmp_path / "store", full)
    count = len(quick(author, 2, dry_run=True, orphan_age_s=0).plan.deletions)
    assert count >= 10
    folders = [tmp_path / f"store{n}" for n in range(1, count + 1)]
    for folder in folders:
        shutil.copytree(full, folder)
    command = [sys.executable, str(CHILD), "2", when, *map(str, folders)]
    ends = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout.split()
    assert ends == [str(-signal.SIGKILL)] * count
    outcomes = set()
    for n, folder in enumerate(folders, 1):
        killed = Author.__new__(Author)
        store = open_store(str(folder))
        killed.__dict__.update(author.__dict__, store=store, reader=StreamReader.open(store))
        assert len(keys(author)) + 1 - len(keys(killed)) == (n if when == "after" else n - 1)
        check_sound(killed)
        prune(killed.reader, keep=2, grace_s=0, orphan_age_s=0)
        check_sound(killed)
        outcomes.add(frozenset(keys(killed)))
    assert len(outcomes) == 1
    prune(author.reader, keep=2, grace_s=0, orphan_age_s=0)
    assert outcomes == {frozenset(keys(author))}


def test_a_survey_reads_no_more_than_it_must(author: Author) -> None:
    extend(author, 9, snapshots=(3, 6))
    quick(author, 1)
    counting = CountingStore(author.store)
    survey_store(StreamReader(counting, author.reader.stream))
    assert len([1 for method, _ in counting.calls if method == "get"]) <= 12


def test_prune_needs_modification_times(author: Author) -> None:
    extend(author, 5, snapshots=(3,))

    class Timeless(CountingStore):
        def list(self, prefix: str, *, after: str = "") -> Any:
            return (Entry(e.key, e.size, None) for e in self.inner.list(prefix, after=after))

    reader = StreamReader(Timeless(author.store), author.reader.stream)
    with pytest.raises(StorageError, match="modification time"):
        prune(reader, keep=1, grace_s=0)
    check_sound(author)
