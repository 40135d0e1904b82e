"""Torch tensors as bits: which can be kept, where they lie, writing to those that have no address here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightcast.schemas.dtypes import TORCH_NAMES
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import TensorSpec

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_MAX_WORK: Final = 1_000_000  # solutions tried before two strided views pass: some 10 ms

SIGNED: Final = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""What torch takes from numpy, by width in bytes."""


def write_by_index(name: str, tensor: torch.Tensor, positions: Any, values: Any) -> None:
    """Write through torch, and read back: any device, any strides.

    Args:
        name: of the tensor, for errors.
        tensor: to write to.
        positions: int64 [n], flat elements of it.
        values: unsigned [n], of its width.

    Raises:
        Corrupt: it does not hold what was written.
    """
    bits = bits_of(tensor)
    new = torch.from_numpy(values.view(SIGNED[tensor.element_size()]).copy()).to(tensor.device)
    if not tensor.dim():
        bits.copy_(new.reshape(()))
        return
    index = tuple(
        torch.from_numpy(i).to(tensor.device) for i in np.unravel_index(positions, tuple(tensor.shape))
    )
    bits[index] = new
    if not torch.equal(bits[index], new):
        raise Corrupt(
            f"tensor {name!r} does not hold what was written to it", hint="somebody else writes to it"
        )


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """A tensor's row in a layout.

    Raises:
        UsageError: it cannot be kept: not plain, dense, or known as a dtype; or a view that is not one of memory.
    """
    if bool(is_traceable_wrapper_subclass(tensor)):  # bool: nothing is known of its type then
        raise UsageError(
            f"tensor {name!r} is a {type(tensor).__name__}, whose bits lie in other tensors",
            hint="hand over plain tensors, such as its local part's or full_tensor()",
        )
    dtype = TORCH_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise UsageError(
            f"tensor {name!r} is {tensor.dtype}, {tensor.layout}, on {tensor.device}; "
            "only dense tensors with data can be kept"
        )
    if (
        tensor.is_conj()
        or tensor.is_neg()
        or any(not s and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    ):
        raise UsageError(
            f"tensor {name!r} is a lazy or expanded view; several elements of it are one in memory, or none",
            hint="clone it",
        )
    return TensorSpec(name, dtype, tuple(tensor.shape))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view as integers of the same width."""
    return tensor.view(_BITS[tensor.element_size()])


def is_addressable(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side in host memory."""
    return bool(tensor.is_cpu) and tensor.is_contiguous()


def place_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """What two tensors have in common that are the same memory, with the same elements in the same order."""
    start = tensor.data_ptr() if tensor.numel() else id(tensor)
    if tensor.is_contiguous():  # whatever the shape
        return tensor.device, tensor.dtype, start, (tensor.numel(),), (1,)
    return tensor.device, tensor.dtype, start, tuple(tensor.shape), tensor.stride()


def overlapping(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Names of two tensors in host memory that share some bytes, but are not the same place; None if there are none.

    Strided views that lie between each other share none. Where that takes too long to find out they pass.
    """
    places: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if tensor.is_cpu and tensor.numel():
            places.setdefault(place_of(tensor), name)
    extents = sorted(((*_extent(tensors[n]), n) for n in places.values()), key=lambda extent: extent[0])
    reaching: list[tuple[int, str]] = []  # what began before, and may end after
    for start, stop, name in extents:
        reaching = [(end, other) for end, other in reaching if end > start]
        for _, other in reaching:
            if _share(tensors[other], tensors[name]):
                return other, name
        reaching.append((stop, name))
    return None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one after the last; torch has no negative strides."""
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.element_size()


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors whose extents intersect share a byte."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    try:
        one_bits, other_bits = bits_of(one).numpy(), bits_of(other).numpy()
        return bool(np.shares_memory(one_bits, other_bits, max_work=_MAX_WORK))  # type: ignore[arg-type]  # any number
    except np.exceptions.TooHardError:
        return False
