"""A row's old bits in memory turned into its new ones in place."""

from __future__ import annotations

import numpy as np

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import UsageError
from weightcast.schemas.shard import Row

from . import classes, kernels_boxes
from .changes import Changes, gather, scatter
from .decode import change_densely, change_plainly, decode, interval_positions, is_plain, new_bits, place_of
from .digest import change_digest
from .memory import UNSIGNED, Memory, bytes_at
from .scratch import Scratch
from .space import FlatSpace

_scratch = Scratch()


def update(
    space: FlatSpace, row: Row, memory: Memory, *, keep: bool = False
) -> tuple[Digest, Changes | None]:
    """Decode a row against memory that nobody serves from, and write it there. Not idempotent: it needs the old bits.

    Args:
        space: the flat space of the row's dtype, in the version's layout.
        row: as a shard has it; nothing in it is trusted.
        memory: the state that the row is told from.
        keep: the bits that were there before are wanted.

    Returns:
        What that moves the state digest by, and the bits that were there before, or None.

    Raises:
        Corrupt: the row breaks a rule of docs/format.md; some of it may be written.
        UsageError: the memory is read-only or not of this space.
    """
    if not memory.writable:
        raise UsageError("the memory to change is read-only")
    if is_plain(row):
        start, dtype = place_of(space, row), UNSIGNED[space.width]
        if row.coding == "dense" and not keep:
            return change_densely(space, row, start, memory), None
        at = _scratch.take("at", row.count, np.int64)
        old, new = (_scratch.take(name, row.count, dtype) for name in ("old", "new"))
        moved = change_plainly(space, row, start, memory, old, Changes(space.dtype, at, new), write=True)
        return moved, Changes(space.dtype, at.copy(), old.copy()) if keep else None
    found, moved = decode(space, row, memory)
    before = Changes(space.dtype, found.positions, gather(space, memory, found.positions)) if keep else None
    scatter(space, memory, found)
    return moved, before


def update_box(space: FlatSpace, row: Row, address: int) -> Digest:
    """Write a row's new bits over its old ones, which lie side by side: for writers that keep a slice alone.

    Args:
        space: the flat space of the row's dtype; of the row's own tensor alone, if that is all there is.
        row: of one tensor; nothing in it is trusted.
        address: of `row.length` elements side by side, in the order in which the row counts them.

    Returns:
        What that moves the state digest by. Not idempotent: it needs the old bits.

    Raises:
        Corrupt: the row breaks a rule of docs/format.md; nothing was written.
        UsageError: it reaches into several tensors.
    """
    if row.tensors != 1:
        raise UsageError(
            f"the row of tensor {row.tensor!r} reaches into {row.tensors} tensors, whose bits lie apart"
        )
    start = place_of(space, row)
    bits = bytes_at(address, row.length * space.width).view(UNSIGNED[space.width])
    found = Changes.room(space, row.count)
    if row.coding == "class":
        old = classes.decode(space, row, address, found.positions, found.values)
        at = found.positions.copy()
        kernels_boxes.spread(found.positions, start, *row.spacing)
    else:
        steps = np.empty(row.count, np.uint8)
        interval_positions(row, 0, found.positions, steps)
        at = found.positions.copy()
        old = bits[at]
        kernels_boxes.spread(found.positions, start, *row.spacing)
        new_bits(space, row, found.positions, steps, old, found.values)
    moved = change_digest(space, found.positions, old, found.values)
    bits[at] = found.values
    return moved
