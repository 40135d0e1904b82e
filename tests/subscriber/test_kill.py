"""A subscriber of a folder is killed before each single thing that it does, with SIGKILL, in a process of its own.

After each: (a) a loader finds nothing, or exactly one version; (b) without the store, a restart leaves nothing or
exactly one version; with it, exactly the head; (c) the mark never claims what the weights in sight are not. This is S1
to S6, and all that lies between. An interrupted patch is finished to the new version offline, from the journal.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from weightcast.manifest.store import open_store
from weightcast.schemas.errors import StorageError
from weightcast.schemas.names import version_key
from weightcast.subscriber import CheckpointFolder, Subscriber

from ..faultstore import FaultStore, Hold, refuse
from ..versions import Bits
from .conftest import Trainer
from .kit import Model, bits, loaded, random_like, stir

SubscriberAt = Callable[..., Subscriber]
_MOST_STEPS = 200
_STEPS_AHEAD = 7  # of a version of two shards and five rows, before its commit


@pytest.fixture(scope="module")
def crasher() -> Iterator[Callable[..., dict[str, Any]]]:
    """Runs a job in a process that may be killed."""
    command = [sys.executable, "-m", "tests.subscriber.crasher"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def crash(**job: Any) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(
                json.dumps({k: v if isinstance(v, int) else str(v) for k, v in job.items()}) + "\n"
            )
            process.stdin.flush()
            return dict(json.loads(process.stdout.readline()))

        yield crash
        process.stdin.close()


def model_of(seed: int) -> Model:
    """Several dtypes, a tie, and enough bytes for several shards."""
    generator = torch.Generator().manual_seed(seed)
    embed = random_like(torch.empty(200, 50, dtype=torch.bfloat16), generator)
    return {
        "embed": embed,
        "head": embed,
        "w": random_like(torch.empty(90_000, dtype=torch.bfloat16), generator),
        "norm": random_like(torch.empty(64), generator),
        "codes": random_like(torch.empty(30, 30, dtype=torch.float8_e4m3fn), generator),
    }


class Scene:
    """Two versions in a store, a folder at the first of them, and what may be found in it."""

    def __init__(self, root: Path, trainer: Trainer, store: FaultStore) -> None:
        self.root = root
        self.trainer = trainer
        self.store = store
        self.versions: list[tuple[dict[str, Bits], bytes]] = []

    def publish(self, model: Model, **options: Any) -> None:
        """The next version, with a config that names it."""
        config = str(len(self.versions)).encode()
        self.trainer.publish(model, files={"config.json": config}, **options)
        self.versions.append((bits(model), config))

    def check(self, folder: Path, at_least: int | None = None) -> int | None:
        """Which version a loader finds; fails if it is none, or not what the mark says."""
        state = folder / ".weightcast" / "state.json"
        mark = json.loads(state.read_text())["version"] if state.exists() else None
        found = loaded(folder)
        if found is None:
            assert at_least is None
            return None
        config = (folder / "config.json").read_bytes()
        version = next((v for v, each in enumerate(self.versions) if each == (found, config)), None)
        assert version is not None, "a mix of versions is in sight"
        assert mark == version
        assert at_least is None or version >= at_least
        return version


def crash_everywhere(
    scene: Scene, start: Path | None, tmp_path: Path, crasher: Callable[..., Any], subscriber_at: SubscriberAt
) -> list[str]:
    """Kill before each step in turn, and check what is left; returns the steps."""
    head = len(scene.versions) - 1
    for at in range(_MOST_STEPS):
        folder, log = tmp_path / f"folder-{at}", tmp_path / f"log-{at}"
        if start is not None:
            shutil.copytree(start, folder)
        ended = crasher(root=scene.root, folder=folder, log=log, at=at)
        if not ended["killed"]:
            assert ended["code"] == 0
            assert scene.check(folder, head) == head
            return log.read_text().splitlines()
        assert ended["killed"] == 9
        if folder.exists():
            scene.check(folder)
        offline = scene.store.on("*", "*", refuse)
        with pytest.raises(StorageError):
            subscriber_at(scene.store, CheckpointFolder(folder)).once()
        scene.check(folder)
        swapping = (folder / ".weightcast" / "swap.json").exists()
        assert not swapping
        assert not (
            folder / ".weightcast" / "journal.arrow"
        ).exists()  # whatever had begun was finished offline
        scene.store.faults.remove(offline)
        assert subscriber_at(scene.store, CheckpointFolder(folder)).once().version == head
        assert scene.check(folder, head) == head
        left = {p.name for p in folder.rglob("*") if p.is_file()} - {
            p.name for p in folder.iterdir() if p.is_file()
        }
        assert left == {"state.json", "layout.arrow", "lock", "reading.lock"}
        shutil.rmtree(folder)
    raise AssertionError("it never came to an end")


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A folder in memory: a SIGKILL loses nothing that a disk would keep, and a thousand fsyncs cost nothing."""
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture
def scene(quick_path: Path, trainer_at: Callable[..., Trainer]) -> Scene:
    """One version is there."""
    store = FaultStore(open_store(quick_path / "store"))
    made = Scene(quick_path / "store", trainer_at(store, shard_bytes=1 << 16, row_elements=1 << 16), store)
    made.publish(model_of(0))
    return made


def follow(scene: Scene, folder: Path, subscriber_at: SubscriberAt) -> Path:
    """A folder at the head."""
    subscriber_at(scene.store, CheckpointFolder(folder)).once()
    return folder


