"""Packed shards: which are, round trips, and frames that are none or would expand without bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import zstandard

from weightcast.schemas.errors import Corrupt
from weightcast.schemas.frames import MAGIC, stated_bytes
from weightcast.schemas.shard import (
    MAX_EXPANSION,
    Row,
    decode_shard,
    encode_shard,
    features_of,
    is_packed,
    store_shard,
)

from .test_shard import BOX, ROW


def by_class(nbytes: int) -> Row:
    """A row with planes of noise; its figures are possible."""
    noise = np.random.default_rng(nbytes).bytes(nbytes)
    return replace(ROW, coding="class", gap_bytes=nbytes, gaps=noise, steps=noise[: nbytes // 3])


def in_pairs(nbytes: int) -> Row:
    """The same with steps in half a byte."""
    noise = np.random.default_rng(nbytes).bytes(nbytes)
    return replace(
        ROW, coding="pairs", count=nbytes, length=10 * nbytes, gap_bytes=nbytes, gaps=noise, steps=noise[::2]
    )


def test_features_of_rows() -> None:
    assert features_of([]) == features_of([ROW]) == set()
    assert features_of([ROW, by_class(100_000), by_class(100_000)]) == {"class"}
    assert features_of([ROW, by_class(9)]) == {"class", "packed"}
    assert features_of([BOX]) == {"boxes"}
    assert features_of([ROW, in_pairs(9)]) == {"packed", "pairs"}
    assert features_of([ROW, in_pairs(200_000)]) == {"pairs"}
    assert features_of([replace(by_class(9), run=30, stride=100), ROW]) == {"boxes", "class", "packed"}


def test_small_shards_with_a_row_by_class_are_packed() -> None:
    named = [replace(by_class(300), tensor=f"model.layers.{i}.mlp.weight") for i in range(50)]
    data = store_shard([ROW, *named])
    assert data == store_shard([ROW, *named])
    assert data[:4] == MAGIC
    assert stated_bytes(data) == len(encode_shard([ROW, *named]))
    planes = sum(len(r.gaps) + len(r.steps) for r in named)
    assert len(data) < planes + 50 * 60 + 1500, "the table takes a third of what it took"
    assert decode_shard(data, "x") == decode_shard(bytearray(data), "x") == [ROW, *named]


def test_a_short_table_beside_long_planes_is_shortened_all_the_same() -> None:
    long = by_class(90_000)
    assert is_packed([long])
    assert len(store_shard([long])) < len(encode_shard([long])) - 1500
    assert decode_shard(store_shard([long]), "x") == [long]


def test_small_shards_with_pairs_are_packed() -> None:
    rows = [ROW, in_pairs(900)]
    assert store_shard(rows)[:4] == MAGIC
    assert len(store_shard(rows)) < len(encode_shard(rows)) - 1500
    assert decode_shard(store_shard(rows), "x") == rows


@pytest.mark.parametrize(
    "rows", [[], [ROW], [ROW, BOX] * 50, [by_class(200_000)]], ids=["none", "one", "many", "long"]
)
def test_other_shards_are_the_table_itself(rows: list[Row]) -> None:
    assert store_shard(rows) == encode_shard(rows)
    assert not is_packed(rows)


def test_what_would_expand_too_much_is_not_packed() -> None:
    flat = [replace(by_class(9), tensor="w" * 1000)] * 3000
    assert is_packed(flat)
    assert store_shard(flat) == encode_shard(flat)


TABLE = encode_shard([by_class(9), by_class(10)])
LONG = bytes(100_000)
FRAMES: dict[str, Callable[[], bytes]] = {
    "cut": lambda: store_shard([by_class(9)])[:-1],
    "more behind it": lambda: store_shard([by_class(9)]) + b"x",
    "two frames": lambda: store_shard([by_class(9)]) * 2,
    "a skippable frame first": lambda: b"\x50\x2a\x4d\x18\1\0\0\0x" + store_shard([by_class(9)]),
    "its size not stated": lambda: zstandard.ZstdCompressor(write_content_size=False).compress(TABLE),
    "a header alone": lambda: MAGIC,
    "nothing in it": lambda: zstandard.compress(b""),
    "another thing in it": lambda: zstandard.compress(b"no table"),
    "a frame in it": lambda: zstandard.compress(store_shard([by_class(9)])),
    "too much in it": lambda: zstandard.compress(LONG),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_that_are_none_or_expand_without_bound(name: str) -> None:
    assert len(FRAMES["too much in it"]()) * MAX_EXPANSION < len(LONG)
    with pytest.raises(Corrupt, match=r"data/x\.arrow is not a delta table"):
        decode_shard(FRAMES[name](), "data/x.arrow")


def test_a_frame_that_states_more_than_it_has() -> None:
    data = bytearray(store_shard([by_class(9)]))
    assert stated_bytes(data) == len(encode_shard([by_class(9)]))
    data[5] ^= 1  # the lowest byte of the stated size
    assert stated_bytes(data) != len(encode_shard([by_class(9)]))
    with pytest.raises(Corrupt, match=r"data/x\.arrow is not a delta table"):
        decode_shard(bytes(data), "data/x.arrow")


def test_b167_any_broken_byte_is_an_error_of_its_own_or_rows() -> None:
    """B167: zstd's own faults never get out, whatever is wrong with a frame."""
    data = store_shard([ROW, by_class(30)])
    refused = 0
    for at in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            broken = bytearray(data)
            broken[at] ^= flip
            try:
                decode_shard(broken, "x")
            except Corrupt:
                refused += 1
    assert refused > len(data)
