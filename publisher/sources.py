"""What a trainer hands over, as plain bits: names, dtypes, shapes, addresses.

A source is any mapping or iterable of (name, tensor), the tensors torch's or numpy's, on any device, of any strides.
From a mapping all tensors are alive at once, so they are compared where they lie. From any other iterable a tensor may
be gone when the next one is asked for, so each is dealt with before that.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightcast.codec.memory import bytes_at
from weightcast.codec.rounding import round_all
from weightcast.schemas.dtypes import TORCH_NAMES, WIDTHS
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import TensorSpec
from weightcast.schemas.wrappers import NameMap

Tensors = Mapping[str, Any] | Iterable[tuple[str, Any]]

_TORCH: Final[dict[torch.dtype, str]] = {
    getattr(torch, attribute): name for attribute, name in TORCH_NAMES.items() if hasattr(torch, attribute)
}
_FROM_NAME: Final = {name: dtype for dtype, name in _TORCH.items()}


@dataclass(slots=True)
class Item:
    """One tensor, ready to be compared. Not changed once handed over; not frozen, since that doubles its cost.

    Attributes:
        spec: name, dtype, shape.
        address: of `spec.nbytes` bytes in C order in host memory; 0 for an empty tensor.
        owner: keeps the address valid.
        lasting: whether the bytes stay where they are until the whole source was read.
        identity: equal for two items that are the same tensor under two names; None if that cannot be known.
    """

    spec: TensorSpec
    address: int
    owner: object
    lasting: bool
    identity: Hashable

    @property
    def tie(self) -> tuple[object, ...] | None:
        """Equal for two items that are one tensor and have the same bits; a cast may have told them apart."""
        return None if self.identity is None else (self.identity, self.spec.dtype, self.spec.shape)

    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, without a copy."""
        return bytes_at(self.address, self.spec.nbytes)

    def copied(self) -> Item:
        """The same bits in memory of their own."""
        array = self.array().copy()
        return replace(self, address=array.ctypes.data if self.spec.nbytes else 0, owner=array, lasting=True)


def dtype_name(tensor: Any, name: str) -> str:
    """The safetensors name of a torch or numpy tensor's dtype.

    Raises:
        UsageError: a stream cannot carry it.
    """
    if isinstance(tensor, torch.Tensor):
        found = _TORCH.get(tensor.dtype)
    else:
        found = (
            _TORCH.get(torch.from_numpy(np.empty(0, tensor.dtype)).dtype)
            if tensor.dtype.kind in "biufc" and tensor.dtype.itemsize <= 8
            else None
        )
    if found is None:
        raise UsageError(
            f"tensor {name!r} has dtype {tensor.dtype}; supported are {', '.join(WIDTHS)}",
            hint="publish it under a dtype of the same bits",
        )
    return found


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a dtype name: safetensors' (`BF16`) or torch's (`bfloat16`).

    Raises:
        UsageError: this torch has no such dtype.
    """
    try:
        return _FROM_NAME[TORCH_NAMES.get(name, name)]
    except KeyError:
        raise UsageError(f"dtype {name!r} is not known; use one of {', '.join(sorted(_FROM_NAME))}") from None


class Casts:
    """Conversions that the user asked for: the first pattern that matches a name decides; without one, none is made."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = {pattern: torch_dtype(dtype) for pattern, dtype in rules.items()}

    def __bool__(self) -> bool:
        return bool(self._rules)

    def __call__(self, name: str, tensor: Any) -> Any:
        """`tensor`, rounded to nearest even if a rule says so."""
        for pattern, dtype in self._rules.items():
            if fnmatchcase(name, pattern):
                return _round(
                    tensor
                    if isinstance(tensor, torch.Tensor)
                    else torch.from_numpy(np.ascontiguousarray(tensor)),
                    dtype,
                )
        return tensor


