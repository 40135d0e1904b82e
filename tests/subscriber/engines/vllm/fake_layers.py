"""As much of vLLM's layers and of its layerwise reload as the dense path touches, with kernels of each kind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import linear

INFOS: WeakKeyDictionary[torch.nn.Module, Info] = WeakKeyDictionary()
CONFIG = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))


class Info:
    """vLLM's notes on a layer that is being reloaded."""

    def __init__(self, layer: torch.nn.Module) -> None:
        meta = {name: _meta(p) for name, p in layer._parameters.items() if p is not None}
        self.restore_metadata: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = (meta, {})
        self.reset()

    def reset(self) -> None:
        self.load_numel = 0
        self.load_numel_total: int | None = None
        self.loaded: list[tuple[Any, ...]] = []
        self.kernel: dict[str, Any] | None = None

    def can_load(self) -> bool:
        return self.load_numel_total is not None


def _meta(parameter: torch.Tensor) -> Any:
    meta = parameter.data.to("meta")
    vars(meta).update(vars(parameter))
    return meta


class UnquantizedLinearMethod:
    """Reads the parameter, as default kernels of accelerators do."""

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear(x, layer.weight, bias)


class Packed(UnquantizedLinearMethod):
    """Packs the weights away, and leaves nothing of the parameter."""

    keep = False

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.kernel = lambda x, bias: linear(x, packed, bias)
        if not self.keep:
            layer.weight = Parameter(torch.empty(0, dtype=packed.dtype), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return layer.kernel(x, bias)  # type: ignore[no-any-return]


class PackedBeside(Packed):
    """Packs a copy and keeps the parameter."""

    keep = True


class PackedOnce(Packed):
    """Keeps what it packed first, whatever is loaded later: what a reload must not be trusted with."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if not hasattr(layer, "kernel"):
            super().process_weights_after_loading(layer)
        else:
            layer.weight = Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)


class PackedOnceBeside(PackedBeside):
    """The same with a parameter that is still there."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if not hasattr(layer, "kernel"):
            super().process_weights_after_loading(layer)


class LinearBase(torch.nn.Module):
    """Weights [n, k] that `parts` tensors fill, from above."""

    def __init__(self, n: int, k: int, method: UnquantizedLinearMethod, parts: int = 1) -> None:
        super().__init__()
        self.parts, self.quant_method = parts, method
        self.weight = Parameter(torch.zeros(n, k, dtype=torch.bfloat16), requires_grad=False)
        vars(self.weight)["weight_loader"] = self.load
        INFOS[self] = Info(self)

    def load(self, parameter: torch.Tensor, loaded: torch.Tensor, part: int = 0) -> None:
        rows = len(parameter) // self.parts
        target = parameter.data[part * rows : (part + 1) * rows]
        if target.shape != loaded.shape:
            raise AssertionError("shapes differ")
        target.copy_(loaded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.quant_method.apply(self, x, None)


LinearBase.forward.__module__ = "vllm.model_executor.layers.linear"


class ParallelLMHead(LinearBase):
    """The head."""


class Model(torch.nn.Module):
    """qkv of two tensors, out, a head, and experts that are no linear layer."""

    def __init__(
        self, qkv: UnquantizedLinearMethod, out: UnquantizedLinearMethod, head: UnquantizedLinearMethod
    ) -> None:
        super().__init__()
        self.qkv, self.out, self.head = (
            LinearBase(8, 6, qkv, 2),
            LinearBase(6, 8, out),
            ParallelLMHead(10, 6, head),
        )
        self.experts = Parameter(torch.zeros(4, 4, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "experts":
                self.experts.data.copy_(tensor)
            else:
                layer, _, part = name.partition(".")
                weight = getattr(self, layer).weight
                weight.weight_loader(weight, tensor, int(part or 0))

    def outputs(self) -> torch.Tensor:
        """Of everything, for a fixed input."""
        x = torch.arange(12, dtype=torch.bfloat16).reshape(2, 6) - 5
        qkv = self.qkv(x)
        return torch.cat([qkv, self.out(qkv), self.head(x), (self.experts * 1).reshape(2, 8)], 1).clone()


def weights(seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint of `Model`."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"qkv.0": (4, 6), "qkv.1": (4, 6), "out": (6, 8), "head": (10, 6), "experts": (4, 4)}
    return {name: torch.randn(shape, generator=random).to(torch.bfloat16) for name, shape in shapes.items()}


def started(model: Model, checkpoint: dict[str, torch.Tensor]) -> Model:
    """The model with a checkpoint's weights, as a server has it."""
    model.load_weights(checkpoint.items())
    for layer in (model.qkv, model.out, model.head):
        layer.quant_method.process_weights_after_loading(layer)
    return model


def initialize_layerwise_reload(model: torch.nn.Module) -> None:
    for layer in model.modules():
        for buffer in layer.buffers(recurse=False):
            torch.nn.init.ones_(buffer)  # as happens to those that no checkpoint has
        if layer not in INFOS:
            continue
        info = INFOS[layer]
        info.kernel = dict(layer._parameters)
        info.load_numel_total = 0
        for name, meta in info.restore_metadata[0].items():
            weight = Parameter(
                torch.full(meta.shape, 77.0, dtype=meta.dtype), requires_grad=False
            )  # undefined memory
            vars(weight).update(
                vars(meta) | {"weight_loader": _buffering(layer, info, vars(meta)["weight_loader"])}
            )
            layer._parameters[name] = weight
            info.load_numel_total += weight.numel()


def _buffering(layer: Any, info: Info, loader: Callable[..., None]) -> Callable[..., None]:
    def load(parameter: torch.Tensor, loaded: torch.Tensor, *args: Any) -> None:
        info.loaded.append((loader, loaded, *args))
        info.load_numel += loaded.numel()
        if info.load_numel >= (info.load_numel_total or 0):
            _process(layer, info)

    return load


def _process(layer: Any, info: Info) -> None:
    for loader, loaded, *args in info.loaded:
        loader(layer.weight, loaded, *args)
    layer.quant_method.process_weights_after_loading(layer)
    kernel = info.kernel or {}
    for name, parameter in kernel.items():
        parameter.data.copy_(getattr(layer, name))
    layer._parameters.update(kernel)
    info.reset()


def finalize_layerwise_reload(model: torch.nn.Module, config: Any) -> None:
    for layer in model.modules():
        if layer in INFOS and INFOS[layer].can_load():
            _process(layer, INFOS[layer])


@contextmanager
def _config(config: Any) -> Iterator[None]:
    yield


def install(patch: pytest.MonkeyPatch) -> None:
    """Make these the layers that `import vllm` finds."""
    here = globals()
    members = {
        "vllm.config": {"set_current_vllm_config": _config},
        "vllm.model_executor.layers.linear": {
            name: here[name] for name in ("LinearBase", "UnquantizedLinearMethod")
        },
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "ParallelLMHead": ParallelLMHead,
            "UnquantizedEmbeddingMethod": UnquantizedLinearMethod,
        },
        "vllm.model_executor.model_loader.reload.layerwise": {
            "get_layerwise_info": lambda layer: INFOS[layer],
            "initialize_layerwise_reload": initialize_layerwise_reload,
            "finalize_layerwise_reload": finalize_layerwise_reload,
        },
    }
    for name, content in members.items():
        steps = name.split(".")
        for depth in range(1, len(steps) + 1):
            package = ".".join(steps[:depth])
            if package not in sys.modules:
                patch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[name]).update(content)
