"""accelerate's own `Accelerator`: one process, and two with DDP and FSDP2 over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weightcast.publisher.hooks.accelerate import AcceleratePublisher

from .kit import assert_same_bits, followed, reader_at, tiny_qwen3, versions

ROOT = Path(__file__).parents[3]
WORKER = "tests.publisher.hooks.accelerate_worker"
PORT_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def launch(mode: str, root: Path, out: Path, ranks: int = 2) -> None:
    """Run the worker with torch's own launcher on this machine."""
    environment = {k: v for k, v in os.environ.items() if k not in PORT_VARIABLES}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run(
        [*command, "-m", WORKER, mode, str(root), str(out)],
        check=True,
        timeout=100,
        env=environment | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        cwd=ROOT,
    )


def test_one_process(root: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny_qwen3()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    publisher = AcceleratePublisher(accelerator, root)
    for step in range(3):
        accelerator.backward(prepared(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss)
        optimizer.step()
        pending = publisher.publish(prepared, step=step, metadata={"kind": "test"})
        pending.wait()
        assert_same_bits(followed(root, model.state_dict()), model.state_dict())
    publisher.close()
    assert [v.step for v in versions(root)] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks(mode: str, tmp_path: Path) -> None:
    root, out = tmp_path / "store", tmp_path / "out"
    out.mkdir()
    launch(mode, root, out)
    said = json.loads((out / "0.json").read_text())
    assert said["versions"] == [0, 1, 2]
    assert json.loads((out / "1.json").read_text())["versions"] == [0, 1, 2]
    assert bool(said["parts"]) == (mode == "fsdp2")
    assert all(0 < part < 1 for part in said["parts"])
    expected = torch.load(out / "whole.pt")
    assert_same_bits(followed(str(root), expected), expected)
    for version in (1, 2):  # both ranks sent something
        shards = reader_at(str(root)).manifest(version).shards
        assert {shard.key.partition("publisher.")[2][0] for shard in shards} == {"0", "1"}
    assert [v.step for v in versions(str(root))] == [0, 1, 2]
    assert all(v.changed > 0 for v in versions(str(root)))


@pytest.mark.slow
def test_an_error_on_one_rank_is_raised_on_all_and_the_next_step_is_published(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    launch("fsdp2-broken", tmp_path / "store", tmp_path / "out")
    said = [json.loads((tmp_path / "out" / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert said[0]["error"].startswith("rank 1: cannot reach data/")
    assert said[1]["error"] == said[0]["error"]
    assert said[0]["versions"] == said[1]["versions"] == [0, 1]
    expected = torch.load(tmp_path / "out" / "whole.pt")
    assert_same_bits(followed(str(tmp_path / "store"), expected), expected)
