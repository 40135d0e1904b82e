"""A kept folder: taking over what is there, what loaders see, what a disk may do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weightcast.manifest.export import export
from weightcast.schemas.errors import Corrupt, StorageError, Untrusted, UsageError
from weightcast.subscriber import CheckpointFolder, Subscriber, folder_files, reading
from weightcast.subscriber import folder as folder_module

from ..faultstore import FaultStore
from ..versions import state_at
from .conftest import Trainer
from .kit import Model, bits, loaded

SubscriberAt = Callable[..., Subscriber]


def filled(value: float) -> Model:
    """A model of which every element is `value`, with a tie."""
    embed = torch.full((64, 8), value, dtype=torch.bfloat16)
    return {
        "embed": embed,
        "head": embed,
        "w": torch.full((1000,), float(value)),
        "s": torch.tensor(float(value)),
    }


def test_a_fresh_folder_is_a_checkpoint_for_any_loader(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    trainer.publish(filled(1), files={"config.json": b"{}", "tokenizer.json": b"[]"})
    subscriber_at(store, CheckpointFolder(tmp_path / "a" / "b")).once()
    folder = tmp_path / "a" / "b"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    merged = {}
    for name in set(index["weight_map"].values()):
        merged.update(load_file(folder / name))
    assert bits(merged) == bits(filled(1))
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in filled(1).values())
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "tokenizer.json").read_bytes() == b"[]"


@pytest.mark.parametrize(
    "kind", ["single file", "single file without the tied name", "pulled", "index with one file"]
)
def test_a_checkpoint_that_is_a_version_is_adopted_and_patched_in_place(
    kind: str, store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    trainer.publish(filled(0))
    trainer.publish(filled(1))
    trainer.publish(filled(2))
    if kind == "pulled":
        export(state_at(store, 1), {}, tmp_path / "model")
        folder = tmp_path / "model"
    else:
        folder = tmp_path
        names = ["embed", "w", "s"] if "without" in kind else list(filled(1))
        save_file({n: filled(1)[n].clone() for n in names}, folder / "model.safetensors")
        if kind.startswith("index"):
            index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    before = sorted(p.name for p in folder.iterdir())
    kept = set(loaded(folder) or {})
    store.calls.clear()
    assert subscriber_at(store, CheckpointFolder(folder)).once().version == 2
    assert not store.keys("download")
    assert sorted(p.name for p in folder.iterdir() if p.name != ".weightcast") == before
    assert loaded(folder) == {n: b for n, b in bits(filled(2)).items() if n in kept}


def test_an_adopted_file_with_odd_offsets_is_patched(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    def model(value: int) -> Model:
        return {
            "a": torch.full((3,), value, dtype=torch.uint8),
            "b": torch.full((5,), value, dtype=torch.float64),
        }

    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F64", "shape": [5], "data_offsets": [3, 43]},
    }
    text = json.dumps(header).encode()
    body = model(1)["a"].numpy().tobytes() + model(1)["b"].numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    trainer.publish(model(1))
    trainer.publish(model(2))
    subscriber_at(store, CheckpointFolder(tmp_path)).once()
    assert loaded(tmp_path) == bits(model(2))


@pytest.mark.parametrize("kind", ["other weights", "untrue tie", "both kinds", "link", "hard link"])
def test_foreign_weights_are_refused_untouched(
    kind: str, store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    trainer.publish(filled(1))
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere.safetensors"
    folder.mkdir()
    weights = {n: t.clone() for n, t in filled(1).items()}
    if kind == "other weights":
        weights["w"][3] = 7
    if kind == "untrue tie":
        weights["head"][0, 0] = 7
    save_file(weights, elsewhere)
    if kind == "link":
        (folder / "model.safetensors").symlink_to(elsewhere)
    elif kind == "hard link":
        (folder / "model.safetensors").hardlink_to(elsewhere)
    else:
        elsewhere.rename(folder / "model.safetensors")
    if kind == "both kinds":
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}})
        )
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    trainer.publish(filled(2))
    subscriber = subscriber_at(store, CheckpointFolder(folder))
    with pytest.raises(UsageError):
        subscriber.once()
    with pytest.raises(UsageError):
        next(subscriber.follow())
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".weightcast"} == before


def test_companions_change_together_with_the_weights(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    trainer.publish(filled(1), files={"config.json": b"1"})
    subscriber.once()
    trainer.publish(filled(2), files={"config.json": b"2"})
    seen = []
    monkeypatch.setattr(
        folder_module,
        "scatter",
        lambda *a, _scatter=folder_module.scatter: (
            seen.append(((tmp_path / "config.json").read_bytes(), loaded(tmp_path))),
            _scatter(*a),
        ),
    )
    subscriber.once()
    assert seen
    assert set(map(str, seen)) == {str((b"1", None))}  # in between: no weights to go with the old config
    assert (tmp_path / "config.json").read_bytes() == b"2"
    trainer.publish(filled(2), files={"config.json": b"3"})  # the weights stay
    subscriber.once()
    assert (tmp_path / "config.json").read_bytes() == b"3"
    trainer.publish(filled(3))
    subscriber.once()
    assert (tmp_path / "config.json").read_bytes() == b"3"


def test_companions_of_an_attempt_that_failed_do_not_come_with_the_next(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    trainer.publish(filled(1), files={"config.json": b"1"})
    subscriber.once()
    trainer.publish(filled(2), files={"config.json": b"2", "extra.json": b"2"})

    def full(*_: Any) -> None:
        raise StorageError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(folder_module, "write_journal", full)
        with pytest.raises(StorageError):
            subscriber.once()
    assert (tmp_path / "config.json").read_bytes() == b"1"
    trainer.publish(filled(3), files={"config.json": b"1"})
    subscriber.once()
    assert (tmp_path / "config.json").read_bytes() == b"1"
    assert not (tmp_path / "extra.json").exists()


LOADER = """
import json, sys
from contextlib import nullcontext
from pathlib import Path
import numpy as np
from safetensors import safe_open
from weightcast.subscriber import reading
folder, guarded = Path(sys.argv[1]), sys.argv[2] == "guarded"
values, nothing, mixed = set(), 0, 0
print("ready", flush=True)
while not (folder / "stop").exists():
    with reading(folder) if guarded else nullcontext():
        index = folder / "model.safetensors.index.json"
        if not index.exists():
            nothing += 1
            continue
        found = set()
        for name in set(json.loads(index.read_text())["weight_map"].values()):
            with safe_open(folder / name, "np") as file:
                for key in file.keys():
                    found |= set(np.unique(file.get_tensor(key)).tolist())
        mixed += len(found) != 1
        values |= found
