"""The folder watcher on real files: what it publishes, in which order, and what it leaves alone."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightcast.publisher import Publisher
from weightcast.publisher import contents as contents_module
from weightcast.publisher.candidates import Candidates, Existing, in_order
from weightcast.publisher.sightings import Sighting, is_temporary, look
from weightcast.publisher.watch import Outcome, Watcher, WatchSettings
from weightcast.schemas.errors import Conflict, Corrupt, UsageError
from weightcast.schemas.manifest import VersionManifest

from ..faultstore import FaultStore, refuse
from ..versions import assert_version, chain_of, copy_of
from .checkpoints import INDEX, SINGLE, changed, model, rotate_away, save, snapshot_of, write_index

SETTLE_S = 2.0


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A watcher whose time is under control."""

    def __init__(self, folder: Path, publisher: Publisher, **settings: Any) -> None:
        self.clock = Clock()
        self.watcher = Watcher(
            folder, publisher, WatchSettings(settle_s=SETTLE_S, **settings), clock=self.clock
        )

    def look(self) -> Outcome:
        """One step, now."""
        return self.watcher.step()

    def later(self, seconds: float = SETTLE_S + 0.1) -> Outcome:
        """A look now and one after a while; what the second one did. The first must not publish."""
        assert self.watcher.step().published is None
        self.clock.now += seconds
        return self.watcher.step()

    def all(self) -> list[VersionManifest]:
        """Look until nothing is published any more, twice in a row with time to settle in between."""
        found, quiet = [], 0
        while quiet < 2:
            manifest = self.look().published
            quiet = 0 if manifest is not None else quiet + 1
            found += [manifest] if manifest is not None else []
            self.clock.now += 0 if manifest is not None else SETTLE_S + 0.1
        return found


