"""Tiles of a holding, and snapshots put together from tiles."""

from __future__ import annotations

import math
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faultstore import FaultStore, Hold
from weightcast.codec import Geometry
from weightcast.codec.digest import digest_all
from weightcast.codec.memory import Memory
from weightcast.manifest.store import open_store
from weightcast.publisher.group import assembly
from weightcast.publisher.group.assembly import Assembly
from weightcast.publisher.group.draft import Draft, Stage
from weightcast.publisher.group.holding import Holding, cut_into_tiles
from weightcast.publisher.group.plan import Corner, Entry, Piece
from weightcast.publisher.placement import Slice
from weightcast.publisher.sources import Casts
from weightcast.schemas.errors import StorageError, UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.settings import PublisherSettings


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), max_size=4), st.integers(1, 60))
def test_tiles_follow_each_other_in_the_boxs_own_order(extent: list[int], limit: int) -> None:
    corner = Corner(tuple(range(len(extent))), tuple(extent))
    order = np.arange(math.prod(extent)).reshape(extent)
    seen = []
    for tile in cut_into_tiles(corner, limit):
        assert 1 <= tile.elements <= limit
        inside = tuple(slice(s - i, s - i + n) for i, (s, n) in enumerate(zip(*tile, strict=True)))
        seen += order[inside].reshape(-1).tolist()
    assert seen == list(range(math.prod(extent)))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_an_assembly_of_tiles_is_the_tensor(data: st.DataObject) -> None:
    """Columns, rows and blocks of two ranks, read back in pieces of any length."""
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    dtype, kind = data.draw(
        st.sampled_from([("F32", torch.float), ("BF16", torch.bfloat16), ("U8", torch.uint8)])
    )
    whole = torch.arange(math.prod(shape)).reshape(shape).to(kind)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    parts = []
    with ThreadPoolExecutor(1) as pool:
        for rank, (begin, end) in enumerate([(0, cut), (cut, shape[dim])]):
            start = tuple(begin if d == dim else 0 for d in range(len(shape)))
            part = whole.narrow(dim, begin, end - begin)
            entry = Entry("w", dtype, shape, Corner(start, tuple(part.shape)))
            holding = Holding([entry], [Piece(0, entry.corner)], data.draw(st.integers(1, 50)))
            holding.copy(holding.staged([Slice("w", shape, start, part)], [entry], Casts({})))
            parts.append(
                Draft(holding, Stage(0, None, rank, 2), store, PublisherSettings(), pool, pool).finished()
            )
    layout = Layout.of([TensorSpec("w", dtype, shape)])
    found, step = Assembly(store, layout, parts), data.draw(st.integers(1, 40))
    read = b"".join(
        found.read(layout["w"], at, min(at + step, whole.numel())) for at in range(0, whole.numel(), step)
    )
    bits = whole.contiguous().view(torch.uint8).numpy()
    assert read == bits.tobytes()
    geometry = Geometry(layout)
    assert found.digest == digest_all(geometry, Memory.over(geometry, {"w": bits.reshape(-1)}))
    assert sum(p.elements for p in parts) == whole.numel()


def test_an_assembly_holds_few_tiles_and_fetches_some_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "HELD_BYTES", 1 << 14)
    monkeypatch.setattr("weightcast.publisher.group.draft.WHOLE_SHARD_BYTES", 1 << 12)
    whole = torch.randn(64, 256)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    parts = []
    with ThreadPoolExecutor(1) as pool:
        for rank in range(8):
            part = whole[:, 32 * rank : 32 * rank + 32]
            entry = Entry("w", "F32", (64, 256), Corner((0, 32 * rank), (64, 32)))
            holding = Holding([entry], [Piece(0, entry.corner)], 1024)
            holding.copy(holding.staged([Slice("w", (64, 256), (0, 32 * rank), part)], [entry], Casts({})))
            parts.append(
                Draft(holding, Stage(0, None, rank, 8), store, PublisherSettings(), pool, pool).finished()
            )
    layout = Layout.of([TensorSpec("w", "F32", (64, 256))])
    found = Assembly(store, layout, parts)
    read = b""
    for at in range(0, whole.numel(), 4096):
        read += found.read(layout["w"], at, at + 4096)
        assert found._held_bytes <= 1 << 14
    assert read == whole.numpy().tobytes()
    with pytest.raises(UsageError, match="carry 0 of 16384 elements"):
        Assembly(store, layout, []).read(layout["w"], 0, whole.numel())


def test_a_whole_part_that_was_given_up_sends_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcast.publisher.group.draft.WHOLE_SHARD_BYTES", 1)
    whole = torch.randn(64, 16)
    entry = Entry("w", "F32", (64, 16), Corner((0, 0), (64, 16)))
    holding = Holding([entry], [Piece(0, entry.corner)], 16)
    holding.copy(holding.staged([Slice("w", (64, 16), (0, 0), whole)], [entry], Casts({})))
    store, hold = FaultStore(open_store(f"memory://{uuid.uuid4().hex}")), Hold()
    store.on("put", "data/*", hold, skip=2)
    with ThreadPoolExecutor(1) as compute, ThreadPoolExecutor(1) as transfer, ThreadPoolExecutor(1) as helper:
        draft = Draft(holding, Stage(0, None, 0, 1), store, PublisherSettings(), compute, transfer)
        sending = helper.submit(draft.finished)
        assert hold.reached.wait(10)
        draft.cancel()
        hold.release()
        with pytest.raises(StorageError, match="given up"):
            sending.result(10)
    assert len(store.keys("put")) < 8, "of 64"


def test_memory_of_a_holding_is_what_is_owned_and_can_be_mapped(tmp_path: object) -> None:
    from pathlib import Path

    entry = Entry("w", "BF16", (100, 30), Corner((0, 0), (100, 30)))
    path = Path(str(tmp_path)) / "copy"
    holding = Holding([entry], [Piece(0, Corner((10, 5), (20, 25)))], 1 << 16, path)
    assert (holding.elements, holding.nbytes) == (500, 1000)
    whole = torch.randn(100, 30).bfloat16()
    holding.copy(holding.staged([Slice("w", (100, 30), (0, 0), whole)], [entry], Casts({})))
    bits = whole[10:30, 5:].contiguous().view(torch.uint8).numpy().tobytes()
    assert path.read_bytes()[:1000] == bits
    again = Holding([entry], [Piece(0, entry.corner)], 1 << 16, path)  # a later one leaves it what it has
    assert holding.old(holding.tiles[0]).tobytes() == bits
    again.copy(again.staged([Slice("w", (100, 30), (0, 0), whole)], [entry], Casts({})))
    assert path.read_bytes()[:6000] == whole.view(torch.uint8).numpy().tobytes()
