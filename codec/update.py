"""A row's old bits, side by side in memory, turned into its new ones in place: for writers that keep a slice alone."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.shard import Row

from . import classes, kernels_boxes
from .decode import STEP_FAULTS, interval_positions, place_of
from .digest import change_digest
from .memory import UNSIGNED
from .planes import apply_steps, expand_plane
from .space import FlatSpace

_Bits = npt.NDArray[Any]


def update_box(space: FlatSpace, row: Row, address: int) -> Digest:
    """Write a row's new bits over its old ones. Not idempotent: it needs the old ones.

    Args:
        space: the flat space of the row's dtype; of the row's own tensor alone, if that is all there is.
        row: of one tensor; nothing in it is trusted.
        address: of `row.length` elements side by side, in the order in which the row counts them.

    Returns:
        What that moves the state digest by.

    Raises:
        Corrupt: the row breaks a rule of docs/format.md; nothing was written.
        UsageError: it reaches into several tensors.
    """
    if row.tensors != 1:
        raise UsageError(
            f"the row of tensor {row.tensor!r} reaches into {row.tensors} tensors, whose bits lie apart"
        )
    start = place_of(space, row)
    memory = (ctypes.c_uint8 * (row.length * space.width)).from_address(address)
    bits: _Bits = np.frombuffer(memoryview(memory), UNSIGNED[space.width])
    if row.coding == "class":
        at, old, new = classes.decode(space, row, address)
    else:
        at, old, new = _stepped(space, row, bits)
    places = at.copy()
    run, stride = (row.run, row.stride) if row.is_box else (row.length, row.length)
    kernels_boxes.spread(places, start, run, stride)
    if row.coding == "whole":
        found = change_digest(space, places, np.zeros_like(new), new)
        if found != row.digest:
            raise Corrupt(
                f"row of tensor {row.tensor!r}: bits have digest {found}, the row says {row.digest}"
            )
    moved = change_digest(space, places, old, new)
    bits[at] = new
    return moved


def _stepped(space: FlatSpace, row: Row, bits: _Bits) -> tuple[npt.NDArray[np.int64], _Bits, _Bits]:
    """Positions of a row's changes, relative to it; the bits there before, and after."""
    at, steps = interval_positions(row, 0)
    old = bits[at]
    escapes = expand_plane(row.escapes, row.escaped * space.width, row.tensor, "escapes").view(old.dtype)
    if row.coding == "whole":
        return at, old, escapes
    new = old.copy()
    fault = apply_steps(steps, escapes, new)
    if fault:
        raise Corrupt(f"row of tensor {row.tensor!r}: {STEP_FAULTS[fault]}")
    return at, old, new
