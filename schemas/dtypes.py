"""Element types, by the names that safetensors files use.

Weightcast never computes with values: a dtype is a name and a width in bytes, and an element is an unsigned
integer of that width.
"""

from __future__ import annotations

from typing import Final

from .errors import UsageError

WIDTHS: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element for every dtype a stream can carry."""


def width_of(dtype: str, tensor: str) -> int:
    """Bytes of one element of `dtype`; `tensor` names the tensor in the error.

    Raises:
        UsageError: the dtype is not one a stream can carry.
    """
    try:
        return WIDTHS[dtype]
    except KeyError:
        raise UsageError(
            f"tensor {tensor!r} has dtype {dtype!r}; supported are {', '.join(WIDTHS)}",
            hint="store it under a supported dtype of the same bytes, such as U8",
        ) from None
