"""accelerate's own `Accelerator`: one process, and two with DDP and FSDP2 over gloo, also under `Trainer`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weightcast.manifest.export import fetch_files
from weightcast.publisher import Publisher
from weightcast.publisher.group import GroupPublisher
from weightcast.publisher.hooks.accelerate import AcceleratePublisher
from weightcast.publisher.hooks.outlet import outlet_of
from weightcast.schemas.errors import UsageError

from .kit import assert_same_bits, followed, reader_at, tiny_qwen3, versions

WORKER = "tests.publisher.hooks.accelerate_worker"


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


def test_an_open_publisher_of_the_other_kind_is_refused(root: str) -> None:
    with Publisher(root + "/one") as one, pytest.raises(UsageError, match="of one process"):
        outlet_of(one, None, group=True)
    with GroupPublisher(root + "/all") as group, pytest.raises(UsageError, match="of all ranks"):
        outlet_of(group, None, group=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks were trained in each mode."""
    folder = tmp_path_factory.mktemp("accelerate")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", WORKER, str(folder), "ddp", "fsdp2", "fsdp2-broken", "trainer"]
    subprocess.run(command, check=True, timeout=110, env=environment, cwd=Path(__file__).parents[3])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks(mode: str, run: Path) -> None:
    out, root = run / mode, str(run / mode / "store")
    said = json.loads((out / "0.json").read_text())
    assert said["versions"] == [0, 1, 2]
    assert json.loads((out / "1.json").read_text())["versions"] == [0, 1, 2]
    assert bool(said["parts"]) == (mode == "fsdp2")
    assert all(0 < part < 1 for part in said["parts"])
    expected = torch.load(out / "whole.pt")
    assert_same_bits(followed(root, expected), expected)
    for version in (1, 2):  # both ranks sent something
        shards = reader_at(root).manifest(version).shards
        assert {shard.key.partition("publisher.")[2][0] for shard in shards} == {"0", "1"}
    assert [v.step for v in versions(root)] == [0, 1, 2]
    assert all(v.changed > 0 for v in versions(root))


@pytest.mark.slow
def test_an_error_on_one_rank_is_raised_on_all_and_the_next_step_is_published(run: Path) -> None:
    out = run / "fsdp2-broken"
    said = [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert said[0]["error"].startswith("rank 1: cannot reach data/")
    assert said[1]["error"] == said[0]["error"]
    assert said[0]["versions"] == said[1]["versions"] == [0, 1]
    expected = torch.load(out / "whole.pt")
    assert_same_bits(followed(str(out / "store"), expected), expected)


@pytest.mark.slow
def test_the_callback_of_a_trainer_on_two_ranks(run: Path) -> None:
    """Each publishes its own, without a collective; config and tied head come along."""
    out, root = run / "trainer", str(run / "trainer" / "store")
    said = [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]
    for one in said:
        assert one["stamps"] == [[0, 0], [1, 2], [2, 4], [3, 5]]
        assert one["collectives"] == 0
        assert one["parts"]
        assert all(0 < part < 1 for part in one["parts"])
        assert "another form of what this sharded model holds" in one["experts"]
    assert [v.step for v in versions(root)] == [0, 2, 4, 5]
    expected = torch.load(out / "whole.pt")
    assert_same_bits(followed(root, expected), expected)
    reader = reader_at(root)
    manifest = reader.manifest(3)
    assert {shard.key.partition("publisher.")[2][0] for shard in manifest.shards} == {"0", "1"}
    assert reader.layout(manifest.layout)["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert "config.json" in fetch_files(reader, manifest.files)
    assert reader.manifest(2).metadata["trainer"]["loss"] > 0
