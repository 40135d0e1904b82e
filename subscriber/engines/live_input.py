"""What a caller hands in, checked before anything live is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.codec import Changes, FlatSpace
from weightcast.codec.kernels import ascends
from weightcast.codec.memory import UNSIGNED
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import TensorSpec

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]


def check_positions(space: FlatSpace, positions: Ints) -> None:
    """Refuse positions that are not int64 elements of a space, ascending.

    Raises:
        UsageError: they are not.
    """
    if positions.ndim != 1 or positions.dtype != np.int64 or not ascends(positions, space.elements):
        raise UsageError(f"positions are not ascending int64 elements of the {space.dtype} space")


def check_changes(space: FlatSpace, changes: Changes) -> None:
    """Refuse changes that are not of a space.

    Raises:
        UsageError: another dtype, positions that `check_positions` refuses, or values that are not one a position.
    """
    check_positions(space, changes.positions)
    if changes.dtype != space.dtype or changes.values.dtype != UNSIGNED[space.width]:
        raise UsageError(
            f"changes of {changes.dtype} ({changes.values.dtype}) are not for the {space.dtype} space"
        )
    if changes.values.shape != changes.positions.shape:
        raise UsageError(f"{len(changes.positions)} positions, but {len(changes.values)} values")


def touched(space: FlatSpace, positions: Ints) -> list[str]:
    """Names of the tensors that have any of the positions, which ascend."""
    bounds = np.searchsorted(positions, space.starts)
    return [space.names[i] for i in np.flatnonzero(np.diff(bounds)).tolist()]


def elements_of(spec: TensorSpec, bits: Bits) -> Bits:
    """A tensor's bytes in C order as unsigned elements: a view.

    Raises:
        UsageError: not as many bytes as the tensor has, or not contiguous.
    """
    if bits.nbytes != spec.nbytes or not bits.flags.c_contiguous:
        raise UsageError(
            f"tensor {spec.name!r} has {spec.nbytes} bytes, found {bits.nbytes} of shape {list(bits.shape)}"
        )
    return bits.reshape(-1).view(UNSIGNED[spec.width])
