"""`update_box`: a slice's old bits become its new ones, as a whole state's would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.codec import Changes, Geometry, Memory, decode, scatter, update
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
    st.sampled_from([None, "gap", "pairs", "dense", "whole", "class"]),
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


@settings(deadline=None)
@given(
    st.sampled_from(sorted(SPACES)),
    st.sampled_from(BOXES),
    st.sampled_from([None, "gap", "pairs", "dense", "whole", "class"]),
    st.floats(0.001, 0.4),
    st.integers(0, 2**32 - 1),
)
def test_update_is_decode_and_scatter(
    dtype: str, figures: tuple[int, int, int, int], coding: Coding | None, share: float, seed: int
) -> None:
    space = SPACES[dtype]
    offset, length, run, stride = figures
    box = Box(dtype, 7 + offset, length, run, stride)
    random = np.random.default_rng(seed)
    old = random.integers(0, 2**8, length).astype(UNSIGNED[space.width])
    new = old.copy()
    at = random.choice(length, max(1, int(share * length)), replace=False)
    new[at] += random.integers(1, 2 ** (8 * space.width - 1), len(at)).astype(new.dtype)
    geometry = Geometry(Layout.of(space.specs))
    one, other, third = (Memory.allocate(geometry) for _ in range(3))
    for memory in (one, other, third):
        scatter(space, memory, Changes(dtype, places_of(box), old))
    try:
        row = encode_box(space, box, new.ctypes.data, old.ctypes.data, coding=coding).row
    except UsageError:
        assert coding == "class"  # which not every dtype and density has
        return
    assert row is not None
    changes, moved = decode(space, row, other)
    room = Changes.room(space, row.count)
    placed, again = decode(space, row, other, room=room)
    assert placed is room
    assert again == moved
    assert np.array_equal(room.positions, changes.positions)
    assert np.array_equal(room.values, changes.values)
    scatter(space, other, changes)
    same, before = update(space, row, one, keep=True)
    assert same == moved
    assert before is not None
    assert np.array_equal(before.positions, changes.positions)
    everything = np.zeros(space.elements, old.dtype)
    everything[places_of(box)] = old
    assert np.array_equal(before.values, everything[before.positions])
    assert update(space, row, third) == (moved, None)
    for memory in (one, third):
        assert np.array_equal(memory.flat(dtype), other.flat(dtype))
    assert np.array_equal(one.flat(dtype)[places_of(box)], new)


def places_of(box: Box) -> np.typing.NDArray[np.int64]:
    """Flat elements of a box."""
    j = np.arange(box.length)
    run, stride = box.spacing
    return box.start + j // run * stride + j % run


def test_update_leaves_what_may_not_be_written() -> None:
    space = SPACES["BF16"]
    old, new = np.zeros(3600, np.uint16), np.zeros(3600, np.uint16)
    new[5] = 3
    frozen = {spec.name: np.zeros(spec.shape, np.uint16) for spec in space.specs}
    for part in frozen.values():
        part.flags.writeable = False
    memory = Memory.over(Geometry(Layout.of(space.specs)), frozen)
    codings: tuple[Coding, ...] = ("gap", "pairs", "dense")
    for coding in codings:
        row = encode_box(space, Box("BF16", 7, 3600), new.ctypes.data, old.ctypes.data, coding=coding).row
        assert row is not None
        with pytest.raises(UsageError, match="read-only"):
            update(space, row, memory)
