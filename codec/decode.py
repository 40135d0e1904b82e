"""From shard rows to absolute new values."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.shard import CODINGS, GAPPED, Row, has_possible_planes

from . import classes, kernels, kernels_apply, kernels_boxes
from .changes import Changes, within
from .digest import change_digest
from .jit import TAGS
from .memory import UNSIGNED, Memory
from .planes import apply_steps, expand_plane, find_some, joined_bytes, part_pairs, read_gaps
from .scratch import Scratch
from .space import FlatSpace

MAX_GAP_SHIFT = 24  # bits: a row has at most 2^24 elements

_STEP_FAULTS: Final = {
    1: "a changed element has step 0",
    2: "the escapes are not exactly used up",
    3: "an escaped element has equal old and new bits",
}

_NONE: Final = np.frombuffer(b"", np.uint8)

_scratch = Scratch()

_Ints = npt.NDArray[np.int64]
_Bits = npt.NDArray[Any]


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
        steps = _positions(row, start, found.positions)
        old = _old_bits(space, base, overlay, found.positions)
        found.values[:] = new_bits(space, row, found.positions, steps, old)
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
        marks, steps = _NONE, _steps(row)
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


def new_bits(space: FlatSpace, row: Row, places: _Ints, steps: npt.NDArray[np.uint8], old: _Bits) -> _Bits:
    """The bits after a row's changes, whatever its coding but `class`.

    Args:
        places: of the changes, flat elements.
        steps: of the changes, as `interval_positions` gives them.
        old: the bits there before.

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
        return escapes
    values = np.empty_like(old)
    fault = apply_steps(steps, escapes, row.coding == "pairs", old, values)
    if fault:
        raise _wrong_steps(row, fault)
    return values


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
    elif row.coding != "whole":
        _positions(row, start, np.empty(row.count, np.int64))


def place_of(space: FlatSpace, row: Row) -> int:
    """Check the figures of `row`, so that what a reader allocates is bounded; flat start of the interval or box."""
    start = space.locate(row)
    if row.coding not in CODINGS:
        raise Corrupt(f"row of tensor {row.tensor!r} has coding {str(row.coding)[:32]!r}")
    if not 1 <= row.count <= row.length or not 0 <= row.escaped <= row.count:
        raise Corrupt(
            f"row of tensor {row.tensor!r}: {row.escaped} escapes of {row.count} changes in {row.length}"
        )
    if row.coding == "class":
        if row.dtype not in classes.EXPONENTS or not has_possible_planes(row):
            raise Corrupt(
                f"row of tensor {row.tensor!r} in coding class: {row.tensors} tensors of {row.dtype}, {row.escaped} "
                f"escapes, gap_bytes {row.gap_bytes} of {len(row.gaps)}, or planes that the coding does not use"
            )
        return start
    gapped = row.coding in GAPPED
    if row.coding == "whole" and not row.escaped == row.count == row.length:
        raise Corrupt(f"row of tensor {row.tensor!r} is whole, but has {row.count} changes in {row.length}")
    if not 0 <= row.gap_shift <= (MAX_GAP_SHIFT if gapped else 0):
        raise Corrupt(f"row of tensor {row.tensor!r}: gap_shift {row.gap_shift} in coding {row.coding}")
    least, most = (row.count, row.count + (row.length >> row.gap_shift) // 255) if gapped else (0, 0)
    if not least <= row.gap_bytes <= most:
        raise Corrupt(f"row of tensor {row.tensor!r}: gap_bytes {row.gap_bytes}, expected {least} to {most}")
    if len(row.lows) != -(-row.count * row.gap_shift // 8):
        raise Corrupt(f"row of tensor {row.tensor!r}: {len(row.lows)} bytes of lows for {row.count} changes")
    unused = {"dense": (row.gaps,), "whole": (row.gaps, row.steps)}.get(row.coding, ())
    if any(unused):
        raise Corrupt(f"row of tensor {row.tensor!r} has planes that its coding {row.coding} does not use")
    return start


def _positions(row: Row, start: int, out: _Ints) -> npt.NDArray[np.uint8]:
    """Write the flat positions of the changes of a row with checked figures to `out`; their step bytes."""
    steps = interval_positions(row, 0 if row.is_box else start, out)
    if row.is_box:
        kernels_boxes.spread(out, start, *row.spacing)
    return steps


def interval_positions(row: Row, start: int, out: _Ints) -> npt.NDArray[np.uint8]:
    """The same of a row whose elements are side by side. `whole` has no steps."""
    if row.coding == "whole":
        out[:] = np.arange(start, start + row.length)
        return np.empty(0, np.uint8)
    if row.coding == "dense":
        nonzero = np.empty(row.count, np.uint8)
        find_some(_marks(row), 0, start, out, nonzero)
        return nonzero
    steps = _steps(row)
    gaps = expand_plane(row.gaps, row.gap_bytes, row.tensor, "gaps")
    lows = np.frombuffer(row.lows, np.uint8)
    if not read_gaps(gaps, lows, row.gap_shift, row.length, start, out):
        raise _wrong_gaps(row)
    return steps


def _escapes(row: Row, dtype: npt.DTypeLike) -> _Bits:
    """The escaped elements of a row whose elements are of this dtype: bits, or steps if the coding is `pairs`."""
    width = np.dtype(dtype).itemsize
    data = expand_plane(row.escapes, row.escaped * width, row.tensor, "escapes")
    return (joined_bytes(data, width) if row.coding == "pairs" else data).view(dtype)


def _steps(row: Row) -> npt.NDArray[np.uint8]:
    """The step bytes of the changes of a row in coding `gap` or `pairs`."""
    if row.coding == "gap":
        return expand_plane(row.steps, row.count, row.tensor, "steps")
    steps = np.empty(row.count, np.uint8)
    if not part_pairs(expand_plane(row.steps, -(-row.count // 2), row.tensor, "steps"), steps):
        raise Corrupt(f"row of tensor {row.tensor!r}: the steps do not end with {row.count} changes")
    return steps


def _marks(row: Row) -> npt.NDArray[np.uint8]:
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
