"""The callback in Hugging Face's own `Trainer`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from weightcast.manifest.export import export, fetch_files
from weightcast.manifest.rebuild import rebuild
from weightcast.publisher.group import GroupPublisher
from weightcast.publisher.hooks.transformers import WeightcastCallback, checkpoint_tensors
from weightcast.schemas.errors import UsageError

from .kit import assert_same_bits, copied, followed, reader_at, tiny_qwen3, versions


def rows(count: int = 64) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [{"input_ids": (ids := torch.randint(0, 64, (8,))), "labels": ids} for _ in range(count)]


class Recorder(TrainerCallback):  # type: ignore[misc]
    """What the model is after each step."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, torch.Tensor]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        self.states[state.global_step] = copied(found["model"].state_dict())


def trainer(model: Any, folder: Path, *callbacks: TrainerCallback, **changes: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
    }
    return Trainer(
        model, TrainingArguments(**(arguments | changes)), train_dataset=rows(), callbacks=list(callbacks)
    )


def test_an_open_publisher_of_the_other_kind_is_refused_on_all_ranks(root: str) -> None:
    """On one alone, the others would train on, and wait for it in their next collective."""
    with GroupPublisher(root) as group:
        callback = WeightcastCallback(group)
        state = TrainerState(global_step=0, is_world_process_zero=False)
        with pytest.raises(UsageError, match="of all ranks"):
            callback.on_train_begin(None, state, None, model=tiny_qwen3())


def test_versions_of_a_run_are_the_trainers_bits(root: str, tmp_path: Path) -> None:
    model, recorder = tiny_qwen3(), Recorder()
    start = copied(model.state_dict())
    trainer(model, tmp_path, WeightcastCallback(root), recorder, gradient_accumulation_steps=2).train()
    found = versions(root)
    assert (found[0].step, found[-1].step) == (0, 5)
    assert_same_bits(followed(root, start), model.state_dict())
    assert_same_bits(recorder.states[5], model.state_dict())
    assert not torch.equal(start["lm_head.weight"], model.state_dict()["lm_head.weight"])
    reader = reader_at(root)
    layout = reader.layout(reader.manifest(0).layout)
    assert layout["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    logged = reader.manifest(found[-1].version).metadata["trainer"]
    assert logged["step"] in (3, 4, 5)
    assert logged["loss"] > 0


def test_every_second_step_and_the_last(root: str, tmp_path: Path) -> None:
    """Each version is waited for, so that none coalesces with the next."""

    class Patient(WeightcastCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
            super().on_step_end(args, state, control, **found)
            self.stamp()

    model, callback = tiny_qwen3(), Patient(root, every=2)
    trainer(model, tmp_path, callback).train()
    assert [v.step for v in versions(root)] == [0, 2, 4, 5]
    assert_same_bits(followed(root, model.state_dict()), model.state_dict())
    stamp = callback.stamp()
    assert stamp is not None
    assert (stamp.version, stamp.step) == (3, 5)


def test_a_run_that_is_resumed_goes_on_in_the_stream(root: str, tmp_path: Path) -> None:
    model = tiny_qwen3()
    trainer(model, tmp_path, WeightcastCallback(root), save_strategy="steps", save_steps=3).train()
    again = tiny_qwen3()
    trainer(again, tmp_path, WeightcastCallback(root), max_steps=7).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    assert versions(root)[-1].step == 7
    assert_same_bits(followed(root, model.state_dict()), again.state_dict())


def test_what_is_pulled_from_the_stream_loads_as_a_model(root: str, tmp_path: Path) -> None:
    """A model whose experts are stacked in memory is published as it is saved, with its config."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = Qwen3MoeForCausalLM(config)
    trainer(model, tmp_path / "run", WeightcastCallback(root), max_steps=2).train()
    names = checkpoint_tensors(model).keys()
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names
    assert names != model.state_dict().keys()
    reader, head = reader_at(root), versions(root)[-1].version
    with ThreadPoolExecutor(2) as pool:
        state = rebuild(reader, head, pool)
        export(state, fetch_files(reader, state.position.manifest.files), tmp_path / "pulled")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pulled")
    assert_same_bits(loaded.state_dict(), model.state_dict())


def test_an_adapter_is_refused(root: str, tmp_path: Path) -> None:
    model = tiny_qwen3()
    model.peft_config = {"default": object()}
    callback = WeightcastCallback(root)
    with pytest.raises(UsageError, match="adapter on another"):
        callback._check(model)


def test_a_model_in_parts_that_nobody_can_place_is_refused_before_it_trains(root: str) -> None:
    model = tiny_qwen3()
    model.model.norm.weight._fsdp_flattened = True  # as FSDP1 leaves it
    with pytest.raises(UsageError, match=r"'model\.norm\.weight' is flattened by FSDP1"):
        WeightcastCallback(root).on_train_begin(None, None, None, model=model)


def test_processes_that_are_not_the_main_one_publish_nothing(root: str) -> None:
    from transformers import TrainerState

    callback, model = WeightcastCallback(root), tiny_qwen3()
    state = TrainerState(is_world_process_zero=False, global_step=1)
    callback.on_train_begin(None, state, None, model=model)
    callback.on_step_end(None, state, None, model=model)
    callback.on_train_end(None, state, None, model=model)
    assert callback.stamp() is None
