"""Box rows: exact for all bits, widths and codings against plain numpy, cut into rows, and no trust."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import (
    Box,
    Changes,
    Encoded,
    FlatSpace,
    Geometry,
    Interval,
    check,
    code_box,
    decode,
    digest_box,
    encode,
    encode_box,
    find_box,
    positions,
    reference,
    scatter,
    split_box,
)
from weightcast.codec import reference_classes as by_class
from weightcast.codec.classes import EXPONENTS
from weightcast.codec.kernels_boxes import LONG_RUN_BYTES
from weightcast.codec.lines import Lines
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import MAX_ROW_ELEMENTS, Coding, Row, decode_shard, encode_shard, features_of

from .states import CODINGS, Bits, Ints, bits_of, change, examples, memory_of, random_bits, space_of

LEAD = 7
"""Elements of the tensor before the one that boxes are in."""

WIDTHS = st.sampled_from([1, 2, 4, 8])
SEEDS = st.integers(0, 2**32)


def elements_of(box: Box) -> Ints:
    """Flat elements of a box, in its order, one by one."""
    return np.array(
        [box.start + (j // box.run * box.stride + j % box.run if box.run else j) for j in range(box.length)]
    )


@st.composite
def boxes(draw: st.DrawFn, dtype: str, elements: int) -> Box:
    """A box or interval in the second tensor of a space, which has so many elements."""
    run = draw(st.one_of(st.sampled_from([1, 2, 3, 8, 64, 65]), st.integers(1, 200)))
    stride = run + draw(st.one_of(st.just(1), st.integers(1, 100)))
    count = draw(st.integers(1, min(40, (elements - run) // stride + 1)))
    offset = draw(st.integers(0, elements - (count - 1) * stride - run))
    if draw(st.booleans()) or count == 1:
        return Box(dtype, LEAD + offset, count * run, run, stride)
    return draw(
        st.sampled_from([Box(dtype, LEAD + offset, run), Box(dtype, LEAD + offset, count * run, run, stride)])
    )


def side_by_side(bits: Bits, at: Ints, lead: int = 0) -> Bits:
    """The elements of a box in memory of their own, `lead` bytes off."""
    raw = np.zeros(len(at) * bits.itemsize + lead, np.uint8)
    part: Bits = raw[lead:].view(bits.dtype)
    part[:] = bits[at]
    return part


def encoded(space: FlatSpace, box: Box, old: Bits, new: Bits, lead: int = 0, **options: Any) -> Encoded:
    """`encode_box` of two states of a space."""
    at = elements_of(box)
    a, b = side_by_side(old, at, lead), side_by_side(new, at, lead)
    return encode_box(space, box, b.ctypes.data, a.ctypes.data, **options)


def digest_of(space: FlatSpace, at: Ints, bits: Bits) -> Digest:
    """By the reference: bits [n] at flat elements."""
    lanes = [0, 0]
    for i, value in zip(at.tolist(), bits.tolist(), strict=True):
        tensor = space.tensor_at(i)
        for k, weight in enumerate(reference.weights(space.specs[tensor], i - int(space.starts[tensor]))):
            lanes[k] = (lanes[k] + value * weight) % (1 << 64)
    return Digest(*lanes)


def carried(space: FlatSpace, box: Box, old: Bits, new: Bits, lead: int = 0, **options: Any) -> Row | None:
    """Encode, carry through a shard, decode, compare bits and digests; the row."""
    at = elements_of(box)
    result = encoded(space, box, old, new, lead, **options)
    assert result.digest == digest_of(space, at, new[at])
    assert result.change == result.digest - digest_of(space, at, old[at])
    if result.row is None:
        assert np.array_equal(old[at], new[at])
        return None
    assert features_of([result.row]) >= ({"boxes"} if box.normal.run else set())
    (row,) = decode_shard(encode_shard([result.row]), "test")
    assert row == result.row
    check(space, row)
    before = memory_of(space, old, lead=lead)
    changes, moved = decode(space, row, before)
    assert moved == result.change
    assert set(changes.positions.tolist()) <= set(at.tolist())
    if row.coding != "class":
        assert np.array_equal(positions(space, row), changes.positions)
    assert np.array_equal(bits_of(space, before), old), "decode changes nothing"
    scatter(space, before, changes)
    wanted = old.copy()
    wanted[at] = new[at]
    assert np.array_equal(bits_of(space, before), wanted)
    return row


@examples
@given(WIDTHS, st.sampled_from([None, *CODINGS]), st.sampled_from([0.0, 0.01, 0.2, 0.9]), SEEDS, st.data())
def test_any_box_comes_back(
    width: int, coding: Coding | None, density: float, seed: int, data: st.DataObject
) -> None:
    space, rng = space_of(width, [(LEAD,), (30, 20, 11), (5,)]), np.random.default_rng(seed)
    box = data.draw(boxes(space.dtype, 6600))
    old = random_bits(width, space.elements, rng)
    carried(space, box, old, change(old, density, rng), data.draw(st.sampled_from([0, 1, 5])), coding=coding)


def floats(dtype: str, count: int, rng: np.random.Generator) -> Bits:
    """Bits with exponents as those of weights."""
    shift, mask = EXPONENTS[dtype]
    exponents = np.clip(mask * 3 // 4 - rng.geometric(0.4, count), 0, mask)
    bits = 8 if mask < 31 or shift < 7 else 16
    signs = rng.integers(0, 2, count) << (bits - 1)
    found: Bits = (signs | exponents << shift | rng.integers(0, 1 << shift, count)).astype(f"u{bits // 8}")
    return found


@examples
@given(
    st.sampled_from(sorted(EXPONENTS)), st.sampled_from([0.005, 0.05, 0.3]), st.booleans(), SEEDS, st.data()
)
def test_any_box_comes_back_by_class(
    dtype: str, density: float, few_lines: bool, seed: int, data: st.DataObject
) -> None:
    """And its planes are the reference's, with the lines that docs/format.md gives it."""
    shape = data.draw(st.sampled_from([(6600,), (30, 220), (66, 100), (10, 11, 60)]))
    space = Geometry(Layout.of([TensorSpec("a", dtype, (LEAD,)), TensorSpec("b", dtype, shape)]))[dtype]
    box, rng = data.draw(boxes(dtype, 6600)), np.random.default_rng(seed)
    at = elements_of(box)
    old = floats(dtype, space.elements, rng)
    new = change(old, density, rng, reach=3)
    if few_lines:
        new = np.where(rng.random(len(old)) < 0.9, old, new)
    if not 0 < np.count_nonzero(old[at] != new[at]) < len(at) / 2:
        return
    row = carried(space, box, old, new, coding="class")
    assert row is not None
    o, n = old[at].tolist(), new[at].tolist()
    changed = [j for j in range(len(at)) if o[j] != n[j]]
    lines = Lines.of(row.shape, row.offset, row.length, row.run)
    shape_of_row = by_class.Shape(dtype, row.gaps[0], lines.elements, lines.phase)
    assert row.gaps == by_class.gap_plane(shape_of_row, o, changed, row.gaps[1] == 1)
    steps, _ = by_class.code_steps(shape_of_row, changed, [o[j] for j in changed], [n[j] for j in changed])
    assert row.steps == steps


