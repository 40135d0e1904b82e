"""CPU layers that compute from their parameters as they were loaded.

vLLM's CPU backend packs every linear layer into a handle and drops the parameter, and packs experts in place. CUDA's default
kernels do neither, so these layers stand for a GPU's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


def keep_linears() -> None:
    """Unquantised linear layers and heads call torch on `layer.weight`."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _keep


def _keep(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = _linear


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(x, weight, bias)


def keep_experts() -> None:
    """Unquantised experts loop over `w13_weight` and `w2_weight`."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    kinds = [cpu_moe.CPUUnquantizedExperts, *cpu_moe.CPUUnquantizedExperts.__subclasses__()]
    for kind in kinds:  # one for each instruction set
        kind.process_weights_after_loading = _leave
        kind.apply = _apply


def _leave(self: Any, layer: torch.nn.Module) -> None:
    self._use_zentorch = False


def _apply(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: Tensor | None,
    *rest: Any,
    **more: Any,
) -> None:
    """SiLU-gated experts, one after the other; those of other ranks add nothing here."""
    ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    total = torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in range(w1.shape[0]):
        token, slot = torch.where(ids == expert)
        if token.numel():
            gate, up = linear(hidden_states[token], w1[expert]).chunk(2, -1)
            out = linear(silu(gate) * up, w2[expert]).float()
            total.index_add_(0, token, out * topk_weights[token, slot].float().unsqueeze(-1))
    output.copy_(total.to(output.dtype))
