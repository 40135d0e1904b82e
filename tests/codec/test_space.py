"""Flat spaces: where tensors begin, what the writer's intervals are, which rows fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import Geometry, Interval, joined, reference
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import Row

from .states import examples, space_of

SMALL = 16


def row_of(interval: Interval, shapes: list[tuple[int, ...]]) -> Row:
    space = space_of(2, shapes)
    place = space.describe(interval)
    return Row(
        place.tensor, place.tensors, interval.dtype, place.shape, place.offset, interval.length,
        1, 0, "gap", 0, 1, b"\0", b"", b"\1", b"", Digest(),
    )  # fmt: skip


def test_spaces_hold_untied_tensors_by_dtype_in_layout_order() -> None:
    specs = [TensorSpec("b", "BF16", (2, 3)), TensorSpec("a", "F32", (5,)), TensorSpec("a2", "BF16", ())]
    geometry = Geometry(Layout.of([*specs, TensorSpec("c", "BF16", (2, 3), tied_to="b")]))
    assert [space.dtype for space in geometry] == ["BF16", "F32"]
    assert geometry["BF16"].names == ("a2", "b")
    assert geometry["BF16"].starts.tolist() == [0, 1, 7]
    assert (geometry["BF16"].width, geometry["BF16"].elements, geometry["F32"].elements) == (2, 7, 5)


def test_seeds_are_those_of_the_reference() -> None:
    space = space_of(4, [(), (0,), (2, 3)])
    assert [tuple(map(int, seed)) for seed in space.seeds] == [
        (*reference.seeds(spec), 2) for spec in space.specs
    ]


@examples
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=30),
    st.integers(SMALL, 40),
    st.sets(st.integers(0, 20), max_size=3),
)
def test_joined_intervals_keep_what_they_are_made_of_whole(
    sizes: list[int], most: int, gone: set[int]
) -> None:
    cut = [i for n, i in enumerate(space_of(2, [(s,) for s in sizes]).split(most, SMALL)) if n not in gone]
    found = joined(cut, most)
    inside = [[i for i in cut if f.start <= i.start and i.stop <= f.stop] for f in found]
    assert [i for part in inside for i in part] == cut
    for f, part in zip(found, inside, strict=True):
        assert f.length == sum(i.length for i in part) <= most
    for before, after in pairwise(inside):
        follows = before[-1].stop == after[0].start
        assert not follows or sum(i.length for i in before) + after[0].length > most
    assert joined(cut, most, "class") == cut


def test_intervals_of_two_dtypes_are_not_joined() -> None:
    apart = [Interval("BF16", 0, 5), Interval("F16", 5, 5), Interval("F16", 10, 1)]
    assert joined(apart, 40) == [Interval("BF16", 0, 5), Interval("F16", 5, 6)]


@examples
@given(st.lists(st.integers(0, 70), min_size=1, max_size=30), st.integers(SMALL, 40))
def test_split_covers_the_space_once_and_keeps_large_tensors_apart(
    sizes: list[int], row_elements: int
) -> None:
    space = space_of(2, [(size,) for size in sizes])
    intervals = space.split(row_elements, SMALL)
    edges = [0, *(i.stop for i in intervals)]
    assert [i.start for i in intervals] == edges[:-1]
    assert edges[-1] == sum(sizes)
    for interval in intervals:
        assert 1 <= interval.length <= row_elements
        place = space.describe(interval)
        reached = [space.specs[space.index[place.tensor] + i] for i in range(place.tensors)]
        if any(spec.elements >= SMALL for spec in reached):
            assert len(reached) == 1
        else:
            assert place.offset == 0  # runs of small tensors are cut between tensors


def test_100000_small_tensors_make_a_handful_of_rows() -> None:
    """Small tensors share rows (docs/format.md, delta shard)."""
    assert len(space_of(2, [(64,)] * 100_000).split()) == 2


@pytest.mark.parametrize("row_elements", [0, 100, (1 << 24) + 1])
def test_split_refuses_rows_that_no_reader_takes(row_elements: int) -> None:
    with pytest.raises(UsageError, match="rows of"):
        space_of(2, [(4,)]).split(row_elements)


SHAPES: list[tuple[int, ...]] = [(4, 5), (0, 3), (), (7,), (0,)]


@examples
@given(st.integers(0, 27), st.integers(1, 28))
def test_locate_undoes_describe(start: int, length: int) -> None:
    space = space_of(2, SHAPES)
    interval = Interval("BF16", start, min(length, 28 - start))
    assert space.locate(row_of(interval, SHAPES)) == start


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor": "t9"}, "stores no such"),
        ({"dtype": "F16"}, "stores no such"),
        ({"offset": -1}, "not inside"),
        ({"offset": 20}, "not inside"),
        ({"length": 0}, "not inside"),
        ({"length": 29}, "not inside"),
        ({"length": 1 << 62}, "not inside"),
        ({"offset": 1 << 62}, "not inside"),
        ({"length": 21}, "expected 3 tensors"),
        ({"tensors": 2}, "expected 1 tensors"),
        ({"tensors": 0}, "expected 1 tensors"),
        ({"shape": (5, 4)}, "expected 1 tensors"),
        ({"shape": ()}, "expected 1 tensors"),
    ],
)
def test_locate_refuses_a_row_that_does_not_fit(change: dict[str, object], message: str) -> None:
    row = row_of(Interval("BF16", 0, 20), SHAPES)
    assert space_of(2, SHAPES).locate(row) == 0
    with pytest.raises(Corrupt, match=message) as caught:
        space_of(2, SHAPES).locate(replace(row, **change))  # type: ignore[arg-type]
    assert repr(str(change.get("tensor", "t00000"))) in str(caught.value)


def test_a_row_of_several_tensors_must_have_no_shape() -> None:
    row = row_of(Interval("BF16", 18, 5), SHAPES)
    assert (row.tensors, row.shape, row.offset) == (4, (), 18)
    with pytest.raises(Corrupt, match="expected 4 tensors"):
        space_of(2, SHAPES).locate(replace(row, shape=(4, 5)))


def test_a_row_of_a_dtype_that_is_not_there_is_corrupt() -> None:
    geometry = Geometry(Layout.of(space_of(2, SHAPES).specs))
    row = row_of(Interval("BF16", 0, 20), SHAPES)
    assert geometry.space_of(row).dtype == "BF16"
    with pytest.raises(Corrupt, match="no F64 tensor"):
        geometry.space_of(replace(row, dtype="F64"))


def test_positions_beyond_32_bits_are_located() -> None:
    space = space_of(1, [(1 << 33,), (9,)])
    place = space.describe(Interval(space.dtype, (1 << 33) + 2, 5))
    assert (place.tensor, place.tensors, place.offset) == ("t00001", 1, 2)
    assert space.starts.dtype == np.int64
