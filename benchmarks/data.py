"""Data as training makes it: bf16 copies of fp32 masters, before and after one AdamW step whose moments have settled.

Masters are N(0, 0.02), scaled by layer; the learning rate is set so that the wanted share of the bf16 elements changes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

LAYER_ELEMENTS: Final = 1 << 22
DISTINCT_LAYERS: Final = 4  # generated; repeated further apart than any row or zstd window reaches
BETA1: Final = 0.9
BETA2: Final = 0.999
EPSILON: Final = 1e-8
SETTLED_STEPS: Final = 20  # AdamW steps after moments that were drawn at their stationary size

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]


def to_bf16(values: F32) -> U16:
    """Round to nearest even, as bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def settled_step(layer: int) -> tuple[F32, F32]:
    """fp32 masters [LAYER_ELEMENTS] of a layer, and their next AdamW step at learning rate 1."""
    rng = np.random.default_rng(layer)
    scale = np.float32(0.02 * (0.5 + layer % 4 / 2))
    master = rng.standard_normal(LAYER_ELEMENTS, np.float32) * scale
    moment = rng.standard_normal(LAYER_ELEMENTS, np.float32) * np.float32(((1 - BETA1) / (1 + BETA1)) ** 0.5)
    square = np.ones(LAYER_ELEMENTS, np.float32)
    for _ in range(SETTLED_STEPS):
        gradient = rng.standard_normal(LAYER_ELEMENTS, np.float32)
        moment = np.float32(BETA1) * moment + np.float32(1 - BETA1) * gradient
        square = np.float32(BETA2) * square + np.float32(1 - BETA2) * gradient * gradient
    return master, (moment / (np.sqrt(square) + np.float32(EPSILON))).astype(np.float32)


def states(density: float, mib: int) -> tuple[U16, U16, float]:
    """bf16 bits before and after a step that changes `density` of them, and the share that really changed."""
    layers = [settled_step(i) for i in range(DISTINCT_LAYERS)]
    master, direction = (
        np.concatenate([part[: 1 << 18] for part in parts]) for parts in zip(*layers, strict=True)
    )
    low, high = 1e-9, 1e-2
    for _ in range(30):  # bisection in the exponent
        rate = (low * high) ** 0.5
        share = np.mean(to_bf16(master) != to_bf16(master - np.float32(rate) * direction))
        low, high = (rate, high) if share < density else (low, rate)
    old = np.concatenate([to_bf16(m) for m, _ in layers])
    new = np.concatenate([to_bf16(m - np.float32(rate) * d) for m, d in layers])
    repeats = -(-mib * (1 << 19) // len(old))
    return np.tile(old, repeats), np.tile(new, repeats), float(np.mean(old != new))
