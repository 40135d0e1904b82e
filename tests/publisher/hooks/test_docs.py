"""The examples of docs/integrations.md that need a framework: a follower ends up with the bits of each trainer."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer

from weightcast.subscriber import Subscriber, Tensors

from .kit import assert_same_bits, followed, tiny_qwen3
from .test_trainer import rows
from .test_trl import Rollouts, no_gpu, parameters, tokenizer  # noqa: F401 - a fixture

PAGE: Final = Path(__file__).parents[3] / "docs" / "integrations.md"
BLOCK: Final = re.compile(r"^```python needs=(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(marker: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the one example that contains `marker`."""
    (source,) = [m[2] for m in BLOCK.finditer(PAGE.read_text("utf-8")) if marker in m[2]]
    exec(compile(source, str(PAGE), "exec"), names)
    return names


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
        finally:
            stop.set()
            follower.join()