@pytest.mark.parametrize(
    ("shape", "run", "expected"),
    [
        ((30, 220), 110, 110),  # half of each line of the tensor
        ((30, 220), 440, 220),  # whole lines of it
        ((30, 220), 330, 330),
        ((30, 220), 10, 70),
        ((30, 220), 1, 64),
        ((30, 220), 64, 64),
        ((9, 8, 3, 3), 72, 72),  # a line is 8 * 3 * 3 here
        ((9, 8, 3, 3), 9, 72),
        ((9, 8, 3, 3), 3, 66),
        ((5, 4), 2, 64),
    ],
)
def test_lines_of_a_box(shape: tuple[int, ...], run: int, expected: int) -> None:
    lines = Lines.of(shape, 3, 10 * run, run)
    assert (lines.elements, lines.phase) == (expected, 0)
    assert lines.count == -(-10 * run // expected)


@examples
@given(WIDTHS, st.sampled_from([0.01, 0.2, 0.9]), SEEDS, st.data())
def test_planes_are_those_of_the_elements_side_by_side(
    width: int, density: float, seed: int, data: st.DataObject
) -> None:
    space, rng = space_of(width, [(LEAD,), (6600,)]), np.random.default_rng(seed)
    box = data.draw(boxes(space.dtype, 6600))
    at = elements_of(box)
    old = random_bits(width, space.elements, rng)
    new = change(old, density, rng)
    alone = space_of(width, [(len(at),)])
    plain = encode(
        alone, memory_of(alone, new[at]), memory_of(alone, old[at]), Interval(alone.dtype, 0, len(at))
    )
    row = encoded(space, box, old, new).row
    assert (row is None) == (plain.row is None)
    if row is not None and plain.row is not None:
        figures = (
            "length",
            "count",
            "escaped",
            "coding",
            "gap_shift",
            "gap_bytes",
            "gaps",
            "lows",
            "steps",
            "escapes",
        )
        assert all(getattr(row, name) == getattr(plain.row, name) for name in figures)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("run", [*range(1, 20), 31, 63, 64, 65, 127, 300])
def test_digest_of_runs_at_all_places_in_a_word(width: int, run: int, rng: np.random.Generator) -> None:
    """Runs that begin and end anywhere within words, and blocks that end within runs."""
    space = space_of(width, [(LEAD,), (6600,)])
    bits = random_bits(width, space.elements, rng)
    for offset in range(9):
        for stride in (run + 1, run + 5):
            box = Box(space.dtype, LEAD + offset, (6000 // stride) * run, run, stride)
            at = elements_of(box)
            part = side_by_side(bits, at, lead=offset)
            ones = np.ones(1, bits.dtype)
            assert digest_box(space, box, part.ctypes.data) == encoded(space, box, bits ^ ones, bits).digest
            if offset == run % 9:  # the reference takes its time
                assert digest_box(space, box, part.ctypes.data) == digest_of(space, at, bits[at])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [-1, 0, 1, 3, 64, 129])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.9])
