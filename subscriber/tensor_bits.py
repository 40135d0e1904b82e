"""Torch tensors as bits: which can be kept, where they lie, writing to those that have no address here."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightcast.schemas.dtypes import TORCH_NAMES
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import TensorSpec

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

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
    """What two tensors have in common that are the same memory, seen in the same way."""
    return (
        tensor.device,
        tensor.data_ptr() if tensor.numel() else id(tensor),
        tuple(tensor.shape),
        tensor.stride(),
    )
