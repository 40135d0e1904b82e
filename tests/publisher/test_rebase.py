"""Rows that wait while others are committed, told from what those lead to; their intervals need not be the same."""

from __future__ import annotations

import itertools
import uuid

import numpy as np
import pytest

from weightcast.codec import Geometry, Interval, Memory, encode, joined
from weightcast.manifest.deltas import apply_directly
from weightcast.manifest.rebuild import State
from weightcast.manifest.store import open_store
from weightcast.publisher.rebase import rebase_rows
from weightcast.schemas.shard import Codec, Row

from ..manifest.author import POOL, Author, Tensors

ROW_ELEMENTS = 1 << 16
SIZES = (20_000, 70_000, 300, 30_000, 30_000, 66_000, 1)


def changed(tensors: Tensors, seed: int, untouched: str) -> Tensors:
    random = np.random.default_rng(seed)
    found = Tensors({n: a.copy() for n, a in tensors.bits.items()}, tensors.dtypes)
    for name, bits in found.bits.items():
        if name != untouched:
            bits[random.random(bits.shape) < 0.01] ^= bits.dtype.type(1)
    return found


def rows_between(old: Tensors, new: Tensors, geometry: Geometry, codec: Codec) -> dict[Interval, Row]:
    before, after = Memory.over(geometry, old.bits), Memory.over(geometry, new.bits)
    found = {
        i: encode(geometry[i.dtype], after, before, i, codec=codec).row
        for i in joined(geometry.intervals(ROW_ELEMENTS), ROW_ELEMENTS, codec)
    }
    return {i: row for i, row in found.items() if row is not None}


@pytest.mark.parametrize(
    "codecs", list(itertools.product(("gap", "class"), repeat=2)), ids=lambda codecs: "-".join(codecs)
)
def test_rows_of_nested_intervals(codecs: tuple[Codec, Codec]) -> None:
    random = np.random.default_rng(0)
    start = Tensors.of(
        None, **{f"t{i}": ("BF16", random.integers(0x3C00, 0x3D00, n)) for i, n in enumerate(SIZES)}
    )
    one, other = changed(start, 1, "t3"), changed(start, 2, "t5")
    author = Author(open_store(f"memory://{uuid.uuid4().hex}"))
    author.reset(start)
    state: State = author.state()
    geometry = state.geometry
    committed, waiting = (
        rows_between(start, t, geometry, c) for t, c in zip((one, other), codecs, strict=True)
    )
    for rows, codec in zip((committed, waiting), codecs, strict=True):
        joint = any(row.offset > 0 and row.tensors > 1 for row in rows.values())
        assert joint == (codec == "gap"), "the end of t1 with those behind it"
    rebased = rebase_rows(state, committed, waiting, POOL, 1, codecs[1])
    assert sum(i.length for i in rebased) <= sum(SIZES)
    memory = Memory.over(geometry, {n: a.copy() for n, a in one.bits.items()})
    apply_directly(geometry, rebased.values(), memory, POOL)
    for name, bits in other.bits.items():
        assert np.array_equal(memory.tensor(name), bits), name
