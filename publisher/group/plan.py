"""Who publishes what: from all ranks' tables of slices to one owner for each element. Pure.

Equal boxes of a tensor on several ranks are replicas. A large one is cut among its holders so that the ranks' bytes
even out; small ones go whole to the holder that has least. Everything else is its only holder's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from weightcast.schemas.dtypes import width_of
from weightcast.schemas.errors import UsageError, some
from weightcast.schemas.layout import MIX, Layout, TensorSpec

CUT_ELEMENTS: Final = 1 << 14
"""Elements of a replicated box from which on it is cut. A part of half of it has 80 changes at 1 %, 100 bytes: a row's
own cost. What is cut changes evenly, whatever one tensor does."""

_FINE: Final = 8
"""A dimension is cut if it has at least so many rows for each holder: shares are then right to a sixteenth."""


class Corner(NamedTuple):
    """A box of a tensor: first index and size in each dimension."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.extent)


@dataclass(frozen=True, slots=True)
class Entry:
    """A slice that a rank holds: tensor, dtype, whole shape, box; `tie`: the name it has the same memory as, or ""."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    corner: Corner
    tie: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that a rank owns. `entry`: position in its table of the slice that holds it."""

    entry: int
    corner: Corner


@dataclass(frozen=True)
class Replica:
    """A box that several ranks hold. Their bits must be equal.

    Attributes:
        name: of its tensor.
        holders: (rank, position in its table) of each.
        group: number of the ranks that hold it, as a set.
    """

    name: str
    holders: tuple[tuple[int, int], ...]
    group: int


@dataclass(frozen=True)
class Plan:
    """What all ranks agree on.

    Attributes:
        layout: all tensors.
        pieces: by rank what it owns, in the order of its table. Together they are each element once.
        replicas: what more than one rank holds.
    """

    layout: Layout
    pieces: tuple[tuple[Piece, ...], ...]
    replicas: tuple[Replica, ...]


@dataclass(slots=True)
class _Tensor:
    """All ranks' slices of one tensor: by box the (rank, position) of its holders; `ties`: what it repeats, by rank."""

    spec: TensorSpec
    rank: int
    boxes: dict[Corner, list[tuple[int, int]]]
    ties: dict[int, str]


def plan(tables: Sequence[Sequence[Entry]], before: Layout | None = None, drop: Collection[str] = ()) -> Plan:
    """Divide what the ranks hold. Deterministic.

    Args:
        tables: by rank.
        before: of the version before. Of tied tensors the one that it stores keeps the bytes; a second name that is not
            listed any more stays tied.
        drop: names of it that are not there any more.

    Raises:
        UsageError: ranks disagree about a tensor, hold boxes of it that overlap, or do not hold all of it (names the
            tensor and the ranks); or a tensor of the version before is missing.
    """
    tensors = _by_name(tables)
    if not tensors:
        raise UsageError("there is no tensor to publish", hint="pass model.state_dict()")
    ties = _ties(tensors, before.stored_by_name if before else ())
    checked: set[tuple[object, ...]] = set()
    for tensor in tensors.values():
        key = (tensor.spec.shape, *sorted(tensor.boxes))
        if key not in checked:  # models have few shapes
            _check(tensor)
            checked.add(key)
    specs = {n: replace(t.spec, tied_to=ties.get(n)) for n, t in tensors.items()}
    layout = Layout.of(_with_others(specs, before or (), drop).values(), before.mix if before else MIX)
    stored = [tensors[spec.name] for spec in layout.stored]
    owned = _divide(stored, len(tables))
    replicas = _replicas(stored)
    return Plan(layout, tuple(tuple(sorted(p, key=_in_order)) for p in owned), replicas)


def _with_others(
    specs: dict[str, TensorSpec], before: Iterable[TensorSpec], drop: Collection[str]
) -> dict[str, TensorSpec]:
    """Add second names that the version before has and no rank lists; refuse where something else is missing."""
    missing = []
    for spec in before:
        if spec.name in specs or spec.name in drop:
            continue
        first = specs.get(spec.tied_to or "")
        if first is None:
            missing.append(spec.name)
        else:
            specs[spec.name] = replace(first, name=spec.name, tied_to=first.tied_to or first.name)
    if missing:
        raise UsageError(
            f"not published, since the last version has tensors that no rank has now: {some(missing)}",
            hint="publish every tensor, or name those to drop",
        )
    return specs


def _replicas(tensors: Iterable[_Tensor]) -> tuple[Replica, ...]:
    groups: dict[tuple[int, ...], int] = {}
    found = []
    for tensor in tensors:
        for corner, holders in tensor.boxes.items():
            if len(holders) > 1 and corner.elements:
                group = groups.setdefault(tuple(rank for rank, _ in holders), len(groups))
                found.append(Replica(tensor.spec.name, tuple(holders), group))
    return tuple(found)


def _in_order(piece: Piece) -> tuple[int, Corner]:
    return piece.entry, piece.corner


