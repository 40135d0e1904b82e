"""Gaps, eight at a time and one by one: the planes of the reference, and the same verdict on planes that are wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import Changes, FlatSpace, Interval, Memory, decode, encode, gather, reference, update
from weightcast.codec.kernels_gaps import read_gaps, write_gaps
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt
from weightcast.schemas.shard import Coding, Row

from .states import change, examples, memory_of, random_bits, space_of

SEEDS = st.integers(0, 2**32 - 1)
SHIFTS = st.integers(0, 13)


@examples
@given(st.integers(1, 60), SHIFTS, st.sampled_from([3, 300, 4000]), SEEDS)
def test_planes_of_any_shift_are_those_of_the_reference(count: int, shift: int, mean: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gaps = rng.geometric(1 / mean, count)
    positions = (np.cumsum(gaps) - 1).astype(np.uint32)
    length = int(positions[-1]) + 1
    new = np.zeros(length, np.int64)
    new[positions] = 1
    expected = reference.gap_planes([0] * length, new.tolist(), 1, shift)
    plane = np.empty(count + (length >> shift) // 255, np.uint8)
    low_bytes = -(-count * shift // 8)
    lows = np.empty(low_bytes + 8, np.uint8)
    used = write_gaps(positions, count, shift, plane, lows)
    assert plane[:used].tobytes() == expected.gaps
    assert lows[:low_bytes].tobytes() == expected.lows
    back = np.empty(count, np.int64)
    assert read_gaps(plane[:used], lows[:low_bytes], shift, length, 7, back)
    assert np.array_equal(back, positions.astype(np.int64) + 7)


def both_ways(space: Any, row: Row, memory: Any) -> list[Any]:
    """What comes of a row at once, and step by step as where changes lie over it: arrays, or the error's text."""
    nothing = np.zeros(1, f"u{space.width}")
    beyond = Changes(
        space.dtype, np.array([space.elements - 1]), nothing
    )  # of no row here: takes the other way
    found: list[Any] = []
    for overlay in (None, beyond):
        try:
            changes, moved = decode(space, row, memory, overlay)
            found.append((changes.positions.tolist(), changes.values.tolist(), moved))
        except Corrupt as error:
            found.append(str(error))
    return found


def in_place(space: FlatSpace, row: Row, memory: Memory) -> Digest | str:
    """What `update` returns, or the error's text."""
    try:
        return update(space, row, memory)[0]
    except Corrupt as error:
        return str(error)


@examples
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 4000),
    st.sampled_from([0.0005, 0.004, 0.03, 0.2, 1.0]),
    st.sampled_from(["gap", "pairs", "dense"]),
    SEEDS,
)
def test_decoding_in_one_pass_is_decoding_step_by_step(
    width: int, length: int, density: float, coding: Coding, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    space = space_of(width, [(900,), (0,), (5,), (5000,), (1,)])
    old = random_bits(width, space.elements, rng)
    new = change(old, density, rng)
    start = int(rng.integers(0, space.elements - 1 - length))
    interval = Interval(space.dtype, start, length)
    memory = memory_of(space, old, lead=3)
    row = encode(space, memory_of(space, new), memory, interval, coding=coding).row
    if row is None:
        return
    written = memory_of(space, old, lead=5)
    expected = old.copy()
    expected[start : start + length] = new[start : start + length]
    first, second = both_ways(space, row, memory)
    assert first == second
    positions, values, _ = first
    assert (
        positions
        == (np.flatnonzero(old[start : start + length] != new[start : start + length]) + start).tolist()
    )
    assert values == new[positions].tolist()
    assert update(space, row, written) == (first[2], None)
    every = np.arange(space.elements)
    assert np.array_equal(gather(space, written, every), expected)
    for _ in range(20):  # and of planes with a byte that is wrong
        plane = rng.choice(["gaps", "lows", "steps", "escapes"])
        data = bytearray(getattr(row, plane))
        if data:
            data[rng.integers(len(data))] = rng.integers(256)
            wrong = dataclasses.replace(row, **{plane: bytes(data)})
            first, second = both_ways(space, wrong, memory)
            assert first == second
            written = memory_of(space, old, lead=5)
            told = in_place(space, wrong, written)
            if isinstance(first, str):
                assert told == first
            else:
                assert told == first[2]
                assert gather(space, written, np.array(first[0])).tolist() == first[1]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 127, 128, 129, 255, 256, 257, 1000])
def test_counts_around_the_blocks(count: int, rng: np.random.Generator) -> None:
    space = space_of(2, [(100_000,)])
    old = random_bits(2, 100_000, rng)
    new = old.copy()
    at = np.sort(rng.choice(100_000, count, replace=False))
    new[at] += np.uint16(1)
    memory = memory_of(space, old)
    row = encode(space, memory_of(space, new), memory, Interval("BF16", 0, 100_000), coding="gap").row
    assert row is not None
    changes, _ = decode(space, row, memory)
    assert np.array_equal(changes.positions, at)
    assert np.array_equal(changes.values, new[at])
