"""A captured version waits while the one before it commits; then its changes must be told from the new baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor

import numpy as np

from weightcast.codec import FlatSpace, Geometry, Interval, Memory, decode, encode
from weightcast.manifest.deltas import apply_directly
from weightcast.manifest.rebuild import State, carry_over
from weightcast.schemas.shard import Codec, Row

from .capture import Capture, DeltaCapture
from .sources import Item


def rebase_rows(
    state: State,
    committed: Mapping[Interval, Row],
    waiting: Mapping[Interval, Row],
    pool: Executor,
    level: int,
    codec: Codec,
) -> dict[Interval, Row]:
    """Rows that lead from `state` + `committed` to `state` + `waiting`; both are told from `state`.

    Works interval by interval on copies, so that memory grows by a few rows alone.
    """

    groups = _by_widest(committed, waiting)

    def one(interval: Interval) -> tuple[Interval, Row | None]:
        space = state.geometry[interval.dtype]
        old, new = (_patched(space, state, interval, rows) for rows in groups[interval])
        return interval, encode(space, new, old, interval, level, codec=codec).row

    return {interval: row for interval, row in pool.map(one, groups) if row is not None}


def _by_widest(*both: Mapping[Interval, Row]) -> dict[Interval, tuple[list[Row], ...]]:
    """Rows of each side by the intervals that lie in no other.

    Of two intervals that a capture may have, the one lies in the other, or they have nothing in common: `split` always
    cuts alike, and `joined` puts whole intervals together, or does not (`class`).
    """
    groups: dict[Interval, tuple[list[Row], ...]] = {}
    widest: Interval | None = None
    for interval in sorted({i for rows in both for i in rows}, key=lambda i: (i.dtype, i.start, -i.length)):
        if widest is None or interval.dtype != widest.dtype or interval.start >= widest.stop:
            widest = interval
            groups[widest] = tuple([] for _ in both)
        for rows, group in zip(both, groups[widest], strict=True):
            if interval in rows:
                group.append(rows[interval])
    return groups


def _patched(space: FlatSpace, state: State, interval: Interval, rows: Iterable[Row]) -> Memory:
    """A copy of the interval with `rows` applied, at addresses at which the codec finds it."""
    copy = np.empty(interval.length, f"u{space.width}")
    memory = Memory.blank(state.geometry)
    first, last = space.tensor_at(interval.start), space.tensor_at(interval.stop - 1)
    for position in range(first, last + 1):
        begin = max(int(space.starts[position]), interval.start)
        end = min(int(space.starts[position + 1]), interval.stop)
        if begin < end:
            inside = begin - int(space.starts[position])
            source = state.memory.tensor(space.names[position]).reshape(-1)[inside : inside + end - begin]
            copy[begin - interval.start : end - interval.start] = source
            memory.place(
                space.names[position],
                copy.ctypes.data + (begin - interval.start - inside) * space.width,
                copy,
            )
    for row in rows:
        changes, _ = decode(space, row, state.memory)
        copy[changes.positions - interval.start] = changes.values
    return memory


def recapture(
    before: State,
    waiting: Capture,
    after: State,
    pool: Executor,
    *,
    row_elements: int,
    level: int,
    codec: Codec,
) -> Capture:
    """The same for captures between which the layout changes: through a whole copy of the waiting state.

    Args:
        before: what `waiting` was told from; no longer the baseline's state, but with its bits.
        waiting: a finished capture.
        after: the new baseline.
    """
    image = materialise(before, waiting, pool)
    fresh = Capture(waiting.label)
    found = []
    for spec in sorted(
        waiting.layout, key=lambda s: s.tied_to is not None
    ):  # the tensor before those that are tied to it
        name = spec.tied_to or spec.name
        array = image.tensor(name)
        address = array.ctypes.data if spec.elements else 0
        found.append(Item(spec, address, array, True, (name,) if spec.elements else None))
    drop = [s.name for s in after.layout if s.name not in waiting.layout]
    DeltaCapture(fresh, after, pool, row_elements=row_elements, level=level, codec=codec).run(found, drop)
    fresh.rows.by_interval()  # all coded, before `after` changes
    return fresh


def materialise(before: State, capture: Capture, pool: Executor) -> Memory:
    """All bits that `capture` saw, in memory of their own."""
    geometry: Geometry = capture.geometry or before.geometry
    memory, _ = carry_over(before, geometry, pool)
    apply_directly(geometry, capture.rows, memory, pool)
    return memory