RigAt = Callable[..., Rig]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The watched folder. It does not exist yet."""
    return tmp_path / "run"


@pytest.fixture
def rig_at(folder: Path, publisher_at: Callable[..., Publisher]) -> RigAt:
    """Makes watchers of `folder`; settings by name."""

    def make(*, cast: dict[str, str] | None = None, **settings: Any) -> Rig:
        return Rig(folder, publisher_at(cast=cast or {}), **settings)

    return make


@contextmanager
def during_read(act: Callable[[Path], None], *, at: int = 1) -> Iterator[list[Path]]:
    """Run `act` on the file that is being read, before tensor number `at` (from 0); gives what was read."""
    real = contents_module._read
    done: list[Path] = []

    def read(path: Path, *args: Any) -> None:
        if len(done) == at:
            act(path)
        done.append(path)
        real(path, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents_module, "_read", read)
        yield done


# --- which one ----------------------------------------------------------------------------------------------


def sighting(
    name: str, step: int | None, modified: int, *, marked: bool = True, version: int = 0
) -> Sighting:
    path = Path("/run") / name
    return Sighting(path, path, step, ((SINGLE, version, 100, modified),), marked)


def test_order_is_by_step_and_one_without_step_follows_what_was_there_before_it() -> None:
    every = [
        sighting("checkpoint-100", 100, 50),
        sighting("checkpoint-9", 9, 70),
        sighting("checkpoint-20", 20, 20),
        sighting("final", None, 55),
        sighting("base", None, 10),
    ]
    random.Random(1).shuffle(every)
    assert [s.path.name for s in in_order(every)] == [
        "base",
        "checkpoint-9",
        "checkpoint-20",
        "checkpoint-100",
        "final",
    ]


@pytest.mark.parametrize(
    ("existing", "every", "expected"),
    [
        ("newest", False, [30, 50]),
        ("newest", True, [10, 20, 30, 40, 50]),
        ("all", False, [10, 20, 30, 50]),
        ("ignore", False, [50]),
        ("ignore", True, [40, 50]),
    ],
)
def test_existing_and_every(existing: Existing, every: bool, expected: list[int]) -> None:
    candidates = Candidates(SETTLE_S, existing, every=every)
    seen = [sighting(f"checkpoint-{n}", n, n) for n in (10, 20, 30)]
    chosen = []

    def run() -> None:
        while (choice := candidates.choose(now)) is not None:
            chosen.append(choice.sighting.step)
            candidates.settle(choice)

    now = 0.0
    candidates.see(seen, now)
    assert candidates.choose(1.9) is None, "not settled"
    now = 2.0
    run()
    seen += [sighting(f"checkpoint-{n}", n, n) for n in (40, 50)]
    candidates.see(seen, now)
    now = 4.0
    candidates.see(seen, now)
    run()
    assert chosen == expected


def test_what_changes_between_looks_is_not_settled() -> None:
    candidates = Candidates(SETTLE_S)
    for now in range(10):
        candidates.see([sighting("checkpoint-1", 1, now)], float(now))
        assert candidates.choose(float(now)) is None
    assert candidates.choose(11.0) is not None


def test_an_older_one_is_the_choice_while_the_newest_is_left_aside_or_refused() -> None:
    candidates = Candidates(0)
    old, new = sighting("checkpoint-1", 1, 1), sighting("checkpoint-2", 2, 2)
    candidates.see([old, new], 0)
    choice = candidates.choose(0)
    assert choice is not None
    assert (choice.sighting, choice.replaced) == (new, (old,))
    aside = candidates.choose(0, {new.path})
    assert aside is not None
    assert aside.sighting == old
    candidates.refuse(new)
    again = candidates.choose(0)
    assert again is not None
    assert again.sighting == old


@pytest.mark.parametrize(
    ("name", "temporary"),
    [
        ("tmp-checkpoint-30", True),
        ("checkpoint-30.tmp", True),
        ("checkpoint-30-tmp-8f2", True),
        ("step_4.orbax-checkpoint-tmp-123", True),
        (".checkpoint-30", True),
        ("checkpoint-30.incomplete", True),
        ("checkpoint-30", False),
        ("latest", False),
        ("attempt-1", False),
        ("tmpfs", False),
    ],
)
def test_is_temporary(name: str, temporary: bool) -> None:
    assert is_temporary(name) is temporary


def test_settings_out_of_bounds_are_refused() -> None:
    for bad in (
        {"settle_s": -1},
        {"poll_s": 0},
        {"marker": "../x"},
        {"marker": ""},
        {"settle_s": float("nan")},
    ):
        with pytest.raises(UsageError):
            WatchSettings(**bad)  # type: ignore[arg-type]


# --- the usual life -----------------------------------------------------------------------------------------


def test_versions_follow_the_checkpoints_bit_for_bit(folder: Path, rig_at: RigAt, store: FaultStore) -> None:
    rig = rig_at()
    assert rig.look() == Outcome(), "no folder yet"
    states = [model(1)]
    for count in (7, 0, 300):
        states.append(changed(states[-1], count, seed=count))
    for number, state in enumerate(states):
        save(folder / f"checkpoint-{10 * number}", state, shards=1 + number % 3)
        (folder / f"checkpoint-{10 * number}" / "config.json").write_text(json.dumps({"step": number}))
        before = snapshot_of(folder)
        outcome = rig.later()
        assert outcome.published is not None
        assert outcome.path == (folder / f"checkpoint-{10 * number}").resolve()
        assert (outcome.published.version, outcome.published.step) == (number, 10 * number)
        assert outcome.published.metadata == {"checkpoint": f"checkpoint-{10 * number}"}
        assert_version(store, number, copy_of(state))
        assert snapshot_of(folder) == before, "something was written"
        assert rig.later().published is None, "published twice"
    assert [m.totals.changed for m in chain_of(store)][1:] == [7, 0, 300]


def test_a_rewrite_under_the_same_name_is_a_new_version(
    folder: Path, rig_at: RigAt, store: FaultStore
) -> None:
    rig = rig_at()
    first = model(2)
    save(folder, first)
    assert [m.version for m in rig.all()] == [0]
    second = changed(first, 11)
    save(folder, second)  # FOLDER itself is the checkpoint
    published = rig.all()
    assert [(m.version, m.totals.changed, m.step) for m in published] == [(1, 11, None)]
    assert_version(store, 1, copy_of(second))


def test_files_that_come_or_go_beside_the_weights_are_no_new_version(folder: Path, rig_at: RigAt) -> None:
    rig = rig_at()
    save(folder / "checkpoint-1", model(3))
    assert len(rig.all()) == 1
    (folder / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
    (folder / "checkpoint-1" / "tokenizer.json").write_text("{}")
    save_file({"stray": torch.ones(2)}, folder / "checkpoint-1" / "stray.safetensors")
    assert rig.all() == []
    (folder / "checkpoint-1" / "stray.safetensors").unlink()
    assert rig.all() == []


def test_the_newest_of_several_is_published_and_older_ones_never(
    folder: Path, rig_at: RigAt, store: FaultStore
) -> None:
    rig = rig_at()
    for step in (1, 9, 10):
        save(folder / f"global_step_{step}", model(step))
    assert [m.step for m in rig.all()] == [10]
    assert_version(store, 0, copy_of(model(10)))
    save(folder / "global_step_11", model(11))
    rotate_away(folder / "global_step_1")
    assert [m.step for m in rig.all()] == [11]


def test_a_lower_step_written_later_is_a_rollback(folder: Path, rig_at: RigAt, store: FaultStore) -> None:
    rig = rig_at()
    save(folder / "step_10", model(1))
    save(folder / "step_20", model(2))
    assert [m.step for m in rig.all()] == [20]
    save(folder / "step_10", model(3))
    assert [m.step for m in rig.all()] == [10]
    assert_version(store, 1, copy_of(model(3)))


def test_leftovers_of_a_rollback_are_told_of(
    folder: Path, rig_at: RigAt, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rig_at()
    save(folder / "step_30", model(1))
    for path in (folder / "step_30").iterdir():
        os.utime(path, (1_000_000, 1_000_000))
    save(folder / "step_20", model(2))
    with caplog.at_level(logging.WARNING, "weightcast"):
        assert [m.step for m in rig.all()] == [30]
    assert "step_20" in caplog.text
    assert "rollback" in caplog.text


@pytest.mark.parametrize("nested", ["huggingface", "actor/huggingface"])
def test_weights_in_a_folder_of_their_own(
    folder: Path, rig_at: RigAt, store: FaultStore, nested: str
) -> None:
    rig = rig_at()
    save(folder / "global_step_5" / nested, model(4))
    (folder / "global_step_5" / "data.pt").write_bytes(b"dataloader")
    assert [(m.step, m.metadata) for m in rig.all()] == [(5, {"checkpoint": "global_step_5"})]
    assert_version(store, 0, copy_of(model(4)))


def test_casts_of_the_settings_are_made(folder: Path, rig_at: RigAt, store: FaultStore) -> None:
    rig = rig_at(cast={"layer.*": "BF16"})
    masters = {name: t.to(torch.float32) + 1e-4 for name, t in model(5).items()} | {"norm": torch.ones(3)}
    save(folder / "checkpoint-1", masters)
    assert len(rig.all()) == 1
    moved = {n: t + 1e-2 for n, t in masters.items()}
    save(folder / "checkpoint-2", moved)
    assert len(rig.all()) == 1
    rounded = {n: t if n == "norm" else t.to(torch.bfloat16) for n, t in moved.items()}
    assert_version(store, 1, copy_of(rounded))


# --- finished, or not ---------------------------------------------------------------------------------------


def test_b175_a_checkpoint_in_the_writing_is_not_taken(
    folder: Path, publisher_at: Callable[..., Publisher], store: FaultStore
) -> None:
    """20 MB in pieces of 1 MB, 200 ms apart; the folder first, the header right from the start. Real time."""
    state = model(6, tensors=10, elements=1 << 20)
    whole = save(folder.parent / "elsewhere", state) / SINGLE
    data = whole.read_bytes()
    assert len(data) > 20_000_000
    stop, outcomes, finished_at = threading.Event(), [], [0.0]

    def write() -> None:
        (folder / "checkpoint-1").mkdir(parents=True)
        with (folder / "checkpoint-1" / SINGLE).open("wb", buffering=0) as file:
            for begin in range(0, len(data), 1 << 20):
                time.sleep(0.2)
                file.write(data[begin : begin + (1 << 20)])
        finished_at[0] = time.monotonic()

    def report(outcome: Outcome) -> None:
        if outcome != Outcome():
            outcomes.append((time.monotonic(), outcome))
        if outcome.published or time.monotonic() > limit:
            stop.set()

    limit = time.monotonic() + 30
    writer = threading.Thread(target=write)
    writer.start()
    Watcher(folder, publisher_at(), WatchSettings(settle_s=0.6, poll_s=0.05)).run(stop, report)
    writer.join()
    # A writer that a busy machine holds up for longer than settle_s is reported, and still not taken.
    assert all(isinstance(e, Corrupt) for _, outcome in outcomes for e in outcome.failures)
    [at] = [at for at, outcome in outcomes if outcome.published is not None]
    assert at > finished_at[0] > 0
    assert len(chain_of(store)) == 1
    assert_version(store, 0, copy_of(state))


def test_shards_that_come_one_after_another_wait_for_the_index(
    folder: Path, rig_at: RigAt, store: FaultStore
) -> None:
    rig = rig_at()
    complete = save(folder.parent / "elsewhere", model(7), shards=3)
    target = folder / "checkpoint-1"
    target.mkdir(parents=True)
    for path in [*sorted(complete.glob("model-*")), complete / INDEX]:
        assert rig.later(60).published is None
        (target / path.name).write_bytes(path.read_bytes())
    outcome = rig.later()
    assert outcome.published is not None
    assert outcome.failures == ()
    assert_version(store, 0, copy_of(model(7)))


def test_b179_marker_and_temporary_names(folder: Path, rig_at: RigAt, store: FaultStore) -> None:
    rig = rig_at(marker="COMPLETE")
    for number, name in enumerate(("step_1", "step_2", "step_3.tmp", "step_4.orbax-checkpoint-tmp-123")):
        save(folder / name, model(number))
    for name in ("step_1", "step_3.tmp", "step_4.orbax-checkpoint-tmp-123"):
        (folder / name / "COMPLETE").touch()
    before = snapshot_of(folder)
    assert [m.step for m in rig.all()] == [1]
    assert snapshot_of(folder) == before
    assert_version(store, 0, copy_of(model(0)))
    (folder / "step_2" / "COMPLETE").touch()
    assert [m.step for m in rig.all()] == [2]


def test_b184_rename_and_latest(folder: Path, rig_at: RigAt, store: FaultStore) -> None:
    """`latest` that goes back to a checkpoint that was published is ignored: its files did not change."""
    rig = rig_at()
    save(folder / "checkpoint-10", model(10))
    latest = folder / "latest"
    latest.symlink_to("checkpoint-10")
    assert [m.step for m in rig.all()] == [10], "nothing lost at the start"
    save(folder / "tmp-checkpoint-30", model(30))
    assert rig.all() == []
    (folder / "tmp-checkpoint-30").rename(folder / "checkpoint-30")
    latest.unlink()
    latest.symlink_to("checkpoint-30")
    assert rig.look().published is None
    latest.unlink()
    latest.symlink_to("checkpoint-10")
    assert [m.step for m in rig.all()] == [30], "once, although seen under two names"
    for target in ("checkpoint-30", "checkpoint-10"):
        latest.unlink()
        latest.symlink_to(target)
        assert rig.all() == []
    assert_version(store, 1, copy_of(model(30)))


def test_b184_latest_alone_leads_to_folders_elsewhere(folder: Path, rig_at: RigAt, store: FaultStore) -> None:
    rig = rig_at()
    folder.mkdir()
    latest = folder / "latest"
    for number, name in enumerate(("weights-a", "weights-b", "weights-a", "weights-b")):
        target = folder.parent / name
        if not target.exists():
            save(target, model(number))
        latest.unlink(missing_ok=True)
        latest.symlink_to(target)
        assert len(rig.all()) == (1 if number < 2 else 0)
    save(folder.parent / "weights-a", model(9))
    latest.unlink()
    latest.symlink_to(folder.parent / "weights-a")
    assert len(rig.all()) == 1
    assert_version(store, 2, copy_of(model(9)))


def test_b184_latest_going_back_to_what_was_ignored_or_passed_over(folder: Path, rig_at: RigAt) -> None:
    rig = rig_at(existing="ignore")
    latest = folder / "latest"
    targets = [save(folder.parent / f"weights-{n}", model(n)) for n in range(2)]
    folder.mkdir()
    for number, published in ((0, 0), (1, 1), (0, 0)):
        latest.unlink(missing_ok=True)
        latest.symlink_to(targets[number])
        assert len(rig.all()) == published


def test_b184_latest_that_leads_to_a_temporary_name_waits_for_the_rename(folder: Path, rig_at: RigAt) -> None:
    rig = rig_at()
    save(folder / "tmp-checkpoint-40", model(1))
    (folder / "latest").symlink_to("tmp-checkpoint-40")
    assert rig.all() == []
    (folder / "tmp-checkpoint-40").rename(folder / "checkpoint-40")
    assert [m.step for m in rig.all()] == [40]


def test_links_that_lead_nowhere_are_left_alone(folder: Path, rig_at: RigAt) -> None:
    rig = rig_at()
    folder.mkdir()
    (folder / "latest").symlink_to("checkpoint-1")
    (folder / "checkpoint-2").symlink_to("checkpoint-3")
    (folder / "checkpoint-3").symlink_to("checkpoint-2")
    (folder / "checkpoint-4").write_text("a file")
    assert look(folder) == []
    save(folder / "checkpoint-1", model(1))
    assert [m.step for m in rig.all()] == [1]


@pytest.mark.parametrize("marker", [None, "DONE"])
def test_b077_leftovers_are_ignored_until_this_run_saves_over_them(
    folder: Path, rig_at: RigAt, store: FaultStore, marker: str | None
) -> None:
    leftover, fresh = model(1), model(2)
    save(folder / "step_10", leftover, shards=2)
    if marker:
        (folder / "step_10" / marker).touch()
    rig = rig_at(existing="ignore", marker=marker)
    assert rig.all() == []
    if marker:
        (folder / "step_10" / marker).unlink()
    (folder / "step_10" / "config.json").write_text(
        "{}"
    )  # this run begins with its config, and then takes a while
    assert rig.all() == []
    save(folder / "step_10", fresh, shards=2)
    if marker:
        assert rig.all() == []
        (folder / "step_10" / marker).touch()
    assert [m.step for m in rig.all()] == [10]
    assert_version(store, 0, copy_of(fresh))
    assert len(chain_of(store)) == 1


def test_b134_stray_files_do_not_matter(folder: Path, rig_at: RigAt, store: FaultStore) -> None:
    rig = rig_at()
    target = save(folder / "checkpoint-1", model(8), shards=2)
    save_file({"stray": torch.ones(3)}, target / "shard-9.safetensors")
    for name in (".shard-1.safetensors.swp", "._model.safetensors", "model.safetensors.bak"):
        (target / name).write_bytes(b"junk")
        (folder / name).write_bytes(b"junk")
    outcome = rig.later()
    assert outcome.published is not None
    assert outcome.failures == ()
    assert_version(store, 0, copy_of(model(8)))


# --- what cannot be published -------------------------------------------------------------------------------


def test_b038_a_reserved_name_is_reported_and_the_watch_goes_on(folder: Path, rig_at: RigAt) -> None:
    rig = rig_at()
    target = folder / "checkpoint-1"
    target.mkdir(parents=True)
    raw = b'{"__metadata__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (target / SINGLE).write_bytes(len(raw).to_bytes(8, "little") + raw + b"\0")
    outcome = rig.later()
    assert ["__metadata__" in str(e) for e in outcome.failures] == [True]
    assert rig.later().failures == (), "reported once"
    save(folder / "checkpoint-2", model(2))
    assert [m.step for m in rig.all()] == [2]


def test_b170_pickles_are_never_loaded_and_reported_once(
    folder: Path, rig_at: RigAt, caplog: pytest.LogCaptureFixture
) -> None:
    witness = folder.parent / "witness"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(witness),)

    rig = rig_at()
    (folder / "checkpoint-1").mkdir(parents=True)
    torch.save(Bomb(), folder / "checkpoint-1" / "pytorch_model.bin")
    with caplog.at_level(logging.INFO, "weightcast"):
        found = [rig.later() for _ in range(3)]
    assert [len(o.failures) for o in found] == [1, 0, 0]
    assert caplog.text.count("only safetensors is read") == 1
    assert not witness.exists()
    save(folder / "checkpoint-1", model(1))
    assert [m.step for m in rig.all()] == [1]
    assert not witness.exists()


def test_b174_b180_a_contradiction_is_reported_and_the_older_one_taken(
    folder: Path, rig_at: RigAt, store: FaultStore
) -> None:
    rig = rig_at()
    save(folder / "checkpoint-1", model(1))
    target = save(folder / "checkpoint-2", model(2), shards=2)
    mapping = json.loads((target / INDEX).read_text())["weight_map"]
    write_index(target, mapping | {"ghost": next(iter(mapping.values()))})
    save(save(folder / "checkpoint-3", model(3), shards=2), model(4))
    outcome = rig.later()
    assert sorted(e.kind for e in outcome.failures) == ["corrupt", "usage"]
    assert any("'ghost'" in str(e) for e in outcome.failures)
    assert outcome.published is not None
    assert outcome.published.step == 1
    assert_version(store, 0, copy_of(model(1)))
    write_index(target, mapping)
    assert [m.step for m in rig.all()] == [2]
    assert_version(store, 1, copy_of(model(2)))


def test_b183_weights_and_state_of_different_steps_are_not_combined(
    folder: Path, rig_at: RigAt, store: FaultStore
) -> None:
    rig = rig_at()
    target = save(folder / "checkpoint-10", model(10))
    (target / "trainer_state.json").write_text('{"global_step": 20}')
    outcome = rig.later()
    assert outcome.published is None
    assert ["step 10" in str(e) and "step 20" in str(e) for e in outcome.failures] == [True]
    (target / "trainer_state.json").write_text('{"global_step": 10}')
    assert [m.step for m in rig.all()] == [10]
    # FOLDER itself has no step in its name: the state beside it may be of another save, and is not believed.
    save(folder, changed(model(10), 1))
    (folder / "trainer_state.json").write_text('{"global_step": 20}')
    assert [m.step for m in rig.all()] == [None]
    assert [m.step for m in chain_of(store)] == [10, None]


def test_a_model_with_missing_tensors_is_refused_once(folder: Path, rig_at: RigAt, store: FaultStore) -> None:
    rig = rig_at()
    save(folder / "checkpoint-1", model(1))
    assert len(rig.all()) == 1
    save(folder / "checkpoint-2", model(1, tensors=5))
    outcome = rig.later()
    assert ["layer.5.weight" in str(e) for e in outcome.failures] == [True]
    assert rig.later() == Outcome()
    save(folder / "checkpoint-3", changed(model(1), 5))
    assert [m.step for m in rig.all()] == [3]
    assert_version(store, 1, copy_of(changed(model(1), 5)))


# --- what changes while it is read --------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("how", ["flip", "cut", "rewrite"])
def test_b098_a_change_while_reading_aborts_and_is_published_later(
    folder: Path, rig_at: RigAt, store: FaultStore, version: int, how: str
) -> None:
    """For a first version and for a delta: what is committed is never a mixture of two saves."""
    rig = rig_at()
    before = model(1, tensors=5, elements=1 << 16)
    after = changed(before, 9)
    if version:
        save(folder / "checkpoint-1", model(0, tensors=5, elements=1 << 16))
        assert len(rig.all()) == 1
    save(folder / "checkpoint-2", before)

    def interfere(path: Path) -> None:
        if how == "flip":
            with path.open("r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last[0] ^ 1]))
        elif how == "cut":
            os.truncate(path, 9000)
        else:
            path.write_bytes(new)

    new = (save(folder.parent / "new", after) / SINGLE).read_bytes()
    with during_read(interfere, at=2):
        outcome = rig.later()
    assert outcome.published is None
    assert len(chain_of(store)) == version if version else store.keys("create") in ([], ["stream.json"])
    assert rig.look().published is None, "has to settle again"
    save(folder / "checkpoint-2", after)
    assert [m.version for m in rig.all()] == [version]
    assert_version(store, version, copy_of(after))


def test_b098_a_file_that_is_replaced_while_reading_is_read_to_its_end(
    folder: Path, rig_at: RigAt, store: FaultStore
) -> None:
    """All files are held open before the first is read: the earlier save is published, then the later."""
    rig = rig_at()
    before, after = model(1), model(2)
    save(folder, before, shards=3)
    new = save(folder.parent / "new", after, shards=3)

    def replace_all(path: Path) -> None:
        for fresh in new.iterdir():
            fresh.replace(folder / fresh.name)

    with during_read(replace_all, at=2):
        outcome = rig.later()
    assert outcome.published is not None
    assert_version(store, 0, copy_of(before))
    assert [m.version for m in rig.all()] == [1]
    assert_version(store, 1, copy_of(after))


def test_b177_rotation_while_reading(folder: Path, rig_at: RigAt, store: FaultStore) -> None:
    """checkpoint-10 is deleted when one of its shards is read: published whole, since it is held open."""
    rig = rig_at(existing="all")
    save(folder / "checkpoint-10", model(10), shards=3)
    save(folder / "checkpoint-20", model(20), shards=3)
    with during_read(lambda path: rotate_away(path.parent), at=2):
        outcome = rig.later()
    assert outcome.published is not None
    assert outcome.published.step == 10
    assert not (folder / "checkpoint-10").exists()
    assert [m.step for m in rig.all()] == [20]
    assert_version(store, 0, copy_of(model(10)))
    assert_version(store, 1, copy_of(model(20)))


def test_b177_rotation_before_reading(
    folder: Path, rig_at: RigAt, store: FaultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_at(existing="all")
    save(folder / "checkpoint-10", model(10))
    save(folder / "checkpoint-20", model(20))
    from weightcast.publisher import watch

    real = watch._open

    def opened(seen: Sighting) -> Any:
        checkpoint = real(seen)
        if seen.step == 10:
            rotate_away(seen.path)
        return checkpoint

    monkeypatch.setattr(watch, "_open", opened)
    outcome = rig.later()
    assert (outcome.published, outcome.failures) == (None, ())
    assert [m.step for m in rig.all()] == [20]
    assert_version(store, 0, copy_of(model(20)))


def test_a_change_between_look_and_opening_waits_for_the_next_look(
    folder: Path, rig_at: RigAt, store: FaultStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_at()
    save(folder / "checkpoint-1", model(1))
    rig.look()
    from weightcast.publisher import watch

    real = watch.open_checkpoint

    def opened(path: Path) -> Any:
        save(path, model(2))
        monkeypatch.setattr(watch, "open_checkpoint", real)
        return real(path)

    monkeypatch.setattr(watch, "open_checkpoint", opened)
    rig.clock.now += SETTLE_S
    assert rig.look() == Outcome()
    assert [m.step for m in rig.all()] == [1]
    assert_version(store, 0, copy_of(model(2)))


# --- a store that fails, another publisher, the end ---------------------------------------------------------


def test_a_store_that_is_down_is_tried_again_with_growing_pauses(
    folder: Path, rig_at: RigAt, store: FaultStore
) -> None:
    rig = rig_at()
    save(folder / "checkpoint-1", model(1))
    assert len(rig.all()) == 1
    save(folder / "checkpoint-2", changed(model(1), 2))
    store.on("put", "data/*", refuse)
    first = rig.later()
    assert (first.retrying, [e.kind for e in first.failures]) == (True, ["storage"])
    failed_at = []
    for _ in range(140):
        rig.clock.now += 0.5
        if rig.look().failures:
            failed_at.append(rig.clock.now)
    pauses = [b - a for a, b in pairwise(failed_at)]
    assert pauses == pytest.approx([2, 4, 8, 16, 32])
    store.heal()
    save(folder / "checkpoint-3", changed(model(1), 3))
    rig.look()
    rig.clock.now += 61
    outcome = rig.look()
    assert outcome.published is not None
    assert (outcome.published.version, outcome.published.step) == (1, 3), "the newest, and no step was lost"
    assert_version(store, 1, copy_of(changed(model(1), 3)))
    assert rig.all() == []


def test_a_first_version_survives_a_store_that_is_down(
    folder: Path, rig_at: RigAt, store: FaultStore
) -> None:
    rig = rig_at()
    save(folder / "checkpoint-1", model(1))
    store.on("create", "*", refuse)
    assert rig.later().retrying
    store.heal()
    rig.clock.now += 2
    assert [m.version for m in rig.all()] == [0]
    assert_version(store, 0, copy_of(model(1)))


def test_another_publisher_ends_the_watch(
    folder: Path, rig_at: RigAt, publisher_at: Callable[..., Publisher], store: FaultStore
) -> None:
    rig = rig_at()
    save(folder / "checkpoint-1", model(1))
    assert len(rig.all()) == 1
    other = publisher_at(writer="successor")
    save(folder / "checkpoint-2", model(2))
    stop = threading.Event()
    rig.look()
    rig.clock.now += SETTLE_S
    with pytest.raises(Conflict, match="successor"):
        rig.watcher.run(stop)
    assert not stop.is_set()
    assert other.version == 1
    assert len(chain_of(store)) == 2


def test_a_stop_interrupts_reading_and_commits_nothing(
    folder: Path, rig_at: RigAt, store: FaultStore
) -> None:
    rig = rig_at()
    save(folder / "checkpoint-1", model(1))
    assert len(rig.all()) == 1
    save(folder / "checkpoint-2", model(2))
    stop = threading.Event()
    rig.look()
    rig.clock.now += SETTLE_S
    outcomes: list[Outcome] = []
    with during_read(lambda path: stop.set(), at=2) as done:
        rig.watcher.run(stop, outcomes.append)
    assert len(done) == 3, "the tensor at hand is the last one that is read"
    assert [o.published for o in outcomes] == [None]
    assert len(chain_of(store)) == 1
    rig.watcher.run(stop, outcomes.append)
    assert len(outcomes) == 1, "no step after the stop"


def test_an_unreadable_checkpoint_does_not_hold_up_the_others(
    folder: Path, rig_at: RigAt, monkeypatch: pytest.MonkeyPatch, store: FaultStore
) -> None:
    """It is asked for again once a minute. (Permissions do not bind root, so the refusal is simulated.)"""
    rig = rig_at()
    save(folder / "checkpoint-1", model(1))
    save(folder / "checkpoint-2", model(2))
    from weightcast.publisher import checkpoint as module

    real, locked = module.read_header, [True]

    def read_header(path: Path) -> Any:
        if locked[0] and path.parent.name == "checkpoint-2":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(module, "read_header", read_header)
    outcome = rig.later()
    assert ["Permission denied" in str(e) for e in outcome.failures] == [True]
    assert outcome.published is not None
    assert outcome.published.step == 1
    assert rig.later() == Outcome()
    locked[0] = False
    rig.clock.now += 61
    assert [m.step for m in rig.all()] == [2]
    assert [m.step for m in chain_of(store)] == [1, 2]
