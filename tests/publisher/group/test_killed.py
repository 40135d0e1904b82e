"""Show 2 of many writers: a rank killed at each stage of a publish, and one that is too slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.publisher.hooks.kit import assert_same_bits
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.manifest import VersionManifest

from . import kill_worker
from .kill_worker import ALL, RANKS, SCENARIOS, VICTIM_STEP
from .kit import Crew, agreed, held_by_a_subscriber, model, rows, stir

ROOT = Path(__file__).parents[3]

SLACK_S = 20.0
"""For machines that are busy: hangs are for ever."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all scenarios have taken place."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", kill_worker.__name__, str(folder), str(folder), *SCENARIOS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def states() -> list[dict[str, Any]]:
    """What the ranks had at each step."""
    whole, found = model(), []
    for step in range(VICTIM_STEP + 2):
        if step:
            stir(whole, step)
        found.append({name: tensor.clone() for name, tensor in whole.items()})
    return found


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_b090_b092_no_wrong_or_partial_version_no_hang_and_the_stream_goes_on(run: Path) -> None:
    """One test, so that one worker runs all scenarios at once."""
    for scenario in SCENARIOS:
        check(scenario, run)


def check(scenario: str, run: Path) -> None:
    """What must hold after a scenario: what each rank saw, how long it took, what the stream has; it goes on."""
    slow, (victim, sleep_s, timeout_s) = scenario.startswith("slow"), ALL[scenario]
    left = [rank for rank in range(RANKS) if slow or rank != victim]
    said = {rank: json.loads((run / f"{scenario}-{rank}.json").read_text()) for rank in left}
    committed = scenario in ("after-gather", "commit-after")
    for rank in left:
        outcome, seconds = said[rank][str(VICTIM_STEP)]
        waited = sleep_s if rank == victim else 0.0
        assert seconds < waited + timeout_s + SLACK_S, (rank, seconds)
        if scenario == "after-gather":  # it had handed over all it had
            assert outcome == VICTIM_STEP
        else:
            assert outcome.startswith("storage: rank "), outcome
        if not slow:
            assert f"rank {victim} of {RANKS} did not" in said[rank][str(VICTIM_STEP + 1)][0]
    if scenario not in ("after-gather", "slow-zero"):
        assert len({said[rank][str(VICTIM_STEP)][0].replace("decide", "come") for rank in left}) == 1
    store, steps = open_store(f"{run}/{scenario}"), states()
    reader = StreamReader.open(store)
    head = reader.head()
    assert head == (VICTIM_STEP if slow or committed else VICTIM_STEP - 1)
    step = reader.manifest(head).step
    assert step == (VICTIM_STEP + 1 if slow else head)  # after a sleep the ranks went on with the next step
    assert_same_bits(held_by_a_subscriber(store, steps[step]), steps[step])
    crew = Crew([store, store])
    whole = steps[VICTIM_STEP + 1]
    manifest = agreed(crew.publish(lambda r: rows(whole, r, 2), step=9))
    crew.close()
    assert isinstance(manifest, VersionManifest)
    assert manifest.version == head + 2  # after the fence
    assert_same_bits(held_by_a_subscriber(store, whole), whole)
