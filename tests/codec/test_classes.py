"""The coding `class`: exact for all bits, the planes of the reference, never larger than `gap`, and no trust."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import (
    Changes,
    FlatSpace,
    Geometry,
    Interval,
    Memory,
    check,
    decode,
    digest,
    encode,
    positions,
    scatter,
)
from weightcast.codec import reference_classes as reference
from weightcast.codec.classes import EXPONENTS
from weightcast.codec.jit_classes import BLOCK, DEPOSITS
from weightcast.codec.kernels_classes import list_bits, nth_by_deposit, nth_by_turns
from weightcast.codec.lines import Lines
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import Row, decode_shard, encode_shard

from .states import Bits, bits_of, change, examples, memory_of, random_bits, space_of

SEEDS = st.integers(0, 2**32)
DTYPES = st.sampled_from(sorted(EXPONENTS))
SHAPES = st.sampled_from(
    [
        (1,),
        (2,),
        (63,),
        (64,),
        (700,),
        (BLOCK,),
        (BLOCK + 1,),
        (3000,),
        (40, 70),
        (30, 100),
        (9, 8, 3, 3),
        (2000, 1),
    ]
)


def space(dtype: str, *shapes: tuple[int, ...]) -> FlatSpace:
    specs = [TensorSpec(f"t{i}", dtype, shape) for i, shape in enumerate(shapes)]
    return Geometry(Layout.of(specs))[dtype]


def weights(dtype: str, count: int, rng: np.random.Generator) -> Bits:
    """Bits whose exponents are like those of weights: halved from class to class."""
    shift, mask = EXPONENTS[dtype]
    width = WIDTHS[dtype]
    exponents = np.clip(mask * 3 // 4 - rng.geometric(0.4, count), 0, mask)
    noise = rng.integers(0, 1 << shift, count)
    signs = rng.integers(0, 2, count) << (8 * width - 1)
    return (signs | exponents << shift | noise).astype(f"u{width}")


def coded(
    found: FlatSpace, old: Bits, new: Bits, interval: Interval | None = None, lead: int | None = None
) -> Row:
    """Encode by class, carry through a shard, decode, compare bits; the row."""
    before, after = memory_of(found, old, lead=lead), memory_of(found, new, lead=lead)
    interval = interval or Interval(found.dtype, 0, found.elements)
    result = encode(found, after, before, interval, coding="class")
    assert result.row is not None
    assert result.digest == digest(found, after, interval)
    (row,) = decode_shard(encode_shard([result.row]), "test")
    check(found, row)
    changes, moved = decode(found, row, before)
    assert moved == result.change
    assert np.array_equal(bits_of(found, before), old)  # decode changes nothing
    scatter(found, before, changes)
    part = slice(interval.start, interval.stop)
    assert np.array_equal(bits_of(found, before)[part], new[part])
    return row


def sparse(old: Bits, density: float, rng: np.random.Generator) -> Bits:
    """A copy with at least one change, and few enough for this coding."""
    new = change(old, min(density, 0.4), rng)
    if np.array_equal(old, new):
        new[rng.integers(len(new))] ^= 1
    if np.count_nonzero(old != new) >= len(old) / 2:
        new = old.copy()
        new[0] ^= 1
    return new


@examples
@given(
    DTYPES,
    SHAPES,
    st.sampled_from([0.0, 0.002, 0.02, 0.3]),
    st.sampled_from([None, 1, 5]),
    st.booleans(),
    SEEDS,
)
def test_any_bits_come_back(
    dtype: str, shape: tuple[int, ...], density: float, lead: int | None, any_bits: bool, seed: int
) -> None:
    rng, found = np.random.default_rng(seed), space_of(1, [(1,)])
    found = space(dtype, shape)
    if found.elements < 3:
        return
    old = random_bits(found.width, found.elements, rng) if any_bits else weights(dtype, found.elements, rng)
    coded(found, old, sparse(old, density, rng), lead=lead)


@examples
@given(DTYPES, st.integers(0, 2999), st.integers(3, 3000), st.floats(0.001, 0.4), SEEDS)
def test_slices_of_a_tensor(dtype: str, start: int, length: int, density: float, seed: int) -> None:
    """Rows that begin and end within a line, in a tensor behind others."""
    rng, found = np.random.default_rng(seed), space(dtype, (17,), (30, 100))
    length = min(length, 3000 - start)
    if length < 3:
        return
    old = weights(dtype, found.elements, rng)
    new = old.copy()
    part = slice(17 + start, 17 + start + length)
    new[part] = sparse(old[part], density, rng)
    coded(found, old, new, Interval(dtype, 17 + start, length))


@examples
@given(
    DTYPES, st.sampled_from([(50,), (20, 70), (40, 80), (2500,)]), st.sampled_from([0.002, 0.05, 0.3]), SEEDS
)
def test_planes_are_those_of_the_reference(
    dtype: str, shape: tuple[int, ...], density: float, seed: int
) -> None:
    rng, found = np.random.default_rng(seed), space(dtype, shape)
    old = weights(dtype, found.elements, rng)
    new = sparse(old, density, rng)
    if len(shape) == 2 and seed % 2:  # most lines without a change
        new.reshape(shape)[rng.random(shape[0]) < 0.8] = old.reshape(shape)[0]
        new = np.where(np.repeat(rng.random(shape[0]) < 0.8, shape[1]), old, new).astype(old.dtype)
        if np.array_equal(old, new) or np.count_nonzero(old != new) >= len(old) / 2:
            return
    row = coded(found, old, new)
    lines = Lines.of(shape, 0, found.elements)
    kind = reference.Shape(dtype, row.gaps[0], lines.elements, lines.phase)
    at = np.flatnonzero(old != new).tolist()
    o, n = old[at].tolist(), new[at].tolist()
    assert row.gaps == reference.gap_plane(kind, old.tolist(), at, row.gaps[1] == 1)
    assert reference.positions_of(kind, old.tolist(), row.count, row.gaps) == at
    steps, same = reference.code_steps(kind, at, o, n)
    assert (row.steps, same) == (steps, n)
    plane, back = reference.code_steps(kind, at, o, [0] * len(o), row.steps)
    assert (plane, back) == (row.steps, n)


def test_b016_negative_zero_and_nans_are_bits_as_any_others() -> None:
    found = space("BF16", (200,))
    old = np.zeros(200, np.uint16)
    old[100:] = 0x7FC0  # NaN
    new = old.copy()
    new[[0, 5, 100, 120, 199]] = [0x8000, 0xFF80, 0x7FC1, 0xFFFF, 0x0000]
    row = coded(found, old, new)
    assert row.count == 5


@pytest.mark.parametrize("step", [1, -1, 2, -2, 127, 128, 255, 256, 0x7FFF, -0x7FFF, 0x8000])
@pytest.mark.parametrize("old", [0, 1, 0x3F80, 0x7FFF, 0x8000, 0xBF80, 0xFFFF])
def test_steps_of_all_sizes(old: int, step: int) -> None:
    bits = np.full(1000, old, np.uint16)
    new = bits.copy()
    new[::7] = (old + step) % 65536
    row = coded(space("BF16", (10, 100)), bits, new)
    assert (row.escaped, row.escapes, row.lows) == (0, b"", b"")


@pytest.mark.parametrize("at", [[0], [999_999], [0, 999_999], [*range(0, 1_000_000, 100_000)], [*range(64)]])
def test_gaps_of_all_sizes(at: list[int]) -> None:
    """Also those that are written out, since they are 32 times what was expected and more."""
    old = np.full(1_000_000, 0x3C12, np.uint16)
    old[::3] = 0x2000
    new = old.copy()
    new[at] += np.uint16(1)
    assert coded(space("BF16", (1_000_000,)), old, new).count == len(at)


def test_lines_without_changes_are_not_counted_where_that_pays(rng: np.random.Generator) -> None:
    found = space("BF16", (5000, 100))
    old = weights("BF16", found.elements, rng)
    new = old.copy().reshape(5000, 100)
    live = rng.choice(5000, 200, replace=False)
    new[live, ::9] += np.uint16(1)
    row = coded(found, old, new.ravel())
    assert row.gaps[1] == 1
    spread = old.copy()
    spread[rng.choice(found.elements, row.count, replace=False)] += np.uint16(1)
    other = coded(found, old, spread)
    assert other.gaps[1] == 0
    assert len(row.gaps) < 0.8 * len(other.gaps)


def trained(rng: np.random.Generator, count: int = 1 << 20) -> tuple[Bits, Bits]:
    """Bits that changed as those of trained weights do: half as often from exponent to exponent."""
    old = (rng.normal(0, 0.04, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    exponents = (old >> 7 & 0xFF).astype(np.float64)
    new = old.copy()
    at = np.flatnonzero(rng.random(count) < np.minimum(0.5, 2.0 ** (113.5 - exponents)))
    new[at] += rng.choice(np.array([1, 65535], np.uint16), len(at))
    return old, new


@pytest.mark.parametrize("codec", ["class", "auto"])
def test_the_codec_takes_it_where_it_is_smaller(codec: Any, rng: np.random.Generator) -> None:
    old, new = trained(rng)
    found = space("BF16", (1024, 1024))
    before, after = memory_of(found, old), memory_of(found, new)
    interval = Interval("BF16", 0, found.elements)
    rows = [encode(found, after, before, interval, codec=c).row for c in ("gap", codec)]
    assert rows[0] is not None
    assert rows[1] is not None
    assert (rows[0].coding, rows[1].coding) == ("pairs", "class")
    assert rows[1].nbytes < 0.8 * rows[0].nbytes
    assert encode(found, after, before, interval, codec=codec).row == rows[1]  # deterministic


@examples
@given(st.sampled_from(["BF16", "F16", "F8_E4M3", "F32", "I16"]), st.floats(0, 1), SEEDS)
def test_never_larger_than_gap(dtype: str, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    found = space(dtype, (30, 40), (5,), (0,), (700,))
    old = random_bits(found.width, found.elements, rng)
    before, after = memory_of(found, old), memory_of(found, change(old, density**4, rng))
    for interval in found.split(1 << 16, 1 << 9):
        gap, auto = (encode(found, after, before, interval, codec=c) for c in ("gap", "auto"))
        assert (gap.digest, gap.change, gap.row is None) == (auto.digest, auto.change, auto.row is None)
        if gap.row is not None and auto.row is not None:
            assert auto.row.nbytes <= gap.row.nbytes
            assert auto.row.coding != "class" or (auto.row.tensors == 1 and dtype in EXPONENTS)


@pytest.mark.parametrize(("dtype", "shapes"), [("F32", [(100,)]), ("BF16", [(50,), (50,)])])
def test_rows_that_cannot_have_it(dtype: str, shapes: list[tuple[int, ...]]) -> None:
    found = space(dtype, *shapes)
    old = np.zeros(100, f"u{found.width}")
    new = old.copy()
    new[3] = 1
    with pytest.raises(UsageError, match="cannot be coded by class"):
        encode(found, memory_of(found, new), memory_of(found, old), Interval(dtype, 0, 100), coding="class")


def test_the_overlay_counts_for_the_classes(rng: np.random.Generator) -> None:
    """A row told from version 1 decodes against version 0 and what version 1 changed, and against nothing less."""
    found = space("BF16", (50, 100))
    first = weights("BF16", 5000, rng)
    second = first.copy()
    moved = rng.choice(5000, 900, replace=False)
    second[moved] ^= np.uint16(0x0580)  # into other classes
    third = sparse(second, 0.05, rng)
    row = coded(found, second, third)
    moved.sort()
    overlay = Changes("BF16", moved.astype(np.int64), second[moved])
    changes, _ = decode(found, row, memory_of(found, first), overlay)
    at = np.flatnonzero(second != third)
    assert np.array_equal(changes.positions, at)
    assert np.array_equal(changes.values, third[at])
    try:
        alone, _ = decode(found, row, memory_of(found, first))
    except Corrupt:
        return
    assert not (np.array_equal(alone.positions, at) and np.array_equal(alone.values, third[at]))


def test_without_all_old_bits_it_is_refused_with_the_remedy(rng: np.random.Generator) -> None:
    found, row, base = example()
    bits = bits_of(found, base)
    with pytest.raises(UsageError, match="coded by class") as refusal:
        positions(found, row)
    assert "--mirror" in str(refusal.value.hint)
    assert "--codec gap" in str(refusal.value.hint)
    with pytest.raises(UsageError, match="coded by class"):
        decode(found, row, Changes(found.dtype, np.arange(len(bits)), bits))


def example() -> tuple[FlatSpace, Row, Memory]:
    rng, found = np.random.default_rng(7), space("BF16", (60, 100))
    old = weights("BF16", found.elements, rng)
    new = sparse(old, 0.05, rng)
    return found, coded(found, old, new), memory_of(found, old)


FOUND, ROW, BASE = example()


@pytest.mark.parametrize(
    "fields",
    [
        {"gap_bytes": len(ROW.gaps) - 1},
        {"gap_shift": 1},
        {"escaped": 1},
        {"lows": b"\0"},
        {"escapes": b"\0\0"},
        {"tensors": 2, "shape": ()},
        {"gaps": b"", "gap_bytes": 0},
        {"gaps": ROW.gaps[:2], "gap_bytes": 2},
        {"gaps": ROW.gaps + b"\0", "gap_bytes": len(ROW.gaps) + 1},
        {"gaps": ROW.gaps[:-1], "gap_bytes": len(ROW.gaps) - 1},
        {"gaps": ROW.gaps[:1] + b"\2" + ROW.gaps[2:]},
        {"gaps": ROW.gaps[:1] + b"\1" + ROW.gaps[2:]},
        {"count": ROW.count - 1},
        {"count": ROW.count + 1},
        {"dtype": "I16"},
        {"coding": "klass"},
    ],
)
def test_rows_that_break_a_rule(fields: dict[str, Any]) -> None:
    row = replace(ROW, **fields)
    for call in (lambda: decode(FOUND, row, BASE), lambda: check(FOUND, row)):
        with pytest.raises(Corrupt):
            call()


@pytest.mark.parametrize(
    "steps",
    [b"", ROW.steps[:-5], ROW.steps + b"\0", ROW.steps[: len(ROW.steps) // 2], b"\xff" * len(ROW.steps)],
)
def test_steps_are_used_up_exactly(steps: bytes) -> None:
    with pytest.raises(Corrupt, match="plane steps"):
        decode(FOUND, replace(ROW, steps=steps), BASE)


@examples
@given(st.sampled_from(["gaps", "steps"]), st.data())
def test_damaged_planes_never_crash(plane: str, data: st.DataObject) -> None:
    """What comes out is either an error or changes inside the interval."""
    raw = bytearray(getattr(ROW, plane))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    refused_or_inside(FOUND, replace(ROW, **{plane: bytes(raw)}), BASE)  # type: ignore[arg-type]


@examples
@given(st.integers(1, 3000), st.binary(min_size=3, max_size=300), st.binary(max_size=300), st.booleans())
def test_planes_of_any_bytes_never_crash(count: int, gaps: bytes, steps: bytes, listed: bool) -> None:
    gaps = gaps[:1] + bytes([listed]) + gaps[2:]
    refused_or_inside(FOUND, replace(ROW, count=count, gaps=gaps, gap_bytes=len(gaps), steps=steps), BASE)


def test_any_other_old_bits_never_crash(rng: np.random.Generator) -> None:
    for _ in range(50):
        refused_or_inside(FOUND, ROW, memory_of(FOUND, random_bits(2, FOUND.elements, rng)))


def refused_or_inside(found: FlatSpace, row: Row, base: Memory) -> None:
    try:
        changes, _ = decode(found, row, base)
    except Corrupt:
        return
    check(found, row)
    assert len(changes) == row.count
    assert np.all(np.diff(changes.positions) > 0)
    assert 0 <= changes.positions[0] <= changes.positions[-1] < row.length
    old = bits_of(found, base)[changes.positions]
    assert np.all(changes.values != old)


@pytest.mark.parametrize("nth", [nth_by_turns, *([nth_by_deposit] if DEPOSITS else [])])
def test_the_nth_bit_of_a_word(nth: Any, rng: np.random.Generator) -> None:
    for share in (0.02, 0.5, 1.0):
        word = int.from_bytes(np.packbits(rng.random(64) < share).tobytes(), "little")
        ones = [i for i in range(64) if word >> i & 1]
        assert [int(nth(np.uint64(word), n)) for n in range(len(ones))] == [1 << i for i in ones]


def test_bits_of_words_are_listed_and_gone() -> None:
    words = np.array([0, 1, 2**63 | 5, 2**64 - 1, 0], np.uint64)
    out = np.empty(68 + 1, np.int64)
    assert list_bits(words, out) == 68
    assert out[:68].tolist() == [64, 128, 130, 191, *range(192, 256)]
    assert not words.any()
    assert list_bits(words, out) == 0
