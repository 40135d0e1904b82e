"""Slices of DTensors, held against torch: its own splits in one process, its own gather in four."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from weightcast.publisher.placement import Slice, Span, boxes_of, local_rows, slices, slices_of
from weightcast.schemas.errors import UsageError

ROOT = Path(__file__).parents[2]
RANKS = 4


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    """This process as one of `size`, without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- boxes


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape, start and extent of a box; any of its dimensions may be empty."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return shape, start, tuple(draw(st.integers(0, n - first)) for n, first in zip(shape, start, strict=True))


def elements(span: Span) -> list[int]:
    """By the definition of a box row."""
    if not span.run:
        return list(range(span.offset, span.offset + span.length))
    return [span.offset + (j // span.run) * span.stride + j % span.run for j in range(span.length)]


@given(boxes())
def test_boxes_are_the_elements_of_the_box_in_c_order(
    box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    shape, start, extent = box
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    expected = whole[tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))].ravel().tolist()
    spans = boxes_of(shape, start, extent)
    assert [e for span in spans for e in elements(span)] == expected
    for span in spans:
        if span.run or span.stride:
            assert 1 <= span.run < span.stride
            assert span.length % span.run == 0
            assert span.length > span.run


@pytest.mark.parametrize(
    ("shape", "start", "extent", "spans"),
    [
        ((), (), (), [Span(0, 1, 0, 0)]),
        ((8, 4), (2, 0), (3, 4), [Span(8, 12, 0, 0)]),
        ((8, 4), (0, 1), (8, 2), [Span(1, 16, 2, 4)]),
        ((3, 8, 4), (0, 0, 1), (3, 8, 2), [Span(1, 48, 2, 4)]),
        ((3, 8, 4), (0, 2, 0), (3, 4, 4), [Span(8, 48, 16, 32)]),
        ((2, 8, 4), (0, 2, 1), (2, 3, 2), [Span(9, 6, 2, 4), Span(41, 6, 2, 4)]),
        ((8, 4), (3, 1), (1, 2), [Span(13, 2, 0, 0)]),
        ((8, 4), (3, 1), (0, 2), []),
    ],
)
def test_boxes_are_as_few_as_there_are(
    shape: tuple[int, ...], start: tuple[int, ...], extent: tuple[int, ...], spans: list[Span]
) -> None:
    assert boxes_of(shape, start, extent) == spans


@pytest.mark.parametrize(
    ("start", "extent"), [((7, 0), (2, 4)), ((-1, 0), (1, 1)), ((0,), (8,)), ((0, 0), (-1, 4))]
)
def test_a_box_outside_its_tensor_is_refused(start: tuple[int, ...], extent: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="is not inside a tensor of shape"):
        boxes_of((8, 4), start, extent)


# -- one process


@st.composite
def placements(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """Shape, mesh and a placement for each mesh dimension."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    one = st.one_of(
        st.builds(Replicate),
        st.builds(Shard, dims),
        st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 4)),
    )
    return shape, mesh, [draw(one) for _ in mesh]


@given(placements())
def test_rows_are_those_of_torchs_own_split(case: tuple[tuple[int, ...], tuple[int, ...], list[Any]]) -> None:
    shape, mesh, placed = case
    whole = torch.arange(int(np.prod(shape))).reshape(shape)
    for coordinate in product(*map(range, mesh)):
        local = whole
        for at, placement in enumerate(placed):
            if not placement.is_replicate():
                parts, _ = placement._split_tensor(local, mesh[at], with_padding=False)
                local = parts[coordinate[at]]
        rows = local_rows("w", shape, mesh, coordinate, enumerate(placed))
        found = whole
        for dim, ranges in enumerate(rows):
            found = found.index_select(dim, torch.tensor([i for r in ranges for i in r], dtype=torch.int64))
        assert torch.equal(found, local)
        assert all(a.stop < b.start for ranges in rows for a, b in pairwise(ranges))


def test_strided_rows_are_several_slices_that_cover_the_tensor_once() -> None:
    whole = torch.arange(60).reshape(10, 6)
    seen = torch.zeros(10, 6, dtype=torch.int64)
    for rank in range(8):
        with fake_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2))
            placed = [Shard(0), _StridedShard(0, split_factor=2), Shard(1)]
            found = slices_of("w", distribute_tensor(whole, mesh, placed, src_data_rank=None))
            assert len(found) == 2
            for part in found:
                where = tuple(slice(s, s + n) for s, n in zip(part.start, part.extent, strict=True))
                assert torch.equal(whole[where], part.tensor)
                seen[where] += 1
    assert torch.equal(seen, torch.ones_like(seen))


def test_a_plain_tensor_is_all_of_itself() -> None:
    tensor = torch.randn(3, 4, requires_grad=True)
    (found,) = slices_of("w", tensor)
    assert (found.name, found.shape, found.start, found.extent) == ("w", (3, 4), (0, 0), (3, 4))
    assert found.extent == found.shape
    assert found.tensor.data_ptr() == tensor.data_ptr()
    assert not found.tensor.requires_grad
    assert boxes_of(found.shape, found.start, found.extent) == [Span(0, 12, 0, 0)]
    (scalar,) = slices_of("s", torch.tensor(3))
    assert (scalar.shape, scalar.start, boxes_of((), (), ())) == ((), (), [Span(0, 1, 0, 0)])


def test_the_slice_is_the_local_tensor_and_not_a_copy() -> None:
    with fake_rank(2, 4):
        mesh = init_device_mesh("cpu", (4,))
        tensor = distribute_tensor(torch.arange(40).reshape(10, 4), mesh, [Shard(0)], src_data_rank=None)
        (found,) = slices_of("w", torch.nn.Parameter(tensor, requires_grad=False))
        assert (found.start, found.extent, found.shape) == ((6, 0), (3, 4), (10, 4))
        assert found.tensor.data_ptr() == tensor.to_local().data_ptr()
        assert not isinstance(found.tensor, DTensor)


def test_a_rank_without_rows_has_an_empty_box_and_one_outside_the_mesh_has_none() -> None:
    with fake_rank(3, 4):
        mesh = init_device_mesh("cpu", (4,))
        (found,) = slices_of("w", distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)], src_data_rank=None))
        assert (found.extent, boxes_of(found.shape, found.start, found.extent)) == ((0, 3), [])
        outside = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
        assert (
            slices_of("w", distribute_tensor(torch.ones(2, 3), outside, [Shard(0)], src_data_rank=None)) == []
        )


def test_wrapper_parts_leave_the_names_and_two_that_become_one_are_refused() -> None:
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    assert [s.name for s in slices(compiled.state_dict())] == ["weight", "bias"]
    both = {"module._orig_mod.weight": torch.ones(1), "weight": torch.ones(1)}
    with pytest.raises(UsageError, match="would both be published as 'weight'"):
        list(slices(both))


def test_slices_pass_as_they_are() -> None:
    given = Slice("module.w", (4, 2), (1, 0), torch.ones(2, 2))
    assert next(slices([given, ("module.v", torch.ones(1))])) is given


# -- refusals


def test_partial_sums_are_refused_by_name() -> None:
    with fake_rank(0, 2):
        tensor = DTensor.from_local(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Partial()])
        with pytest.raises(UsageError, match="'w' has placement Partial") as caught:
            slices_of("w", tensor)
    assert "redistribute()" in str(caught.value.hint)


def test_a_local_tensor_that_is_not_what_its_placements_say_is_refused() -> None:
    with fake_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.ones(3, 2)  # of the five rows rank 0 has three, this one two
        tensor = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size([5, 2]), stride=(2, 1))
        with pytest.raises(UsageError, match=r"\[5, 2\] has local shape \[3, 2\] .* say \[2, 2\]") as caught:
            slices_of("w", tensor)
        assert "distribute_tensor()" in str(caught.value.hint)


def test_b019_what_other_frameworks_partition_is_refused_by_name() -> None:
    for attribute, how in (("ds_id", "partitioned by ZeRO-3"), ("_fsdp_flattened", "flattened by FSDP1")):
        tensor = torch.nn.Parameter(torch.ones(0))
        setattr(tensor, attribute, 1)
        with pytest.raises(UsageError, match=f"'layers.0.w' is {how}"):
            slices_of("layers.0.w", tensor)


def test_meta_tensors_are_refused_with_what_to_do() -> None:
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = DTensor.from_local(torch.ones(1, 2, device="meta"), mesh, [Shard(0)], run_check=False)
        for tensor in (torch.ones(2, device="meta"), sharded):
            with pytest.raises(UsageError, match="'w' is on the meta device") as caught:
                slices_of("w", tensor)
            assert "to_empty" in str(caught.value.hint)


def test_what_is_no_dense_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a tensor under the name 'w', found list"):
        slices_of("w", [1, 2])
    with pytest.raises(UsageError, match="only dense tensors"):
        slices_of("w", torch.eye(3).to_sparse())


# -- four processes


def test_slices_are_those_of_torchs_gather_without_a_collective(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.publisher.placement_worker", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert len(said[0]) == 22
    for title in said[0]:
        parts = [rank[title] for rank in said]
        assert all(part["equal"] for part in parts), title
        assert all(part["collectives"] == 0 for part in parts), title
        for name, shape in parts[0]["shapes"].items():
            _check_cover(
                f"{title}, {name}", shape, [s for part in parts for s in part["slices"] if s[0] == name]
            )


def _check_cover(what: str, shape: list[int], held: list[list[Any]]) -> None:
    """All elements are held, and two boxes that share elements are the same box."""
    assert held, what
    seen = np.zeros(shape, np.int64)
    for start, extent in {(tuple(start), tuple(extent)) for _, start, extent in held}:
        seen[tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))] += 1
    assert (seen == 1).all(), what