def _by_name(tables: Sequence[Sequence[Entry]]) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for rank, table in enumerate(tables):
        for position, entry in enumerate(table):
            spec = TensorSpec(entry.name, entry.dtype, entry.shape)
            tensor = tensors.get(entry.name)
            if tensor is None:
                tensor = tensors[entry.name] = _Tensor(spec, rank, {}, {})
            if tensor.spec != spec:
                raise UsageError(
                    f"not published, since tensor {entry.name!r} is {tensor.spec.dtype}{list(tensor.spec.shape)} on "
                    f"rank {tensor.rank} and {entry.dtype}{list(entry.shape)} on rank {rank}",
                    hint="all ranks must give the whole tensor's shape and the same dtype",
                )
            if entry.corner.elements or not spec.elements:
                holders = tensor.boxes.setdefault(entry.corner, [])
                if holders and holders[-1][0] == rank:
                    raise UsageError(
                        f"not published, since tensor {entry.name!r} comes twice on rank {rank}",
                        hint="publish every tensor once",
                    )
                holders.append((rank, position))
                tensor.ties[rank] = entry.tie if tensor.ties.get(rank, entry.tie) == entry.tie else ""
    return tensors


def _ties(tensors: Mapping[str, _Tensor], prefer: Collection[str]) -> dict[str, str]:
    """For tensors that are another one on every rank that has some of them: that one's name."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        found = set(tensor.ties.values())
        first = found.pop() if len(found) == 1 else ""
        other = tensors.get(first)
        if other is not None and (other.boxes.keys(), other.spec.dtype) == (
            tensor.boxes.keys(),
            tensor.spec.dtype,
        ):
            groups[first].append(name)
    ties: dict[str, str] = {}
    for first, names in groups.items():
        keeper = next((n for n in [first, *names] if n in prefer), first)
        ties |= {name: keeper for name in [first, *names] if name != keeper}
    return ties


def _check(tensor: _Tensor) -> None:
    """Refuse boxes that overlap, or that leave something out."""
    boxes = sorted(tensor.boxes)
    active: list[Corner] = []
    for box in boxes:  # ascending in the first dimension: what ended before cannot overlap
        active = [b for b in active if not box.start or b.start[0] + b.extent[0] > box.start[0]]
        for other in active:
            if _overlap(box, other):
                one, two = (", ".join(str(rank) for rank, _ in tensor.boxes[b]) for b in (other, box))
                raise UsageError(
                    f"not published, since ranks {one} and {two} hold parts of tensor {tensor.spec.name!r} that "
                    f"overlap: {list(other.extent)} at {list(other.start)}, {list(box.extent)} at {list(box.start)}",
                    hint="parts of a tensor must be the same on two ranks, or have nothing in common",
                )
        active.append(box)
    held = sum(box.elements for box in boxes)
    if held != tensor.spec.elements:
        ranks = sorted({rank for holders in tensor.boxes.values() for rank, _ in holders})
        raise UsageError(
            f"not published, since no rank has {tensor.spec.elements - held} of the {tensor.spec.elements} elements of "
            f"tensor {tensor.spec.name!r}; ranks that have some: {', '.join(map(str, ranks)) or 'none'}",
            hint="every rank must publish its slices of every tensor",
        )


def _overlap(a: Corner, b: Corner) -> bool:
    return all(
        s < t + m and t < s + n for s, n, t, m in zip(a.start, a.extent, b.start, b.extent, strict=True)
    )


def _divide(tensors: Sequence[_Tensor], ranks: int) -> list[list[Piece]]:
    owned: list[list[Piece]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    shared: list[tuple[int, str, Corner, list[tuple[int, int]], int]] = []
    for tensor in tensors:
        width = width_of(tensor.spec.dtype, tensor.spec.name)
        for corner, holders in tensor.boxes.items():
            if len(holders) == 1:
                rank, position = holders[0]
                owned[rank].append(Piece(position, corner))
                loads[rank] += corner.elements * width
            elif corner.elements:
                shared.append((corner.elements * width, tensor.spec.name, corner, holders, width))
    shared.sort(key=lambda s: (-s[0], s[1], s[2]))
    for nbytes, _, corner, holders, width in shared:
        dim = _dimension_to_cut(corner, len(holders)) if corner.elements >= CUT_ELEMENTS else None
        if dim is None:
            rank, position = min(holders, key=lambda h: (loads[h[0]], h[0]))
            owned[rank].append(Piece(position, corner))
            loads[rank] += nbytes
            continue
        shares = _shares([loads[rank] for rank, _ in holders], nbytes)
        for (rank, position), part in zip(holders, _cut(corner, dim, shares), strict=True):
            if part.elements:
                owned[rank].append(Piece(position, part))
                loads[rank] += part.elements * width
    return owned


def _dimension_to_cut(corner: Corner, holders: int) -> int | None:
    """The first dimension that can be cut finely: parts are then as long as they can be side by side."""
    return next((d for d, n in enumerate(corner.extent) if n >= _FINE * holders), None)


def _shares(loads: Sequence[int], nbytes: int) -> list[float]:
    """Fractions of `nbytes` more that bring all loads as near to one level as they come, as water would."""
    total, level = nbytes, 0.0
    ascending = sorted(loads)
    for count, load in enumerate(ascending, 1):
        total += load
        level = total / count
        if count < len(ascending) and level <= ascending[count]:
            break
    return [max(0.0, level - load) / nbytes for load in loads]


def _cut(corner: Corner, dim: int, shares: Sequence[float]) -> Iterator[Corner]:
    """Cut a box along a dimension by fractions that add up to 1."""
    size, done, share = corner.extent[dim], 0, 0.0
    for number, fraction in enumerate(shares, 1):
        share += fraction
        end = size if number == len(shares) else min(size, round(share * size))
        start = (*corner.start[:dim], corner.start[dim] + done, *corner.start[dim + 1 :])
        yield Corner(start, (*corner.extent[:dim], end - done, *corner.extent[dim + 1 :]))
        done = end
