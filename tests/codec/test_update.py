"""`update_box`: a slice's old bits become its new ones, as a whole state's would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.codec import Geometry
from weightcast.codec.boxes import Box, digest_box, encode_box
from weightcast.codec.memory import UNSIGNED
from weightcast.codec.update import update_box
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import Coding

SPACES = {
    d: Geometry(Layout.of([TensorSpec("a", d, (7,)), TensorSpec("w", d, (90, 40))]))[d]
    for d in ("U8", "BF16", "F32", "I64")
}
BOXES = [(0, 3600, 0, 0), (17, 400, 0, 0), (40, 960, 16, 40), (5, 89, 1, 40), (0, 1760, 40, 80)]


@settings(deadline=None)
@given(
    st.sampled_from(sorted(SPACES)),
    st.sampled_from(BOXES),
    st.sampled_from([None, "gap", "dense", "whole", "class"]),
    st.floats(0.001, 0.4),
    st.integers(0, 2**32 - 1),
)
def test_new_bits_over_old_ones(
    dtype: str, figures: tuple[int, int, int, int], coding: Coding | None, share: float, seed: int
) -> None:
    space = SPACES[dtype]
    offset, length, run, stride = figures
    box = Box(dtype, 7 + offset, length, run, stride)
    random = np.random.default_rng(seed)
    old = random.integers(0, 2**8, length).astype(UNSIGNED[space.width])
    new = old.copy()
    at = random.choice(length, max(1, int(share * length)), replace=False)
    new[at] += random.integers(1, 200, len(at)).astype(new.dtype)
    try:
        row = encode_box(space, box, new.ctypes.data, old.ctypes.data, coding=coding).row
    except UsageError:
        assert coding == "class"  # which not every dtype and density has
        return
    assert row is not None
    before = digest_box(space, box, old.ctypes.data)
    moved = update_box(space, row, old.ctypes.data)
    assert np.array_equal(old, new)
    assert before + moved == digest_box(space, box, new.ctypes.data) == row.digest


def test_a_row_that_is_wrong_writes_nothing() -> None:
    space = SPACES["BF16"]
    old, new = np.zeros(3600, np.uint16), np.zeros(3600, np.uint16)
    new[5] = 3
    row = encode_box(space, Box("BF16", 7, 3600), new.ctypes.data, old.ctypes.data).row
    assert row is not None
    from dataclasses import replace

    with pytest.raises(Corrupt):
        update_box(space, replace(row, steps=b"\x00"), old.ctypes.data)
    with pytest.raises(UsageError, match="reaches into 2 tensors"):
        update_box(space, replace(row, tensors=2), old.ctypes.data)
    assert not old.any()
