"""TRL's own asynchronous GRPO trainer with our `weight_transfer`; rollouts are made up, as in TRL's tests."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher.hooks.transformers import WeightcastCallback
from weightcast.publisher.hooks.trl import WeightTransfer
from weightcast.schemas.errors import UsageError
from weightcast.subscriber import Subscriber, SubscriberSettings, Tensors

from .attention import Attention
from .kit import assert_same_bits, copied, followed, reader_at, tiny_qwen3, versions

GENERATIONS = 2


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's trainer asks CUDA for the device's name, to look up its FLOPs, and has one attention kernel, for GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "cpu")
    monkeypatch.setattr(packing, "_flash_attn", Attention)


def tokenizer() -> Any:
    """64 words, and a chat template that TRL can train on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{n}" for n in range(61))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}"
    return made


class Rollouts:
    """TRL's `RolloutWorkerProtocol`: samples from nowhere, marked with the version that TRL takes for live."""

    def __init__(self, seen: Any) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []
        self._seen = seen
        self._groups = itertools.count()
        self._version = 0

    def start(self) -> None:
        self._fill()

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version
        self.versions.append(model_version)
        self._seen()
        self._fill()

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...

    def _fill(self) -> None:
        for _ in range(4):
            group = next(self._groups)
            for n in range(GENERATIONS):
                ids = [3 + (group + k) % 60 for k in range(4)] + [10 + n] * 4
                self.rollout_buffer.put(
                    RolloutSample(
                        prompt=[{"role": "user", "content": "w1"}],
                        completion=[{"role": "assistant", "content": "w2"}],
                        input_ids=np.array(ids),
                        completion_mask=np.array([0] * 4 + [1] * 4),
                        old_log_probs=np.array([0.0] * 4 + [-0.5] * 4),
                        advantage=1.0 if n else -1.0,
                        model_version=self._version,
                        group_id=group,
                        metrics={"reward": float(n)},
                    )
                )


def async_trainer(folder: Path, transfer: WeightTransfer, rollouts: Rollouts, **changes: Any) -> Any:
    tiny_qwen3().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": 4,
        "learning_rate": 0.05,
        "per_device_train_batch_size": GENERATIONS,
        "num_generations": GENERATIONS,
        "max_completion_length": 8,
        "token_budget": 0,  # a fixed count of samples a step
        "vllm_server_timeout": 5.0,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    return AsyncGRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=AsyncGRPOConfig(**(arguments | changes)),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "w1"}]}] * 8),
        processing_class=tokenizer(),
        rollout_worker=rollouts,
        weight_transfer=transfer,
    )


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """What TRL sends: each parameter once, so that a tied head goes under its embedding's name."""
    return dict(model.named_parameters())


def test_engines_hold_what_trl_takes_for_live(root: str, tmp_path: Path) -> None:
    """At each version that TRL announces to its rollouts, a following engine has the trainer's bits of that moment."""
    trainer: Any = None
    checked: list[int | None] = []
    engine = {name: torch.zeros_like(p) for name, p in parameters(tiny_qwen3()).items()}
    tensors, stop = Tensors(engine), threading.Event()
    subscriber = Subscriber(root, tensors, SubscriberSettings(poll_s=0.02))

    def seen() -> None:
        with tensors.reading() as mark:
            assert mark is not None
            assert_same_bits(engine, parameters(trainer.model))
            checked.append(mark.version)

    def step() -> int:
        return int(trainer.state.global_step)

    transfer = WeightTransfer(root, step=step, reached=lambda version: subscriber.wait_for(version, 30))
    rollouts = Rollouts(seen)
    trainer = async_trainer(tmp_path, transfer, rollouts)
    follower = threading.Thread(target=lambda: [None for _ in subscriber.follow(stop)])
    follower.start()
    try:
        start = copied(parameters(trainer.model))
        trainer.train()
    finally:
        stop.set()
        follower.join()
        subscriber.close()
    assert rollouts.versions == [1, 2, 3, 4, 5]  # the cold sync and four steps
    assert checked == [0, 1, 2, 3, 4]
    assert [v.step for v in versions(root)] == [0, 1, 2, 3, 4]
    assert any(not torch.equal(start[n], p) for n, p in parameters(trainer.model).items())


def test_without_an_engine_a_sync_is_a_commit(root: str, tmp_path: Path) -> None:
    transfer = WeightTransfer(root)
    stamps = []
    rollouts = Rollouts(lambda: stamps.append(transfer.stamp()))
    trainer = async_trainer(tmp_path, transfer, rollouts, weight_sync_steps=2)
    trainer.train()
    assert [s.version for s in stamps if s is not None] == [0, 1, 2]  # cold, after step 2, after step 4
    assert_same_bits(followed(root, parameters(trainer.model)), parameters(trainer.model))
    assert StreamReader.open(open_store(root)).head() == 2


def test_tensors_are_walked_to_the_end_on_an_error(root: str) -> None:
    """Other ranks wait in a collective for each tensor."""
    walked = []

    def iterator() -> Iterator[tuple[str, torch.Tensor]]:
        for name, device in (("a", "cpu"), ("b", "meta"), ("c", "cpu"), ("d", "cpu")):
            walked.append(name)
            yield name, torch.zeros(2, device=device)

    transfer = WeightTransfer(root)
    transfer.init_weight_transfer()
    transfer.pause()
    with pytest.raises(UsageError, match="'b'"):
        transfer.send_weights(iterator())
    assert walked == ["a", "b", "c", "d"]
    transfer.resume()
    transfer.destroy()
    transfer.send_weights(iter([("a", torch.ones(2))]))
    transfer.destroy()
    assert_same_bits(followed(root, {"a": torch.ones(2)}), {"a": torch.ones(2)})


def test_the_callback_in_a_trl_trainer(root: str, tmp_path: Path) -> None:
    model = tiny_qwen3()
    trainer = SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=0.01,
            report_to="none",
            use_cpu=True,
            bf16=False,
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"text": "w1 w2 w3 w4"}] * 8),
        processing_class=tokenizer(),
        callbacks=[WeightcastCallback(root)],
    )
    trainer.train()
    assert_same_bits(followed(root, model.state_dict()), model.state_dict())
    assert versions(root)[-1].step == 3
    reader = reader_at(root)
    names = {f.name for f in reader.files(reader.manifest(0).files).files}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
