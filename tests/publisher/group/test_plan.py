"""Who owns what: every element has one owner, bytes are balanced, and what does not fit is named."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.publisher.group.plan import Corner, Entry, Plan, plan
from weightcast.publisher.group.words import division, pieces_of
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import Layout, TensorSpec


def entry(
    name: str,
    shape: tuple[int, ...],
    start: Any = None,
    extent: Any = None,
    tie: str = "",
    dtype: str = "BF16",
) -> Entry:
    """A slice of a tensor; all of it by default."""
    return Entry(name, dtype, shape, Corner(start or (0,) * len(shape), extent or shape), tie)


def rows(name: str, shape: tuple[int, ...], rank: int, size: int) -> Entry:
    """A rank's rows, as FSDP divides them."""
    each = -(-shape[0] // size)
    begin = min(rank * each, shape[0])
    return entry(name, shape, (begin, *[0] * (len(shape) - 1)), (min(each, shape[0] - begin), *shape[1:]))


def check(found: Plan, tables: list[list[Entry]]) -> list[int]:
    """Every element of every stored tensor has one owner, who has it; bytes by rank."""
    seen = {s.name: np.zeros(s.shape, np.int64) for s in found.layout.stored}
    loads = []
    for pieces, table in zip(found.pieces, tables, strict=True):
        load = 0
        for piece in pieces:
            held = table[piece.entry]
            for at, n, first, size in zip(*piece.corner, *held.corner, strict=True):
                assert first <= at
                assert at + n <= first + size
            seen[held.name][tuple(slice(s, s + n) for s, n in zip(*piece.corner, strict=True))] += 1
            load += piece.corner.elements * WIDTHS[held.dtype]
        loads.append(load)
    assert all((count == 1).all() for count in seen.values())
    return loads


SHAPES = [(2048, 64), (64,), (64, 192), (50, 64), (3, 100, 40), (), (7,)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_full_replicas_are_balanced(size: int) -> None:
    tables = [[entry(f"t{i}", shape) for i, shape in enumerate(SHAPES * 3)] for _ in range(size)]
    loads = check(plan(tables), tables)
    assert max(loads) < 1.05 * sum(loads) / size, loads


def test_hsdp_shards_are_balanced_within_their_replicas() -> None:
    tables = [[rows(f"t{i}", s, rank % 2, 2) for i, s in enumerate(SHAPES * 3) if s] for rank in range(4)]
    found = plan(tables)
    loads = check(found, tables)
    assert max(loads) < 1.05 * sum(loads) / 4
    assert {r.group for r in found.replicas} == {0, 1}


def test_replicas_make_up_for_what_is_uneven() -> None:
    """Rank 0 has a part of its own; the rest, which all have, goes to the others until they are level."""
    tables = [[entry("common", (4000, 10))] for _ in range(3)]
    tables[0].append(entry("own", (1000, 10)))
    assert check(plan(tables), tables) == [pytest.approx(100_000 / 3, rel=0.01)] * 3


def test_fsdp_and_tensor_parallel_slices_belong_to_those_who_have_them() -> None:
    tables = [
        [entry("w", (8, 6), (4 * (rank // 2), 3 * (rank % 2)), (4, 3)), rows("n", (5,), rank // 2, 2)]
        for rank in range(4)
    ]
    found = plan(tables)
    check(found, tables)
    assert [p[0].corner for p in found.pieces] == [table[0].corner for table in tables]


def test_ranks_with_nothing_empty_shards_and_empty_tensors() -> None:
    tables = [[entry("w", (3, 2)), entry("e", (0, 4))], [], [entry("w", (3, 2), (3, 0), (0, 2))]]
    found = plan(tables)
    assert check(found, tables) == [12, 0, 0]
    assert "e" in found.layout


@settings(deadline=None)
@given(st.data())
def test_whatever_is_held_each_element_has_one_owner(data: st.DataObject) -> None:
    """Grids of cuts in every dimension, each cell held by some ranks."""
    size = data.draw(st.integers(1, 4))
    tables: list[list[Entry]] = [[] for _ in range(size)]
    for number in range(data.draw(st.integers(1, 4))):
        shape = tuple(data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)))
        cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
        cells = [()]
        for dim in cuts:
            cells = [(*cell, pair) for cell in cells for pair in pairwise(dim)]
        for cell in cells:
            start, extent = tuple(a for a, _ in cell), tuple(b - a for a, b in cell)
            for rank in data.draw(st.sets(st.integers(0, size - 1), min_size=1)):
                tables[rank].append(entry(f"t{number}", shape, start, extent))
    found = plan(tables)
    check(found, tables)
    assert plan(tables) == found
    told = division(found, tables, "plan", "")
    for rank, table in enumerate(tables):  # what a rank is told is what it owns
        assert pieces_of(told.shared[rank], table) == list(found.pieces[rank])


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ([[entry("w", (4, 2))], [entry("w", (4, 3))]], r"'w' is BF16\[4, 2\] on rank 0 and BF16\[4, 3\] on rank 1"),
        ([[entry("w", (4,))], [entry("w", (4,), dtype="F16")]], r"'w' is BF16\[4\] on rank 0 and F16\[4\] on rank 1"),
        ([[rows("w", (4, 2), 0, 2)], []], "no rank has 4 of the 8 elements of tensor 'w'; ranks that have some: 0"),
        ([[entry("w", (4, 2), (4, 0), (0, 2))], []], "ranks that have some: none"),
        ([[entry("w", (4,))], [rows("w", (4,), 1, 2)]], "ranks 0 and 1 hold parts of tensor 'w' that overlap"),
        ([[entry("w", (4, 4), (0, 0), (2, 4))], [entry("w", (4, 4), (2, 0), (2, 4))], [entry("w", (4, 4), (1, 1), (2, 2))]],
         "ranks 0 and 2 hold parts of tensor 'w' that overlap"),
        ([[entry("w", (4,)), entry("w", (4,))]], "'w' comes twice on rank 0"),
        ([[], []], "there is no tensor to publish"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tables: list[list[Entry]], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        plan(tables)


def test_ties_hold_where_all_ranks_see_them() -> None:
    def table(rank: int, tie: str) -> list[Entry]:
        return [
            rows("embed", (6, 2), rank, 2),
            Entry(**_fields(rows("head", (6, 2), rank, 2)) | {"tie": tie}),
        ]

    tied = plan([table(0, "embed"), table(1, "embed")])
    assert tied.layout["head"].tied_to == "embed"
    assert sum(p.corner.elements for pieces in tied.pieces for p in pieces) == 12
    apart = [table(0, "embed"), table(1, "")]
    assert plan(apart).layout["head"].tied_to is None
    check(plan(apart), apart)
    before = Layout.of([TensorSpec("head", "BF16", (6, 2)), TensorSpec("embed", "BF16", (6, 2), "head")])
    assert plan([table(0, "embed"), table(1, "embed")], before).layout["embed"].tied_to == "head"


def _fields(of: Entry) -> dict[str, Any]:
    return {"name": of.name, "dtype": of.dtype, "shape": of.shape, "corner": of.corner}


def test_what_the_version_before_has_must_be_there_or_be_dropped() -> None:
    before = Layout.of(
        [TensorSpec("a", "BF16", (2,)), TensorSpec("b", "BF16", (2,), "a"), TensorSpec("c", "BF16", (3,))]
    )
    with pytest.raises(UsageError, match="no rank has now: 'c'"):
        plan([[entry("a", (2,))]], before)
    layout = plan([[entry("a", (2,))]], before, drop=["c"]).layout
    assert [(s.name, s.tied_to) for s in layout] == [
        ("a", None),
        ("b", "a"),
    ]  # a second name that nobody lists stays


def test_many_tensors_on_many_ranks_are_divided_in_time() -> None:
    tables = [[rows(f"t{i}", (512, 64), rank, 16) for i in range(500)] for rank in range(16)]
    assert check(plan(tables), tables) == [math.prod((500, 32, 64, 2))] * 16
