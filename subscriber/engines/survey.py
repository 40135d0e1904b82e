"""Judges what all ranks of an engine recorded: which tensors it holds once and whole, and who answers for which part.

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np

from weightcast.codec.regions import Region, canonical, runs
from weightcast.schemas.digest import Digest
from weightcast.schemas.engine import RankReport
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import Layout, TensorSpec

NOBODYS: Final = -1
"""Class of the moves of refused tensors; nothing may be written through them."""


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """A rank, and which of its copies: it may hold the same part twice."""

    rank: str
    copy: int


@dataclass(frozen=True, slots=True)
class Class:
    """All parts that the same holders have.

    Attributes:
        id: its position in `Survey.classes`.
        holders: ascending. The first one leads: it answers reads.
        elements: of each holder.
        digest: of the live bits, equal at all holders.
    """

    id: int
    holders: tuple[Holder, ...]
    elements: int
    digest: Digest


@dataclass(frozen=True, slots=True)
class Survey:
    """The judgement.

    Attributes:
        refused: stored tensor -> why the engine cannot be kept at a version of it.
        classes: of the tensors that are not refused.
        assignment: rank -> for each region that it reported, in its order: class, and whether the rank leads it there.
            Regions of refused tensors: (`NOBODYS`, False).
        digest: of the live bits of all tensors that are not refused: the sum over the classes.
    """

    refused: dict[str, str]
    classes: tuple[Class, ...]
    assignment: dict[str, list[tuple[int, bool]]]
    digest: Digest


@dataclass(slots=True)
class _Part:
    """A set of elements of a tensor, and everyone who has it."""

    holders: list[Holder] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    moves: list[int] = field(default_factory=list)  # of each holder: the position in its report


_Parts = dict[Region, _Part]


def survey(layout: Layout, reports: Mapping[str, RankReport]) -> Survey:
    """Judge the reports of all ranks, by name. The result does not depend on the order of `reports`.

    Raises:
        UsageError: a report names a tensor that the layout does not have; it was made for another one.
    """
    tensors = _gather(layout, reports)
    refused = _refusals(layout, reports)
    for spec in layout.stored:
        if spec.name not in refused:
            reason = _fault(spec, tensors.get(spec.name, {}))
            if reason:
                refused[spec.name] = reason
    accepted = {s.name: tensors[s.name] for s in layout.stored if s.name in tensors and s.name not in refused}
    classes, ids = _classify(accepted)
    assignment = {rank: [(NOBODYS, False)] * len(report.regions) for rank, report in reports.items()}
    for parts in accepted.values():
        for part in parts.values():
            number = ids[tuple(part.holders)]
            for i, (holder, move) in enumerate(zip(part.holders, part.moves, strict=True)):
                assignment[holder.rank][move] = (number, i == 0)
    return Survey(refused, classes, assignment, sum((c.digest for c in classes), Digest()))


def _gather(layout: Layout, reports: Mapping[str, RankReport]) -> dict[str, _Parts]:
    """All regions by tensor and by the elements that they hold, empty ones left out."""
    tensors: dict[str, _Parts] = {}
    for rank in sorted(reports):
        for move, region in enumerate(reports[rank].regions):
            if region.tensor not in layout.stored_by_name:
                raise _foreign(rank, region.tensor)
            where = _canonical(tuple(region.shape), tuple(region.strides), region.offset)
            if where.elements:
                part = tensors.setdefault(region.tensor, {}).setdefault(where, _Part())
                copy = sum(h.rank == rank for h in reversed(part.holders))
                part.holders.append(Holder(rank, copy))
                part.digests.append(region.digest)
                part.moves.append(move)
    return tensors


@lru_cache(1 << 16)
def _canonical(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Region:
    return canonical(Region(shape, strides, offset))


def _refusals(layout: Layout, reports: Mapping[str, RankReport]) -> dict[str, str]:
    """Whatever is refused on any rank, with the first such rank's reason."""
    refused: dict[str, str] = {}
    for rank in sorted(reports):
        for name, reason in reports[rank].refused.items():
            if name not in layout:
                raise _foreign(rank, name)
            refused.setdefault(layout[name].tied_to or name, f"{rank}: {reason}")
    return refused


def _foreign(rank: str, tensor: str) -> UsageError:
    return UsageError(
        f"rank {rank} reports tensor {tensor!r}, which the layout does not store",
        hint="attach again, so that all ranks record the same layout",
    )


def _fault(spec: TensorSpec, parts: _Parts) -> str:
    """Why the engine does not hold a tensor once and whole; "" if it does."""
    if not spec.elements:
        return ""
    if not parts:
        return "no rank of the engine has a place for it"
    fault = _coverage(spec.elements, tuple(sorted(parts, key=lambda r: (r.offset, r.shape, r.strides))))
    if fault:
        return fault
    for region, part in parts.items():
        for holder, digest in zip(part.holders, part.digests, strict=True):
            if digest != part.digests[0]:
                return (
                    f"ranks hold different bits of elements {region.offset} to {region.stop}: "
                    f"{_called(part.holders[0])} and {_called(holder)}"
                )
    return ""


def _called(holder: Holder) -> str:
    return f"{holder.rank} (copy {holder.copy + 1})" if holder.copy else holder.rank


def _coverage(elements: int, regions: tuple[Region, ...]) -> str:
    """What keeps `regions` from being all of `elements`, each once; "" if nothing does."""
    if regions == (Region((elements,), (1,), 0),) or (regions == (Region((), (), 0),) and elements == 1):
        return ""
    stop = max(region.stop for region in regions)
    if stop > elements:
        return f"a rank reports elements up to {stop}, and the tensor has {elements}"
    return _swept(elements, regions)


@lru_cache(1 << 16)
def _swept(elements: int, regions: tuple[Region, ...]) -> str:
    """Cached: all layers of a model, and all experts, are split alike."""
    spans = [runs(region) for region in regions]
    starts = np.concatenate([s for s, _ in spans])
    stops = np.concatenate([s + n for s, n in spans])
    order = np.argsort(starts, kind="stable")
    starts, stops = np.append(starts[order], elements), np.append(0, stops[order])
    wrong = np.flatnonzero(starts != stops)
    if not len(wrong):
        return ""
    start, stop = int(starts[wrong[0]]), int(stops[wrong[0]])
    if start > stop:
        return f"elements {stop} to {start} are on no rank"
    stop = min(stop, int(stops[wrong[0] + 1]))
    return f"ranks hold overlapping parts: elements {start} to {stop} are in more than one"


def _classify(tensors: Mapping[str, _Parts]) -> tuple[tuple[Class, ...], dict[tuple[Holder, ...], int]]:
    """One class for each set of holders, in the order in which the layout needs them."""
    ids: dict[tuple[Holder, ...], int] = {}
    elements: list[int] = []
    digests: list[Digest] = []
    for parts in tensors.values():
        for region in sorted(parts, key=lambda r: (r.offset, r.shape, r.strides)):
            number = ids.setdefault(tuple(parts[region].holders), len(ids))
            if number == len(elements):
                elements.append(0)
                digests.append(Digest())
            elements[number] += region.elements
            digests[number] += Digest.from_hex(parts[region].digests[0])
    classes = (Class(i, holders, elements[i], digests[i]) for holders, i in ids.items())
    return tuple(classes), ids
