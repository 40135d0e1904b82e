"""Small Qwen3 checkpoints, a real AdamW run over them, and the streams that it publishes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from weightcast.publisher import Publisher, PublisherSettings

Kind = Literal["dense", "tied", "moe", "biased", "large"]

VERSIONS: Final = {"dense": 40, "tied": 6, "moe": 6, "biased": 1, "large": 5}
"""Versions after version 0, by kind of model. Tests of faults and load go on from where others ended."""

DENSITY: Final = 0.02
"""Changed elements of a version of the large model, which is too large to be trained within the time of a test."""

SPECIAL: Final = (0x7FC1, 0xFFAB, 0x7F81, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0x8001)
"""bf16 bits: NaNs with payloads (quiet, negative, signalling), both zeros, both infinities, subnormals."""

SPECIAL_TENSOR: Final = "model.layers.1.mlp.down_proj.weight"
"""Whose first elements are `SPECIAL` in the version after the dense model's last trained one."""

_SIZES: Final = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "bos_token_id": None,
}

_LARGE: Final = _SIZES | {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
    "initializer_range": 0.04,
}
"""218 M parameters."""


@dataclass(frozen=True)
class Stream:
    """A published stream.

    Attributes:
        root: its folder.
        versions: the newest version.
        changed: elements whose bits version i + 1 changed.
    """

    root: Path
    versions: int
    changed: tuple[int, ...]


def make_stream(kind: Kind, folder: Path) -> Stream:
    """Publish all versions of one kind of model to `folder`/stream."""
    states = _flipped(folder / "start") if kind == "large" else _trained(kind, folder / "start")
    settings = PublisherSettings(threads=2, snapshot_every=0)
    changed: list[int] = []
    with Publisher(str(folder / "stream"), settings, fence=False) as publisher:
        for step, tensors in enumerate(states):
            files = _companions(folder / "start") if step == 0 else None
            manifest = publisher.publish(tensors, step=step, files=files).wait()
            changed.append(manifest.totals.changed)
    return Stream(folder / "stream", len(changed) - 1, tuple(changed[1:]))


def _trained(kind: Kind, folder: Path) -> Iterator[Mapping[str, Tensor]]:
    """The bf16 weights before and after each step of AdamW on random tokens; fp32 masters."""
    torch.manual_seed(7)
    disable_progress_bar()
    model = _build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6)
    _tokenizer().save_pretrained(folder)
    for step in range(VERSIONS[kind] + 1):
        if step:
            tokens_BT = torch.randint(2, _SIZES["vocab_size"], (8, 64))
            optimizer.zero_grad()
            torch.autograd.backward(model(input_ids=tokens_BT, labels=tokens_BT).loss)
            optimizer.step()
        state = _bf16_checkpoint(model, folder)
        yield state
    if kind == "dense":
        bits = state[SPECIAL_TENSOR].view(torch.int16).view(-1)
        bits[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.int32).to(torch.int16)
        yield state


def make_checkpoint(kind: Kind, folder: Path) -> Path:
    """A fresh model of random bf16 weights, with its tokenizer."""
    torch.manual_seed(7)
    disable_progress_bar()
    _build(kind).to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _build(kind: Kind) -> Any:
    if kind == "moe":
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **_SIZES, **sizes, decoder_sparse_step=1, norm_topk_prob=True, tie_word_embeddings=False
            )
        )
    biased = {"attention_bias": True, "num_key_value_heads": 1} if kind == "biased" else {}
    return Qwen3ForCausalLM(Qwen3Config(**(_SIZES | biased), tie_word_embeddings=kind == "tied"))


def _bf16_checkpoint(model: Any, folder: Path) -> Mapping[str, Tensor]:
    """The weights under the names of the model's checkpoint, which `save_pretrained` knows."""
    masters = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(torch.bfloat16).save_pretrained(folder)
    model.to(torch.float32).load_state_dict(masters)
    return load_file(folder / "model.safetensors")


def _flipped(folder: Path) -> Iterator[Mapping[str, Tensor]]:
    """A large model of random weights; each version flips the lowest bit of `DENSITY` of the elements."""
    torch.manual_seed(3)
    disable_progress_bar()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Qwen3ForCausalLM(Qwen3Config(**_LARGE, tie_word_embeddings=False))
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    yield state
    random = np.random.default_rng(5)
    for _ in range(VERSIONS["large"]):
        for tensor in state.values():
            bits = tensor.view(torch.int16).view(-1).numpy()
            bits ^= random.random(bits.size, dtype=np.float32) < DENSITY
        yield state


def _tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the spot: tests fetch nothing."""
    lines = [
        " ".join(f"w{i * j % 97} the sum of {i} and {j} is {i + j}" for j in range(20)) for i in range(200)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|end|>", "<|pad|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def _companions(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.json") if "index" not in path.name}
