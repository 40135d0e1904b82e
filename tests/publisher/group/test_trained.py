"""Real processes over gloo that train as people do: FSDP2, HSDP, FSDP and tensor parallel; then on fewer ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.manifest import VersionManifest

from . import kill_worker
from .kill_worker import HALF_A_MINUTE
from .test_killed import check as check_ending

ROOT = Path(__file__).parents[3]
WORKER = "tests.publisher.group.trained_worker"
STEPS, MORE_STEPS = 20, 3


KINDS = [f"{way}-{model}" for way in ("fsdp", "hsdp", "tp") for model in ("dense", "experts")]


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Groups in which a rank is half a minute late, and their folder. They sleep while others train."""
    folder = tmp_path_factory.mktemp("late")
    with launched(kill_worker.__name__, folder, HALF_A_MINUTE) as process:
        yield folder, process


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, late: object) -> Path:
    """The folder in which all kinds were trained: 20 AdamW versions on four ranks, then 3 on two."""
    folder = tmp_path_factory.mktemp("trained")
    with launched(WORKER, folder, KINDS) as process:
        ended(process)
    return folder


@contextmanager
def launched(module: str, folder: Path, names: Iterable[str]) -> Iterator[subprocess.Popen[str]]:
    """A worker at work in a folder."""
    command = [sys.executable, "-m", module, str(folder), str(folder), *names]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> None:
    """Wait until it has done well."""
    _, errors = process.communicate(timeout=390)
    assert process.returncode == 0, errors


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_b092_each_way_to_shard_arrives_bit_for_bit_and_meanwhile_a_rank_is_late(
    late: tuple[Path, subprocess.Popen[str]], run: Path
) -> None:
    """Show 1 of many writers; and of show 2 a rank that is 30 s late, where others wait for 10 s: see `test_killed`.

    One test, so that one worker trains, and nobody waits for those who sleep.
    """
    for kind in KINDS:
        check_kind(kind, run)
    folder, process = late
    ended(process)
    for scenario in HALF_A_MINUTE:
        check_ending(scenario, folder)


def check_kind(kind: str, run: Path) -> None:
    """What must hold of one way to shard, on four ranks and then on two."""
    reader = StreamReader.open(open_store(str(run / kind)))
    four, two = (
        [json.loads((run / f"{kind}-{n}-{rank}.json").read_text()) for rank in range(n)] for n in (4, 2)
    )
    assert four[0]["versions"] == list(range(STEPS))
    assert two[0]["versions"] == list(range(STEPS + 1, STEPS + 1 + MORE_STEPS))  # between them the fence
    for ranks in (four, two):
        check(kind, ranks, [reader.manifest(version) for version in ranks[0]["versions"]])


def check(kind: str, ranks: list[dict[str, Any]], versions: list[VersionManifest]) -> None:
    """What must hold of a run on so many ranks."""
    assert all(ranks[0]["equal"]), kind
    for said in ranks:
        assert said["versions"] == ranks[0]["versions"], kind
        assert said["collectives"] == 0, kind
        # Of a text that passed between ranks; the weights have 100,000 bytes.
        assert said["longest"] < 10_000, kind
    elements = sum(said["elements"] for said in ranks)
    for version, changed in zip(versions[1:], ranks[0]["changed"][1:], strict=True):
        assert version.totals.elements == elements, kind  # each element has one owner
        assert changed <= version.totals.changed <= elements, (
            kind
        )  # a row that is sent whole counts all it sends
        assert version.totals.changed < 1.05 * changed, kind
    sent = [
        sum(shard.size for v in versions[1:] for shard in v.shards if f"publisher.{rank}-" in shard.key)
        for rank in range(len(ranks))
    ]
    if kind == "fsdp-experts" and len(ranks) == 4:
        # 6 experts in rows of 2, 2, 2 and 0: FSDP gives the fourth rank nothing of them, and only it has them.
        assert sent.index(min(sent)) == 3
        sent = sent[:3]
    assert max(sent) <= 1.25 * sum(sent) / len(sent), (kind, sent)
