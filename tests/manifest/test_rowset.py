"""Rows that lie across each other: merged, told apart from rows that overlap, and read by everything that reads rows."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.codec import Box, Changes, Geometry, Memory, crossings, decode, gather, scatter, split_box
from weightcast.manifest.commit import put_shard
from weightcast.manifest.deltas import apply_directly, changed_positions, collect, fold
from weightcast.manifest.inspect import show
from weightcast.manifest.inspect.verify import verify
from weightcast.manifest.rebuild import rebuild
from weightcast.manifest.rowset import Joined, RowSet, ascending, concatenated
from weightcast.manifest.store import open_store
from weightcast.schemas.errors import Corrupt
from weightcast.schemas.shard import Row

from .author import POOL, Author, Tensors, check_state, columns

SHAPE = (20, 30)


def author_of(seed: int = 0) -> Author:
    """Version 0: two matrices and a vector of one dtype, and a matrix of another."""
    random = np.random.default_rng(seed)
    author = Author(open_store(f"memory://{uuid.uuid4().hex}"))
    author.reset(
        Tensors.of(
            a=("U16", random.integers(0, 9, SHAPE)),
            b=("U16", random.integers(0, 9, (4, 6, 5))),
            c=("U16", random.integers(0, 9, 40)),
            d=("U8", random.integers(0, 9, SHAPE)),
        )
    )
    return author


def moved(tensors: Tensors, seed: int, density: float = 0.3) -> Tensors:
    random = np.random.default_rng(seed)
    bits = {}
    for name, old in tensors.bits.items():
        bits[name] = old + (random.random(old.shape) < density).astype(old.dtype)
    return Tensors(bits, tensors.dtypes)


def slices(tensors: Tensors, row_elements: int = 1 << 20) -> list[Box]:
    """Everything: matrices by columns, experts by their middle dimension, the vector whole; cut into rows."""
    geometry = Geometry(tensors.layout)
    space = geometry["U16"]
    b, c = (int(space.starts[space.index[n]]) for n in "bc")
    found = [*columns(space, "a", 7, 11, 12), *columns(geometry["U8"], "d", 29, 1)]
    found += [Box("U16", b + 10 * i, 4 * 2 * 5, 10, 30) for i in range(3)] + [Box("U16", c, 40)]
    return [row for box in found for row in split_box(box, row_elements)]


def copied(author: Author, version: int = -1) -> tuple[Geometry, Memory]:
    tensors = author.tensors[version]
    geometry = Geometry(tensors.layout)
    return geometry, Memory.over(geometry, {n: x.copy() for n, x in tensors.bits.items()})


def bits(memory: Memory) -> dict[str, bytes]:
    return {s.name: memory.tensor(s.name).tobytes() for s in memory.geometry.layout.stored}


def rows_of(row_elements: int = 1 << 20, **options: Any) -> tuple[Author, Tensors, list[Row]]:
    author = author_of()
    target = moved(author.tensors[0], 1)
    return author, target, author.box_rows(target, slices(target, row_elements), **options)


@pytest.mark.parametrize("row_elements", [1 << 20, 100, 25, 5])
@pytest.mark.parametrize("coding", ["gap", "pairs", "dense", "whole"])
def test_apply_directly_collect_and_positions_agree(row_elements: int, coding: Any) -> None:
    author, target, rows = rows_of(row_elements, coding=coding)
    assert any(r.is_box for r in rows)
    wanted = {n: x.tobytes() for n, x in target.bits.items()}
    np.random.default_rng(2).shuffle(rows)  # type: ignore[arg-type]
    geometry, memory = copied(author)
    undo: list[Changes] = []
    digest = apply_directly(geometry, rows, memory, POOL, undo.append)
    assert bits(memory) == wanted
    for dtype in ("U8", "U16"):
        scatter(geometry[dtype], memory, concatenated([u for u in undo if u.dtype == dtype]))
    geometry, untouched = copied(author)
    assert bits(memory) == bits(untouched), "old bits of rows across each other lead back"
    changes, same = collect(geometry, rows, untouched, POOL, {})
    assert same == digest
    found = changed_positions(geometry, rows, POOL)
    assert set(changes) == set(found) == {"U8", "U16"}
    for dtype, part in changes.items():
        assert np.all(np.diff(part.positions) > 0)
        assert np.array_equal(part.positions, found[dtype])
        scatter(geometry[dtype], untouched, part)
    assert bits(untouched) == wanted


def test_versions_of_boxes_and_intervals_fold() -> None:
    """By an overlay, and from the bits at changed positions alone, as for a live engine."""
    author = author_of()
    geometry, base = copied(author)
    folded: dict[str, Changes] = {}
    for seed in range(1, 6):
        target = moved(author.tensors[-1], seed, 0.1)
        rows = author.box_rows(target, slices(target, 60)) if seed % 2 else author.rows(target)
        changes, digest = collect(geometry, rows, base, POOL, folded)
        old = {
            d: Changes(d, at, gather(geometry[d], base, at))
            for d, at in changed_positions(geometry, rows, POOL).items()
        }
        narrow, same = collect(geometry, rows, old, POOL, folded)
        assert same == digest
        assert all(np.array_equal(narrow[d].values, changes[d].values) for d in changes)
        author.publish(target, boxes=slices(target, 60)) if seed % 2 else author.publish(target)
        assert author.positions[-2].digest + digest == author.positions[-1].digest
        folded = fold(folded, changes)
    for dtype, part in folded.items():
        scatter(geometry[dtype], base, part)
    assert bits(base) == {n: x.tobytes() for n, x in author.tensors[-1].bits.items()}


def test_rebuild_show_and_verify() -> None:
    author = author_of()
    for seed in range(1, 4):
        target = moved(author.tensors[-1], seed)
        author.publish(target, boxes=slices(target, 100), rows_a_shard=5)
        assert author.positions[-1].manifest.features == ["boxes", "mix2", "packed", "pairs"]
    check_state(rebuild(author.reader, 3, POOL), author.tensors[3])
    shown = show(author.reader, 3, tensors=True).tensors
    assert shown is not None
    before, after = author.tensors[2].bits, author.tensors[3].bits
    assert {t.name: t.changed for t in shown} == {n: np.count_nonzero(before[n] != after[n]) for n in after}
    report = verify(author.reader, deep=True)
    assert (report.ok, report.rebuilt) == (True, 4)


# Overlap

BOX = Box("U16", 3, 20 * 7, 7, 30)
"""Columns 3 to 9 of `a`."""

OVERLAPS: dict[str, Box] = {
    "the same": BOX,
    "a column": Box("U16", 9, 20, 1, 30),
    "a column of a few lines": Box("U16", 12 * 30 + 4, 4, 1, 30),
    "an element": Box("U16", 19 * 30 + 9, 1),
    "an interval from between runs": Box("U16", 10, 24),
    "an interval over all": Box("U16", 0, 600),
    "another stride": Box("U16", 5, 10, 1, 60),
    "a stride that meets once": Box("U16", 0, 5, 1, 31),
    "wraps to the next run": Box("U16", 20, 10 * 14, 14, 30),
}
APART: dict[str, Box] = {
    "the columns before": Box("U16", 0, 20 * 3, 3, 30),
    "the columns after": Box("U16", 10, 20 * 20, 20, 30),
    "the columns around": Box("U16", 10, 19 * 23, 23, 30),
    "an interval between runs": Box("U16", 10, 23),
    "another stride": Box("U16", 2, 10, 1, 60),
    "behind it": Box("U16", 19 * 30 + 10, 15),
    "a box in another tensor": Box("U16", 600, 40, 10, 30),
}


def rows_in(*boxes: Box) -> tuple[Author, list[Row]]:
    """One row each, all elements changed."""
    author = author_of()
    target = Tensors(
        {n: x + np.array(1, x.dtype) for n, x in author.tensors[0].bits.items()}, author.tensors[0].dtypes
    )
    return author, author.box_rows(target, boxes, coding="dense")


def readers(author: Author) -> list[Callable[[list[Row]], Any]]:
    geometry, memory = copied(author)
    return [
        lambda rows: apply_directly(geometry, rows, copied(author)[1], POOL),
        lambda rows: collect(geometry, rows, memory, POOL, {}),
        lambda rows: changed_positions(geometry, rows, POOL),
    ]


@pytest.mark.parametrize("name", OVERLAPS)
def test_rows_that_overlap_are_refused_in_any_order(name: str) -> None:
    author, rows = rows_in(BOX, OVERLAPS[name], Box("U16", 720, 40))
    for read in readers(author):
        for order in (rows, rows[::-1], [rows[2], rows[1], rows[0]]):
            with pytest.raises(Corrupt, match="rows of the delta overlap"):
                read(order)


@pytest.mark.parametrize("name", APART)
def test_rows_that_lie_across_each_other_are_not(name: str) -> None:
    author, rows = rows_in(BOX, APART[name], Box("U16", 720, 40))
    for read in readers(author):
        for order in (rows, rows[::-1]):
            read(order)


def test_more_elements_than_there_are_are_refused_before_they_are_decoded() -> None:
    """A thousand times the same box must not become a thousand lists of changes before it is refused."""
    author, rows = rows_in(BOX)
    geometry, _ = copied(author)
    space, seen = geometry["U16"], RowSet()
    for _ in range(space.elements // BOX.length):
        seen.add(space, BOX)
    with pytest.raises(Corrupt, match="more than the 760 elements of the U16 tensors"):
        seen.add(space, BOX)
    for read in readers(author):
        with pytest.raises(Corrupt, match="overlap"):
            read(rows * 1000)


def test_boxes_too_tangled_to_check_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    author, rows = rows_in(BOX, APART["the columns before"], APART["the columns after"])
    monkeypatch.setattr(crossings, "BUDGET", 2)
    for read in readers(author):
        with pytest.raises(Corrupt, match="more than 2 pairs of the 3 rows"):
            read(rows)


def test_verify_finds_boxes_that_overlap_in_shards_of_their_own() -> None:
    author = author_of()
    target = Tensors(
        {n: x + np.array(1, x.dtype) for n, x in author.tensors[0].bits.items()}, author.tensors[0].dtypes
    )
    rows = author.box_rows(target, [BOX, OVERLAPS["a column"]])
    shards = [put_shard(author.store, 1, "w", i, [row]) for i, row in enumerate(rows)]
    author.commit(target, shards=shards, features=["boxes"])
    (problem,) = verify(author.reader).problems
    assert (problem.version, problem.kind) == (1, "corrupt")
    assert "overlap in tensor 'a' at offset 9" in problem.message
    author.commit(target)  # a version after it without rows: the one before is still named
    assert [p.version for p in verify(author.reader).problems] == [1]


@pytest.mark.parametrize(
    "fields", [{"tensor": "z"}, {"dtype": "F64"}, {"offset": 24}, {"stride": 32}, {"run": 0}]
)
def test_boxes_of_unknown_places_are_refused(fields: dict[str, Any]) -> None:
    author, rows = rows_in(BOX)
    for read in readers(author):
        with pytest.raises(Corrupt):
            read([replace(rows[0], **fields)])


# Merging

Ints = npt.NDArray[np.int64]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.sets(st.integers(0, 200), min_size=1, max_size=20), min_size=1, max_size=9))
def test_lists_across_each_other_become_one(found: list[set[int]]) -> None:
    taken: set[int] = set()
    parts: list[Changes] = []
    for one in found:
        at = np.array(sorted(one - taken), np.int64)
        taken |= one
        if len(at):
            parts.append(Changes("U16", at, (at * 3).astype(np.uint16)))
    every = np.array(sorted(taken), np.int64)
    merged = concatenated(list(parts))
    assert np.array_equal(merged.positions, every)
    assert np.array_equal(merged.values, (every * 3).astype(np.uint16))
    assert np.array_equal(ascending([p.positions for p in parts]), every)


def test_changes_are_one_list_without_a_copy_if_rows_come_in_order() -> None:
    author = author_of()
    rows = author.box_rows(moved(author.tensors[0], 1), [Box("U16", at, 100) for at in range(0, 600, 100)])
    geometry, base = copied(author)
    assert len(rows) == 6
    total = sum(r.count for r in rows)
    plain, digest = collect(geometry, rows, base, POOL, {})
    for order in (rows, rows[::-1]):
        for expected in (total, total - 1, 0, 10 * total):
            found, same = collect(geometry, order, base, POOL, {}, expected=expected)
            assert same == digest
            assert np.array_equal(found["U16"].positions, plain["U16"].positions)
            assert np.array_equal(found["U16"].values, plain["U16"].values)
    joined = Joined(geometry["U16"], total, Changes.room)
    parts = [joined.take(row) for row in rows]
    for row, part in zip(rows, parts, strict=True):
        decode(geometry["U16"], row, base, room=part)
    assert np.shares_memory(joined.filled().positions, parts[0].positions)
    assert len(joined.filled()) == total
