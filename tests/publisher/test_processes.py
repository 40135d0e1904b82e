"""Publishers in processes of their own: killed, stopped, forked, left alone, and set against each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from weightcast.manifest.store import Store, open_store

from ..versions import assert_version, chain_of, copy_of, objects_in
from .trainer import state

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["local", "seaweedfs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh root on a local store, or on the real S3 server."""
    return f"file://{tmp_path}/store" if request.param == "local" else str(request.getfixturevalue("s3_url"))


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    """A fresh root on a local store."""
    return f"file://{tmp_path}/store"


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a trainer; ends it if the test does not."""
    started: list[subprocess.Popen[str]] = []

    def start(url: str, *command: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.publisher.trainer", url, *map(str, command)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def outcome(process: subprocess.Popen[str], timeout: float = 100) -> tuple[int, list[str], str]:
    """Exit code, lines of stdout, stderr."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out.splitlines(), err


def committed(lines: list[str]) -> dict[int, int]:
    """Version -> step, as the trainer was told."""
    return {int(v): int(k) for word, v, k in (line.split() for line in lines if line.startswith("committed")) if word}


def assert_steps(store: Store) -> dict[int, int | None]:
    """Every version of the chain has the bits of its step; a fence those of the version before. Version -> step."""
    steps: dict[int, int | None] = {}
    current = 0
    for manifest in chain_of(store):
        current = current if manifest.step is None else manifest.step
        steps[manifest.version] = manifest.step
        assert_version(store, manifest.version, copy_of(state(current)))
    return steps


@pytest.mark.parametrize("point", ["P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8"])
def test_b092_b093_killed_at(url: str, point: str, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    code, lines, err = outcome(spawn(url, "kill", point))
    assert code == -signal.SIGKILL, err
    store = open_store(url)
    told = committed(lines)
    steps = assert_steps(store)
    assert told.items() <= steps.items()
    assert len(steps) == (4 if point in ("P5", "P6", "P7", "P8") else 3)
    assert told.keys() == ({0, 1, 2, 3} if point == "P8" else {0, 1, 2})
    code, lines, err = outcome(spawn(url, "restart", 4))
    assert code == 0, err
    steps = assert_steps(store)
    assert told.items() <= steps.items()
    assert committed(lines) == {len(steps) - 1: 4}
    assert len(chain_of(store)[-1].shards) >= 3
    assert [k for k in objects_in(store) if k.endswith(".tmp")] == []  # leftovers are no objects


def test_b085_a_commit_that_nobody_was_told_of_is_taken_up(
    local_url: str, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    outcome(spawn(local_url, "kill", "P5"))
    code, lines, err = outcome(spawn(local_url, "one-shot", 5))
    assert code == 0, err
    assert committed(lines) == {4: 5}  # on top of version 3, which nobody was told of; nothing twice
    assert assert_steps(open_store(local_url)) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 5}


def test_b087_a_stopped_publisher_cannot_go_on_over_its_successor(
    url: str, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    zombie = spawn(url, "stop", 7)
    assert zombie.stdout is not None
    for line in zombie.stdout:
        if line.startswith("stopping"):
            break
    end = time.monotonic() + 60
    while Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end
        time.sleep(0.02)
    code, lines, err = outcome(spawn(url, "restart", 2))
    assert code == 0, err
    assert committed(lines) == {2: 2}
    store = open_store(url)
    before = [m.token for m in chain_of(store)]
    zombie.send_signal(signal.SIGCONT)
    code, lines, err = outcome(zombie)
    assert (code, lines[0].split()[0]) == (11, "conflict"), err
    assert "version 1 was committed by 'publisher' run" in lines[0]
    assert [m.token for m in chain_of(store)] == before
    assert assert_steps(store) == {0: 0, 1: None, 2: 2}


def test_b082_one_hundred_versions_are_won_by_one_of_two(
    local_url: str, spawn: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 100
    monkeypatch.setenv("RACE_FOLDER", str(tmp_path))
    outcome(spawn(local_url, "one-shot", 0))
    racers = [spawn(local_url, "race", name, rounds) for name in "ab"]
    lines = []
    for racer in racers:
        code, found, err = outcome(racer)
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
    host: str, request: pytest.FixtureRequest, local_url: str, spawn: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = local_url
    if host != "file":
        url = request.getfixturevalue("s3_url")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["AWS_ENDPOINT_URL_S3"].replace("127.0.0.1", host))
    code, _, err = outcome(spawn(url, "leave", 1.5))
    assert (code, err) == (0, "")
    store = open_store(url)
    assert assert_steps(store) == {0: 0, 1: 1, 2: 2}


def test_b100a_a_failure_in_the_background_ends_the_process_with_an_error(
    local_url: str, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    code, _, err = outcome(spawn(local_url, "fail"))
    assert code == 1
    assert "StorageError: cannot write data/000000000001/" in err.splitlines()[-1]
    assert assert_steps(open_store(local_url)) == {0: 0}


def test_b221_a_fork_has_to_open_a_publisher_of_its_own(
    url: str, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    code, lines, err = outcome(spawn(url, "fork"), timeout=60)
    assert code == 0, err
    # The child's own publisher takes the stream over (fence 2, state 2 as 3), so the parent's next commit conflicts.
    assert lines == ["committed 0 0", "committed 1 1", "usage", "committed 3 2", "child 0", "conflict"]
    assert assert_steps(open_store(url)) == {0: 0, 1: 1, 2: None, 3: 2}
