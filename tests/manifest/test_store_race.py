"""Two real processes create the same object at the same instant."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightcast.manifest.store import open_store

ROUNDS = 60


@pytest.mark.parametrize("kind", ["local", "seaweedfs"])
def test_b082_two_processes_one_winner_each_round(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = str(tmp_path / "store") if kind == "local" else request.getfixturevalue("s3_url")
    store = open_store(url)
    command = [sys.executable, str(Path(__file__).with_name("race_worker.py")), url]
    racers = [
        subprocess.Popen(
            [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for name in ("A", "B")
    ]
    wins = [0, 0]
    try:
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for round_ in range(ROUNDS):
            key = f"versions/{round_:012d}.json"
            line = f"{key} {time.monotonic() + 0.003}\n"
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write(line)
                racer.stdin.flush()
            won = [racer.stdout.readline() == "1\n" for racer in racers if racer.stdout]
            assert sum(won) == 1, f"round {round_}"
            winner = won.index(True)
            wins[winner] += 1
            assert store.get(key, max_bytes=100) == f"{'AB'[winner]} {key}".encode()
    finally:
        for racer in racers:
            racer.communicate(timeout=20)
    assert len(list(store.list("versions/"))) == ROUNDS
    assert min(wins) > 0, f"no race took place: {wins}"


@pytest.mark.parametrize("kind", ["local", "seaweedfs"])
def test_b221_a_store_that_was_used_before_a_fork_works_in_the_child(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store") if kind == "local" else request.getfixturevalue("s3_url"))
    store.put("a", b"parent")

    def child() -> None:
        sys.exit(0 if store.get("a", max_bytes=10) == b"parent" and store.create("b", b"child") else 1)

    for _ in range(2):
        store.delete("b")
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(10)
        alive = process.is_alive()
        if alive:
            process.kill()
        assert (alive, process.exitcode) == (False, 0)
        assert store.get("b", max_bytes=10) == b"child"
        assert store.probe().usable
