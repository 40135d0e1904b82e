"""From shard rows to absolute new values, and those into memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.shard import CODINGS, Row, has_possible_planes

from . import classes, kernels, kernels_apply, kernels_boxes
from .digest import change_digest
from .jit import TAGS
from .memory import UNSIGNED, Memory
from .planes import apply_steps, expand_plane, find_steps, read_gaps
from .space import FlatSpace

MAX_GAP_SHIFT = 24  # bits: a row has at most 2^24 elements

STEP_FAULTS = {
    1: "a changed element has step 0",
    2: "the escapes are not exactly used up",
    3: "an escaped element has equal old and new bits",
}


@dataclass(frozen=True, slots=True)
class Changes:
    """New bits of elements of a flat space.

    Attributes:
        dtype: of the space.
        positions: int64 [n], flat elements, strictly ascending.
        values: unsigned [n], of the dtype's width.
    """

    dtype: str
    positions: npt.NDArray[np.int64]
    values: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes that both arrays take."""
        return self.positions.nbytes + self.values.nbytes

    @classmethod
    def none(cls, space: FlatSpace) -> Changes:
        """No changes."""
        return cls(space.dtype, np.empty(0, np.int64), np.empty(0, UNSIGNED[space.width]))


def decode(
    space: FlatSpace, row: Row, base: Memory | Changes, overlay: Changes | None = None
) -> tuple[Changes, Digest]:
    """The new bits that `row` stands for, and what they move the state digest by. Changes nothing.

    Args:
        space: the flat space of the row's dtype, in the version's layout.
        row: as a shard has it; nothing in it is trusted.
        base: state of some earlier version, over the same space; or of it the bits at all positions of the row that
            `overlay` has not.
        overlay: what versions between `base` and the row's parent changed, or None.

    Raises:
        Corrupt: the row breaks a rule of docs/format.md.
        UsageError: `base` or `overlay` is not of this space, or `base` lacks positions.
    """
    start = place_of(space, row)
    if row.coding == "class":
        at, old, values = _decode_class(space, row, start, base, overlay)
        return Changes(space.dtype, at, values), change_digest(space, at, old, values)
    if row.coding == "gap" and not row.is_box and isinstance(base, Memory) and not overlay:
        return _decode_gaps(space, row, start, base)
    at, steps = _positions(row, start)
    values = np.empty(len(at), UNSIGNED[space.width])
    if len(at):
        _old_bits(space, base, overlay, at, values)
    old = values.copy()
    escapes = expand_plane(row.escapes, row.escaped * space.width, row.tensor, "escapes").view(values.dtype)
    if row.coding == "whole":
        values = escapes
        found = change_digest(space, at, np.zeros_like(values), values)
        if found != row.digest:
            raise Corrupt(
                f"row of tensor {row.tensor!r}: bits have digest {found}, the row says {row.digest}"
            )
    else:
        fault = apply_steps(steps, escapes, values)
        if fault:
            raise Corrupt(f"row of tensor {row.tensor!r}: {STEP_FAULTS[fault]}")
    return Changes(space.dtype, at, values), change_digest(space, at, old, values)


def positions(space: FlatSpace, row: Row) -> npt.NDArray[np.int64]:
    """Flat elements that `row` has new bits for: int64 [count], ascending. Needs no base.

    Raises:
        Corrupt: the row breaks a rule of docs/format.md that shows without a base.
        UsageError: the row is coded by class, and only a base says where its changes are.
    """
    start = place_of(space, row)
    if row.coding == "class":
        raise _needs_base(row)
    return _positions(row, start)[0]


def check(space: FlatSpace, row: Row) -> None:
    """Check all of `row` that shows without a base.

    Raises:
        Corrupt: the row breaks a rule of docs/format.md.
    """
    start = place_of(space, row)
    if row.coding == "class":
        classes.check(row)
    elif row.coding != "whole":
        _positions(row, start)


def merge(older: Changes, newer: Changes) -> Changes:
    """Both lists of changes as one; where both have an element, the newer one holds.

    Raises:
        UsageError: they are of different dtypes.
    """
    if older.dtype != newer.dtype:
        raise UsageError(f"changes of {older.dtype} do not merge with changes of {newer.dtype}")
    if not len(older) or not len(newer):
        return newer if len(newer) else older
    positions = np.empty(len(older) + len(newer), np.int64)
    values = np.empty(len(positions), newer.values.dtype)
    count = kernels.merge(older.positions, older.values, newer.positions, newer.values, positions, values)
    return Changes(newer.dtype, positions[:count], values[:count])


