"""The proof that two processes hold the same weights: SHA-256 of each tensor's bytes, and a state digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weightcast.codec import Geometry, Memory, digest_all
from weightcast.schemas.dtypes import TORCH_NAMES
from weightcast.schemas.layout import Layout, TensorSpec

from .messages import Proof


@dataclass(frozen=True)
class Verdict:
    """What came of comparing a subscriber's weights with the trainer's.

    Attributes:
        equal: tensors whose bytes have the trainer's SHA-256.
        tensors: tensors that either side has.
        problems: every difference, in a sentence each; empty if the weights are the same.
    """

    equal: int
    tensors: int
    problems: tuple[str, ...]


def prove(version: int, weights: Mapping[str, Tensor]) -> Proof:
    """Read all bytes of `weights`, host tensors of any dtype, and say which they are."""
    flat = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    return Proof(
        version=version,
        digest=_state_digest(flat),
        sha256={name: _sha256(tensor) for name, tensor in flat.items()},
    )


def compare(trainer: Proof, subscriber: Proof) -> Verdict:
    """Compare a subscriber's weights with the trainer's."""
    names = sorted(trainer.sha256.keys() | subscriber.sha256.keys())
    different = [name for name in names if trainer.sha256.get(name) != subscriber.sha256.get(name)]
    problems = [f"tensor {name} does not have the trainer's bytes" for name in different]
    if subscriber.version != trainer.version:
        problems.append(f"it holds version {subscriber.version}, the trainer published {trainer.version}")
    if subscriber.digest != trainer.digest:
        problems.append(f"its state digest is {subscriber.digest}, the trainer's is {trainer.digest}")
    return Verdict(len(names) - len(different), len(names), tuple(problems))


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _state_digest(weights: Mapping[str, Tensor]) -> str:
    layout = Layout.of(
        TensorSpec(name, TORCH_NAMES[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape))
        for name, tensor in weights.items()
    )
    memory = Memory.over(Geometry(layout), {name: (t.data_ptr(), t.nbytes, t) for name, t in weights.items()})
    return str(digest_all(memory.geometry, memory))