print(json.dumps([sorted(values), nothing, mixed]))
"""


def test_a_loader_inside_reading_never_sees_a_mix(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    def model(value: float) -> Model:
        return {f"w{i}": torch.full((100_000,), value) for i in range(4)} | {"n": torch.full((3, 3), value)}

    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    trainer.publish(model(0))
    subscriber.once()
    with subprocess.Popen(
        [sys.executable, "-c", LOADER, str(tmp_path), "guarded"], stdout=subprocess.PIPE, text=True
    ) as loader:
        assert loader.stdout is not None
        assert loader.stdout.readline() == "ready\n"
        for value in range(1, 25):
            trainer.publish(model(value), reset=value % 8 == 0)  # patches, and swaps of files
            subscriber.once()
        (tmp_path / "stop").touch()
        values, nothing, mixed = json.loads(loader.stdout.read())
    assert (nothing, mixed) == (0, 0)
    assert len(values) > 1


def test_a_loader_outside_reading_finds_nothing_while_values_are_written(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    trainer.publish(filled(1))
    subscriber.once()
    trainer.publish(filled(2))
    seen = []
    for module, name in (
        (folder_module, "scatter"),
        (folder_module, "gather"),
        (folder_module, "write_tied"),
    ):
        inner = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, _inner=inner: (seen.append(loaded(tmp_path)), _inner(*a))[1]
        )
    subscriber.once()
    assert len(seen) > 3
    assert seen == [None] * len(seen)
    assert loaded(tmp_path) == bits(filled(2))


def test_reading_keeps_the_subscriber_waiting_and_needs_a_kept_folder(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(UsageError, match="not kept"), reading(folder):
        pass
    subscriber = subscriber_at(store, CheckpointFolder(folder))
    trainer.publish(filled(1))
    subscriber.once()
    trainer.publish(filled(2))
    with reading(folder):
        thread = threading.Thread(target=subscriber.once)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert loaded(folder) == bits(filled(1))
    thread.join(10)
    assert loaded(folder) == bits(filled(2))


def test_b159_a_reader_with_a_map_sees_a_patch_in_place_and_a_swap_not_at_all(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    trainer.publish(filled(1))
    subscriber.once()
    (path,) = {tmp_path / n for n in _files(tmp_path) if "w" in load_file(tmp_path / n)}
    held = load_file(path)["w"]
    trainer.publish(filled(2))
    subscriber.once()
    assert set(held.tolist()) == {2.0}  # documented: the map shows the change
    trainer.publish(filled(3), reset=True)
    subscriber.once()
    assert set(held.tolist()) == {2.0}  # replaced by new files
    assert loaded(tmp_path) == bits(filled(3))


def _files(folder: Path) -> set[str]:
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())


def test_a_sparse_file_is_filled_before_it_is_written_through_a_map(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1 << 20)}, path)
    head = path.read_bytes()[:4096]
    with path.open("r+b") as file:
        size = os.path.getsize(path)
        file.truncate(len(head))
        file.truncate(size)
    assert path.stat().st_blocks * 512 < size
    folder_files.map_file(path, writable=False)
    assert path.stat().st_blocks * 512 < size
    folder_files.map_file(path, writable=True)
    assert path.stat().st_blocks * 512 >= size


@contextmanager
def small_disk(at: Path, options: str) -> Iterator[Path]:
    """A file system of its own."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_b155_a_full_disk_keeps_the_version_before_until_there_is_room(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    model: Model = {"w": torch.zeros(10 << 20, dtype=torch.float32)}  # 40 MiB of 64
    trainer.publish(model)
    with small_disk(tmp_path / "disk", "size=64m") as disk:
        folder = disk / "model"
        subscriber = subscriber_at(store, CheckpointFolder(folder))
        subscriber.once()
        before = loaded(folder)
        model["w"][::4] = 1.5  # a journal of 30 MiB
        trainer.publish(model)
        steps = subscriber.follow()
        assert next(steps).version == 0
        for _ in range(2):
            with pytest.raises(StorageError, match=r"needs \d+ bytes, \d+ are free"):
                subscriber.once()
        assert loaded(folder) == before
        assert (subscriber.status().version, subscriber.status().ready) == (0, True)
        assert {p.name for p in (folder / ".weightcast").iterdir()} <= {
            "state.json",
            "layout.arrow",
            "lock",
            "reading.lock",
            "hidden",
            "incoming",
        }
        subprocess.run(["mount", "-o", "remount,size=128m", str(disk)], check=True)
        assert subscriber.once().version == 1
        assert loaded(folder) == bits(model)
        model["extra"] = torch.zeros(1)  # a new layout needs the whole again
        trainer.publish(model)
        (disk / "ballast").write_bytes(bytes(50 << 20))
        with pytest.raises(StorageError, match="are free"):
            subscriber.once()
        (disk / "ballast").unlink()
        subscriber.once()
        assert loaded(folder) == bits(model)
        shutil.rmtree(folder)
        (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - (20 << 20)))
        with pytest.raises(StorageError, match=f"{disk}.* needs .* bytes"):
            subscriber_at(store, CheckpointFolder(folder)).once()
        assert loaded(folder) is None


