"""The tensors of a model: which memory is its own, and how to give it back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True, slots=True)
class Owned:
    """A storage of the model.

    Attributes:
        name: of the first parameter, buffer or attribute that lies in it.
        tensor: that one.
        reason: why nothing can be kept up to date in it; "" if it can.
    """

    name: str
    tensor: torch.Tensor
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Replaced:
    """A tensor of the model that was another one, or lay elsewhere, when it was put back."""

    name: str
    before: int  # storage, as `storage_of`
    after: int


@dataclass(frozen=True, slots=True)
class _Kept:
    tensor: torch.Tensor
    alias: torch.Tensor  # another tensor object over the same memory, which nobody else knows
    looks: tuple[object, ...]


class Belongings:
    """Parameters, buffers and tensor attributes of a model, as they are at construction.

    Holds the tensors themselves, no copies.

    Attributes:
        owned: by storage (`storage_of`).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.owned: dict[int, Owned] = {}
        self._kept: dict[int, _Kept] = {}
        self._registries: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = []
        modules = list(model.named_modules())
        for prefix, module in modules:
            for registry in (module._parameters, module._buffers):
                self._registries.append((prefix, registry, dict(registry), True))
        for prefix, module in modules:  # after all places, so that an alias of one is not taken for the place
            tensors = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
            self._registries.append((prefix, vars(module), tensors, False))
        for prefix, _, before, registered in self._registries:
            for key, tensor in before.items():
                if isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and _is_plain(tensor):
                    self._keep(f"{prefix}.{key}".removeprefix("."), tensor, registered)

    def restore(self) -> list[Replaced]:
        """Put back every tensor that is not where it was. Returns what was found instead.

        A tensor attribute that is new stays; see `new`.
        """
        replaced = []
        for prefix, registry, before, registered in self._registries:
            for key, tensor in before.items():
                name = f"{prefix}.{key}".removeprefix(".")
                found = registry.get(key)
                if isinstance(tensor, torch.Tensor) and found is not tensor:
                    after = storage_of(found) if isinstance(found, torch.Tensor) else 0
                    replaced.append(Replaced(name, storage_of(tensor), after))
            if registered and not _same(registry, before):
                registry.clear()
                registry.update(before)
            elif not registered:
                registry.update(before)
        return replaced + self._restore_data()

    def new(self) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
        """Tensors that the model did not have: name, the dictionary that holds it, its key there, the tensor."""
        for prefix, registry, before, _ in self._registries:
            for key, tensor in list(registry.items()):
                if isinstance(tensor, torch.Tensor) and key not in before:
                    yield f"{prefix}.{key}".removeprefix("."), registry, key, tensor

    def _keep(self, name: str, tensor: torch.Tensor, registered: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            alias = tensor.detach()
        storage = storage_of(tensor)
        self._kept.setdefault(id(tensor), _Kept(tensor, alias, _looks(tensor)))
        self.owned.setdefault(storage, Owned(name, tensor, _why_not(tensor, registered)))

    def _restore_data(self) -> list[Replaced]:
        replaced = []
        for kept in self._kept.values():
            if _looks(kept.tensor) != kept.looks:
                before = storage_of(kept.alias)
                replaced.append(Replaced(self.owned[before].name, before, storage_of(kept.tensor)))
                with torch._C.DisableTorchFunctionSubclass():
                    kept.tensor.data = kept.alias
        return replaced


def storage_of(tensor: torch.Tensor) -> int:
    """Which storage a tensor is a view of; 0 if it has none. Two tensors share memory if this is equal.

    The number of a storage that has been freed may come again, unless somebody holds a weak reference.
    """
    return int(tensor.untyped_storage()._cdata) if _is_plain(tensor) else 0


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _looks(tensor: torch.Tensor) -> tuple[object, ...]:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return storage_of(tensor), shape, stride, tensor.storage_offset(), tensor.dtype


def _same(registry: dict[str, Any], before: dict[str, Any]) -> bool:
    return list(registry) == list(before) and all(registry[key] is before[key] for key in before)


def _why_not(tensor: torch.Tensor, registered: bool) -> str:
    if not registered:
        return "it is neither a parameter nor a buffer"
    if bool(is_traceable_wrapper_subclass(tensor)):
        return f"it is a {type(tensor).__name__}, whose bits lie in other tensors"
    return "it has no memory" if tensor.device.type == "meta" else ""
