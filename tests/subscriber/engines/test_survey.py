"""Judging all ranks' reports: splits of every kind are accepted, and each fault is refused by name."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.codec import Geometry, Memory, digest_all
from weightcast.codec.digest import change_digest
from weightcast.codec.regions import Region, runs
from weightcast.schemas.digest import Digest
from weightcast.schemas.engine import RankReport
from weightcast.schemas.engine import Region as Reported
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.subscriber.engines.survey import NOBODYS, Holder, Survey, survey

Parts = dict[str, list[tuple[str, Region, Digest]]]
"""By rank: tensor, source, digest."""


def reports(parts: Parts, refused: dict[str, dict[str, str]] | None = None) -> dict[str, RankReport]:
    return {
        rank: RankReport(
            regions=[
                Reported(
                    tensor=t, shape=list(r.shape), strides=list(r.strides), offset=r.offset, digest=d.hex
                )
                for t, r, d in found
            ],
            refused=(refused or {}).get(rank, {}),
            absent=[],
        )
        for rank, found in parts.items()
    }


def box(shape: tuple[int, ...], lo: tuple[int, ...], hi: tuple[int, ...]) -> Region:
    """A box of a C-order tensor."""
    strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    size = tuple(b - a for a, b in zip(lo, hi, strict=True))
    return Region(size, strides, sum(a * s for a, s in zip(lo, strides, strict=True)))


@dataclass
class World:
    """A layout, its bits, and how ranks split it."""

    layout: Layout
    whole: Digest
    parts: Parts


def bits_digest(geometry: Geometry, values: dict[str, Any], tensor: str, region: Region) -> Digest:
    """Digest of a part: what setting it, in a state of zeros, moves the digest by."""
    space = geometry[geometry.layout[tensor].dtype]
    starts, length = runs(region)
    flat = (starts[:, None] + np.arange(length)).ravel()
    new = values[tensor][flat]
    return change_digest(space, flat + space.starts[space.index[tensor]], np.zeros_like(new), new)


def cuts(draw: Any, length: int, most: int) -> list[int]:
    inside = draw(st.lists(st.integers(1, max(1, length - 1)), max_size=most - 1, unique=True))
    return [0, *sorted(c for c in inside if c < length), length]


def pieces(draw: Any, shape: tuple[int, ...]) -> list[Region]:
    """A tensor as a grid of boxes: row slices, column slices, blocks."""
    along = [cuts(draw, n, 3) for n in shape]
    grid = itertools.product(*[list(itertools.pairwise(c)) for c in along])
    return [box(shape, tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in grid]


def turned(draw: Any, region: Region) -> Region:
    """The same elements as another loader may have copied them."""
    order = draw(st.permutations(range(len(region.shape))))
    return Region(
        (1, *(region.shape[i] for i in order)), (7, *(region.strides[i] for i in order)), region.offset
    )


@st.composite
def worlds(draw: Any) -> World:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5))
    layout = Layout.of(
        TensorSpec(f"t{i}", draw(st.sampled_from(["BF16", "F32", "U8"])), shape)
        for i, shape in enumerate(shapes)
    )
    geometry = Geometry(layout)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    values = {s.name: random.integers(1, 1 << 8, s.elements).astype(f"u{s.width}") for s in layout.stored}
    memory = Memory.at(geometry, {n: v.ctypes.data for n, v in values.items()}, values)
    ranks = [f"dp{i}-pp0-tp0" for i in range(draw(st.integers(1, 4)))]
    parts: Parts = {rank: [] for rank in ranks}
    for spec in layout.stored:
        for region in pieces(draw, spec.shape) if spec.elements else []:
            value = bits_digest(geometry, values, spec.name, region)
            for rank in draw(
                st.lists(st.sampled_from(ranks), min_size=1, max_size=4)
            ):  # one twice: two copies
                parts[rank].append((spec.name, turned(draw, region), value))
    return World(layout, digest_all(geometry, memory), parts)


@settings(max_examples=60, deadline=None)
@given(worlds())
def test_any_split_is_accepted_and_adds_up_to_the_whole(world: World) -> None:
    found = survey(world.layout, reports(world.parts))
    assert found.refused == {}
    assert found.digest == world.whole
    assert sum(c.elements for c in found.classes) == world.layout.elements
    check_assignment(world, found)


def check_assignment(world: World, found: Survey) -> None:
    """Every holder's parts of a class add up to its digest, and exactly the first holder leads."""
    sums: dict[tuple[int, Holder], Digest] = {}
    leaders: dict[int, set[str]] = {}
    for rank, regions in world.parts.items():
        seen: dict[tuple[str, frozenset[int]], int] = {}
        assert len(found.assignment[rank]) == len(regions)
        for (tensor, region, digest), (number, leads) in zip(regions, found.assignment[rank], strict=True):
            starts, length = runs(region)
            key = (tensor, frozenset((starts[:, None] + np.arange(length)).ravel().tolist()))
            copy = seen[key] = seen.get(key, -1) + 1
            part = (number, Holder(rank, copy))
            sums[part] = sums.get(part, Digest()) + digest
            assert leads == (found.classes[number].holders[0] == Holder(rank, copy))
            if leads:
                leaders.setdefault(number, set()).add(rank)
    assert sums == {(c.id, h): c.digest for c in found.classes for h in c.holders}
    assert all(len(leaders[c.id]) == 1 for c in found.classes)
    assert len({c.holders for c in found.classes}) == len(found.classes)


