"""Rows with gaps are decoded alike by vectors and by blocks, whatever the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from weightcast.codec import FlatSpace, Interval, Memory, change_digest, encode, kernels_apply
from weightcast.codec.decode import _escapes, _step_plane
from weightcast.codec.jit import TAGS
from weightcast.codec.jit_find import COMPRESSES
from weightcast.codec.memory import UNSIGNED
from weightcast.codec.planes import expand_plane
from weightcast.schemas.digest import Digest
from weightcast.schemas.shard import Coding, Row

from .states import Bits, change, memory_of, random_bits, space_of

WAYS: Final[dict[str, Callable[..., Any]]] = {
    "blocks": kernels_apply.change_by_blocks, "whichever": kernels_apply.change_row
} | ({"vectors": kernels_apply.change_by_vectors} if COMPRESSES else {})  # fmt: skip
EACH = pytest.mark.parametrize("way", WAYS)
SIZES: Final = [3, 7, 20_000, 1, 5000, 64]
"""Of tensors: some without a whole vector of changes, one with more changes than a stretch has."""


def changed_row(
    way: str, space: FlatSpace, row: Row, memory: Memory, *, write: bool
) -> tuple[int, Digest, Any, Bits, Bits]:
    """What a kernel says, and the positions, old and new bits that it gives."""
    positions, (olds, news) = np.empty(row.count, np.int64), np.empty((2, row.count), UNSIGNED[space.width])
    gaps = expand_plane(row.gaps, row.gap_bytes, row.tensor, "gaps")
    steps, escapes = _step_plane(row), _escapes(row, olds.dtype)
    none = np.frombuffer(b"", np.uint8)
    fault, *lanes = WAYS[way](
        memory.addresses(space), space.starts, space.seeds, 0, 0, row.length, row.gap_shift, gaps,
        np.frombuffer(row.lows, np.uint8), none, steps, escapes, row.coding == "pairs",
        positions, olds, news, write, TAGS[space.width],
    )  # fmt: skip
    return int(fault), Digest(*map(int, lanes)), positions, olds, news


@EACH
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("mix", [1, 2])
@pytest.mark.parametrize("coding", ["gap", "pairs"])
@pytest.mark.parametrize("write", [False, True])
def test_a_row_over_many_tensors(
    way: str, width: int, mix: int, coding: Coding, write: bool, rng: np.random.Generator
) -> None:
    space = space_of(width, [(n,) for n in SIZES], mix)
    old = random_bits(width, space.elements, rng)
    new = change(old, 0.3, rng)  # to any bits, so that most of them are escaped
    small = rng.random(space.elements) < 0.3
    new[small] = old[small] + np.array(1, old.dtype)
    memory = memory_of(space, old)
    row = encode(
        space, memory_of(space, new), memory, Interval(space.dtype, 0, space.elements), coding=coding
    ).row
    assert row is not None
    assert row.coding == coding
    assert row.count > kernels_apply.STRETCH
    fault, moved, positions, olds, news = changed_row(way, space, row, memory, write=write)
    at = np.flatnonzero(old != new)
    assert fault == 0
    assert np.array_equal(positions, at)
    assert np.array_equal(olds, old[at])
    assert np.array_equal(news, new[at])
    assert moved == change_digest(space, at, old[at], new[at])
    assert np.array_equal(memory.flat(space.dtype), new if write else old)


@EACH
@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_faults(way: str, count: int, rng: np.random.Generator) -> None:
    """A step of zero, a missing escape, one too many, and one that changes nothing: in vectors and behind them."""
    space = space_of(2, [(1000,)])
    old = random_bits(2, 1000, rng)
    new = old.copy()
    at = np.sort(rng.choice(1000, count, replace=False))
    new[at] += np.uint16(1)
    memory = memory_of(space, old)
    row = encode(space, memory_of(space, new), memory, Interval("BF16", 0, 1000), coding="gap").row
    assert row is not None
    steps = expand_plane(row.steps, count, row.tensor, "steps")
    for place in {0, count // 2, count - 1}:
        for step, escapes, expected in [
            (0, b"", 1),
            (255, b"", 2),
            (2, b"\1\0", 2),
            (255, old[at[place]].tobytes(), 3),
        ]:
            wrong = steps.copy()
            wrong[place] = step
            bad = replace(row, steps=wrong.tobytes(), escapes=escapes, escaped=len(escapes) // 2)
            fault, *_ = changed_row(way, space, bad, memory, write=False)
            assert fault == expected
