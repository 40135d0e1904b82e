"""One rank of Hugging Face's `Trainer` on a model under FSDP2, for `accelerate_worker`.

OUT/RANK.json has what its stamps say, how many collectives there were while it published, whether its parameters are
parts, and what a model with stacked experts is told; rank 0 writes OUT/whole.pt, the state dict at the end, gathered by
torch itself. The stream is in OUT/store. accelerate shards on accelerators only, so FSDP2 is applied as it would, and
accelerate leaves the model alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerState, TrainingArguments

from tests.publisher.hooks.kit import sharded, tiny_qwen3
from tests.publisher.hooks.test_trainer import rows
from weightcast.benchmarks.lab.traffic import traffic
from weightcast.publisher.hooks.transformers import WeightcastCallback
from weightcast.schemas.errors import UsageError


class Counted(WeightcastCallback):
    """Counts collectives while it publishes, and what it was told of each version."""

    def __init__(self, root: str) -> None:
        super().__init__(root, every=2)
        self.collectives = 0
        self.stamps: list[tuple[int, int | None]] = []

    def _publish(self, *args: Any) -> None:
        with traffic() as counted:
            super()._publish(*args)
            stamp = self.stamp(60)
        self.collectives += counted.calls
        if stamp is not None:
            self.stamps.append((stamp.version, stamp.step))


def train(rank: int, out: Path) -> None:
    """Train five steps."""
    root = str(out / "store")
    arguments = TrainingArguments(
        output_dir=str(out / "run"), max_steps=5, per_device_train_batch_size=2, learning_rate=0.01,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
    )  # fmt: skip
    assert arguments.process_index == rank  # brings up torch.distributed
    model = sharded(tiny_qwen3(vocab_size=65))
    callback = Counted(root)
    trainer = Trainer(model, arguments, train_dataset=rows(), callbacks=[callback])
    trainer.accelerator.prepare_model = lambda model, **_: model
    trainer.train()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    said = {
        "stamps": callback.stamps,
        "collectives": callback.collectives,
        "parts": [p.to_local().numel() / p.numel() for p in model.parameters() if isinstance(p, DTensor)],
        "experts": told_of_experts(root),
    }
    (out / f"{rank}.json").write_text(json.dumps(said))
    if rank == 0:
        torch.save(whole, out / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


def told_of_experts(root: str) -> str:
    """What is said of a sharded model whose checkpoints have another form."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = sharded(Qwen3MoeForCausalLM(config))
    try:
        WeightcastCallback(root).on_train_begin(None, TrainerState(), None, model=model)
    except UsageError as error:
        return str(error)
    return ""