@settings(max_examples=60, deadline=None)
@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_the_ranks_does_not_matter(world: World, rng: random.Random) -> None:
    shuffled = list(world.parts.items())
    rng.shuffle(shuffled)
    assert survey(world.layout, reports(dict(shuffled))) == survey(world.layout, reports(world.parts))


@settings(max_examples=60, deadline=None)
@given(worlds(), st.data())
def test_every_fault_is_refused_by_name(world: World, data: st.DataObject) -> None:
    """A part is lost everywhere, or moved by an element on one rank, or has one bit wrong on one rank of several."""
    held = [(rank, i) for rank, regions in world.parts.items() for i in range(len(regions))]
    if not held:
        return
    rank, at = data.draw(st.sampled_from(held))
    tensor, region, digest = world.parts[rank][at]
    twins = [
        (r, i)
        for r, i in held
        if world.parts[r][i][0] == tensor and set_of(world.parts[r][i][1]) == set_of(region)
    ]
    fault = data.draw(st.sampled_from(["lost", "moved", "flipped"]))
    parts = {r: list(regions) for r, regions in world.parts.items()}
    if fault == "lost":
        parts = {r: [p for i, p in enumerate(found) if (r, i) not in twins] for r, found in parts.items()}
    elif fault == "moved":
        parts[rank][at] = (tensor, Region(region.shape, region.strides, region.offset + 1), digest)
    else:
        parts[rank][at] = (tensor, region, digest + Digest(1, 0))
    found = survey(world.layout, reports(parts))
    if fault == "flipped" and len(twins) == 1:
        assert found.refused == {}  # nobody to compare with: the version's digest says so
        assert found.digest == world.whole + Digest(1, 0)
        return
    assert set(found.refused) == {tensor}
    rest = sum((d for t, _, d in first_of_each(world) if t != tensor), Digest())
    assert found.digest == rest
    for r, regions in parts.items():
        for (name, _, _), (number, leads) in zip(regions, found.assignment[r], strict=True):
            assert (number == NOBODYS and not leads) == (name == tensor) or number != NOBODYS


def set_of(region: Region) -> frozenset[int]:
    starts, length = runs(region)
    return frozenset((starts[:, None] + np.arange(length)).ravel().tolist())


def first_of_each(world: World) -> list[tuple[str, Region, Digest]]:
    found = {(t, set_of(r)): (t, r, d) for regions in world.parts.values() for t, r, d in regions}
    return list(found.values())