def test_long_runs(width: int, more: int, density: float) -> None:
    """Those that are compared one by one, and the longest that are not; they begin and end anywhere within words."""
    run = LONG_RUN_BYTES // width + more
    space, rng = space_of(width, [(LEAD,), (3 * run + 40,)]), np.random.default_rng(more + 9)
    old = random_bits(width, space.elements, rng)
    for offset in (0, 5):
        box = Box(space.dtype, LEAD + offset, 2 * run, run, run + 11)
        carried(space, box, old, change(old, density, rng), lead=3)


def test_an_interval_inside_a_tensor_is_a_box() -> None:
    """Given so, or as one run, or as runs without gaps: the row is that of `encode`, bit for bit."""
    space, rng = space_of(2, [(LEAD,), (5000,)]), np.random.default_rng(1)
    old = random_bits(2, space.elements, rng)
    new = change(old, 0.05, rng)
    interval = Interval(space.dtype, LEAD + 13, 3000)
    plain = encode(space, memory_of(space, new), memory_of(space, old), interval)
    for run, stride in ((0, 0), (3000, 3001), (30, 30), (3000, 3000)):
        box = Box(space.dtype, interval.start, 3000, run, stride)
        assert encoded(space, box, old, new) == plain
        assert box.stop == interval.stop


def test_without_old_bits_a_row_is_whole() -> None:
    space, rng = space_of(2, [(LEAD,), (50, 40)]), np.random.default_rng(1)
    bits, box = random_bits(2, space.elements, rng), Box("BF16", LEAD + 5, 50 * 11, 11, 40)
    part = side_by_side(bits, elements_of(box))
    result = encode_box(space, box, part.ctypes.data, None)
    assert result.row is not None
    assert result.row.coding == "whole"
    assert result.change == result.digest == digest_of(space, elements_of(box), part)
    blank = memory_of(space, np.zeros_like(bits))
    scatter(space, blank, decode(space, result.row, blank)[0])
    assert np.array_equal(bits_of(space, blank)[elements_of(box)], part)
    with pytest.raises(UsageError, match="needs old bits"):
        encode_box(space, box, part.ctypes.data, None, coding="gap")
    zeros = np.zeros(LEAD + 2000, np.uint16)
    assert encode_box(space, box, zeros.ctypes.data, None).row is not None, "all of it is sent, zeros too"


def test_finding_and_coding_apart() -> None:
    """What was found is coded later, when the new bits are gone and other boxes were looked at."""
    space, rng = space_of(2, [(LEAD,), (50, 40)]), np.random.default_rng(1)
    old = random_bits(2, space.elements, rng)
    new, box = change(old, 0.2, rng), Box("BF16", LEAD + 5, 50 * 11, 11, 40)
    a, b = side_by_side(old, elements_of(box)), side_by_side(new, elements_of(box))
    found = find_box(space, box, b.ctypes.data, a.ctypes.data).copied()
    b[:] = 0
    find_box(space, box, b.ctypes.data, a.ctypes.data)
    assert code_box(space, box, found, a.ctypes.data) == encoded(space, box, old, new).row


