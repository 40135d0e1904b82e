"""Absolute new values of elements: merged, read from memory, written to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.errors import UsageError

from . import kernels, kernels_apply
from .jit import TAGS
from .memory import UNSIGNED, Memory
from .space import FlatSpace
from .threads import spread_evenly

SHARE: Final = 1 << 16
"""Changes from which on a thread of its own pays: half a millisecond of work, where a thread costs a tenth."""


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
        return cls.room(space, 0)

    @classmethod
    def room(cls, space: FlatSpace, count: int) -> Changes:
        """Arrays for so many, with nothing in them yet."""
        return cls(space.dtype, np.empty(count, np.int64), np.empty(count, UNSIGNED[space.width]))

    def part(self, first: int, last: int) -> Changes:
        """A view of the changes [first, last)."""
        return Changes(self.dtype, self.positions[first:last], self.values[first:last])


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
    """Write `changes` into `memory`. Idempotent. Releases the GIL; many changes take several cores.

    Raises:
        UsageError: the memory is read-only or not of this space, or the changes are not ascending in it.
    """
    addresses = _to_write(space, memory, changes)

    def part(first: int, last: int) -> None:
        positions = changes.positions[first:last]
        tensor = space.tensor_at(int(positions[0]))
        kernels.scatter(addresses, space.starts, tensor, positions, changes.values[first:last])

    spread_evenly(part, len(changes), SHARE)


def put(space: FlatSpace, memory: Memory, changes: Changes) -> bool:
    """`scatter`, and read back, some thousand changes at a time; whether everything was found as it was written.

    Raises:
        UsageError: as `scatter`.
    """
    addresses = _to_write(space, memory, changes)

    def part(first: int, last: int) -> bool:
        positions = changes.positions[first:last]
        tensor = space.tensor_at(int(positions[0]))
        values, tag = changes.values[first:last], TAGS[space.width]
        return bool(kernels_apply.put(addresses, space.starts, tensor, positions, values, tag))

    return all(spread_evenly(part, len(changes), SHARE))


def gather(space: FlatSpace, memory: Memory, positions: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """The bits at `positions`: unsigned [n]. Releases the GIL; many positions take several cores.

    Raises:
        UsageError: the memory is not of this space, or the positions are not ascending elements of it.
    """
    addresses = memory.addresses(space)
    _check_ascending(space, positions)
    values = np.empty(len(positions), UNSIGNED[space.width])

    def part(first: int, last: int) -> None:
        tensor = space.tensor_at(int(positions[first]))
        tag = TAGS[space.width]
        kernels.gather(addresses, space.starts, tensor, positions[first:last], values[first:last], tag)

    spread_evenly(part, len(positions), SHARE)
    return values


def within(space: FlatSpace, changes: Changes, first: int, last: int) -> Changes:
    """Those of `changes` from flat element `first` to `last`, which counts.

    Raises:
        UsageError: they are not of this space.
    """
    if changes.dtype != space.dtype:
        raise UsageError(f"bits of {changes.dtype} are not for the {space.dtype} space")
    begin, end = np.searchsorted(changes.positions, [first, last + 1])
    return changes.part(int(begin), int(end))


def _to_write(space: FlatSpace, memory: Memory, changes: Changes) -> npt.NDArray[np.uint64]:
    """Addresses of the memory, after checking that the changes can be written to it."""
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
    return addresses


def _check_ascending(space: FlatSpace, positions: npt.NDArray[np.int64]) -> None:
    def part(first: int, last: int) -> bool:  # with the last one of the part before
        return bool(kernels.ascends(positions[max(first - 1, 0) : last], space.elements))

    if positions.dtype != np.int64 or not all(spread_evenly(part, len(positions), 8 * SHARE)):
        raise UsageError(f"positions are not ascending int64 elements of the {space.dtype} space")
