"""Strided regions against the lists of their elements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import Region, canonical, collisions, overlaps, runs, simplify
from weightcast.schemas.errors import UsageError

from .states import Ints, elements_of, examples, nested

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def pairs(source: Region, target: Region) -> list[tuple[int, int]]:
    return sorted(zip(elements_of(source).tolist(), elements_of(target).tolist(), strict=True))


@st.composite
def copies(draw: st.DrawFn) -> tuple[Region, Region]:
    shape = draw(SHAPES)
    return draw(nested(shape)), draw(nested(shape))


def rewritten(draw: st.DrawFn, *regions: Region) -> list[Region]:
    """The same indices with dimensions split, added and in another order, the same for all regions."""
    dims: list[tuple[int, ...]] = []
    for d, n in enumerate(regions[0].shape):
        strides = tuple(r.strides[d] for r in regions)
        inner = draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0])) if n else 1
        dims += [(n // inner, *(s * inner for s in strides)), (inner, *strides)]
    dims.append((1, *draw(st.tuples(*[st.integers(0, 9)] * len(regions)))))
    dims = draw(st.permutations(dims))
    shape = tuple(d[0] for d in dims)
    return [Region(shape, tuple(d[i + 1] for d in dims), r.offset) for i, r in enumerate(regions)]


@examples
@given(copies())
def test_simplify_keeps_the_pairs_and_drops_what_it_can(copy: tuple[Region, Region]) -> None:
    source, target = simplify(*copy)
    assert pairs(source, target) == pairs(*copy)
    if source.elements:
        assert 1 not in source.shape
        assert list(source.strides) == sorted(source.strides, reverse=True)
        for d in range(len(source.shape) - 1):
            n = source.shape[d + 1]
            assert any(r.strides[d] != n * r.strides[d + 1] for r in (source, target)), "not merged"


@examples
@given(copies(), st.data())
def test_simplify_does_not_depend_on_how_a_copy_is_written(
    copy: tuple[Region, Region], data: st.DataObject
) -> None:
    assert simplify(*rewritten(data.draw, *copy)) == simplify(*copy)


@examples
@given(SHAPES.flatmap(nested), st.data())
def test_canonical_regions_of_equal_elements_are_equal(region: Region, data: st.DataObject) -> None:
    (other,) = rewritten(data.draw, region)
    assert canonical(other) == canonical(region)
    assert elements_of(canonical(region)).tolist() == sorted(elements_of(region).tolist())


@examples
@given(SHAPES.flatmap(nested))
def test_runs_are_the_elements_in_ascending_order(region: Region) -> None:
    starts, length = runs(region)
    flat = (starts[:, None] + np.arange(length)).ravel()
    assert flat.tolist() == sorted(elements_of(region).tolist())
    assert region.stop == (int(flat[-1]) + 1 if len(flat) else region.offset)


def test_runs_are_as_long_as_the_innermost_rows() -> None:
    starts, length = runs(Region((3, 2, 4), (4, 100, 1), 7))
    assert (starts.tolist(), length) == ([7, 107], 12)


def test_scalars_and_empty_regions() -> None:
    scalar = Region((), (), 3)
    assert simplify(Region((1, 1), (5, 5), 3), Region((1, 1), (1, 1), 4)) == (scalar, Region((), (), 4))
    assert [a.tolist() if isinstance(a, np.ndarray) else a for a in runs(scalar)] == [[3], 1]
    empty = Region((0, 4), (4, 1), 8)
    assert simplify(empty, Region((0, 4), (1, 7), 2)) == (Region((0,), (1,), 0),) * 2
    assert (runs(empty)[0].size, runs(empty)[1], empty.stop) == (0, 0, 8)


@pytest.mark.parametrize(
    "region",
    [Region((4, 3), (0, 1), 0), Region((2, 3), (2, 1), 0), Region((5, 5), (1, 1), 0), Region((2,), (0,), 9)],
)
def test_views_that_overlap_themselves_are_refused(region: Region) -> None:
    plain = Region(region.shape, tuple(np.cumprod([1, *region.shape[:0:-1]])[::-1].tolist()), 0)
    assert len(set(elements_of(region).tolist())) < region.elements
    assert overlaps(region)
    assert not overlaps(plain)
    for copy in [(region, plain), (plain, region)]:
        with pytest.raises(UsageError, match="overlaps itself"):
            simplify(*copy)
    with pytest.raises(UsageError, match="overlaps itself"):
        runs(region)


@pytest.mark.parametrize("numbers", [((2,), (), 0), ((-1,), (1,), 0), ((2,), (-1,), 1), ((2,), (1,), -1)])
def test_what_is_no_region_is_refused(numbers: tuple[Any, Any, int]) -> None:
    with pytest.raises(UsageError, match="not a region"):
        Region(*numbers)


def test_a_copy_between_shapes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"shape \[2\] to shape \[3\]"):
        simplify(Region((2,), (1,), 0), Region((3,), (1,), 0))


@examples
@given(st.lists(SHAPES.flatmap(nested), max_size=6))
def test_collisions_name_every_region_that_meets_another(regions: list[Region]) -> None:
    sets = [set(elements_of(r).tolist()) for r in regions]
    meet = {(i, j) for i in range(len(sets)) for j in range(i) if sets[i] & sets[j]}
    found = collisions(regions)
    assert bool(found) == bool(meet)
    assert all((max(pair), min(pair)) in meet for pair in found)


def test_ten_thousand_regions_side_by_side_do_not_collide() -> None:
    rows = [Region((64, 64), (128, 1), i * 8192 + half) for i in range(5000) for half in (0, 64)]
    assert collisions(rows) == []
    assert collisions([*rows, Region((2,), (1,), 8192 * 4999 + 127)]) == [(9999, 10000), (10000, 9998)]


def test_elements_of_the_helper_are_those_of_a_view() -> None:
    """The other tests stand on this helper."""
    whole: Ints = np.arange(math.prod((4, 6, 5)))
    view = whole.reshape(4, 6, 5)[1:, ::2, 1:4].transpose(2, 0, 1)
    region = Region(view.shape, tuple(s // 8 for s in view.strides), 31)
    assert elements_of(region).tolist() == view.ravel().tolist()
