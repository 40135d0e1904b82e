"""Linear layers whose kernels packed their weights away: reloaded whole, through vLLM's layerwise reload.

vLLM's reload answers with success where it does not reach a kernel's own copy of the weights (tied heads and experts on
its CPU build). So it is used only for layers that were seen to follow it: each is reloaded once with all signs turned
and must answer with all signs turned, and then gets its kernel's own state back, untouched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast.schemas.errors import Corrupt, UsageError, WeightcastError

from .kernels import FAILURES, Kernel, kernels, negated, original, same
from .snapshots import Snapshot

Source = Callable[[str], torch.Tensor]
"""Gives a checkpoint tensor, whole and on the host, by name. Mapped from a file: it is not written, nor kept."""


@dataclass(frozen=True)
class Judgement:
    """Which of the tensors that cannot be patched can be reloaded, on this rank.

    Attributes:
        dense: name -> why its layer is reloaded whole.
        refused: name -> why it cannot be reloaded either.
        differing: those of `dense` whose layer computes with other values than the source's.
    """

    dense: dict[str, str]
    refused: dict[str, str]
    differing: tuple[str, ...]


def judge(model: torch.nn.Module, vllm_config: Any, refused: Mapping[str, str], source: Source) -> Judgement:
    """Try the reload on every layer that refused tensors belong to. The model is afterwards what it was, bit for bit.

    Nothing may run on the model meanwhile. Needs memory for one layer's weights twice.

    Args:
        model: the rank's model.
        vllm_config: the rank's configuration.
        refused: stored tensors that cannot be patched in place here -> why.
        source: gives their values at some version, best the one that the engine holds.

    Raises:
        Corrupt: a layer did not come back as it was. The engine must be restarted.
    """
    layers = _layers(model, refused, source)
    dense: dict[str, str] = {}
    left = {name: f"{why}; no layer that can be reloaded alone takes it" for name, why in refused.items()}
    differing: list[str] = []
    for kernel, names in layers:
        fault, differs = _try(model, vllm_config, kernel, names, source)
        for name in names:
            if fault:
                left[name] = f"{refused[name]}; {kernel.name}: {fault}"
            else:
                dense[name] = left.pop(name)[: len(refused[name])]
        differing += names if differs and not fault else ()
    return Judgement(dense, left, tuple(differing))


def reload(model: torch.nn.Module, vllm_config: Any, names: Collection[str], source: Source) -> None:
    """Load tensors of layers that `judge` found sound, one layer after the other.

    Generation must be paused. Other layers are not touched.

    Args:
        names: all dense tensors of this rank.

    Raises:
        UsageError: tensors have no layer here. Nothing was loaded.
        Corrupt: tensors could not be loaded, do not fill their layer, or the layer computes with others. Layers may
            hold different versions until all were loaded again.
    """
    layers = _layers(model, names, source)
    if missing := sorted(set(names) - {name for _, own in layers for name in own}):
        raise UsageError(
            f"{missing[0]} and {len(missing) - 1} more: no layer takes them", hint="attach again"
        )
    for kernel, own in layers:
        state = Snapshot(kernel.module, contents=False)
        try:
            weights = _load(model, vllm_config, kernel, own, source)
        except (*FAILURES, WeightcastError) as error:
            state.restore()
            raise Corrupt(f"{kernel.name}: the engine's reload failed: {error}") from error
        if kernel.plain and not kernel.reads(weights, kernel.outputs()):
            raise Corrupt(f"{kernel.name}: the engine's reload left its kernel with other weights")


def _try(
    model: torch.nn.Module, vllm_config: Any, kernel: Kernel, names: Sequence[str], source: Source
) -> tuple[str, bool]:
    """What is wrong with reloading a layer ("" if nothing is), and whether it holds other values than the source."""
    if _is_shared(model, kernel):
        return "its weights are tied to another layer's", False
    before = kernel.outputs()
    state = Snapshot(kernel.module)
    try:
        plus = _load(model, vllm_config, kernel, names, source)
        as_source = kernel.outputs()
        state.restore()
        minus = _load(model, vllm_config, kernel, names, lambda name: -source(name))
        turned = kernel.outputs()
    except (*FAILURES, WeightcastError) as error:
        return f"the engine's reload failed: {error}", False
    finally:
        state.restore()
    if not torch.equal(_bits(kernel.outputs()), _bits(before)):
        raise Corrupt(f"{kernel.name}: could not be put back", hint="restart the engine")
    sound = negated(as_source, turned) and same(-plus, minus)
    shown = not kernel.plain or (kernel.reads(plus, as_source) and kernel.reads(minus, turned))
    fault = "" if sound and shown else "the engine's reload leaves its kernel with other weights"
    return fault, not same(before, as_source)


def _load(
    model: torch.nn.Module, vllm_config: Any, kernel: Kernel, names: Sequence[str], source: Source
) -> torch.Tensor:
    """Reload one layer. Returns the weights [N, K] that vLLM's loaders made of the tensors, before any packing.

    Raises:
        UsageError: the tensors do not fill the layer; its state is undefined.
    """
    from vllm.config import set_current_vllm_config  # type: ignore[import-not-found,unused-ignore]
    from vllm.model_executor.model_loader.reload.layerwise import (  # type: ignore[import-not-found,unused-ignore]
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    alone = torch.nn.ModuleList([kernel.module])
    seen: list[torch.Tensor] = []
    method = kernel.module.quant_method
    method.process_weights_after_loading = partial(_note_weights, method.process_weights_after_loading, seen)
    try:
        with set_current_vllm_config(vllm_config), torch.device(next(model.parameters()).device):
            initialize_layerwise_reload(alone)
            model.load_weights((name, source(name)) for name in names)  # type: ignore[operator]
            _check_filled(kernel)
            finalize_layerwise_reload(alone, vllm_config.model_config)
    finally:
        del method.process_weights_after_loading
    if len(seen) != 1:
        raise UsageError(f"{kernel.name}: packed {len(seen)} times by one reload")
    return seen[0]


def _note_weights(process: Callable[[Any], None], seen: list[torch.Tensor], layer: Any) -> None:
    seen.append(layer.weight.detach().clone())
    process(layer)


def _check_filled(kernel: Kernel) -> None:
    """A reload of some of a layer's elements succeeds, and leaves the others undefined."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    info = get_layerwise_info(kernel.module)
    if not info.can_load():
        return  # every element was loaded, so the layer is done
    padding = getattr(getattr(kernel.module, "shard_indices", None), "num_org_elements", kernel.shape[0])
    needed = padding * kernel.shape[1]
    if info.load_numel < needed:
        raise UsageError(f"{kernel.name}: {info.load_numel} of {needed} elements were loaded")


