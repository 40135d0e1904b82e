"""Publishers in processes of their own: killed, stopped, forked, left alone, and set against each other."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from weightcast.manifest.store import Store, open_store
from weightcast.publisher import Publisher

from ..nursery import Nursery
from ..versions import chain_of, copy_of, objects_in, walk
from .trainer import state


@pytest.fixture(params=["local", "seaweedfs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh root on a local store, or on the real S3 server."""
    return f"file://{tmp_path}/store" if request.param == "local" else str(request.getfixturevalue("s3_url"))


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    """A fresh root on a local store."""
    return f"file://{tmp_path}/store"


class Trainer:
    """A trainer process."""

    def __init__(self, nursery: Nursery, folder: Path, url: str, command: tuple[object, ...]) -> None:
        self._out, self._err = folder / f"{uuid.uuid4().hex}.out", folder / f"{uuid.uuid4().hex}.err"
        environment = {k: v for k, v in os.environ.items() if k.startswith(("AWS_", "RACE_"))}
        run = "tests.publisher.trainer:main"
        self.process = nursery.start(
            run, url, *command, environment=environment, out=self._out, err=self._err
        )
        self.pid = self.process.pid

    def said(self) -> list[str]:
        """Lines of stdout so far."""
        return self._out.read_text().splitlines() if self._out.exists() else []

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait for something."""
        end = time.monotonic() + 60
        while not ready():
            assert time.monotonic() < end, self._err.read_text()
            time.sleep(0.02)

    def outcome(self) -> tuple[int, list[str], str]:
        """Exit code (negative: the signal that ended it), lines of stdout, stderr."""
        return self.process.wait(), self.said(), self._err.read_text()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One for all tests of this module, which has loaded what its trainers run."""
    found = Nursery("tests.publisher.trainer", "tests.publisher.group.kit:warm")
    yield found
    found.close()


