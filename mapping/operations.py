"""What torch operations do, as far as following a loader needs it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from weightcast.codec.regions import Region

from .belongings import Owned

_aten = torch.ops.aten

COPIES: Final = frozenset({_aten.copy_.default, _aten._foreach_copy_.default})
FILLS: Final = frozenset({_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
CLONES: Final = frozenset({_aten.clone.default, _aten._to_copy.default})
"""New memory, same elements (`_to_copy`: unless it casts)."""
VIEWS: Final = frozenset({_aten._unsafe_view.default})
"""Views that their schema does not call so."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operation does with its arguments.

    Attributes:
        writes: arguments that it writes to: position and name.
        returns: for each result, whether it is an argument or a view of one.
        reads: whether its results, or their shapes, depend on values.
        turns: whether it changes how a tensor looks at its memory, and nothing else.
        composite: whether it is made of other operations; such a one arrives whole in inference mode only.
    """

    writes: tuple[tuple[int, str], ...]
    returns: tuple[bool, ...]
    reads: bool
    turns: bool
    composite: bool


@cache
def signature_of(func: Any) -> Signature:
    """As the operation's schema and tags say."""
    schema, tags = func._schema, func.tags
    written = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    turns = torch.Tag.inplace_view in tags and func.overloadpacket not in (
        _aten.set_,
        _aten.resize_,
        _aten.resize_as_,
    )
    return Signature(
        writes=tuple((i, a.name) for i, a in enumerate(schema.arguments) if written[i]),
        returns=tuple(r.alias_info is not None for r in schema.returns),
        reads=torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags,
        turns=turns,
        composite=func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
    )


def mismatch(target: torch.Tensor, value: torch.Tensor, width: int, owned: Owned) -> str:
    """Why a copy is not one of bits, element by element; "" if it is."""
    if not target.numel() and value.numel():
        return f"the parameter has shape {tuple(owned.tensor.shape)}, what is loaded {tuple(value.shape)}"
    if target.dtype is not value.dtype:
        return cast(value, target)
    if is_lazy_math(target) or is_lazy_math(value):
        return "conjugated or negated on the way"
    if value.element_size() != width or owned.tensor.element_size() != width:
        return "written in units that are not the tensor's elements"
    if [n for n in target.shape if n != 1] != [n for n in value.shape if n != 1]:
        return f"shape {tuple(value.shape)} is written to a part of shape {tuple(target.shape)}"
    return ""


def cast(value: torch.Tensor, target: torch.Tensor) -> str:
    """How a conversion is told."""
    return f"{value.dtype} -> {target.dtype}".replace("torch.", "")


def is_lazy_math(tensor: torch.Tensor) -> bool:
    """Whether its elements are not the bits in its memory."""
    return tensor.is_conj() or tensor.is_neg()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in the arguments of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def ghost(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same look without memory."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def region_of(tensor: torch.Tensor) -> Region:
    """The part of its storage that a tensor shows, in its own elements."""
    return Region(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def squeezed(region: Region) -> Region:
    """Without dimensions of size 1."""
    dims = [(n, s) for n, s in zip(region.shape, region.strides, strict=True) if n != 1]
    return Region(tuple(n for n, _ in dims), tuple(s for _, s in dims), region.offset)
