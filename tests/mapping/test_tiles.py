"""Tiles and mosaics do what torch does with numbers in the elements' place."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weightcast.codec.regions import Region
from weightcast.mapping import tiles as tiling
from weightcast.mapping.mosaic import Mosaic
from weightcast.mapping.tiles import MAX_TILES, NOTHING, Tile, Tiles, cat, index, joined, stack

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
PER_SOURCE = 10_000
"""Above any offset here: the number of an element is that of its source times this, and its offset."""


def whole(source: int, shape: list[int]) -> Tiles:
    """All of a tensor in C order."""
    strides = torch.empty(shape, device="meta").stride()
    return (Tile((0,) * len(shape), tuple(shape), str(source), strides, 0),)


def numbers(tiles: Iterable[Tile], shape: torch.Size) -> torch.Tensor:
    """int64 [shape]: which element of which source is where; checks that each is there once."""
    out = torch.full(shape, -1, dtype=torch.int64)
    for tile in tiles:
        part = out[tuple(slice(s, s + n) for s, n in zip(tile.start, tile.extent, strict=True))]
        assert tuple(part.shape) == tile.extent
        assert part.eq(-1).all()
        at = torch.tensor(PER_SOURCE * int(tile.tensor) + tile.offset)
        for dim, (n, stride) in enumerate(zip(tile.extent, tile.strides, strict=True)):
            at = at + (torch.arange(n) * stride).reshape(-1, *[1] * (len(tile.extent) - dim - 1))
        part.copy_(at)
    return out


@st.composite
def composites(draw: st.DrawFn) -> tuple[Tiles, torch.Tensor]:
    """Rows of some tensors, by numbers, side by side along a dimension; and the same in numbers."""
    shape = draw(st.lists(SIZES, min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    parts, values = [], []
    for source in range(draw(st.integers(1, 3))):
        shape[dim] = draw(SIZES)
        tiles, value = whole(source, shape), numbers(whole(source, shape), torch.Size(shape))
        if draw(st.booleans()):
            rows = draw(st.lists(st.integers(0, shape[dim] - 1), min_size=1, max_size=5))
            found = index(tiles, dim, rows)
            assert found is not None
            tiles, value = found, value.index_select(dim, torch.tensor(rows))
        parts.append((tiles, value.shape[dim]))
        values.append(value)
    together = cat(parts, dim)
    assert together is not None
    return together, torch.cat(values, dim)


def viewed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor`, by any one operation that gives one."""
    dim = draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[dim]
    kind = draw(
        st.sampled_from(["transpose", "unflatten", "flatten", "narrow", "step", "unsqueeze", "expand"])
    )
    if kind == "transpose":
        return tensor.transpose(dim, draw(st.integers(0, tensor.dim() - 1)))
    if kind == "unflatten":
        inner = draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        return tensor.unflatten(dim, (size // inner, inner))
    if kind == "flatten" and dim + 1 < tensor.dim() and _flat(tensor, dim):
        return tensor.flatten(dim, dim + 1)
    if kind == "narrow":
        start = draw(st.integers(0, size - 1))
        return tensor.narrow(dim, start, draw(st.integers(1, size - start)))
    if kind == "step" and size % 2 == 0:
        return tensor.unflatten(dim, (size // 2, 2)).select(dim + 1, draw(st.integers(0, 1)))
    if kind == "expand" and size == 1:
        return tensor.expand(*tensor.shape[:dim], 3, *tensor.shape[dim + 1 :])
    return tensor.unsqueeze(dim)


def _flat(tensor: torch.Tensor, dim: int) -> bool:
    return tensor.stride(dim) == tensor.shape[dim + 1] * tensor.stride(dim + 1)


@settings(max_examples=300, deadline=None)
@given(composites(), st.data())
def test_views_of_storages_show_what_torch_shows(
    case: tuple[Tiles, torch.Tensor], data: st.DataObject
) -> None:
    tiles, value = case
    assert torch.equal(numbers(tiles, value.shape), value)
    for _ in range(data.draw(st.integers(1, 3))):
        storage = Mosaic.of(
            2, Region(tuple(value.shape), tuple(value.stride()), value.storage_offset()), tiles
        )
        assert storage is not None
        view = value
        for _ in range(data.draw(st.integers(1, 3))):
            view = viewed(data.draw, view)
        found = storage.view(Region(tuple(view.shape), tuple(view.stride()), int(view.storage_offset())))
        if found is None:  # a narrowed part, taken apart otherwise than the whole: nothing is claimed
            return
        assert torch.equal(numbers(found, view.shape), view)
        # A clone keeps the order of strides where it can, so that frames are not always in the order of dimensions.
        tiles, value = found, view.clone()


@settings(max_examples=300, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=3), st.data())
def test_a_storage_after_parts_of_it_were_written(shape: list[int], data: st.DataObject) -> None:
    value = torch.full(shape, -1, dtype=torch.int64)
    storage = Mosaic.blank(2, value.numel())
    for source in range(data.draw(st.integers(1, 4))):
        view = value
        for _ in range(data.draw(st.integers(1, 3))):
            view = viewed(data.draw, view)
        where = Region(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))
        new = storage.written(where, whole(source, list(view.shape)))
        assume(new is not None)  # parts that are no boxes of one frame
        assert new is not None
        view.copy_(numbers(whole(source, list(view.shape)), view.shape))
        storage = new
        tiles = storage.view(Region(tuple(shape), value.stride(), 0))
        assert tiles is not None
        assert torch.equal(numbers([t for t in tiles if t.tensor != NOTHING], value.shape), value)
        assert sum(torch.Size(t.extent).numel() for t in tiles) == value.numel()


@given(st.lists(SIZES, min_size=1, max_size=3), st.integers(0, 3), st.integers(1, 4))
def test_stacks(shape: list[int], dim: int, count: int) -> None:
    dim = min(dim, len(shape))
    values = [numbers(whole(i, shape), torch.Size(shape)) for i in range(count)]
    found = stack([whole(i, shape) for i in range(count)], dim)
    assert found is not None
    together = torch.stack(values, dim)
    assert torch.equal(numbers(found, together.shape), together)


def test_neighbours_that_are_one_part_become_one_tile() -> None:
    (tile,) = whole(0, [12, 5])
    pieces = [piece for at in range(0, 12, 3) for piece in [tile.cut(0, at, at + 3)] if piece is not None]
    halves = [half for p in pieces for half in (p.cut(1, 0, 2), p.cut(1, 2, 5)) if half is not None]
    assert len(halves) == 8
    assert joined(halves) == (tile,)


def test_single_rows_at_equal_distances_become_one_tile() -> None:
    found = index(whole(0, [12, 5]), 0, [1, 4, 7, 10])
    assert found == (Tile((0, 0), (4, 5), "0", (15, 1), 5),)
    by_row = [row for at in range(4) for row in [found[0].cut(0, at, at + 1)] if row is not None]
    assert joined(by_row) == found


def test_what_is_too_fine_is_not_mapped() -> None:
    rows = [i * 7919 % 20000 for i in range(20000)]  # runs of two or three
    few = index(whole(0, [20000, 2]), 0, rows[:MAX_TILES])
    assert few is not None
    assert len(few) > MAX_TILES // 4
    assert index(whole(0, [20000, 2]), 0, rows) is None


def test_storages_with_gaps_are_not_told() -> None:
    tiles = whole(0, [2, 3])
    assert Mosaic.of(2, Region((2, 3), (4, 1), 0), tiles) is None
    assert Mosaic.of(2, Region((2, 3), (3, 1), 1), tiles) is None
    turned = Mosaic.of(2, Region((2, 3), (1, 2), 0), tiles)
    assert turned is not None
    assert turned.frame == (3, 2)
    assert turned.names == {"0"}


@pytest.mark.parametrize(("begin", "size"), [(0, 12), (2, 8), (4, 4), (1, 2), (3, 9)])
def test_a_dimension_split_and_merged_is_the_same_elements(begin: int, size: int) -> None:
    (tile,) = whole(0, [12])
    part = tile.cut(0, begin, begin + size)
    assert part is not None
    apart = tiling.split([part], 0, 4)
    assert torch.equal(numbers(apart, torch.Size([3, 4])).flatten(), numbers((part,), torch.Size([12])))
    assert joined(tiling.merge(apart, 0, 4)) == (part,)
