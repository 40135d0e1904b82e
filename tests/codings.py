"""Weights that change as trained ones do, so that the coding `class` is the smallest."""

from __future__ import annotations

import torch


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two large bf16 tensors, a small one, and one of another dtype."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": (torch.randn(400, 200, generator=generator) * 0.04).bfloat16(),
        "b": (torch.randn(300, 300, generator=generator) * 0.02).bfloat16(),
        "norm": torch.ones(300, dtype=torch.bfloat16),
        "scale": torch.ones(70_000),
    }


def trained(model: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """A copy in which elements moved by one unit, each twice as often as those of twice its size."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in model.items():
        bits = tensor.view(torch.int16 if tensor.dtype is torch.bfloat16 else torch.int32).clone()
        exponents = (tensor.float().abs().log2().clamp(min=-126).floor() + 127).to(torch.float32)
        chance = (2.0 ** (113.5 - exponents)).clamp(max=0.5)
        at = torch.rand(tensor.shape, generator=generator) < chance
        up = torch.rand(tensor.shape, generator=generator) < 0.5
        bits += at * (up * 2 - 1).to(bits.dtype)
        moved[name] = bits.view(tensor.dtype)
    return moved
