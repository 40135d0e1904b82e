"""A real checkpoint made by transformers, through the command line, over every kind of store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from weightcast.cli.main import run

INDEX = "model.safetensors.index.json"


Command = Callable[..., dict[str, object]]


def in_a_process(*arguments: str | Path) -> dict[str, object]:
    """Run the command as a user does, and return the JSON document that it prints."""
    done = subprocess.run(
        [Path(sys.executable).parent / "weightcast", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture
def weightcast(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command: as processes for a local store, and in this one for others, as each process takes seconds."""

    def here(*arguments: str | Path) -> dict[str, object]:
        capsys.readouterr()
        code, shown = run([str(argument) for argument in arguments]), capsys.readouterr()
        assert code == 0, shown.err
        return dict(json.loads(shown.out))

    return in_a_process if request.node.callspec.params["root"] == "local" else here


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by its index or its single file."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors")
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for file in sorted(set(names.values())):
        found |= load_file(folder / file)
    assert set(found) == set(names)
    return found


def assert_same_bytes(left: Path, right: Path) -> None:
    """Same names, dtypes, shapes and bytes."""
    a, b = tensors_of(left), tensors_of(right)
    assert set(a) == set(b)
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def move_one_percent(source: Path, target: Path) -> int:
    """Copy a checkpoint with 1 % of its elements moved by one bf16 step; returns how many were."""
    shutil.copytree(source, target)
    rng = np.random.default_rng(0)
    moved = 0
    for file in sorted(target.glob("*.safetensors")):
        tensors = load_file(file)
        for tensor in tensors.values():
            bits = tensor.view(torch.int16).reshape(-1).numpy()
            chosen = rng.random(len(bits)) < 0.01
            bits[chosen] += rng.choice(np.array([-1, 1], np.int16), len(bits))[chosen]
            moved += int(chosen.sum())
        save_file(tensors, file, metadata={"format": "pt"})
    return moved


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with tied embeddings, saved by transformers in several shards."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("qwen3") / "checkpoint-1"
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="300KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture(params=["local", "moto", "seaweedfs"])
def root(request: pytest.FixtureRequest, tmp_path: Path, aws: Callable[[object], None]) -> str:
    """A fresh stream root that other processes reach too."""
    if request.param == "local":
        return str(tmp_path / "store")
    server = request.getfixturevalue("moto_server" if request.param == "moto" else "seaweedfs")
    aws(server)
    return f"s3://{server.bucket}/{os.urandom(8).hex()}"


def test_checkpoint_arrives_and_follows(
    root: str, weightcast: Command, checkpoint: Path, tmp_path: Path
) -> None:
    """Published, moved by 1 %, subscribed into an empty folder, a followed one and an adopted one, pulled."""
    second = tmp_path / "checkpoint-2"
    moved = move_one_percent(checkpoint, second)

    first = weightcast("publish", root, checkpoint, "--json")
    assert (first["version"], first["kind"]) == (0, "snapshot")
    followed, fresh, adopted = tmp_path / "followed", tmp_path / "fresh", tmp_path / "adopted"
    assert weightcast("subscribe", root, "--into", followed, "--once", "--json")["version"] == 0
    assert_same_bytes(followed, checkpoint)

    delta = weightcast("publish", root, second, "--step", "2", "--json")
    assert (delta["version"], delta["kind"], delta["changed"]) == (1, "delta", moved)
    elements = sum(t.numel() for t in tensors_of(checkpoint).values())
    assert delta["elements"] == elements
    assert int(str(delta["wire_bytes"])) < 2 * elements / 8

    shutil.copytree(checkpoint, adopted)
    for folder in (followed, fresh, adopted):
        assert weightcast("subscribe", root, "--into", folder, "--once", "--json")["version"] == 1
        assert_same_bytes(folder, second)
        assert (folder / "config.json").read_bytes() == (second / "config.json").read_bytes()

    loaded = AutoModelForCausalLM.from_pretrained(followed, dtype=torch.bfloat16)
    expected = AutoModelForCausalLM.from_pretrained(second, dtype=torch.bfloat16)
    assert torch.equal(loaded.lm_head.weight, expected.lm_head.weight)
    prompt = torch.arange(8)[None]
    assert torch.equal(loaded(prompt).logits, expected(prompt).logits)

    weightcast("pull", root, tmp_path / "pulled", "--version", "0", "--json")
    assert_same_bytes(tmp_path / "pulled", checkpoint)
    assert weightcast("verify", root, "--deep", "--json")["problems"] == []