def _layers(
    model: torch.nn.Module, names: Collection[str], source: Source
) -> list[tuple[Kernel, tuple[str, ...]]]:
    """The layers that take these tensors as their weights, and only these; found by loading empty tensors.

    Writes are suppressed, so that loaders cannot reach parameters that a kernel packed into the same shape.
    """
    found = list(kernels(model))
    states = [Snapshot(kernel.module, contents=False) for kernel in found]
    probes = {name: torch.empty_like(source(name)) for name in names}
    by_storage = {probe.untyped_storage().data_ptr(): name for name, probe in probes.items()}
    takers: dict[str, set[int]] = {}
    try:
        for number, kernel in enumerate(found):
            _listen(kernel, partial(_note_taker, takers, by_storage, number))
        with _NoWrites():  # type: ignore[no-untyped-call,unused-ignore]
            _offer(model, probes)
    finally:
        for state in states:
            state.restore()
    return _grouped(found, takers)


def _grouped(found: Sequence[Kernel], takers: Mapping[str, set[int]]) -> list[tuple[Kernel, tuple[str, ...]]]:
    """Layers with their tensors in loading order; a tensor of several layers has none that can be reloaded alone."""
    groups: dict[int, list[str]] = {}
    shared = {number for numbers in takers.values() if len(numbers) > 1 for number in numbers}
    for name, numbers in takers.items():
        for number in numbers - shared:
            groups.setdefault(number, []).append(name)
    return [(found[number], tuple(names)) for number, names in sorted(groups.items())]


def _listen(kernel: Kernel, note: Callable[[torch.Tensor], None]) -> None:
    """Put the layer's original weight in place, empty, with a loader that only notes what it is given."""
    weight = original(kernel.module)["weight"]
    empty = torch.empty_strided(weight.size(), weight.stride(), dtype=weight.dtype, device="meta")
    empty.__class__ = weight.__class__
    empty.__dict__.update(weight.__dict__)

    def loader(parameter: torch.Tensor, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        note(loaded)

    empty.weight_loader = loader  # type: ignore[attr-defined]
    kernel.module._parameters["weight"] = empty


def _note_taker(
    takers: dict[str, set[int]], by_storage: Mapping[int, str], number: int, loaded: torch.Tensor
) -> None:
    if name := by_storage.get(loaded.untyped_storage().data_ptr()):
        takers.setdefault(name, set()).add(number)


def _offer(model: torch.nn.Module, probes: Mapping[str, torch.Tensor]) -> None:
    """Offer all tensors to the model's loader, past those that it fails on."""
    rest = list(probes.items())
    while rest:
        taken = 0

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal taken
            for pair in rest:  # noqa: B023
                taken += 1
                yield pair

        try:
            model.load_weights(stream())  # type: ignore[operator]
        except FAILURES:
            rest = rest[max(1, taken) :]
        else:
            return


class _NoWrites(TorchDispatchMode):  # type: ignore[no-untyped-call,unused-ignore]
    """Suppresses everything that writes into a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func._schema.is_mutable and args else func(*args, **(kwargs or {}))


def _is_shared(model: torch.nn.Module, kernel: Kernel) -> bool:
    """Whether another layer uses this layer's parameter."""
    weight = kernel.module._parameters.get("weight")
    layers = (layer for layer in model.modules() if layer is not kernel.module)
    return any(p is weight for layer in layers for p in layer._parameters.values() if p is not None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