def _round(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to nearest even; a NaN stays a NaN whatever the vector unit makes of its payload."""
    tensor = tensor.detach()
    plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
    if plain and (tensor.dtype, dtype) == (torch.float32, torch.bfloat16):
        bits = torch.empty(tensor.shape, dtype=torch.uint16)  # one pass, where the way below has five
        round_all(tensor.view(-1).numpy().view(np.uint32), bits.view(-1).numpy())
        return bits.view(dtype)
    rounded = tensor.to(dtype)
    if tensor.is_floating_point() and rounded.is_floating_point() and rounded.element_size() >= 2:
        nan = tensor.isnan()
        if bool((nan & ~rounded.isnan()).any()):
            rounded = torch.where(
                nan, torch.full((), float("nan"), dtype=dtype, device=tensor.device), rounded
            )
    return rounded


def items(tensors: Tensors, casts: Casts, known: Mapping[str, TensorSpec]) -> Iterator[Item]:
    """The tensors of `tensors` under their checkpoint names, each valid at least until the next one is asked for.

    Args:
        tensors: what the trainer hands over.
        casts: conversions that the user asked for.
        known: specs of the version before, used again where they fit: 100,000 of them take time to make.

    Raises:
        UsageError: not (name, tensor) pairs, an unknown dtype, a sparse or meta tensor, or two names that become one.
    """
    names, identify = NameMap(), _Identities(alive=isinstance(tensors, dict))
    lasting = isinstance(tensors, Mapping)
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    for pair in pairs:
        try:
            original, tensor = pair
        except (TypeError, ValueError):
            raise UsageError(
                f"expected (name, tensor) pairs, found {type(pair).__name__}", hint="pass model.state_dict()"
            ) from None
        if not isinstance(original, str) or not isinstance(tensor, (torch.Tensor, np.ndarray)):
            raise UsageError(
                f"expected a tensor under the name {original!r}, found {type(tensor).__name__}",
                hint="pass model.state_dict()",
            )
        name = names(original)
        cast = casts(name, tensor) if casts else tensor
        stays = lasting and cast is tensor
        if isinstance(cast, np.ndarray):
            yield _of_array(name, cast, stays)
        else:
            # An iterable may write the next tensor over the last one: there, equal addresses mean nothing.
            item = _of_tensor(name, cast, stays, known.get(name))
            item.identity = identify(tensor) if lasting and isinstance(tensor, torch.Tensor) else None
            yield item


def _of_array(name: str, array: npt.NDArray[Any], stays: bool) -> Item:
    plain = np.ascontiguousarray(array)
    if not plain.dtype.isnative:
        plain = plain.astype(plain.dtype.newbyteorder("="))
    spec = TensorSpec(name, dtype_name(plain, name), tuple(array.shape))
    return Item(spec, plain.ctypes.data if plain.size else 0, plain, stays and plain is array, None)


def _of_tensor(name: str, tensor: torch.Tensor, stays: bool, known: TensorSpec | None = None) -> Item:
    if bool(is_traceable_wrapper_subclass(tensor)):  # bool: nothing is known of its type then
        raise UsageError(
            f"tensor {name!r} is a {type(tensor).__name__}, whose bits lie in other tensors",
            hint="publish plain tensors, for example full_tensor() of each in a generator",
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise UsageError(
            f"tensor {name!r} is {tensor.layout} on {tensor.device}; only dense tensors with data can be published"
        )
    dtype = dtype_name(tensor, name)
    fits = known is not None and known.dtype == dtype and known.shape == tensor.shape
    spec = known if known is not None and fits else TensorSpec(name, dtype, tuple(tensor.shape))
    plain, lasting = (
        tensor,
        tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg(),
    )
    if not lasting:
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return Item(spec, plain.data_ptr() if plain.numel() else 0, plain, stays and lasting, None)


_Kept = torch.Tensor | weakref.ref[torch.Tensor]


class _Identities:
    """Tells which tensors of a mapping are one: the same elements of the same memory, while both are alive.

    A mapping may make its tensors when they are asked for, so that a later one lies where an earlier one has been; a
    dict keeps them all. With 100,000 tensors each object more that the garbage collector has to look at shows.
    """

    def __init__(self, alive: bool) -> None:
        self._alive = alive
        self._first: dict[int, _Kept] = {}  # by address
        self._numbers: dict[int, int] = {}
        self._others: list[tuple[_Kept, int]] = []  # further ones at an address
        self._count = 0

    def __call__(self, tensor: torch.Tensor) -> Hashable:
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return None
        address = tensor.data_ptr()
        self._count += 1
        first = self._first.get(address)
        if first is None or (isinstance(first, weakref.ref) and first() is None):
            self._first[address] = self._kept(tensor)
            self._numbers[address] = self._count
            return self._count
        for kept, number in [(self._first[address], self._numbers[address]), *self._others]:
            other = kept() if isinstance(kept, weakref.ref) else kept
            if other is not None and other.data_ptr() == address and _is_same(tensor, other):
                return number
        self._others.append((self._kept(tensor), self._count))
        return self._count

    def _kept(self, tensor: torch.Tensor) -> _Kept:
        return tensor if self._alive else weakref.ref(tensor)


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors that begin at one address are the same elements; a conjugate view has other bits."""
    return (
        (tensor.device, tensor.dtype, tensor.shape) == (other.device, other.dtype, other.shape)
        and tensor.stride() == other.stride()
        and (tensor.is_conj(), tensor.is_neg()) == (other.is_conj(), other.is_neg())
    )


def recast(item: Item, casts: Casts) -> Item:
    """`item` under the conversions that the user asked for."""
    if not casts or item.spec.dtype not in _FROM_NAME or not item.spec.elements:
        return item
    tensor = torch.frombuffer(bytearray(item.array()), dtype=torch_dtype(item.spec.dtype)).reshape(
        item.spec.shape
    )
    cast = casts(item.spec.name, tensor)
    return item if cast is tensor else _of_tensor(item.spec.name, cast, False)


def tied(found: Iterable[Item], *preferred: Collection[str]) -> dict[str, str]:
    """For items that are one tensor under several names: each further name -> the one that keeps the bytes.

    That is one of the first of `preferred` that has one, or else the first in the source's order: of a tied output head
    and its embedding the embedding, which every loader of checkpoints expects to find.
    """
    first: dict[tuple[object, ...], str] = {}
    ties: dict[str, str] = {}
    known = [item for item in found if item.identity is not None]
    if len({item.identity for item in known}) == len(known):
        return {}
    for item in sorted(known, key=lambda i: tuple(i.spec.name not in names for names in preferred)):
        key = item.tie
        if key is not None:
            owner = first.setdefault(key, item.spec.name)
            if owner != item.spec.name:
                ties[item.spec.name] = owner
    return ties
