"""How versions differ, tensor by tensor: as a delta says, and as the bits themselves say."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from weightcast.codec import FlatSpace, Geometry, Memory, positions
from weightcast.manifest.chain import Position
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.rebuild import FETCH_BYTES, State, rebuild
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import Row

from .pool import THREADS, ahead, workers
from .values import TensorChange

SLICE_ELEMENTS: Final = 1 << 22
"""Elements compared at once: a few MiB for each thread, so that large tensors are spread over the pool."""

ROWS_AHEAD: Final = 8  # rows unpacked at once; each takes at most 8 bytes a change beyond its planes

DiffKind = Literal["same", "changed", "added", "removed", "reshaped"]


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor in two versions.

    Attributes:
        name: of the tensor.
        kind: "added" and "removed" as seen going from `a` to `b`; "reshaped": another shape or dtype.
        dtype_a, shape_a, dtype_b, shape_b: in each version; None where the tensor is not there.
        tied_to: the tensor of `b` (for "removed": of `a`) whose bytes this one has.
        elements: in `b`; for "removed" in `a`.
        changed: elements whose bits differ; all of them unless "same" or "changed".
    """

    name: str
    kind: DiffKind
    dtype_a: str | None
    shape_a: tuple[int, ...] | None
    dtype_b: str | None
    shape_b: tuple[int, ...] | None
    tied_to: str | None
    elements: int
    changed: int


@dataclass(frozen=True, slots=True)
class Diff:
    """Two versions compared bit by bit.

    Attributes:
        a, b: the versions.
        identical: whether both have the same tensors with the same bits.
        elements: of `b`, without those of tied tensors.
        changed: elements of `b` that are new or have other bits, without those of tied tensors.
        tensors: every tensor of either version, by name.
    """

    a: int
    b: int
    identical: bool
    elements: int
    changed: int
    tensors: tuple[TensorDiff, ...]


def tensor_changes(
    reader: StreamReader, position: Position, *, threads: int = THREADS
) -> tuple[TensorChange, ...]:
    """How many elements of each tensor a version changed, from its shards alone: nothing is rebuilt.

    Raises:
        NotFound: a shard was pruned.
        Corrupt: a shard is not what the manifest says.
    """
    layout = reader.layout(position.manifest.layout)
    geometry = Geometry(layout)
    counts = {space.dtype: np.zeros(len(space.names), np.int64) for space in geometry}
    if position.manifest.reset:
        counts = {space.dtype: np.diff(space.starts) for space in geometry}
    with workers(threads) as fetching, workers(threads) as unpacking:
        rows = DeltaFetcher(reader.store, fetching, FETCH_BYTES).rows(position.manifest)

        def count(row: Row) -> tuple[str, int, npt.NDArray[np.int64]]:
            first, found = count_row(geometry.space_of(row), row)
            return row.dtype, first, found

        for _, future in ahead(unpacking, count, rows, ROWS_AHEAD):
            dtype, first, found = future.result()
            counts[dtype][first : first + len(found)] += found
    return tuple(_change(layout, geometry, counts, spec) for spec in layout)


def count_row(space: FlatSpace, row: Row) -> tuple[int, npt.NDArray[np.int64]]:
    """Changes of a row by tensor: position in the space of the first, and int64 [row.tensors]."""
    start = space.locate(row)
    first = space.tensor_at(start)
    if row.tensors == 1:
        return first, np.array([row.count], np.int64)
    edges = np.searchsorted(positions(space, row), space.starts[first : first + row.tensors + 1])
    return first, np.diff(edges)


def _change(
    layout: Layout,
    geometry: Geometry,
    counts: dict[str, npt.NDArray[np.int64]],
    spec: TensorSpec,
) -> TensorChange:
    owner = spec.tied_to or spec.name
    changed = int(counts[spec.dtype][geometry[spec.dtype].index[owner]])
    return TensorChange(spec.name, spec.dtype, spec.shape, spec.tied_to, spec.elements, changed)


def diff(reader: StreamReader, a: int, b: int, *, threads: int = THREADS) -> Diff:
    """Compare the bits of two versions. Both are rebuilt from the store: takes the memory of two models.

    Raises:
        NotFound: one of them does not exist.
        Gap: one of them can no longer be rebuilt.
        Corrupt: an object on the way is not what the manifests say.
    """
    for version in (a, b):
        reader.position(version)  # before anything large is fetched
    with workers(threads) as pool:
        low = rebuild(reader, min(a, b), pool)
        high = low if a == b else _go_on(reader, low, max(a, b), pool)
        return compare(low, high, pool) if a <= b else compare(high, low, pool)


def _go_on(reader: StreamReader, low: State, version: int, pool: Executor) -> State:
    """Rebuild a newer version, by way of the older one's copy where that is cheaper."""
    memory = Memory.allocate(low.geometry)
    for spec in low.layout.stored:
        np.copyto(memory.tensor(spec.name), low.memory.tensor(spec.name))
    try:
        return rebuild(reader, version, pool, start=State(low.position, low.geometry, memory))
    except WeightcastError:
        del memory
        return rebuild(reader, version, pool)  # damage in between need not concern a newer snapshot


def compare(a: State, b: State, pool: Executor) -> Diff:
    """The difference of two states."""
    names = sorted({s.name for s in a.layout} | {s.name for s in b.layout})
    both = [n for n in names if _comparable(a.layout, b.layout, n)]
    counts = dict.fromkeys(both, 0)
    for (name, _, _), future in ahead(pool, lambda piece: _differing(a, b, *piece), _pieces(b, both), 64):
        counts[name] += future.result()
    tensors = tuple(_tensor_diff(a.layout, b.layout, name, counts.get(name)) for name in names)
    return Diff(
        a=a.position.version,
        b=b.position.version,
        identical=all(t.kind == "same" for t in tensors),
        elements=b.layout.elements,
        changed=sum(t.changed for t in tensors if t.kind != "removed" and t.tied_to is None),
        tensors=tensors,
    )


def _comparable(a: Layout, b: Layout, name: str) -> bool:
    return name in a and name in b and (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)


def _pieces(state: State, names: list[str]) -> Iterator[tuple[str, int, int]]:
    for name in names:
        elements = state.layout[name].elements
        for begin in range(0, elements, SLICE_ELEMENTS):
            yield name, begin, min(begin + SLICE_ELEMENTS, elements)


def _differing(a: State, b: State, name: str, begin: int, end: int) -> int:
    views = [s.memory.tensor(s.layout[name].tied_to or name).reshape(-1)[begin:end] for s in (a, b)]
    return int(np.count_nonzero(views[0] != views[1]))  # unsigned integers: bits are compared, never values


def _tensor_diff(a: Layout, b: Layout, name: str, counted: int | None) -> TensorDiff:
    old, new = _find(a, name), _find(b, name)
    kind: DiffKind = "removed" if new is None else "added" if old is None else "reshaped"
    if counted is not None:
        kind = "changed" if counted else "same"
    spec = new or old
    elements = spec.elements if spec else 0
    return TensorDiff(
        name=name,
        kind=kind,
        dtype_a=old.dtype if old else None,
        shape_a=old.shape if old else None,
        dtype_b=new.dtype if new else None,
        shape_b=new.shape if new else None,
        tied_to=spec.tied_to if spec else None,
        elements=elements,
        changed=elements if counted is None else counted,
    )


def _find(layout: Layout, name: str) -> TensorSpec | None:
    return layout[name] if name in layout else None  # noqa: SIM401 - a Layout has no get()
