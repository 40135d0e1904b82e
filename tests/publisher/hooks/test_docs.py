"""The hooks' examples in docs/integrations.md: a follower ends up with the bits of each trainer."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer

from weightcast.subscriber import Subscriber, Tensors

from .kit import assert_same_bits, followed, reader_at, tiny_qwen3
from .protocols import NemoSynchronizer, VerlManager
from .test_engines import Actor, nemo, verl  # noqa: F401 - fixtures
from .test_folders import weights, write_shards
from .test_trainer import rows
from .test_trl import Rollouts, no_gpu, parameters, tokenizer  # noqa: F401 - a fixture

PAGE: Final = Path(__file__).parents[3] / "docs" / "integrations.md"
BLOCK: Final = re.compile(r"^```([a-z]+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BUCKET: Final = "s3://bucket/runs/policy-a"


def block(language: str, marker: str) -> str:
    """The one block in that language that contains `marker`."""
    blocks = (m for m in BLOCK.finditer(PAGE.read_text("utf-8")) if m[1] == language)
    (source,) = [m[2] for m in blocks if marker in m[2]]
    return source


def run(marker: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the one Python example that contains `marker`."""
    exec(compile(block("python", marker), str(PAGE), "exec"), names)
    return names


def test_optimizer(root: str) -> None:
    state = run("OptimizerHook(", {"ROOT": root, "torch": torch})["net"].state_dict()
    assert_same_bits(followed(root + "-optimizer", state), state)
    assert [reader_at(root + "-optimizer").manifest(version).step for version in range(3)] == [0, 2, 4]


def test_trainer(root: str, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), max_steps=3, report_to="none", use_cpu=True)
    names = run(
        "WeightcastCallback(",
        {"ROOT": root, "model": tiny_qwen3(), "arguments": arguments, "dataset": rows()},
    )
    state = names["trainer"].model.state_dict()
    assert_same_bits(followed(root + "-trainer", state), state)


def test_accelerate(root: str) -> None:
    ids = torch.arange(8)[None]
    batches = [{"input_ids": ids, "labels": ids}] * 3
    names = run(
        "AcceleratePublisher(", {"ROOT": root, "model": tiny_qwen3(), "torch": torch, "batches": batches}
    )
    state = names["model"].state_dict()
    assert_same_bits(followed(root + "-accelerate", state), state)


class Worker(Rollouts):
    """Stands where TRL would start its own worker, which needs a vLLM server."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lambda: None)
        self._loop_kwargs: dict[str, Any] = {}


def test_async_grpo(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_grpo_trainer, "AsyncRolloutWorker", Worker)
    for part in (tiny_qwen3(), tokenizer()):
        part.save_pretrained(tmp_path / "model")
    arguments = AsyncGRPOConfig(
        str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=2,
        num_generations=2,
        token_budget=0,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        learning_rate=0.05,
    )
    engine = {name: torch.zeros_like(p) for name, p in parameters(tiny_qwen3()).items()}
    stop = threading.Event()
    with Subscriber(root + "-grpo", Tensors(engine)) as subscriber:
        follower = threading.Thread(target=lambda: [None for _ in subscriber.follow(stop)])
        follower.start()
        try:
            names = run(
                "WeightTransfer(",
                {
                    "ROOT": root,
                    "model": str(tmp_path / "model"),
                    "reward": lambda completions, **_: [0.0] * len(completions),
                    "arguments": arguments,
                    "dataset": Dataset.from_list([{"prompt": [{"role": "user", "content": "w1"}]}] * 8),
                    "subscriber": subscriber,
                },
            )
            assert_same_bits(engine, parameters(names["trainer"].model))  # the last sync waited for it
            reader = reader_at(root + "-grpo")
            last = reader.manifest(subscriber.version or 0)
            assert {"config.json", "tokenizer.json"} <= {file.name for file in reader.files(last.files).files}
        finally:
            stop.set()
            follower.join()


def test_verl(verl: str, root: str) -> None:  # noqa: F811
    """The settings as verl reads them: the module is imported, the backend made with the arguments under its name."""
    found = yaml.safe_load(block("yaml", "custom_backend_module").replace(BUCKET, root))
    engine = found["actor_rollout_ref"]["rollout"]["checkpoint_engine"]
    importlib.import_module(engine["custom_backend_module"])
    actor = Actor()
    manager = VerlManager(engine["backend"], 2, 2, engine["engine_kwargs"][engine["backend"]])
    for step in (1, 2):
        actor.step()
        asyncio.run(manager.update_weights(actor.weights, step))
        for loaded in manager.loaded:
            assert_same_bits(loaded, actor.state)
    assert_same_bits(followed(root, actor.state), actor.state)


def test_nemo_rl(nemo: str, root: str) -> None:  # noqa: F811
    """The settings as NeMo-RL reads them."""
    found = yaml.safe_load(block("yaml", "refit_transport").replace(BUCKET, root))
    generation = found["policy"]["generation"]
    transport = generation["refit_transport"]
    actor, synchronizer = Actor(), NemoSynchronizer(transport, 2, 2, generation["refit_cfg"][transport])
    for _ in range(2):
        actor.step()
        asyncio.run(synchronizer.sync_weights(actor.weights))
        for loaded in synchronizer.loaded:
            assert_same_bits(loaded, actor.state)
    assert_same_bits(followed(root, actor.state), actor.state)


def test_slime(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that the option names, called as slime calls it, in the environment that the example sets."""
    export, *rest = shlex.split(block("sh", "slime"), comments=True)
    name, value = rest[0].split("=", 1)
    assert (export, value) == ("export", BUCKET)
    monkeypatch.setenv(name, root)
    options = {o: v for o, v in itertools.pairwise(rest) if o.startswith("--")}
    module, _, function = options["--custom-update-weight-post-write-path"].rpartition(".")
    arguments = Namespace(**{o[2:].replace("-", "_"): v for o, v in options.items()})
    publish = getattr(importlib.import_module(module), function)
    for number in (1, 2):
        folder = tmp_path / f"weight_v{number:06d}"
        write_shards(folder, weights(number))
        publish(arguments, str(folder), [])
        assert_same_bits(followed(root, weights(0)), weights(number))
    importlib.import_module(module).outlet_for(root).close()


def test_prime_rl(tmp_path: Path) -> None:
    """The command, beside folders that come as prime-rl's do."""
    root, output = tmp_path / "store", tmp_path / "output"
    (output / "broadcasts").mkdir(parents=True)
    words = shlex.split(block("sh", "STABLE").replace("OUTPUT_DIR", str(output)).replace("ROOT", str(root)))
    command = [str(Path(sys.executable).parent / words[0]), *words[1:], "--settle", "0.2", "--poll", "0.1"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log, cwd=tmp_path, env=dict(os.environ))
    try:
        for step in (0, 1):
            write_shards(output / "broadcasts" / f"step_{step}", weights(step))
            (output / "broadcasts" / f"step_{step}" / "STABLE").touch()
            until = time.monotonic() + 60
            while not (root / "versions" / f"{step:012d}.json").exists():
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < until, (tmp_path / "log").read_text()
                time.sleep(0.05)
            assert_same_bits(followed(str(root), weights(9)), weights(step))
    finally:
        process.terminate()
        process.wait(20)
