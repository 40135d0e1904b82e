"""Follows tensors through a loader, operation by operation, and keeps it from writing to the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from weightcast.codec.regions import Region, overlaps, simplify
from weightcast.schemas.errors import UsageError

from .belongings import Owned, storage_of
from .images import Image
from .mosaic import Mosaic
from .operations import (
    CLONES,
    COPIES,
    FILLS,
    VIEWS,
    Signature,
    cast,
    ghost,
    is_lazy_math,
    mismatch,
    region_of,
    signature_of,
    squeezed,
    tensors_in,
)

_aten = torch.ops.aten

Content = Image | Mosaic | frozenset[str]
"""What a storage holds; names: of the tensors that it was computed from."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A recorded copy: when, and from where to where."""

    order: int
    tensor: str
    source: Region
    place: str
    target: Region


@dataclass(frozen=True, slots=True)
class Overwrite:
    """A write of anything else to a place: when, and what it reaches."""

    order: int
    place: str
    target: Region


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while a loader runs. No operation on a storage in `owned` that would change it is executed.

    Nor are operations that would compute from checkpoint tensors: results have the right shape and any content, so
    that memory of checkpoint tensors is never read. Threads that the loader starts are not seen, nor are reads through
    `numpy()` and `tolist()`.

    Attributes:
        subject: whose code is followed, for the reasons.
        current: name that the loader took last; None before the first and after the last.
        copies: what was recorded.
        overwrites: other writes to the model.
        refused: name -> why its copies, if there are any, are not all that happens to it.
    """

    subject = "the loader"

    def __init__(self, owned: Mapping[int, Owned]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current: str | None = None
        self.copies: list[Copy] = []
        self.overwrites: list[Overwrite] = []
        self.refused: dict[str, str] = {}
        self._owned = owned
        self._known: dict[int, Content] = {}  # by storage
        self._casts: dict[int, str] = {}  # storages that were only cast: from what to what
        self._references: list[StorageWeakRef] = []  # so that no number of a storage comes twice

    def track(self, tensor: torch.Tensor, known: Content) -> None:
        """Say what the storage of a tensor holds."""
        storage = storage_of(tensor)
        if storage and storage not in self._known:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._references.append(reference)
        self._known[storage] = known

    def names(self, storage: int) -> frozenset[str]:
        """Which checkpoint tensors a storage holds, or was computed from."""
        known = self._known.get(storage, frozenset())
        return known if isinstance(known, frozenset) else known.names

    def owner(self, tensor: torch.Tensor) -> Owned | None:
        """The model's storage that a tensor is a view of, if it is one."""
        return self._owned.get(storage_of(tensor))

    def refuse(self, names: Iterable[str | None], reason: str) -> None:
        """The first reason stays."""
        for name in names:
            if name is not None:
                self.refused.setdefault(name, reason)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        signature = signature_of(func)
        if signature.composite:
            with self:
                return func.decompose(*args, **kwargs)
        if signature.writes and not signature.turns:
            return self._write(func, signature, args, kwargs)
        if (signature.returns and all(signature.returns)) or signature.turns or func in VIEWS:
            return func(*args, **kwargs)
        names = self._names_in((args, kwargs))
        return self._compute(func, signature, args, kwargs, names) if names else func(*args, **kwargs)

    def _names_in(self, values: Any) -> frozenset[str]:
        found = [self.names(storage_of(t)) for t in tensors_in(values)]
        return frozenset().union(*found)

    # -- operations that write

    def _write(self, func: Any, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        places = [args[at] if at < len(args) else kwargs[name] for at, name in signature.writes]
        written = list(tensors_in(places))
        names = self._names_in((args, kwargs))
        storages = [storage_of(t) for t in written]
        if not any(s in self._owned for s in storages):
            if not names or func.overloadpacket is _aten.set_:
                return func(*args, **kwargs)
            for tensor, value in self._pairs(func, args, written):
                self._spoil(func, tensor, value, names)
        else:
            for tensor, value in self._pairs(func, args, written):
                if storage_of(tensor) not in self._owned:
                    self._spoil(func, tensor, value, names)
                elif func in COPIES or func in FILLS:
                    self._store(tensor, value, func)
                else:
                    self._damage(tensor, names, f"written by {func}")
        if not all(signature.returns):
            raise NotImplementedError(f"{func} writes to the model and returns something else")
        return None if not signature.returns else places[0] if len(signature.returns) == 1 else tuple(places)

    def _pairs(
        self, func: Any, args: tuple[Any, ...], written: list[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, Any]]:
        values = (
            args[1]
            if func is _aten._foreach_copy_.default
            else [args[1] if len(args) > 1 else 0] * len(written)
        )
        return zip(written, values, strict=True)

    def _spoil(self, func: Any, tensor: torch.Tensor, value: Any, names: frozenset[str]) -> None:
        """Memory that is not the model's gets values from checkpoint tensors."""
        known = self._known.get(storage_of(tensor))
        if isinstance(known, Image):
            self.refuse([known.tensor], f"{self.subject} changes the loaded tensor in place")
            names |= {known.tensor}
        self.track(tensor, names | (known if isinstance(known, frozenset) else frozenset()))

    def _store(self, target: torch.Tensor, value: Any, func: Any) -> None:
        """A copy or a fill of a part of the model."""
        known = self._known.get(storage_of(value)) if isinstance(value, torch.Tensor) else None
        constant = known is None and (func in FILLS or not value.dim())
        if constant:
            self._overwrite(target)
        elif known is None:
            self._damage(target, frozenset(), "written from a tensor that is not in the checkpoint")
        elif not isinstance(known, Image):
            how = self._casts.get(storage_of(value))
            self._damage(target, self.names(storage_of(value)), how or "written from a computed tensor")
        else:
            self._copy(target, value, known)

    def _copy(self, target: torch.Tensor, value: torch.Tensor, image: Image) -> None:
        owned = self._owned[storage_of(target)]
        reason = owned.reason or mismatch(target, value, image.width, owned)
        source = image.view(region_of(value)) if not reason else None
        if source is None:
            reason = reason or "written from a view that is no strided part of the tensor"
            self._damage(target, frozenset({image.tensor}), reason)
            return
        if not source.elements:
            return
        try:
            source, place = simplify(squeezed(source), squeezed(region_of(target)))
        except UsageError:
            self._damage(target, frozenset({image.tensor}), "written from or to an overlapping view")
            return
        self.copies.append(Copy(self._next(), image.tensor, source, owned.name, place))

    def _damage(self, target: torch.Tensor, names: frozenset[str], reason: str) -> None:
        """A part of the model gets something that is not plainly a checkpoint tensor's."""
        name = self._owned[storage_of(target)].name
        self.refuse(names or [self.current], f"{name}: {reason}")
        self._overwrite(target)

    def _overwrite(self, target: torch.Tensor) -> None:
        name = self._owned[storage_of(target)].name
        region = region_of(target)
        if region.elements:
            span = Region((region.stop - region.offset,), (1,), region.offset)
            self.overwrites.append(Overwrite(self._next(), name, span if overlaps(region) else region))

    def _next(self) -> int:
        return len(self.copies) + len(self.overwrites)

    # -- operations that compute

    def _compute(
        self,
        func: Any,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: frozenset[str],
    ) -> Any:
        if signature.reads and not (func is _aten.index.Tensor and not self._names_in(args[1:])):
            self.refuse(names, f"{self.subject} looks at values")
        if func is _aten._local_scalar_dense.default:
            return True if args[0].dtype is torch.bool else 1 if not args[0].is_floating_point() else 1.0
        if signature.reads:
            result = func(*args, **kwargs)
            tree_map_only(torch.Tensor, lambda t: self.track(t, names), result)
            return result
        return self._imagine(func, args, kwargs, names)

    def _imagine(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: frozenset[str]
    ) -> Any:
        """Results of the right look, without computing them."""
        device = kwargs.get("device") or next(
            t.device for t in tensors_in((args, kwargs)) if self.names(storage_of(t))
        )
        options = {**kwargs, **({"device": "meta"} if kwargs.get("device") else {})}
        options.pop("pin_memory", None)
        looks = func(*tree_map_only(torch.Tensor, ghost, args), **tree_map_only(torch.Tensor, ghost, options))

        def blank(ghost: torch.Tensor) -> torch.Tensor:
            result = self._blank(ghost, device)
            self.track(result, self._content(func, args, result) or names)
            if func in CLONES and args[0].dtype is not result.dtype:
                self._casts[storage_of(result)] = cast(args[0], result)
            return result

        return tree_map_only(torch.Tensor, blank, looks)

    def _blank(self, ghost: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        """New memory for a result; nothing writes to it."""
        return torch.empty_strided(ghost.size(), ghost.stride(), dtype=ghost.dtype, device=device)

    def _content(self, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> Content | None:
        """What the new storage of `result` holds, if that was only copied."""
        if func not in CLONES:
            return None
        value: torch.Tensor = args[0]
        known = self._known.get(storage_of(value))
        if not isinstance(known, Image) or value.dtype is not result.dtype or is_lazy_math(value):
            return None
        if value.element_size() != known.width:
            return None
        return known.copied(region_of(value), region_of(result))