@pytest.fixture
def spawn(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Starts a trainer; ends it if the test does not."""
    started: list[Trainer] = []

    def start(url: str, *command: object) -> Trainer:
        started.append(Trainer(nursery, tmp_path, url, command))
        return started[-1]

    yield start
    for trainer in started:
        trainer.process.end()


def committed(lines: list[str]) -> dict[int, int]:
    """Version -> step, as the trainer was told."""
    return {
        int(v): int(k)
        for word, v, k in (line.split() for line in lines if line.startswith("committed"))
        if word
    }


def assert_steps(store: Store) -> dict[int, int | None]:
    """Every version of the chain has the bits of its step; a fence those of the version before. Version -> step."""
    steps: dict[int, int | None] = {}
    current = 0
    for manifest, bits in walk(store):
        current = current if manifest.step is None else manifest.step
        steps[manifest.version] = manifest.step
        assert bits == copy_of(state(current)), f"version {manifest.version}"
    return steps


KILLS = [("local", f"P{n}") for n in range(1, 9)] + [
    ("seaweedfs", point) for point in ("P1", "P2", "P3", "P5", "P7", "P8")
]
"""P4, a manifest under a temporary name, is of local stores alone; to a client of S3, P6 is P5."""


@pytest.mark.parametrize(("url", "point"), KILLS, indirect=["url"])
def test_b092_b093_killed_at(url: str, point: str, spawn: Callable[..., Trainer]) -> None:
    code, lines, err = spawn(url, "kill", point).outcome()
    assert code == -signal.SIGKILL, err
    store = open_store(url)
    told = committed(lines)
    steps = assert_steps(store)
    assert told.items() <= steps.items()
    assert len(steps) == (4 if point in ("P5", "P6", "P7", "P8") else 3)
    if point != "P7":  # the hint is written in the background: who waits is told before or after
        assert told.keys() == ({0, 1, 2, 3} if point == "P8" else {0, 1, 2})
    code, lines, err = spawn(url, "restart", 4).outcome()
    assert code == 0, err
    steps = assert_steps(store)
    assert told.items() <= steps.items()
    assert committed(lines) == {len(steps) - 1: 4}
    assert len(chain_of(store)[-1].shards) >= 3
    assert [k for k in objects_in(store) if k.endswith(".tmp")] == []  # leftovers are no objects


def test_b085_a_commit_that_nobody_was_told_of_is_taken_up(
    local_url: str, spawn: Callable[..., Trainer]
) -> None:
    spawn(local_url, "kill", "P5").outcome()
    code, lines, err = spawn(local_url, "one-shot", 5).outcome()
    assert code == 0, err
    assert committed(lines) == {4: 5}  # on top of version 3, which nobody was told of; nothing twice
    assert assert_steps(open_store(local_url)) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 5}


def test_b087_a_stopped_publisher_cannot_go_on_over_its_successor(
    url: str, spawn: Callable[..., Trainer]
) -> None:
    zombie = spawn(url, "stop", 7)
    zombie.until(lambda: Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    code, lines, err = spawn(url, "restart", 2).outcome()
    assert code == 0, err
    assert committed(lines) == {2: 2}
    store = open_store(url)
    before = [m.token for m in chain_of(store)]
    os.kill(zombie.pid, signal.SIGCONT)
    code, lines, err = zombie.outcome()
    assert (code, lines[-1].split()[0]) == (11, "conflict"), err
    assert "version 1 was committed by 'publisher' run" in lines[-1]
    assert [m.token for m in chain_of(store)] == before
    assert assert_steps(store) == {0: 0, 1: None, 2: 2}


def test_b082_one_hundred_versions_are_won_by_one_of_two(
    local_url: str, spawn: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 100
    monkeypatch.setenv("RACE_FOLDER", str(tmp_path))
    with Publisher(local_url) as publisher:
        publisher.publish({"w": torch.zeros(50)})
    racers = [spawn(local_url, "race", name, rounds) for name in "ab"]
    lines = []
    for racer in racers:
        code, found, err = racer.outcome()
        assert code == 0, err
        lines.append([line.split() for line in found])
    won = {int(line[3]): line[4] for found in lines for line in found if line[0] == "won"}
    lost = [line for found in lines for line in found if line[0] == "lost"]
    assert len(won) == len(lost) == rounds
    assert {line[3] for line in lost} == {"conflict"}
    manifests = chain_of(open_store(local_url))
    assert [m.token for m in manifests[1:]] == [won[v] for v in range(1, rounds + 1)]


@pytest.mark.parametrize("host", ["file", "127.0.0.1", "localhost"])
def test_b100b_a_trainer_that_returns_from_main_has_its_versions_committed(
    host: str,
    request: pytest.FixtureRequest,
    local_url: str,
    spawn: Callable[..., Trainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = local_url
    if host != "file":
        url = request.getfixturevalue("s3_url")
        monkeypatch.setenv(
            "AWS_ENDPOINT_URL_S3", os.environ["AWS_ENDPOINT_URL_S3"].replace("127.0.0.1", host)
        )
    code, _, err = spawn(url, "leave", 0.7).outcome()
    assert (code, err) == (0, "")
    store = open_store(url)
    assert assert_steps(store) == {0: 0, 1: 1, 2: 2}


def test_a_large_row_is_followed_after_main_has_returned(
    local_url: str, spawn: Callable[..., Trainer]
) -> None:
    """One of 196,608 changes, which several threads write where there are cores for them."""
    code, _, err = spawn(local_url, "leave", 0.7, 1 << 20).outcome()
    assert (code, err) == (0, "")
    assert assert_steps(open_store(local_url)) == {0: 0, 1: 1, 2: 2}


def test_b100a_a_failure_in_the_background_ends_the_process_with_an_error(
    local_url: str, spawn: Callable[..., Trainer]
) -> None:
    code, _, err = spawn(local_url, "fail").outcome()
    assert code == 1
    assert "StorageError: cannot write data/000000000001/" in err.splitlines()[-1]
    assert assert_steps(open_store(local_url)) == {0: 0}


def test_b221_a_fork_has_to_open_a_publisher_of_its_own(url: str, spawn: Callable[..., Trainer]) -> None:
    code, lines, err = spawn(url, "fork").outcome()
    assert code == 0, err
    # The child's own publisher takes the stream over (fence 2, state 2 as 3), so the parent's next commit conflicts.
    assert lines == ["committed 0 0", "committed 1 1", "usage", "committed 3 2", "child 0", "conflict"]
    assert assert_steps(open_store(url)) == {0: 0, 1: 1, 2: None, 3: 2}
