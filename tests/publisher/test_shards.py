"""Which rows go together in a shard: what is coded last leaves last, and that is little."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.publisher.shards import FIRST_SHARD_BYTES, LAST_SHARD_BYTES, batches
from weightcast.schemas.digest import Digest
from weightcast.schemas.shard import Row

MIB = 1 << 20


def row(nbytes: int, number: int = 0) -> Row:
    """A row of about so many bytes."""
    return Row(
        tensor=f"w{number}",
        tensors=1,
        dtype="BF16",
        shape=(8,),
        offset=0,
        length=8,
        count=1,
        escaped=0,
        coding="gap",
        gap_shift=0,
        gap_bytes=nbytes,
        gaps=bytes(nbytes),
        lows=b"",
        steps=b"",
        escapes=b"",
        digest=Digest(),
    )


def sizes(rows: list[Row], shard_bytes: int) -> list[int]:
    return [sum(r.nbytes for r in batch) for batch in batches(rows, shard_bytes)]


@given(st.lists(st.integers(0, 300_000), max_size=60), st.sampled_from([1 << 16, 1 << 18, 8 * MIB]))
def test_every_row_is_in_one_shard_in_order(lengths: list[int], shard_bytes: int) -> None:
    rows = [row(n, i) for i, n in enumerate(lengths)]
    made = list(batches(rows, shard_bytes))
    assert [r.tensor for batch in made for r in batch] == [r.tensor for r in rows]
    assert all(made)


@pytest.mark.parametrize("total", [7, 64, 256])
def test_what_is_left_for_the_end_is_about_an_eighth(total: int) -> None:
    """And yet shards are not many: each costs a request of every reader."""
    shard_bytes = 8 * MIB
    found = sizes([row(MIB // 16)] * (16 * total), shard_bytes)
    sent = 0
    for size in found[:-1]:
        assert size <= max(FIRST_SHARD_BYTES, sent / 8) + MIB / 8
        assert size <= shard_bytes + MIB / 8
        sent += size
    assert found[-1] >= LAST_SHARD_BYTES / 2 or len(found) == 1
    assert len(found) <= 8 + total / 8 + 16


def test_the_setting_bounds_small_shards_as_well() -> None:
    assert max(sizes([row(1 << 12)] * 100, 1 << 16)) < (1 << 16) + (1 << 13)


def test_a_shard_is_closed_before_the_next_row_is_coded() -> None:
    taken = 0

    def rows() -> Iterator[Row]:
        nonlocal taken
        for _ in range(64):
            taken += 1
            yield row(MIB // 8)

    first = next(iter(batches(rows(), 8 * MIB)))
    assert taken == len(first) <= 8