@examples
@given(st.integers(1, 300), st.data())
def test_rows_of_a_box_are_its_elements_in_order(row_elements: int, data: st.DataObject) -> None:
    box = data.draw(boxes("BF16", 6600))
    parts = list(split_box(box, row_elements))
    assert np.array_equal(np.concatenate([elements_of(p) for p in parts]), elements_of(box))
    assert all(1 <= p.length <= row_elements and p == p.normal for p in parts)
    run = box.normal.run or box.length
    if run <= row_elements:
        assert all(p.length % run == 0 for p in parts[:-1])
        assert len(parts) == -(-box.length // (row_elements // run * run))
    else:
        assert all(p.run == 0 for p in parts)


@pytest.mark.parametrize("row_elements", [0, -1, MAX_ROW_ELEMENTS + 1])
def test_rows_of_impossible_length(row_elements: int) -> None:
    with pytest.raises(UsageError, match="rows of"):
        list(split_box(Box("BF16", 0, 10), row_elements))


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "F16"},
        {"start": -1},
        {"start": LEAD - 1},  # reaches from one tensor into the next
        {"start": LEAD + 2000},
        {"start": LEAD + 30},
        {"length": 0},
        {"length": 44 * 50},
        {"length": 45},
        {"run": 0},
        {"run": -11},
        {"run": 41},
        {"stride": 0},
        {"stride": 10},
        {"stride": 41},
        {"stride": 1 << 62},
    ],
)
def test_boxes_that_are_none(fields: dict[str, Any]) -> None:
    space = space_of(2, [(LEAD,), (50, 40), (9,)])
    box = replace(Box("BF16", LEAD + 5, 50 * 11, 11, 40), **fields)
    bits = np.zeros(4000, np.uint16)
    for call in (
        lambda: digest_box(space, box, bits.ctypes.data),
        lambda: encode_box(space, box, bits.ctypes.data, bits.ctypes.data),
        lambda: encode_box(space, box, bits.ctypes.data, None),
    ):
        with pytest.raises(UsageError, match="is not a box inside one tensor"):
            call()


def test_a_box_longer_than_a_row() -> None:
    space = space_of(1, [(3 << 24,)])
    bits = np.zeros(1, np.uint8)
    box = Box("F8_E4M3", 0, (1 << 24) + 2, 2, 4)
    for old in (None, bits.ctypes.data):
        with pytest.raises(UsageError, match="longer than a row may be"):
            encode_box(space, box, bits.ctypes.data, old)
    assert max(p.length for p in split_box(box, MAX_ROW_ELEMENTS)) == 1 << 24


# Decoding


def by_class_row() -> tuple[FlatSpace, Box, Bits, Bits, Row]:
    """A class row of a box, the states that it lies between, and it."""
    space, rng = space_of(2, [(LEAD,), (40, 100)]), np.random.default_rng(5)
    old = floats("BF16", space.elements, rng)
    box = Box("BF16", LEAD + 30, 40 * 70, 70, 100)
    new = change(old, 0.05, rng, reach=2)
    row = encoded(space, box, old, new, coding="class").row
    assert row is not None
    return space, box, old, new, row


def test_a_class_row_over_newer_bits() -> None:
    """Old bits are the overlay's where it has some, inside the box, before, between its runs and after."""
    space, box, old, new, row = by_class_row()
    at, rng = elements_of(box), np.random.default_rng(6)
    elsewhere = np.setdiff1d(np.arange(space.elements), at)
    touched = np.sort(
        np.concatenate([rng.choice(at, 500, replace=False), rng.choice(elsewhere, 500, replace=False)])
    )
    base = old.copy()
    base[touched] ^= np.uint16(0x1234)
    changes, moved = decode(space, row, memory_of(space, base), Changes("BF16", touched, old[touched]))
    plain, same = decode(space, row, memory_of(space, old))
    assert np.array_equal(changes.positions, plain.positions)
    assert np.array_equal(changes.values, new[changes.positions])
    assert moved == same
    only_elsewhere = Changes("BF16", elsewhere, old[elsewhere])
    again, _ = decode(space, row, memory_of(space, old), only_elsewhere)
    assert np.array_equal(again.values, plain.values)


def test_a_class_row_needs_all_old_bits() -> None:
    space, _, old, _, row = by_class_row()
    with pytest.raises(UsageError, match="all old bits"):
        positions(space, row)
    with pytest.raises(UsageError, match="all old bits"):
        decode(space, row, Changes("BF16", np.arange(len(old)), old))


@pytest.mark.parametrize("coding", CODINGS)
def test_a_box_row_over_some_bits(coding: Coding) -> None:
    """Of a base that is not memory, and an overlay; as the subscriber of a live engine decodes."""
    space, rng = space_of(4, [(LEAD,), (50, 40)]), np.random.default_rng(2)
    old = random_bits(4, space.elements, rng)
    new, box = change(old, 0.3, rng), Box("F32", LEAD + 5, 50 * 11, 11, 40)
    row = encoded(space, box, old, new, coding=coding).row
    assert row is not None
    at = positions(space, row)
    half = rng.random(len(at)) < 0.5
    base, overlay = Changes("F32", at[~half], old[at[~half]]), Changes("F32", at[half], old[at[half]])
    changes, moved = decode(space, row, base, overlay)
    assert np.array_equal(changes.values, new[at])
    assert moved == decode(space, row, memory_of(space, old))[1]
    if coding != "whole":
        with pytest.raises(UsageError, match="do not cover"):
            decode(space, row, base)


