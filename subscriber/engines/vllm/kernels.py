"""What a linear layer of vLLM computes with, found by running it.

A layer's parameter need not be what its kernel reads: some kernels pack the weights into a buffer of their own at load
time. A layer that is given a row with a single 1 answers with a column of the weights, bit for bit, whatever their
layout; and a layer whose weights are all negated answers with all signs turned, bit for bit, since rounding is
symmetric. Both need no knowledge of the kernel.

Shapes: N outputs, K inputs of a rank's part of a layer; weights are [N, K] in checkpoint layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

_LINEAR: Final = "vllm.model_executor.layers.linear"
_EMBEDDING: Final = "vllm.model_executor.layers.vocab_parallel_embedding"
_COLUMNS: Final = 32  # read back exactly for each layer; a stale or misplaced row shows in every one of them
_MIXTURES: Final = 4  # rows that mix all columns; a stale column shows in each of them
_TINY: Final = torch.finfo(torch.float32).tiny  # some kernels take smaller values for 0

_DTYPES: Final = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
)  # of inputs, too; smaller ones have no arithmetic

FAILURES: Final = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
"""What layers, loaders and kernels of vLLM raise when they are asked for what they cannot do."""


@dataclass(frozen=True)
class Kernel:
    """A linear layer, or the head.

    Attributes:
        shape: [N, K] of this rank's weights before any kernel packed them.
        plain: not quantised: outputs are products of the checkpoint's own values.
    """

    name: str
    module: Any
    shape: tuple[int, int]
    dtype: torch.dtype
    plain: bool

    def columns(self) -> torch.Tensor:
        """Which columns are read back: int64, ascending, spread by a hash of the layer's name."""
        count = min(_COLUMNS, self.shape[1])
        seed = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:7], "big")
        order = torch.randperm(self.shape[1], generator=torch.Generator().manual_seed(seed))
        return order[:count].sort().values

    def units(self) -> torch.Tensor:
        """Inputs [columns, K] that read the columns back."""
        columns = self.columns()
        units = torch.zeros(len(columns), self.shape[1])
        units[torch.arange(len(columns)), columns] = 1
        return self._placed(units)

    def mixtures(self) -> torch.Tensor:
        """Inputs [mixtures, K] that every weight has a part in."""
        generator = torch.Generator().manual_seed(self.shape[1])
        return self._placed(torch.rand(_MIXTURES, self.shape[1], generator=generator) + 0.5)

    def outputs(self, module: Any = None) -> torch.Tensor:
        """[columns + mixtures, N] without bias and without any collective, of this layer or one that stands in."""
        module = self.module if module is None else module
        with torch.inference_mode():
            rows = (self.units(), self.mixtures())
            return torch.cat([module.quant_method.apply(module, x, None) for x in rows]).clone()

    def reads(self, weights: torch.Tensor, outputs: torch.Tensor) -> bool:
        """Whether outputs show these weights: equal in the columns, but for zeros' signs and what is below float32.

        Rows with an infinity or a NaN say nothing: a single one turns the whole row into NaN.
        """
        columns = self.columns().to(weights.device)
        expected = weights.index_select(1, columns).t().float()
        found = outputs[: len(columns)].float()
        ignored = ~weights.isfinite().all(1)
        return bool((((expected - found).abs() <= _TINY) | ignored).all())

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(device=next(self.module.parameters()).device, dtype=self.dtype)


def kernels(model: torch.nn.Module) -> Iterator[Kernel]:
    """Linear layers and heads that are computed in vLLM's usual way, once each.

    A subclass with a forward of its own may read its weights past the kernel; it is left out, and so are layers whose
    checkpoint is quantised.
    """
    from vllm.model_executor.layers.linear import (  # type: ignore[import-not-found,unused-ignore]
        LinearBase,
        UnquantizedLinearMethod,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found,unused-ignore]
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    for name, module in model.named_modules():
        usual = isinstance(module, ParallelLMHead) or (
            isinstance(module, LinearBase) and type(module).forward.__module__ == _LINEAR
        )
        weight = original(module).get("weight") if usual else None
        if weight is None or weight.ndim != 2 or weight.dtype not in _DTYPES:
            continue
        shape = (int(weight.shape[0]), int(weight.shape[1]))
        yield Kernel(name, module, shape, weight.dtype, isinstance(module.quant_method, plain))


def original(module: Any) -> dict[str, torch.Tensor]:
    """The layer's parameters as they were before kernels packed them: meta tensors, noted by vLLM at load time."""
    from vllm.model_executor.model_loader.reload.layerwise import (  # type: ignore[import-not-found,unused-ignore]
        get_layerwise_info,
    )

    return dict(get_layerwise_info(module).restore_metadata[0])


def stand_in(module: Any, weight: torch.Tensor) -> Any:
    """A layer that shares everything with another one but its weight. The other one is not changed."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    parameter = torch.nn.Parameter(weight, requires_grad=False)
    twin.__dict__["_parameters"] = {**module._parameters, "weight": parameter}
    return twin


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values of one shape; zeros of either sign are equal, and so are NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def negated(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether b is a with all signs turned, and not all zero."""
    return same(-a, b) and bool((a != 0).any())