A, B = "dp0-pp0-tp0", "dp0-pp0-tp1"
W = Layout.of([TensorSpec("w", "BF16", (4, 6))])
WHOLE, LEFT, RIGHT = box((4, 6), (0, 0), (4, 6)), box((4, 6), (0, 0), (4, 3)), box((4, 6), (0, 3), (4, 6))
D1, D2 = Digest(1, 2), Digest(3, 5)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({A: []}, "no rank of the engine has a place for it"),
        ({A: [("w", LEFT, D1)]}, "elements 3 to 6 are on no rank"),
        ({A: [("w", RIGHT, D1)]}, "elements 0 to 3 are on no rank"),
        ({A: [("w", box((4, 6), (0, 0), (2, 6)), D1)]}, "elements 12 to 24 are on no rank"),
        (
            {A: [("w", WHOLE, D1)], B: [("w", LEFT, D2)]},
            "ranks hold overlapping parts: elements 0 to 3 are in more than one",
        ),
        (
            {A: [("w", LEFT, D1)], B: [("w", box((4, 6), (0, 2), (4, 6)), D2)]},
            "ranks hold overlapping parts: elements 2 to 3 are in more than one",
        ),
        ({A: [("w", Region((30,), (1,), 0), D1)]}, "a rank reports elements up to 30, and the tensor has 24"),
        ({A: [("w", WHOLE, D1)], B: [("w", Region((3,), (1,), 40), D1)]}, "a rank reports elements up to 43, and the tensor has 24"),
        (
            {A: [("w", WHOLE, D1)], B: [("w", WHOLE, D2)]},
            f"ranks hold different bits of elements 0 to 24: {A} and {B}",
        ),
        (
            {A: [("w", LEFT, D1), ("w", RIGHT, D1), ("w", RIGHT, D2)]},
            f"ranks hold different bits of elements 3 to 24: {A} and {A} (copy 2)",
        ),
    ],
)  # fmt: skip
def test_b039_reasons_name_elements_and_ranks(parts: Parts, reason: str) -> None:
    assert survey(W, reports(parts)).refused == {"w": reason}


def test_tensor_parallel_halves_and_a_replicated_tensor() -> None:
    layout = Layout.of([TensorSpec("norm", "BF16", (4,)), TensorSpec("w", "BF16", (4, 6))])
    norm = Region((4,), (1,), 0)
    found = survey(
        layout, reports({B: [("w", RIGHT, D2), ("norm", norm, D1)], A: [("norm", norm, D1), ("w", LEFT, D1)]})
    )
    assert [(c.holders, c.elements, c.digest) for c in found.classes] == [
        ((Holder(A, 0), Holder(B, 0)), 4, D1),
        ((Holder(A, 0),), 12, D1),
        ((Holder(B, 0),), 12, D2),
    ]
    assert found.assignment == {A: [(0, True), (1, True)], B: [(2, True), (0, False)]}
    assert found.digest == D1 + D1 + D2


def test_a_copy_on_the_same_rank_is_a_holder_of_its_own() -> None:
    found = survey(W, reports({A: [("w", WHOLE, D1), ("w", WHOLE, D1)]}))
    assert [c.holders for c in found.classes] == [(Holder(A, 0), Holder(A, 1))]
    assert found.assignment == {A: [(0, True), (0, False)]}
    assert found.digest == D1


def test_refused_on_one_rank_is_refused() -> None:
    found = survey(W, reports({A: [("w", WHOLE, D1)], B: []}, {B: {"w": "cast"}}))
    assert found.refused == {"w": f"{B}: cast"}
    assert found.assignment == {A: [(NOBODYS, False)], B: []}
    assert (found.classes, found.digest) == ((), Digest())


def test_b017_tensors_without_elements_need_no_holder() -> None:
    layout = Layout.of([TensorSpec("none", "BF16", (0, 4)), TensorSpec("one", "BF16", ())])
    found = survey(layout, reports({A: [("one", Region((), (), 0), D1)]}))
    assert found.refused == {}
    assert found.digest == D1


def test_tied_names_need_no_place_of_their_own() -> None:
    layout = Layout.of([TensorSpec("embed", "BF16", (4,)), TensorSpec("head", "BF16", (4,), tied_to="embed")])
    assert survey(layout, reports({A: [("embed", Region((4,), (1,), 0), D1)]})).refused == {}


def test_a_report_for_another_layout_is_an_error() -> None:
    with pytest.raises(UsageError, match="rank dp0-pp0-tp0 reports tensor 'x'"):
        survey(W, reports({A: [("x", WHOLE, D1)]}))
    with pytest.raises(UsageError, match="'x'"):
        survey(W, reports({A: []}, {A: {"x": "cast"}}))


def test_many_experts_in_column_slices_cost_one_sweep() -> None:
    """1,024 tensors of 7,168 runs on each of 8 ranks."""
    shape, ranks = (7168, 64), 8
    layout = Layout.of(TensorSpec(f"expert.{i}", "BF16", shape) for i in range(1024))
    step = shape[1] // ranks
    parts: Parts = {
        f"tp{k}": [(s.name, box(shape, (0, k * step), (7168, (k + 1) * step)), D1) for s in layout.stored]
        for k in range(ranks)
    }
    found = survey(layout, reports(parts))
    assert found.refused == {}
    assert [c.elements for c in found.classes] == [1024 * 7168 * step] * ranks