# Rows without trust

SPACE = space_of(2, [(LEAD,), (50, 40), (9,)])
BASE = np.random.default_rng(3).integers(0, 1 << 16, SPACE.elements).astype(np.uint16)


def row_in(coding: Coding) -> Row:
    new = change(BASE, 0.1, np.random.default_rng(4), reach=2)
    row = encoded(SPACE, Box("BF16", LEAD + 5, 50 * 11, 11, 40), BASE, new, coding=coding).row
    assert row is not None
    return row


ROWS: dict[Coding, Row] = {coding: row_in(coding) for coding in (*CODINGS, "class")}

HOSTILE: list[dict[str, Any]] = [
    {"run": 0},
    {"run": -1},
    {"run": -11},
    {"run": 40},
    {"run": 41},
    {"run": 550},  # one run, which is an interval
    {"run": 12},
    {"run": 1 << 62},
    {"stride": 0},
    {"stride": 11},
    {"stride": -40},
    {"stride": 41},
    {"stride": (1 << 63) - 1},
    {"run": 275, "stride": 1 << 62},
    {"run": 1, "stride": 4},
    {"offset": 30},
    {"offset": -1},
    {"offset": 2000},
    {"offset": (1 << 63) - 1},
    {"length": 0},
    {"length": 560},
    {"length": 561},
    {"length": MAX_ROW_ELEMENTS + 6},
    {"length": 11 << 56},
    {"tensors": 2, "shape": ()},
    {"tensors": 2},
    {"tensors": 0},
    {"shape": ()},
    {"shape": (2000,)},
    {"tensor": "t00000", "shape": (LEAD,)},
    {"tensor": "t00002", "shape": (9,)},
]


@pytest.mark.parametrize("coding", [*CODINGS, "class"])
@pytest.mark.parametrize("fields", HOSTILE, ids=str)
def test_b167_figures_that_are_no_box(coding: Coding, fields: dict[str, Any]) -> None:
    """B167: refused by name before anything is allocated for it; by the shard already if that shows there."""
    row = replace(ROWS[coding], **fields)
    memory = memory_of(SPACE, BASE)
    decode(SPACE, ROWS[coding], memory)
    calls = [lambda: decode(SPACE, row, memory), lambda: check(SPACE, row)]
    if coding != "class":
        calls.append(lambda: positions(SPACE, row))
    for call in calls:
        with pytest.raises(Corrupt, match=row.tensor):
            call()
    try:
        (read,) = decode_shard(encode_shard([row]), "x")
    except Corrupt:
        return
    assert read == row


@examples
@given(
    st.sampled_from([*CODINGS, "class"]),
    st.sampled_from(["offset", "length", "run", "stride", "count", "escaped"]),
    st.one_of(st.integers(-3, 3000), st.integers(-(1 << 63), (1 << 63) - 1)),
)
def test_any_figure_is_refused_or_stays_inside_the_tensor(coding: Coding, field: str, value: int) -> None:
    row = replace(ROWS[coding], **{field: value})  # type: ignore[arg-type]
    try:
        changes, _ = decode(SPACE, row, memory_of(SPACE, BASE))
    except Corrupt:
        return
    inside = elements_of(Box("BF16", LEAD + row.offset, row.length, row.run, row.stride))
    assert np.isin(changes.positions, inside).all()
    assert LEAD <= changes.positions[0] <= changes.positions[-1] < LEAD + 2000
    assert np.all(np.diff(changes.positions) > 0)


@examples
@given(st.sampled_from([*CODINGS, "class"]), st.sampled_from(["gaps", "lows", "steps", "escapes"]), st.data())
def test_damaged_planes_stay_inside_the_box(coding: Coding, plane: str, data: st.DataObject) -> None:
    row = ROWS[coding]
    raw = bytearray(getattr(row, plane))
    if not raw:
        return
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        changes, _ = decode(SPACE, replace(row, **{plane: bytes(raw)}), memory_of(SPACE, BASE))  # type: ignore[arg-type]
    except Corrupt:
        return
    assert np.isin(changes.positions, elements_of(Box("BF16", LEAD + 5, 550, 11, 40))).all()
    assert len(changes) == row.count
