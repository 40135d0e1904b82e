"""From shard rows to absolute new values."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.shard import GAPPED, Row, fault_of

from . import classes, kernels, kernels_apply, kernels_boxes
from .changes import Changes, within
from .digest import change_digest
from .jit import TAGS
from .kernels_gaps import read_gaps
from .kernels_moves import apply_steps, find_some, part_pairs
from .memory import UNSIGNED, Memory
from .planes import expand_plane, joined_bytes
from .scratch import Scratch
from .space import FlatSpace

_STEP_FAULTS: Final = {
    1: "a changed element has step 0",
    2: "the escapes are not exactly used up",
    3: "an escaped element has equal old and new bits",
}

_FAR: Final = 255
"""Step byte of an element that is escaped."""

_NONE: Final = np.frombuffer(b"", np.uint8)

_scratch = Scratch()

_Ints = npt.NDArray[np.int64]
_Bits = npt.NDArray[Any]
_Bytes = npt.NDArray[np.uint8]


def decode(
    space: FlatSpace,
    row: Row,
    base: Memory | Changes,
    overlay: Changes | None = None,
    room: Changes | None = None,
) -> tuple[Changes, Digest]:
    """The new bits that `row` stands for, and what they move the state digest by. Changes nothing.

    Args:
        space: the flat space of the row's dtype, in the version's layout.
        row: as a shard has it; nothing in it is trusted.
        base: state of some earlier version, over the same space; or of it the bits at all positions of the row that
            `overlay` has not.
        overlay: what versions between `base` and the row's parent changed, or None.
        room: for as many changes as the row has; the result lies there. None: in memory of its own.

    Raises:
        Corrupt: the row breaks a rule of docs/format.md.
        UsageError: `base` or `overlay` is not of this space, or `base` lacks positions.
    """
    start = place_of(space, row)
    found = Changes.room(space, row.count) if room is None else room
    if row.coding == "class":
        old = _decode_class(space, row, start, base, overlay, found)
    elif is_plain(row) and isinstance(base, Memory) and not overlay:
        old = _scratch.take("old", row.count, found.values.dtype)
        return found, change_plainly(space, row, start, base, old, found, write=False)
    else:
        steps = np.empty(row.count, np.uint8)
        _positions(row, start, found.positions, steps)
        old = _old_bits(space, base, overlay, found.positions)
        new_bits(space, row, found.positions, steps, old, found.values)
    return found, change_digest(space, found.positions, old, found.values)


def is_plain(row: Row) -> bool:
    """Whether `change_plainly` takes the row: coding `gap`, `pairs` or `dense`, elements side by side."""
    return row.coding in (*GAPPED, "dense") and not row.is_box


def change_plainly(
    space: FlatSpace, row: Row, start: int, memory: Memory, old: _Bits, found: Changes, *, write: bool
) -> Digest:
    """As `decode`, for a row with checked figures that `is_plain`. `old`: result, the bits before, [row.count].

    Args:
        write: new bits are written to the memory, too. After an error, some of them are by then.
    """
    if row.coding == "dense":
        marks, steps = _marks(row), _NONE
    else:
        marks, steps = _NONE, _step_plane(row)
    fault, *lanes = kernels_apply.change_row(
        memory.addresses(space), space.starts, space.seeds, space.tensor_at(start), start, row.length, row.gap_shift,
        expand_plane(row.gaps, row.gap_bytes, row.tensor, "gaps"), np.frombuffer(row.lows, np.uint8), marks, steps,
        _escapes(row, old.dtype),
        row.coding == "pairs", found.positions, old, found.values, write, TAGS[space.width],
    )  # fmt: skip
    if fault == kernels_apply.GAPS_FAULT:
        raise _wrong_gaps(row)
    if fault:
        raise _wrong_steps(row, fault)
    return Digest(*map(int, lanes))


def change_densely(space: FlatSpace, row: Row, start: int, memory: Memory) -> Digest:
    """Write a dense row with checked figures, whose elements lie side by side. After an error, some of it is written.

    Returns:
        What that moves the state digest by.
    """
    dtype = UNSIGNED[space.width]
    fault, *lanes = kernels_apply.change_all(
        memory.addresses(space), space.starts, space.seeds, space.tensor_at(start), start, _marks(row),
        _escapes(row, dtype), TAGS[space.width],
    )  # fmt: skip
    if fault:
        raise _wrong_steps(row, fault)
    return Digest(*map(int, lanes))


def new_bits(space: FlatSpace, row: Row, places: _Ints, steps: _Bytes, old: _Bits, out: _Bits) -> None:
    """Write the bits after a row's changes to `out`, whatever its coding but `class`.

    Args:
        places: of the changes, flat elements.
        steps: of the changes, as `interval_positions` gives them.
        old: the bits there before; not looked at if the coding is `whole`.
        out: the result, as many.

    Raises:
        Corrupt: steps or escapes break a rule of docs/format.md.
    """
    escapes = _escapes(row, old.dtype)
    if row.coding == "whole":
        found = change_digest(space, places, np.zeros_like(escapes), escapes)
        if found != row.digest:
            raise Corrupt(
                f"row of tensor {row.tensor!r}: bits have digest {found}, the row says {row.digest}"
            )
        out[:] = escapes
        return
    fault = apply_steps(steps, escapes, row.coding == "pairs", old, out)
    if fault:
        raise _wrong_steps(row, fault)


def positions(space: FlatSpace, row: Row) -> npt.NDArray[np.int64]:
    """Flat elements that `row` has new bits for: int64 [count], ascending. Needs no base.

    Raises:
        Corrupt: the row breaks a rule of docs/format.md that shows without a base.
        UsageError: the row is coded by class, and only a base says where its changes are.
    """
    start = place_of(space, row)
    if row.coding == "class":
        raise _needs_base(row)
    found = np.empty(row.count, np.int64)
    _positions(row, start, found)
    return found


def check(space: FlatSpace, row: Row) -> None:
    """Check all of `row` that shows without a base.

    Raises:
        Corrupt: the row breaks a rule of docs/format.md.
    """
    start = place_of(space, row)
    if row.coding == "class":
        classes.check(row)
        return
    at, steps = np.empty(row.count, np.int64), np.empty(row.count, np.uint8)
    _positions(row, start, at, steps)
    escapes = _escapes(row, UNSIGNED[space.width])
    if row.coding == "whole":
        new_bits(space, row, at, steps, escapes, np.empty_like(escapes))
    elif not steps.all():
        raise _wrong_steps(row, 1)
    elif np.count_nonzero(steps == _FAR) != row.escaped:
        raise _wrong_steps(row, 2)
    elif row.coding == "pairs" and not escapes.all():  # the step 0
        raise _wrong_steps(row, 3)


def place_of(space: FlatSpace, row: Row) -> int:
    """Check the figures of `row`, so that what a reader allocates is bounded; flat start of the interval or box."""
    start = space.locate(row)
    fault = fault_of(row)
    if not fault and row.coding == "class" and row.dtype not in classes.EXPONENTS:
        fault = f"is coded by class, which {row.dtype} has no exponents for"
    if fault:
        raise Corrupt(f"row of tensor {row.tensor!r} {fault}")
    return start


def _positions(row: Row, start: int, out: _Ints, steps: _Bytes | None = None) -> None:
    """Write the flat positions of the changes of a row with checked figures to `out`, their step bytes to `steps`."""
    interval_positions(row, 0 if row.is_box else start, out, steps)
    if row.is_box:
        kernels_boxes.spread(out, start, *row.spacing)


def interval_positions(row: Row, start: int, out: _Ints, steps: _Bytes | None = None) -> None:
    """The same of a row whose elements are side by side. `whole` has no steps. None: they are not wanted."""
    if row.coding == "whole":
        out[:] = np.arange(start, start + row.length)
        return
    if row.coding == "dense":
        find_some(_marks(row), 0, start, out, np.empty(row.count, np.uint8) if steps is None else steps)
        return
    if steps is not None and row.coding == "pairs":
        part_pairs(_step_plane(row), steps)
    elif steps is not None:
        steps[:] = _step_plane(row)
    gaps = expand_plane(row.gaps, row.gap_bytes, row.tensor, "gaps")
    lows = np.frombuffer(row.lows, np.uint8)
    if not read_gaps(gaps, lows, row.gap_shift, row.length, start, out):
        raise _wrong_gaps(row)


def _escapes(row: Row, dtype: npt.DTypeLike) -> _Bits:
    """The escaped elements of a row whose elements are of this dtype: bits, or steps if the coding is `pairs`."""
    width = np.dtype(dtype).itemsize
    data = expand_plane(row.escapes, row.escaped * width, row.tensor, "escapes")
    found = (joined_bytes(data, width) if row.coding == "pairs" else data).view(dtype)
    found.flags.writeable = False  # or it depends on their number, and kernels are compiled for either
    return found


def _step_plane(row: Row) -> _Bytes:
    """The steps of a row in coding `gap`, a byte each, or `pairs`, two in a byte."""
    if row.coding == "gap":
        return expand_plane(row.steps, row.count, row.tensor, "steps")
    pairs = expand_plane(row.steps, -(-row.count // 2), row.tensor, "steps")
    if row.count % 2 and pairs[-1] > 15:
        raise Corrupt(f"row of tensor {row.tensor!r}: the steps do not end with {row.count} changes")
    return pairs


def _marks(row: Row) -> _Bytes:
    """The plane of a dense row: a byte an element, of which as many as there are changes are not 0."""
    marks = expand_plane(row.steps, row.length, row.tensor, "steps")
    if np.count_nonzero(marks) != row.count:
        raise Corrupt(f"row of tensor {row.tensor!r}: the steps do not mark {row.count} changes")
    return marks


def _wrong_gaps(row: Row) -> Corrupt:
    return Corrupt(f"row of tensor {row.tensor!r}: gaps do not lead to {row.count} of {row.length} elements")


def _wrong_steps(row: Row, fault: int) -> Corrupt:
    return Corrupt(f"row of tensor {row.tensor!r}: {_STEP_FAULTS[fault]}")


def _decode_class(
    space: FlatSpace, row: Row, start: int, base: Memory | Changes, overlay: Changes | None, found: Changes
) -> _Bits:
    """Write the changes of a row to `found`; the bits there before."""
    if isinstance(base, Changes):
        raise _needs_base(row)
    address = base.address(space, start)
    last = start - row.offset + row.stop - 1
    newer, parent = Changes.none(space) if overlay is None else within(space, overlay, start, last), None
    if len(newer) or row.is_box:
        parent = np.empty(row.length, UNSIGNED[space.width])
        kernels_boxes.pick(np.uint64(address), row.length, *row.spacing, parent, TAGS[space.width])
        kernels_boxes.put(newer.positions, newer.values, start, *row.spacing, parent)
        address = parent.ctypes.data
    old = classes.decode(space, row, address, found.positions, found.values)
    del parent  # its memory was read until here
    kernels_boxes.spread(found.positions, start, *row.spacing)
    return old


def _needs_base(row: Row) -> UsageError:
    return UsageError(
        f"the row of tensor {row.tensor!r} is coded by class: to decode it takes all old bits of the row, and only "
        "some are at hand",
        hint="follow with a mirror (--mirror FOLDER), or publish with --codec gap",
    )


def _old_bits(space: FlatSpace, base: Memory | Changes, overlay: Changes | None, at: _Ints) -> _Bits:
    """Bits that the row's parent has at ascending positions `at`, at least one."""
    first, last = int(at[0]), int(at[-1])
    newer = Changes.none(space) if overlay is None else within(space, overlay, first, last)
    out = np.empty(len(at), UNSIGNED[space.width])
    if isinstance(base, Memory):
        tensor = space.tensor_at(first)
        kernels.gather(base.addresses(space), space.starts, tensor, at, out, TAGS[space.width])
    else:
        older = within(space, base, first, last)
        if kernels.overlay(at, out, older.positions, older.values) < len(at):
            known = np.union1d(older.positions, newer.positions)
            if not np.isin(at, known, assume_unique=True).all():
                raise UsageError(f"the old {space.dtype} bits do not cover every element of the row")
    kernels.overlay(at, out, newer.positions, newer.values)
    return out