def test_b101_killed_anywhere_during_a_patch(
    scene: Scene, quick_path: Path, crasher: Callable[..., Any], subscriber_at: SubscriberAt
) -> None:
    start = follow(scene, quick_path / "start", subscriber_at)
    model = stir(model_of(0), 1, 1.0)
    model["head"] = model["embed"]
    scene.publish(model)
    steps = crash_everywhere(scene, start, quick_path, crasher, subscriber_at)
    assert sum(s.startswith("fetch") and ".arrow" in s for s in steps) >= 3
    written = [s for s in steps if s.startswith("scatter")]
    assert {s.split()[-1] for s in written} == {"BF16", "F32", "F8_E4M3"}
    assert written.count("scatter BF16") == 2  # the second name of the tied tensor


def test_killed_anywhere_during_a_patch_of_a_single_file(
    scene: Scene, quick_path: Path, crasher: Callable[..., Any], subscriber_at: SubscriberAt
) -> None:
    start = follow(scene, quick_path / "start", subscriber_at)
    single = quick_path / "single"
    single.mkdir()
    (first,) = [p for p in start.glob("*.safetensors") if "-00001-of" in p.name]
    shutil.copy(first, single / "model.safetensors")
    shutil.copy(start / "config.json", single)
    follow(scene, single, subscriber_at)
    model = stir(model_of(0), 1, 0.01)
    del model["head"]
    scene.versions[0] = ({k: v for k, v in scene.versions[0][0].items() if k != "head"}, scene.versions[0][1])
    expected = bits(model)
    model["head"] = model["embed"]
    scene.publish(model)
    scene.versions[1] = (expected, scene.versions[1][1])
    steps = crash_everywhere(scene, single, quick_path, crasher, subscriber_at)
    assert "replace model.safetensors model.safetensors" in steps


def test_killed_anywhere_during_the_first_load(
    scene: Scene, quick_path: Path, crasher: Callable[..., Any], subscriber_at: SubscriberAt
) -> None:
    steps = crash_everywhere(scene, None, quick_path, crasher, subscriber_at)
    assert any(s.startswith("download") for s in steps)


def test_killed_anywhere_during_a_swap_to_a_snapshot(
    scene: Scene, quick_path: Path, crasher: Callable[..., Any], subscriber_at: SubscriberAt
) -> None:
    start = follow(scene, quick_path / "start", subscriber_at)
    scene.publish(model_of(5), reset=True)
    crash_everywhere(scene, start, quick_path, crasher, subscriber_at)


def test_killed_anywhere_during_a_change_of_layout(
    scene: Scene, quick_path: Path, crasher: Callable[..., Any], subscriber_at: SubscriberAt
) -> None:
    start = follow(scene, quick_path / "start", subscriber_at)
    model = stir(model_of(0), 3)
    model["head"] = model["embed"]
    model["bias"] = torch.ones(7)
    model["norm"] = torch.ones(65)
    del model["codes"]
    scene.publish(model, drop=["codes"])
    steps = crash_everywhere(scene, start, quick_path, crasher, subscriber_at)
    assert sum(s.startswith("posix_fallocate") for s in steps) == 2


def test_killed_anywhere_while_only_companions_change(
    scene: Scene, quick_path: Path, crasher: Callable[..., Any], subscriber_at: SubscriberAt
) -> None:
    start = follow(scene, quick_path / "start", subscriber_at)
    scene.publish(model_of(0))
    scene.versions[0] = (scene.versions[0][0], b"0")
    # The weights are those of both versions, so that only the config tells them apart
    crash_everywhere(scene, start, quick_path, crasher, subscriber_at)


def test_killed_anywhere_while_it_reads_ahead_of_the_commit(
    scene: Scene, quick_path: Path, crasher: Callable[..., Any], subscriber_at: SubscriberAt
) -> None:
    """With cut-through: what is not committed leaves no trace, and the next start ends exact."""
    folder = follow(scene, quick_path / "folder", subscriber_at)
    for at in range(_MOST_STEPS):
        version, log = len(scene.versions), quick_path / f"log-{at}"
        model = stir(model_of(0), version, 1.0)
        model["head"] = model["embed"]
        commit = Hold()
        scene.store.on("create", version_key(version), commit)
        pending = scene.trainer.publisher.publish(model)
        assert commit.reached.wait(20)
        threading.Thread(target=release_after, args=(commit, log, _STEPS_AHEAD)).start()
        ended = crasher(root=scene.root, folder=folder, log=log, at=at, until=version)
        if ended["killed"]:
            assert not commit.released.is_set()
            assert scene.check(folder, version - 1) == version - 1
            assert subscriber_at(scene.store, CheckpointFolder(folder)).once().version == version - 1
        commit.release()
        pending.wait(20)
        scene.versions.append((bits(model), (folder / "config.json").read_bytes()))
        assert subscriber_at(scene.store, CheckpointFolder(folder)).once().version == version
        assert scene.check(folder, version) == version
        if not ended["killed"]:
            break
    assert ended["code"] == 0
    steps = [step.split()[0] for step in log.read_text().splitlines()]
    assert (steps.count("fetch_part"), steps.count("decode")) == (2, 5), "shards and rows of a version"
    assert at == len(steps) == _STEPS_AHEAD


def release_after(commit: Hold, log: Path, steps: int) -> None:
    """Let the version be committed once so many steps were done."""
    while not commit.released.is_set():
        if log.exists() and len(log.read_text().splitlines()) >= steps:
            commit.release()
        time.sleep(0.02)
