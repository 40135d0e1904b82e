"""Weights that a kernel reads from a copy of its own, although their parameter is still there.

Such a parameter reads back right and can be written, and the engine goes on with the old weights. Found by giving a
layer other weights than its own: outputs that do not follow come from a copy.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from weightcast.schemas.errors import Corrupt

from .kernels import FAILURES, Kernel, kernels, negated, stand_in

_ROWS = 64  # of a layer's weights that it is tried with: a kernel's usual tile, so no kernel refuses it


@dataclass(frozen=True)
class Copies:
    """Copies in a model.

    Attributes:
        refresh: layers that must pack their copy again after their parameter was written (`refresh`).
        refused: parameter name -> why writing it does not reach the kernel.
    """

    refresh: tuple[str, ...]
    refused: dict[str, str]


def find_copies(model: torch.nn.Module) -> Copies:
    """Look for copies. Nothing of the model is changed.

    Costs a product of a few rows with each layer, and a clone of the weights of layers that have a copy.
    """
    again: list[str] = []
    refused: dict[str, str] = {}
    for kernel in kernels(model):
        if _is_live(kernel) and not _follows(kernel):
            if _packs_again(kernel):
                again.append(kernel.name)
            else:
                reason = f"the kernel of {kernel.name} computes with a copy of it"
                refused |= dict.fromkeys(_names(model, kernel.module.weight), reason)
    refused |= _derived(model)
    return Copies(tuple(again), refused)


def refresh(model: torch.nn.Module, layers: Collection[str]) -> None:
    """Let layers pack their copies again from their parameters, as vLLM does when it has loaded a model.

    Raises:
        Corrupt: a layer's outputs do not show its parameter's values afterwards.
    """
    for kernel in kernels(model):
        if kernel.name not in layers:
            continue
        kernel.module.quant_method.process_weights_after_loading(kernel.module)
        if not kernel.reads(kernel.module.weight.data, kernel.outputs()):
            raise Corrupt(f"{kernel.name}: the kernel's copy is not what was written")


def _is_live(kernel: Kernel) -> bool:
    weight = kernel.module._parameters.get("weight")
    return weight is not None and tuple(weight.shape) == kernel.shape and weight.dtype == kernel.dtype


def _follows(kernel: Kernel) -> bool:
    weight = kernel.module.weight.data
    return any(_turns(kernel, weight[:rows]) for rows in sorted({min(_ROWS, len(weight)), len(weight)}))


def _turns(kernel: Kernel, weight: torch.Tensor) -> bool:
    """Whether the layer's outputs turn their signs if these weights do."""
    try:
        plus, minus = (kernel.outputs(stand_in(kernel.module, w)) for w in (weight, -weight))
    except FAILURES:
        return False
    return plus.shape[1] == len(weight) and negated(plus, minus)


def _packs_again(kernel: Kernel) -> bool:
    """Whether a layer of other weights, packed by the layer's own method, computes with these."""
    if not kernel.plain:
        return False
    twin = stand_in(kernel.module, -kernel.module.weight.data)
    try:
        twin.quant_method.process_weights_after_loading(twin)
        kept = tuple(twin._parameters["weight"].shape) == kernel.shape
        return kept and negated(kernel.outputs(), kernel.outputs(twin))
    except FAILURES:
        return False


def _derived(model: torch.nn.Module) -> dict[str, str]:
    """Parameters below layers that computed tensors of their own at load time, as latent attention does."""
    refused: dict[str, str] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "process_weights_after_loading"):
            continue
        own = [key for key, value in vars(module).items() if key != "kv_cache" and _is_weights(value)]
        reason = f"{name} computed {', '.join(own)} from its weights at load time"
        for parameter in module.parameters() if own else ():
            refused |= dict.fromkeys(_names(model, parameter), reason)
    return refused


def _is_weights(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1


def _names(model: torch.nn.Module, wanted: torch.Tensor) -> list[str]:
    """All names of a parameter, those of layers that share it too."""
    named = model.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if parameter is wanted]
