"""Memory: where bits lie, what is accepted, and reading and writing through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import Changes, Geometry, Memory, gather, merge, put, scatter, threads
from weightcast.codec.kernels_apply import WRITTEN
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import Layout, TensorSpec

from .states import bits_of, examples, geometry_of, memory_of, random_bits, space_of

MIXED = Geometry(
    Layout.of(
        [
            TensorSpec("w", "BF16", (3, 5)),
            TensorSpec("v", "BF16", (0, 4)),
            TensorSpec("u", "F64", ()),
            TensorSpec("tied", "BF16", (3, 5), tied_to="w"),
        ]
    )
)


def test_allocated_memory_is_zero_and_contiguous() -> None:
    memory = Memory.allocate(MIXED)
    assert (memory.flat("BF16").shape, memory.flat("F64").shape) == ((15,), (1,))
    assert not memory.flat("BF16").any()
    memory.tensor("w")[2, 4] = 7
    assert memory.flat("BF16")[14] == 7
    assert (memory.tensor("v").shape, memory.tensor("u").shape) == ((0, 4), ())
    assert memory.tensor("u").dtype == np.uint64


def test_a_view_keeps_the_memory_alive() -> None:
    view = Memory.allocate(MIXED).flat("BF16")
    view[:] = 3
    assert [np.zeros(15, np.uint16).sum() for _ in range(100)] == [0] * 100
    assert view.sum() == 45


def test_mapped_file_holds_the_bits(tmp_path: Path) -> None:
    path = tmp_path / "baseline"
    path.write_bytes(b"old" * 5000)
    memory = Memory.allocate(MIXED, path)
    assert not memory.flat("BF16").any()
    memory.tensor("w")[0, 1] = 0x1234
    assert path.read_bytes()[2:4] == b"\x34\x12"
    assert Memory.allocate(MIXED, path, keep=True).tensor("w")[0, 1] == 0x1234
    assert not Memory.allocate(MIXED, path).flat("BF16").any()


def test_over_takes_arrays_and_addresses() -> None:
    w, u = np.arange(15, dtype=np.float16).reshape(3, 5), np.zeros((), np.float64)
    memory = Memory.over(MIXED, {"w": w, "v": (0, 0, None), "u": (u.ctypes.data, 8, u), "unknown": u})
    assert memory.writable
    assert np.array_equal(memory.tensor("w"), w.view(np.uint16))
    memory.tensor("u")[...] = 5
    assert u.view(np.uint64) == 5


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ({}, "'w' of the layout has no buffer|'v' of the layout has no buffer"),
        ({"w": np.zeros((3, 4), np.uint16)}, "'w' needs 30 bytes in C order, found 24"),
        ({"w": np.zeros((5, 3), np.uint16).T}, "'w' needs 30 bytes in C order, found 30, not contiguous"),
        ({"w": (64, 31, None)}, "'w' needs 30 bytes in C order, found 31"),
    ],
)
def test_over_refuses_what_does_not_fit(buffers: dict[str, object], message: str) -> None:
    complete = {"v": np.zeros(0, np.uint16), "u": np.zeros(1)} | buffers if buffers else {}
    with pytest.raises(UsageError, match=message):
        Memory.over(MIXED, complete)  # type: ignore[arg-type]


def test_read_only_memory_is_never_written() -> None:
    space = space_of(2, [(4,)])
    frozen = np.zeros(4, np.uint16)
    frozen.flags.writeable = False
    memory = Memory.over(geometry_of(space), {"t00000": frozen})
    with pytest.raises(UsageError, match="read-only"):
        scatter(space, memory, Changes("BF16", np.array([1]), np.array([1], np.uint16)))
    assert not memory.tensor("t00000").flags.writeable


def test_flat_view_needs_tensors_end_to_end() -> None:
    space = space_of(2, [(4,), (4,)])
    with pytest.raises(UsageError, match="end to end"):
        memory_of(space, np.zeros(8, np.uint16), lead=0).flat("BF16")


@examples
@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 9), st.floats(0, 1), st.integers(0, 2**32))
def test_scatter_and_gather_reach_the_same_elements(width: int, lead: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    space = space_of(width, [(100,), (0,), (), (37, 2), (1,)])
    bits = random_bits(width, space.elements, rng)
    memory = memory_of(space, bits, lead=lead)
    at = np.flatnonzero(rng.random(space.elements) < density)
    assert np.array_equal(gather(space, memory, at), bits[at])
    values = random_bits(width, len(at), rng)
    scatter(space, memory, Changes(space.dtype, at, values))
    bits[at] = values
    assert np.array_equal(bits_of(space, memory), bits)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3])
def test_many_changes_are_spread_over_cores(
    width: int, count: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(threads, "workers", lambda: count)
    monkeypatch.setattr("weightcast.codec.changes.SHARE", 700)
    space = space_of(width, [(100,), (0,), (9000,), (), (70, 90)])
    bits = random_bits(width, space.elements, rng)
    at = np.flatnonzero(rng.random(space.elements) < 0.6)
    assert len(at) > max(3 * 700, 2 * WRITTEN)
    for write in (scatter, put):
        memory, values = memory_of(space, bits, lead=1), random_bits(width, len(at), rng)
        assert np.array_equal(gather(space, memory, at), bits[at])
        assert write(space, memory, Changes(space.dtype, at, values)) is not False
        new = bits.copy()
        new[at] = values
        assert np.array_equal(bits_of(space, memory), new)


@pytest.mark.parametrize(
    "write", [scatter, put, lambda space, memory, found: gather(space, memory, found.positions)]
)
def test_one_that_is_out_of_order_between_two_cores_is_seen(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "workers", lambda: 2)
    monkeypatch.setattr("weightcast.codec.changes.SHARE", 1)
    space = space_of(2, [(64,)])
    memory = memory_of(space, np.zeros(64, np.uint16))
    for at in ([*range(9, 18), *range(17, 26)], [*range(20, 29), *range(1, 10)]):  # 9 each
        with pytest.raises(UsageError, match="not ascending"):
            write(space, memory, Changes("BF16", np.array(at), np.ones(len(at), np.uint16)))
    assert not bits_of(space, memory).any()


def test_what_does_not_read_back_is_told(rng: np.random.Generator) -> None:
    """Two tensors in one place: the second is what the first is found to be."""
    space = space_of(2, [(5,), (5,)])
    place = np.zeros(5, np.uint16)
    memory = Memory.over(geometry_of(space), {"t00000": place, "t00001": place})
    assert put(space, memory, Changes("BF16", np.array([1, 6]), np.array([7, 7], np.uint16)))
    assert not put(space, memory, Changes("BF16", np.array([1, 6]), np.array([7, 8], np.uint16)))
    assert put(space, memory, Changes.none(space))


@pytest.mark.parametrize("at", [[-1], [4], [2, 2], [3, 1], [0, 1 << 62]])
def test_positions_outside_or_out_of_order_are_refused(at: list[int]) -> None:
    space = space_of(2, [(4,)])
    memory = memory_of(space, np.zeros(4, np.uint16))
    with pytest.raises(UsageError, match="not ascending"):
        scatter(space, memory, Changes("BF16", np.array(at), np.ones(len(at), np.uint16)))
    with pytest.raises(UsageError, match="not ascending"):
        gather(space, memory, np.array(at))
    assert not bits_of(space, memory).any()


def test_changes_of_another_kind_are_refused() -> None:
    space = space_of(2, [(4,)])
    memory, at = memory_of(space, np.zeros(4, np.uint16)), np.array([1])
    for changes in (
        Changes("F16", at, np.ones(1, np.uint16)),
        Changes("BF16", at, np.ones(1, np.uint32)),
        Changes("BF16", at, np.ones(2, np.uint16)),
    ):
        with pytest.raises(UsageError):
            scatter(space, memory, changes)
    with pytest.raises(UsageError, match="do not merge"):
        merge(Changes.none(space), Changes("F16", at, np.ones(1, np.uint16)))


@examples
@given(st.sampled_from([1, 2, 4, 8]), st.data())
def test_merge_is_what_writing_one_after_the_other_leaves(width: int, data: st.DataObject) -> None:
    space = space_of(width, [(60,)])
    lists = [data.draw(st.dictionaries(st.integers(0, 59), st.integers(0, 255))) for _ in range(2)]
    older, newer = (
        Changes(space.dtype, np.array(sorted(d), np.int64), np.array([d[k] for k in sorted(d)], f"u{width}"))
        for d in lists
    )
    merged = merge(older, newer)
    expected = lists[0] | lists[1]
    assert merged.positions.tolist() == sorted(expected)
    assert merged.values.tolist() == [expected[k] for k in sorted(expected)]
