"""Data as training makes it: bf16 copies of fp32 masters, before and after one AdamW step whose moments have settled.

Masters are N(0, 0.02), scaled by layer; the learning rate is set so that the wanted share of the bf16 elements changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

LAYER_ELEMENTS: Final = 1 << 22
DISTINCT_LAYERS: Final = 4  # generated; repeated further apart than any row or zstd window reaches
BETA1: Final = 0.9
BETA2: Final = 0.999
EPSILON: Final = 1e-8
SETTLED_STEPS: Final = 5  # AdamW steps after moments that were drawn at their stationary size
_STATIONARY: Final = np.float32(((1 - BETA1) / (1 + BETA1)) ** 0.5)
"""Standard deviation of the first moment under gradients of N(0, 1)."""

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]


def to_bf16(values: F32) -> U16:
    """Round to nearest even, as bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@cache
def settled_step(layer: int, elements: int = LAYER_ELEMENTS) -> tuple[F32, F32]:
    """fp32 masters [elements] of a layer, and their next AdamW step at learning rate 1. Not to be written to."""
    rng = np.random.default_rng(layer)
    scale = np.float32(0.02 * (0.5 + layer % 4 / 2))
    master = rng.standard_normal(elements, np.float32) * scale
    moment = rng.standard_normal(elements, np.float32) * _STATIONARY
    square = np.ones(elements, np.float32)
    for _ in range(SETTLED_STEPS):
        gradient = rng.standard_normal(elements, np.float32)
        moment = np.float32(BETA1) * moment + np.float32(1 - BETA1) * gradient
        square = np.float32(BETA2) * square + np.float32(1 - BETA2) * gradient * gradient
    return master, (moment / (np.sqrt(square) + np.float32(EPSILON))).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Layers:
    """bf16 bits of some distinct layers before and after a step, and the share of them that changed."""

    old: list[U16]
    new: list[U16]
    share: float


def layers(density: float, elements: int = LAYER_ELEMENTS) -> Layers:
    """A step that changes `density` of the bf16 elements of `DISTINCT_LAYERS` layers."""
    made = [settled_step(i, elements) for i in range(DISTINCT_LAYERS)]
    master, direction = (
        np.concatenate([part[: 1 << 18] for part in parts]) for parts in zip(*made, strict=True)
    )
    rate = np.float32(rate_for(density, master, direction))
    old, new = [to_bf16(m) for m, _ in made], [to_bf16(m - rate * d) for m, d in made]
    share = np.mean([np.mean(a != b) for a, b in zip(old, new, strict=True)])
    return Layers(old, new, float(share))


def rate_for(density: float, master: F32, direction: F32) -> float:
    """The learning rate at which a step of `rate * direction` changes `density` of the rounded masters."""
    low, high, rate = 1e-9, 1.0, 1e-9
    for _ in range(40):  # bisection in the exponent
        rate = (low * high) ** 0.5
        share = float(np.mean(to_bf16(master) != to_bf16(master - np.float32(rate) * direction)))
        low, high = (rate, high) if share < density else (low, rate)
    return rate


def states(density: float, mib: int, elements: int = LAYER_ELEMENTS) -> tuple[U16, U16, float]:
    """bf16 bits before and after a step that changes `density` of them, and the share that really changed."""
    found = layers(density, elements)
    count = max(1, mib * (1 << 19) // elements)
    old, new = ([side[i % DISTINCT_LAYERS] for i in range(count)] for side in (found.old, found.new))
    return np.concatenate(old), np.concatenate(new), found.share


class Walk:
    """Masters that AdamW moves step by step under random gradients, so that each version is another one.

    Args:
        elements: of the model.
        density: share of its bf16 elements that a step changes, about.
        seed: of masters and gradients.
    """

    def __init__(self, elements: int, density: float, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.master = self._rng.standard_normal(elements, np.float32) * np.float32(0.02)
        self._moment = self._rng.standard_normal(elements, np.float32) * _STATIONARY
        self._square = np.ones(elements, np.float32)
        for _ in range(SETTLED_STEPS):
            self._advance()
        self._rate = np.float32(rate_for(density, self.master[: 1 << 20], self._moment[: 1 << 20]))

    def bits(self) -> U16:
        """The masters, rounded."""
        return to_bf16(self.master)

    def step(self) -> U16:
        """The next version's bits."""
        self._advance()
        self.master -= self._rate * self._moment / np.sqrt(self._square)
        return self.bits()

    def _advance(self) -> None:
        gradient = self._rng.standard_normal(len(self.master), np.float32)
        self._moment += np.float32(1 - BETA1) * (gradient - self._moment)
        self._square += np.float32(1 - BETA2) * (gradient * gradient - self._square)
