"""Rows that break a rule of docs/format.md, one at a time: `Corrupt` with the tensor's name, no crash."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import Memory, check, decode, encode, positions
from weightcast.codec.space import Interval
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt
from weightcast.schemas.shard import Coding, Row

from .states import CODINGS, change, examples, geometry_of, memory_of, random_bits, space_of

COUNT = 40_000
SPACE = space_of(2, [(COUNT,)])


def row_in(coding: Coding) -> tuple[Row, Memory]:
    """A valid row with compressed planes and escapes, and its base."""
    rng = np.random.default_rng(3)
    old = random_bits(2, COUNT, rng)
    old[rng.random(COUNT) < 0.5] = 0x3F80
    base = memory_of(SPACE, old)
    row = encode(
        SPACE,
        memory_of(SPACE, change(old, 0.02, rng, reach=3)),
        base,
        Interval("BF16", 0, COUNT),
        coding=coding,
    ).row
    assert row is not None
    return row, base


ROWS = {coding: row_in(coding) for coding in CODINGS}


def refused(coding: Coding, message: str, **fields: Any) -> None:
    row, base = ROWS[coding]
    decode(SPACE, row, base)
    with pytest.raises(Corrupt, match=message) as caught:
        decode(SPACE, replace(row, **fields), base)
    assert "t00000" in str(caught.value)


def small(**fields: Any) -> Row:
    """A row of ten elements, two of which change by 1, at 2 and 5."""
    row = Row(
        "t00000", 1, "BF16", (10,), 0, 10, 2, 0, "gap", 0, 2, b"\x02\x02", b"", b"\x02\x02", b"", Digest()
    )
    return replace(row, **fields)


TEN = space_of(2, [(10,)])


def assert_refused(message: str, good: Row, fields: dict[str, Any]) -> None:
    """By a reader that has the base, and as far as it shows without one by `check`."""
    base, row = memory_of(TEN, np.zeros(10, np.uint16)), replace(good, **fields)
    assert decode(TEN, good, base)[0].positions.tolist() == [2, 5]
    check(TEN, good)
    with pytest.raises(Corrupt, match=message) as caught:
        decode(TEN, row, base)
    assert "t00000" in str(caught.value)
    if message == "equal old and new" and row.coding != "pairs":  # it takes the old ones
        check(TEN, row)
        return
    with pytest.raises(Corrupt, match=message):
        check(TEN, row)


def test_the_small_row_is_valid() -> None:
    changes, moved = decode(TEN, small(), memory_of(TEN, np.zeros(10, np.uint16)))
    assert (changes.positions.tolist(), changes.values.tolist()) == ([2, 5], [1, 1])
    assert moved != Digest()


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("coding", {"coding": "class"}),
        ("escapes of", {"count": 0}),
        ("escapes of", {"count": 11}),
        ("escapes of", {"escaped": 3}),
        ("escapes of", {"escaped": -1}),
        ("not inside", {"length": 11}),
        ("gap_shift", {"gap_shift": 25}),
        ("gap_shift", {"gap_shift": -1}),
        ("gap_bytes", {"gap_bytes": 1}),
        ("gap_bytes", {"gap_bytes": 3, "gaps": b"\x02\x02\x02"}),
        ("gap_bytes", {"gap_bytes": 1 << 40}),
        ("bytes of lows", {"lows": b"\0"}),
        ("bytes of lows", {"gap_shift": 1}),
        ("gaps do not lead", {"gaps": b"\x02\x07"}),  # to element 10
        ("gaps do not lead", {"gaps": b"\x0a\x00"}),
        ("gaps do not lead", {"gaps": b"\x02\xff"}),  # ends inside a gap
        ("gaps do not lead", {"gap_shift": 1, "gaps": b"\x00\x00", "lows": b"\x04"}),  # a filling bit is set
        ("gaps do not lead", {"gap_shift": 24, "gaps": b"\xfe\xfe", "lows": b"\xff" * 6}),
        ("plane gaps", {"gaps": b"\x02"}),
        ("plane gaps", {"gaps": b"\x02\x02\x02"}),
        ("plane steps", {"steps": b"\x02"}),
        ("plane steps", {"steps": b""}),
        ("plane escapes", {"escapes": b"\0"}),
        ("plane escapes", {"escaped": 1}),
        ("step 0", {"steps": b"\x02\x00"}),
        ("not exactly used", {"steps": b"\x02\xff"}),
        ("not exactly used", {"escaped": 1, "escapes": b"\1\0"}),
        ("equal old and new", {"steps": b"\x02\xff", "escaped": 1, "escapes": b"\0\0"}),
    ],
)
def test_gap_row_that_breaks_a_rule(message: str, fields: dict[str, Any]) -> None:
    assert_refused(message, small(), fields)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("plane steps", {"steps": b"\x02\x02"}),
        ("plane steps", {"steps": b""}),
        ("step 0", {"steps": b"\x02"}),
        ("step 0", {"steps": b"\x20"}),
        ("not exactly used", {"steps": b"\xf2"}),
        ("equal old and new", {"steps": b"\xf2", "escaped": 1, "escapes": b"\0\0"}),
        ("do not end with 1", {"count": 1, "gaps": b"\2", "gap_bytes": 1}),
        ("bytes of lows", {"gap_shift": 1}),
        ("gap_bytes", {"gap_bytes": 1}),
    ],
)
def test_pairs_row_that_breaks_a_rule(message: str, fields: dict[str, Any]) -> None:
    pairs = {"coding": "pairs", "steps": b"\x22"}
    assert_refused(message, small(**pairs), fields)


DENSE: dict[str, Any] = {"coding": "dense", "gaps": b"", "gap_bytes": 0, "steps": b"\0\0\2\0\0\2\0\0\0\0"}


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("do not mark 3", {"count": 3}),
        ("do not mark 1", {"count": 1}),
        ("gap_shift", {"gap_shift": 1, "lows": b"\0"}),
        ("gap_bytes", {"gap_bytes": 2}),
        ("does not use", {"gaps": b"\2"}),
        ("bytes of lows", {"lows": b"\0"}),
        ("plane steps", {"steps": b"\2\2"}),
        ("not exactly used", {"steps": b"\0\0\2\0\0\xff\0\0\0\0"}),
        ("equal old and new", {"steps": b"\0\0\2\0\0\xff\0\0\0\0", "escaped": 1, "escapes": b"\0\0"}),
    ],
)
def test_dense_row_that_breaks_a_rule(message: str, fields: dict[str, Any]) -> None:
    assert_refused(message, small(**DENSE), fields)


def test_whole_row_that_breaks_a_rule() -> None:
    row = ROWS["whole"][0]
    for field in ("count", "escaped"):
        refused("whole", "is whole, but", **{field: getattr(row, field) - 1, "escaped": COUNT - 1})
    refused("whole", "does not use", steps=b"\1")
    refused("whole", "does not use", gaps=b"\1")
    refused("whole", "bits have digest", digest=Digest(1, 2))
    refused("whole", "plane escapes", escapes=row.escapes[:-1])


def frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


@pytest.mark.parametrize("coding", ["gap", "pairs", "dense"])
def test_planes_are_one_exact_frame(coding: Coding) -> None:
    row = ROWS[coding][0]
    good = row.steps
    content = zstandard.ZstdDecompressor().decompress(good)
    assert len(good) < len(content) - 20
    refused(coding, "plane steps", steps=good[:-1])  # truncated
    refused(coding, "plane steps", steps=good[: len(good) // 2])
    refused(coding, "plane steps", steps=good + b"\0")  # trailing byte
    refused(coding, "plane steps", steps=good + frame(b""))  # second frame
    refused(coding, "plane steps", steps=frame(content[:-1]))
    refused(coding, "plane steps", steps=frame(content + b"\1"))
    refused(coding, "plane steps", steps=frame(content, write_content_size=False))
    refused(coding, "plane steps", steps=b"\x50\x2a\x4d\x18\4\0\0\0abcd" + good)  # a skippable frame first
    refused(coding, "plane steps", steps=good[:4] + b"\xff" * (len(good) - 4))
    refused(coding, "plane steps", steps=b"no frame at all")
    refused(coding, "plane steps", steps=b"")
    refused(coding, "plane steps", steps=content + b"\0")  # longer than raw


def test_frame_that_lies_about_its_content_size() -> None:
    row = ROWS["dense"][0]
    descriptor = frame(bytes(60_000), write_content_size=True)
    at = descriptor.index((60_000 - 256).to_bytes(2, "little"))  # two bytes: RFC 8878, 3.1.1.1.4
    lie = descriptor[:at] + (COUNT - 256).to_bytes(2, "little") + descriptor[at + 2 :]
    assert zstandard.frame_content_size(lie) == COUNT == row.length
    refused("dense", "plane steps", steps=lie)


@pytest.mark.parametrize("plane", ["gaps", "steps", "escapes"])
def test_b165_zip_bomb_is_refused_before_anything_is_allocated(plane: str) -> None:
    bomb = frame(bytes(256 << 20))
    assert len(bomb) < 10_000
    row, base = ROWS["gap"]
    big = space_of(2, [(1 << 24,)])
    row = replace(row, shape=(1 << 24,), length=1 << 24, **{plane: bomb})  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match=f"plane {plane}" if plane != "escapes" else "plane|gaps"):
            decode(big, row, Memory.allocate(geometry_of(big)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20
    assert base.writable


@examples
@given(st.sampled_from(CODINGS), st.sampled_from(["gaps", "lows", "steps", "escapes"]), st.data())
def test_damaged_planes_never_crash(coding: Coding, plane: str, data: st.DataObject) -> None:
    """What comes out is either an error or changes inside the interval."""
    row, base = ROWS[coding]
    raw = bytearray(getattr(row, plane))
    if not raw:
        return
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        changes, _ = decode(SPACE, replace(row, **{plane: bytes(raw)}), base)  # type: ignore[arg-type]
    except Corrupt:
        return
    assert np.all(np.diff(changes.positions) > 0)
    assert 0 <= changes.positions[0] <= changes.positions[-1] < COUNT
    assert len(changes) == row.count


@pytest.mark.parametrize("coding", CODINGS)
def test_positions_need_no_base_and_check_as_much_as_they_can(coding: Coding) -> None:
    row, base = ROWS[coding]
    assert np.array_equal(positions(SPACE, row), decode(SPACE, row, base)[0].positions)
    with pytest.raises(Corrupt):
        positions(SPACE, replace(row, count=row.count - 1))
    with pytest.raises(Corrupt):
        positions(SPACE, replace(row, offset=1))
