"""Models in torch whose weights move as training moves them: what is published, and what is to become the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from ..data import DISTINCT_LAYERS, F32, LAYER_ELEMENTS, U16, Walk, layers, to_bf16


class Model(Protocol):
    """A model that has a next version, again and again. Two of the same sizes have the same bits."""

    def tensors(self) -> dict[str, Tensor]:
        """The first version, in memory of its own."""

    def move(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the next version into `tensors`, in place."""


class Flipping:
    """Large and cheap: two states that take turns, made of a few distinct layers.

    Args:
        mib: bf16 bytes in MiB.
        density: share of elements in which the two differ.
        elements: of a layer.
    """

    def __init__(self, mib: int, density: float, elements: int = LAYER_ELEMENTS) -> None:
        made = layers(density, elements)
        self.share = made.share
        self._count = max(1, mib * (1 << 19) // elements)
        self._sides = [[as_bf16(layer) for layer in side] for side in (made.old, made.new)]
        self._side = 0

    def tensors(self) -> dict[str, Tensor]:
        """The first of the two states."""
        return {layer_name(i): self._sides[0][i % DISTINCT_LAYERS].clone() for i in range(self._count)}

    def move(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the other state."""
        self._side ^= 1
        for i, tensor in enumerate(tensors.values()):
            tensor.copy_(self._sides[self._side][i % DISTINCT_LAYERS])


class Wandering:
    """Large, and never the same twice: each version moves elements drawn anew by one bf16 step, up or down.

    Args:
        mib: bf16 bytes in MiB.
        density: share of elements that are drawn.
        elements: of a layer.
    """

    def __init__(self, mib: int, density: float, elements: int = LAYER_ELEMENTS) -> None:
        self._rng, self._density = np.random.default_rng(0), density
        self._count, self._elements = max(1, mib * (1 << 19) // elements), elements

    def tensors(self) -> dict[str, Tensor]:
        """Layers whose weights are N(0, 0.02)."""
        made = [as_bf16(to_bf16(self._normal())) for _ in range(min(DISTINCT_LAYERS, self._count))]
        return {layer_name(i): made[i % len(made)].clone() for i in range(self._count)}

    def move(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the next version."""
        for tensor in tensors.values():
            bits, drawn = tensor.view(torch.int16).numpy(), int(self._density * tensor.numel())
            at = self._rng.integers(0, len(bits), drawn)
            bits[at] += self._rng.integers(0, 2, drawn, np.int16) * 2 - 1

    def _normal(self) -> F32:
        return self._rng.standard_normal(self._elements, np.float32) * np.float32(0.02)


class Walking:
    """Small: each version is another AdamW step.

    Args:
        elements: of the model.
        density: share of them that a step changes, about.
        parts: tensors that it is cut into.
    """

    def __init__(self, elements: int, density: float, parts: int = 8) -> None:
        self._walk, self._parts = Walk(elements, density), parts
        self._first = self._walk.bits()

    def tensors(self) -> dict[str, Tensor]:
        """The state before the first step."""
        return {layer_name(i): part.clone() for i, part in enumerate(self._chunks(self._first))}

    def move(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the state after the next step."""
        for tensor, part in zip(tensors.values(), self._chunks(self._walk.step()), strict=True):
            tensor.copy_(part)

    def _chunks(self, bits: U16) -> tuple[Tensor, ...]:
        return torch.chunk(as_bf16(bits), self._parts)


class ModelSpec(BaseModel):
    """A model by its sizes, so that two processes can have the same one.

    Attributes:
        elements: of a `Walking` model; 0: a `Flipping` one of `mib`.
        mib: bf16 bytes in MiB.
        layer_elements: of a `Flipping` one.
        density: share of elements that change.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    density: float
    elements: int = 0
    mib: int = 0
    layer_elements: int = LAYER_ELEMENTS

    def make(self) -> Model:
        """Make it."""
        if self.elements:
            return Walking(self.elements, self.density)
        return Flipping(self.mib, self.density, self.layer_elements)


def as_bf16(bits: U16) -> Tensor:
    """The same memory as a tensor."""
    return torch.from_numpy(bits.view("i2")).view(torch.bfloat16)


def layer_name(number: int) -> str:
    """As a checkpoint would name it."""
    return f"model.layers.{number:04d}.weight"


def same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    return all(torch.equal(t.view(torch.int16), right[name].view(torch.int16)) for name, t in left.items())


def check_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Stop the benchmark if a replica is not exact: its figures would be worthless."""
    if not same_bits(left, right):
        raise SystemExit("the replica's bits are not the model's")
