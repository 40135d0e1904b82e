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

TORCH_NAMES: Final[dict[str, str]] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
"""What torch calls them (`torch.bfloat16` -> `BF16`); a table of names, so that nothing here imports torch."""


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