def test_b157_a_folder_that_cannot_be_written_is_named_before_anything_is_fetched(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    trainer.publish(filled(1))
    with small_disk(tmp_path / "disk", "size=1m,ro") as disk:
        store.calls.clear()
        subscriber = subscriber_at(store, CheckpointFolder(disk / "model"))
        for attempt in (subscriber.once, lambda: next(subscriber.follow())):
            with pytest.raises(UsageError, match=f"{disk}/model/.weightcast cannot be written"):
                attempt()
        assert store.calls == []
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"):
        subscriber_at(store, CheckpointFolder(tmp_path / "file")).once()


@pytest.mark.parametrize("left", ["whole", "larger", "wrong bytes", "of another version"])
def test_b158_what_an_earlier_download_left_is_used_or_replaced(
    left: str, store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    trainer.publish(filled(1))
    (key,) = [e.key for e in store.list("snapshots/") if e.key.endswith(".safetensors")]
    incoming = tmp_path / ".weightcast" / "incoming"
    incoming.mkdir(parents=True)
    raw = store.inner.get(key, max_bytes=1 << 30)
    bodies = {"whole": raw, "larger": raw + b"x", "wrong bytes": bytes(len(raw)), "of another version": b"x"}
    name = "other.safetensors" if left == "of another version" else key.split("/")[-1]
    (incoming / name).write_bytes(bodies[left])
    store.calls.clear()
    subscriber_at(store, CheckpointFolder(tmp_path)).once()
    assert loaded(tmp_path) == bits(filled(1))
    assert len(store.keys("download")) == (0 if left == "whole" else 1)
    assert not incoming.exists()


def test_b162_a_temporary_folder_on_another_disk_does_not_matter(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer.publish(filled(1))
    folder = tmp_path / "model"
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        monkeypatch.setenv("TMPDIR", str(disk))
        (folder / ".weightcast" / "incoming").mkdir(parents=True)
        subprocess.run(["mount", "--bind", str(disk), str(folder / ".weightcast" / "incoming")], check=True)
        try:
            assert subscriber_at(store, CheckpointFolder(folder)).once().version == 0
        finally:
            subprocess.run(["umount", "-l", str(folder / ".weightcast" / "incoming")], check=True)
        assert loaded(folder) == bits(filled(1))


FOLLOWER = """
import sys
from weightcast.manifest.store import open_store
from weightcast.subscriber import CheckpointFolder, Subscriber, SubscriberSettings
sys.path.insert(0, ".")
from tests.faultstore import FaultStore
store = FaultStore(open_store(sys.argv[1]))
settings = SubscriberSettings(threads=1, poll_s=0.05, lease=False)
subscriber = Subscriber("", CheckpointFolder(sys.argv[2]), settings, store=store)
print("start", flush=True)
for position in subscriber.follow():
    data = [k for kind, k in store.calls if kind in ("fetch", "download") and k.startswith(("data/", "snap"))]
    print(position.version, len(data), flush=True)
    if position.version == int(sys.argv[3]):
        break
"""


def test_b102_four_processes_keep_one_folder(
    local_store: FaultStore, trainer_at: Callable[..., Trainer], tmp_path: Path
) -> None:
    trainer = trainer_at(local_store)
    trainer.publish(filled(0))
    folder = tmp_path / "model"
    command = [sys.executable, "-c", FOLLOWER, str(tmp_path / "store"), str(folder), "5"]
    followers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        for each in followers:
            assert each.stdout is not None
            assert each.stdout.readline() == "start\n"
            each.stdout.readline()  # at version 0
        for version in range(1, 6):
            trainer.publish(filled(version))
        told = [list(map(str.split, each.communicate(timeout=60)[0].splitlines())) for each in followers]
    finally:
        for each in followers:
            each.kill()
    assert [lines[-1][0] for lines in told] == ["5"] * 4
    assert loaded(folder) == bits(filled(5))
    fetched = sum(int(lines[-1][1]) for lines in told)
    assert (
        fetched <= 1 + 5 * 1 + 4 * 3
    )  # each object once, but for what was fetched ahead by one that came second


def test_a_subscriber_builds_on_nothing_that_another_left_half_written(
    local_store: FaultStore,
    trainer_at: Callable[..., Trainer],
    subscriber_at: SubscriberAt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B102, one of them dies: steps add up on any base, so the digest alone would not notice a base that is torn."""
    trainer = trainer_at(local_store)
    folder = tmp_path / "model"
    survivor = subscriber_at(local_store, CheckpointFolder(folder))
    trainer.publish(filled(1))
    survivor.once()
    trainer.publish(filled(2))
    dying = subscriber_at(local_store, CheckpointFolder(folder))
    with monkeypatch.context() as patched:

        def die(*_: Any) -> None:
            raise KeyboardInterrupt

        patched.setattr(folder_module, "gather", die)  # something is written by then, and nothing is told
        with pytest.raises(KeyboardInterrupt):
            dying.once()
    trainer.publish(filled(3))
    assert survivor.once().version == 2
    assert loaded(folder) == bits(filled(3))
    assert dying.once().version == 2


@pytest.mark.parametrize("how", ["reset", "layout"])
def test_b102_new_files_that_another_brought_are_taken_over(
    how: str, store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    first, second = (subscriber_at(store, CheckpointFolder(tmp_path)) for _ in range(2))
    trainer.publish(filled(1))
    first.once()
    second.once()
    model = filled(2) | ({"bias": torch.ones(4)} if how == "layout" else {})
    trainer.publish(model, reset=how == "reset")
    first.once()
    store.calls.clear()
    assert second.once().version == 1
    assert not store.keys("download")
    assert [k for k in store.keys("fetch") if not k.startswith("layouts/")] == []
    model["w"] = torch.full((1000,), 5.0)
    trainer.publish(model)
    second.once()
    assert loaded(tmp_path) == bits(model)


def test_weights_replaced_behind_its_back_are_noticed(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    trainer.publish(filled(1))
    subscriber.once()
    (name,) = [n for n in _files(tmp_path) if "w" in load_file(tmp_path / n)]
    weights = {n: t.clone() for n, t in load_file(tmp_path / name).items()}
    weights["w"][5] = 100
    save_file(weights, tmp_path / "new")
    (tmp_path / "new").rename(tmp_path / name)
    trainer.publish(filled(2))
    assert subscriber.once().version == 1
    assert loaded(tmp_path) == bits(filled(2))


@pytest.mark.parametrize(
    "what", ["a weight file", "the index", "the mark", "everything of ours", "the layout"]
)
def test_what_goes_missing_is_found_or_fetched_again(
    what: str, store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    subscriber = subscriber_at(store, CheckpointFolder(tmp_path))
    trainer.publish(filled(1))
    subscriber.once()
    own = tmp_path / ".weightcast"
    if what == "a weight file":
        (tmp_path / sorted(_files(tmp_path))[0]).unlink()
    if what == "the index":
        (tmp_path / "model.safetensors.index.json").unlink()
    if what == "the mark":
        (own / "state.json").unlink()
    if what == "the layout":
        (own / "layout.arrow").unlink()
    if what == "everything of ours":
        shutil.rmtree(own)
    trainer.publish(filled(2))
    assert subscriber.once().version == 1
    assert loaded(tmp_path) == bits(filled(2))
    assert subscriber_at(store, CheckpointFolder(tmp_path)).once().version == 1


@pytest.mark.parametrize("what", ["journal", "layout", "weights"])
def test_a_patch_that_cannot_be_finished_is_given_up_for_a_snapshot(
    what: str,
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: SubscriberAt,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer.publish(filled(1))
    subscriber_at(store, CheckpointFolder(tmp_path)).once()
    trainer.publish(filled(2))
    with monkeypatch.context() as patched:
        patched.setattr(folder_module, "gather", lambda *_: None)
        with pytest.raises(Corrupt, match="does not hold what was written"):
            subscriber_at(store, CheckpointFolder(tmp_path), tries=1).once()
    assert loaded(tmp_path) is None
    own = tmp_path / ".weightcast"
    if what == "journal":
        (own / "journal.arrow").write_bytes(b"ARROW1 but no more")
    if what == "layout":
        (own / "layout.arrow").unlink()
    if what == "weights":
        next(tmp_path.glob("*.safetensors")).unlink()
    assert subscriber_at(store, CheckpointFolder(tmp_path)).once().version == 1
    assert loaded(tmp_path) == bits(filled(2))


def test_a_mark_that_is_none_says_what_to_do(
    store: FaultStore, trainer: Trainer, subscriber_at: SubscriberAt, tmp_path: Path
) -> None:
    trainer.publish(filled(1))
    (tmp_path / ".weightcast").mkdir()
    (tmp_path / ".weightcast" / "state.json").write_text("{}")
    with pytest.raises(Corrupt, match=r"state\.json is not a subscriber's mark.*remove the folder"):
        subscriber_at(store, CheckpointFolder(tmp_path)).once()


def test_b079_marks_and_hints_of_another_run_are_not_believed(
    store: FaultStore,
    local_store: FaultStore,
    trainer_at: Callable[..., Trainer],
    subscriber_at: SubscriberAt,
    tmp_path: Path,
) -> None:
    yesterday, today = trainer_at(local_store), trainer_at(store)
    for value in range(4):
        yesterday.publish(filled(value))
    subscriber_at(local_store, CheckpointFolder(tmp_path / "old")).once()
    today.publish(filled(9))
    store.inner.put("head.json", b'{"kind":"head","version":3}')
    with pytest.raises(Untrusted, match="is at version 3 of stream"):
        subscriber_at(store, CheckpointFolder(tmp_path / "old")).once()
    assert subscriber_at(store, CheckpointFolder(tmp_path / "new")).once().version == 0
    assert loaded(tmp_path / "new") == bits(filled(9))