def scatter(space: FlatSpace, memory: Memory, changes: Changes) -> None:
    """Write `changes` into `memory`. Idempotent. Releases the GIL.

    Raises:
        UsageError: the memory is read-only or not of this space, or the changes are not ascending in it.
    """
    if not memory.writable:
        raise UsageError("the memory to change is read-only")
    addresses = memory.addresses(space)
    _check_ascending(space, changes.positions)
    if changes.dtype != space.dtype or changes.values.dtype != UNSIGNED[space.width]:
        raise UsageError(
            f"changes of {changes.dtype} ({changes.values.dtype}) are not for the {space.dtype} space"
        )
    if len(changes.values) != len(changes.positions):
        raise UsageError(f"{len(changes.positions)} positions, but {len(changes.values)} values")
    if len(changes):
        first = space.tensor_at(int(changes.positions[0]))
        kernels.scatter(addresses, space.starts, first, changes.positions, changes.values)


def gather(space: FlatSpace, memory: Memory, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The bits at `positions`: unsigned [n].

    Raises:
        UsageError: the memory is not of this space, or the positions are not ascending elements of it.
    """
    addresses = memory.addresses(space)
    _check_ascending(space, positions)
    values = np.empty(len(positions), UNSIGNED[space.width])
    if len(positions):
        first = space.tensor_at(int(positions[0]))
        kernels.gather(addresses, space.starts, first, positions, values, TAGS[space.width])
    return values


def _check_ascending(space: FlatSpace, positions: npt.NDArray[np.int64]) -> None:
    if positions.dtype != np.int64 or not kernels.ascends(positions, space.elements):
        raise UsageError(f"positions are not ascending int64 elements of the {space.dtype} space")


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
    gapped = row.coding == "gap"
    if row.coding == "whole" and not row.escaped == row.count == row.length:
        raise Corrupt(f"row of tensor {row.tensor!r} is whole, but has {row.count} changes in {row.length}")
    if not 0 <= row.gap_shift <= (MAX_GAP_SHIFT if gapped else 0):
        raise Corrupt(f"row of tensor {row.tensor!r}: gap_shift {row.gap_shift} in coding {row.coding}")
    least, most = (row.count, row.count + (row.length >> row.gap_shift) // 255) if gapped else (0, 0)
    if not least <= row.gap_bytes <= most:
        raise Corrupt(f"row of tensor {row.tensor!r}: gap_bytes {row.gap_bytes}, expected {least} to {most}")
    if len(row.lows) != -(-row.count * row.gap_shift // 8):
        raise Corrupt(f"row of tensor {row.tensor!r}: {len(row.lows)} bytes of lows for {row.count} changes")
    unused = {"gap": (), "dense": (row.gaps,), "whole": (row.gaps, row.steps)}[row.coding]
    if any(unused):
        raise Corrupt(f"row of tensor {row.tensor!r} has planes that its coding {row.coding} does not use")
    return start


def _positions(row: Row, start: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Flat positions and step bytes of the changes of a row with checked figures; no steps for `whole`."""
    positions, steps = interval_positions(row, 0 if row.is_box else start)
    if row.is_box:
        kernels_boxes.spread(positions, start, row.run, row.stride)
    return positions, steps


def interval_positions(row: Row, start: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """The same of a row whose elements are side by side."""
    if row.coding == "whole":
        return np.arange(start, start + row.length), np.empty(0, np.uint8)
    raw = row.count if row.coding == "gap" else row.length
    steps = expand_plane(row.steps, raw, row.tensor, "steps")
    positions = np.empty(row.count, np.int64)
    if row.coding == "dense":
        nonzero = np.empty(row.count, np.uint8)
        if not find_steps(steps, start, positions, nonzero):
            raise Corrupt(f"row of tensor {row.tensor!r}: the steps do not mark {row.count} changes")
        return positions, nonzero
    gaps = expand_plane(row.gaps, row.gap_bytes, row.tensor, "gaps")
    lows = np.frombuffer(row.lows, np.uint8)
    if not read_gaps(gaps, lows, row.gap_shift, row.length, start, positions):
        raise _wrong_gaps(row)
    return positions, steps


def _decode_gaps(space: FlatSpace, row: Row, start: int, base: Memory) -> tuple[Changes, Digest]:
    """As `decode`, for a row of coding `gap` whose elements are side by side."""
    at, values = np.empty(row.count, np.int64), np.empty(row.count, UNSIGNED[space.width])
    fault, *lanes = kernels_apply.change_by_gaps(
        base.addresses(space), space.starts, space.seeds, space.tensor_at(start), start, row.length, row.gap_shift,
        expand_plane(row.gaps, row.gap_bytes, row.tensor, "gaps"), np.frombuffer(row.lows, np.uint8),
        expand_plane(row.steps, row.count, row.tensor, "steps"),
        expand_plane(row.escapes, row.escaped * space.width, row.tensor, "escapes").view(values.dtype),
        at, values, TAGS[space.width],
    )  # fmt: skip
    if fault == kernels_apply.GAPS_FAULT:
        raise _wrong_gaps(row)
    if fault:
        raise Corrupt(f"row of tensor {row.tensor!r}: {STEP_FAULTS[fault]}")
    return Changes(space.dtype, at, values), Digest(*map(int, lanes))


def _wrong_gaps(row: Row) -> Corrupt:
    return Corrupt(f"row of tensor {row.tensor!r}: gaps do not lead to {row.count} of {row.length} elements")


def _decode_class(
    space: FlatSpace, row: Row, start: int, base: Memory | Changes, overlay: Changes | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any], npt.NDArray[Any]]:
    """Flat positions of the changes of a row, and the bits there before and after."""
    if isinstance(base, Changes):
        raise _needs_base(row)
    address = base.address(space, start)
    run, stride = (row.run, row.stride) if row.is_box else (row.length, row.length)
    ends = np.array([start, start - row.offset + row.stop - 1])
    newer, parent = Changes.none(space) if overlay is None else _within(space, overlay, ends), None
    if len(newer) or row.is_box:
        parent = np.empty(row.length, UNSIGNED[space.width])
        kernels_boxes.pick(np.uint64(address), row.length, run, stride, parent, TAGS[space.width])
        kernels_boxes.put(newer.positions, newer.values, start, run, stride, parent)
        address = parent.ctypes.data
    at, old, values = classes.decode(space, row, address)
    del parent  # its memory was read until here
    kernels_boxes.spread(at, start, run, stride)
    return at, old, values


def _needs_base(row: Row) -> UsageError:
    return UsageError(
        f"the row of tensor {row.tensor!r} is coded by class: to decode it takes all old bits of the row, and only "
        "some are at hand",
        hint="follow with a mirror (--mirror FOLDER), or publish with --codec gap",
    )


def _old_bits(
    space: FlatSpace,
    base: Memory | Changes,
    overlay: Changes | None,
    at: npt.NDArray[np.int64],
    out: npt.NDArray[Any],
) -> None:
    """Bits that the row's parent has at ascending positions `at`."""
    newer = Changes.none(space) if overlay is None else _within(space, overlay, at)
    if isinstance(base, Changes):
        older = _within(space, base, at)
        if kernels.overlay(at, out, older.positions, older.values) < len(at):
            known = np.union1d(older.positions, newer.positions)
            if not np.isin(at, known, assume_unique=True).all():
                raise UsageError(f"the old {space.dtype} bits do not cover every element of the row")
    else:
        first = space.tensor_at(int(at[0]))
        kernels.gather(base.addresses(space), space.starts, first, at, out, TAGS[space.width])
    if len(newer):
        kernels.overlay(at, out, newer.positions, newer.values)


def _within(space: FlatSpace, changes: Changes, at: npt.NDArray[np.int64]) -> Changes:
    """Those of `changes` from the first to the last of the ascending positions `at`."""
    if changes.dtype != space.dtype:
        raise UsageError(f"bits of {changes.dtype} are not for the {space.dtype} space")
    begin, end = np.searchsorted(changes.positions, [at[0], at[-1] + 1])
    return Changes(changes.dtype, changes.positions[begin:end], changes.values[begin:end])
