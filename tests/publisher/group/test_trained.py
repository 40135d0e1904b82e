"""Real processes over gloo that train as people do: FSDP2, HSDP, FSDP and tensor parallel; then on fewer ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.manifest import VersionManifest

ROOT = Path(__file__).parents[3]
WORKER = "tests.publisher.group.trained_worker"
STEPS, MORE_STEPS = 20, 3


KINDS = [f"{way}-{model}" for way in ("fsdp", "hsdp", "tp") for model in ("dense", "experts")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all kinds were trained: 20 AdamW versions on four ranks, then 3 on two."""
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", WORKER, str(folder), str(folder), *KINDS]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, timeout=390, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_each_way_to_shard_arrives_bit_for_bit_without_a_collective(kind: str, run: Path) -> None:
    """Show 1 of many writers."""
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
        assert said["collectives"] == [], kind
        assert said["longest"] < 10_000, (
            kind
        )  # of a text that passed between ranks; the weights have 100,000 bytes
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
