"""The state digest of bits in memory (docs/format.md, state digest)."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt

from weightcast.schemas.digest import Digest

from . import kernels
from .jit import TAGS
from .memory import Memory
from .space import FlatSpace, Geometry, Interval


def digest(space: FlatSpace, memory: Memory, interval: Interval) -> Digest:
    """Digest of the bits that `memory` has in `interval`, which may be of any length. Releases the GIL.

    Raises:
        UsageError: the interval is not in the space, or the memory is not of its layout.
    """
    space.check(interval)
    lanes = kernels.digest_interval(
        memory.addresses(space), space.starts, space.seeds, space.tensor_at(interval.start),
        interval.start, interval.length, TAGS[space.width],
    )  # fmt: skip
    return Digest(int(lanes[0]), int(lanes[1]))


def digest_all(geometry: Geometry, memory: Memory, pool: Executor | None = None) -> Digest:
    """Digest of a whole state, interval by interval, in `pool` if there is one."""

    def of(interval: Interval) -> Digest:
        return digest(geometry[interval.dtype], memory, interval)

    run = map if pool is None else pool.map
    return sum(run(of, geometry.intervals()), Digest())


def change_digest(
    space: FlatSpace, positions: npt.NDArray[np.int64], old: npt.NDArray[Any], new: npt.NDArray[Any]
) -> Digest:
    """What changes move the digest by: the sum of (new - old) * R.

    Args:
        space: the flat space.
        positions: int64 [n], flat elements, strictly ascending, inside the space.
        old: unsigned [n] of the space's width.
        new: likewise.
    """
    if not len(positions):
        return Digest()
    first = space.tensor_at(int(positions[0]))
    positions, old, new = (np.ascontiguousarray(side) for side in (positions, old, new))
    lanes = kernels.digest_change(space.starts, space.seeds, first, positions, 0, old, new, len(positions))
    return Digest(int(lanes[0]), int(lanes[1]))
