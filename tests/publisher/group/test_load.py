"""The head's bits of a few boxes, some tensors at a time."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from weightcast.codec import Geometry
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.publisher.group import load as module
from weightcast.publisher.group.holding import Holding
from weightcast.publisher.group.load import load, tensor_groups
from weightcast.publisher.group.plan import Corner, Entry, Piece
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.settings import PublisherSettings

from .kit import stir


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def many() -> dict[str, torch.Tensor]:
    """Small tensors that share rows, and large ones among them."""
    torch.manual_seed(0)
    whole = {f"layer.{i}.norm": torch.randn(100 + i).bfloat16() for i in range(30)}
    return whole | {f"layer.{i}.up": torch.randn(300, 256).bfloat16() for i in (3, 11, 29)}


def published(root: Path, versions: int, **settings: object) -> dict[str, torch.Tensor]:
    """A stream of so many versions; what the last one holds."""
    whole = many()
    options = PublisherSettings(threads=1, row_elements=1 << 16, snapshot_every=0, **settings)  # type: ignore[arg-type]
    with Publisher(str(root), options) as publisher:
        for step in range(versions):
            if step:
                stir(whole, step)
            publisher.publish(whole).wait(30)
    return whole


def holding() -> tuple[Holding, list[Entry]]:
    """Some columns of a large tensor, a part of a small one, and one that the stream has not."""
    table = [
        Entry("layer.11.up", "BF16", (300, 256), Corner((0, 100), (300, 50))),
        Entry("layer.7.norm", "BF16", (107,), Corner((7,), (20,))),
        Entry("layer.9.new", "BF16", (5,), Corner((0,), (5,))),
        Entry("layer.8.norm", "BF16", (7,), Corner((0,), (7,))),
    ]
    return Holding(table, [Piece(at, e.corner) for at, e in enumerate(table)], 1 << 16), table


def check(found: Holding, whole: dict[str, torch.Tensor]) -> None:
    """It holds what the tensors have; zeros where the stream has no such tensor of that shape."""
    got = {tile.spec.name: found.old(tile) for tile in found.tiles}
    assert torch.equal(
        torch.from_numpy(got["layer.11.up"].view("int16")), whole["layer.11.up"].view(torch.int16)[:, 100:150]
    )
    assert torch.equal(
        torch.from_numpy(got["layer.7.norm"].view("int16")), whole["layer.7.norm"].view(torch.int16)[7:27]
    )
    assert not got["layer.9.new"].any()
    assert not got["layer.8.norm"].any()


@pytest.mark.parametrize("codec", ["gap", "class"])
def test_bits_of_the_head_by_groups_of_tensors(
    codec: str, tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = published(tmp_path / "store", 4, codec=codec)
    reader = StreamReader.open(open_store(str(tmp_path / "store")))
    monkeypatch.setattr(module, "GROUP_BYTES", 50_000)
    monkeypatch.setattr(module, "rebuild", None)  # which would take memory for the whole
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found, _ = holding()
    lost = load(reader, reader.position(3), found, ["layer.8.norm", "layer.29.up"], pool, 1 << 16)
    check(found, whole)
    rest, _ = holding()
    everything = load(reader, reader.position(3), rest, list(whole), pool, 1 << 16)
    assert everything == reader.manifest(3).after
    assert lost != everything


def test_a_layout_that_changed_since_the_snapshot_is_rebuilt_whole(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    whole = many()
    with Publisher(str(tmp_path), PublisherSettings(threads=1, snapshot_every=0)) as publisher:
        first = dict(whole)
        del first["layer.5.norm"]
        publisher.publish(first).wait(30)
        publisher.publish(whole).wait(30)
    reader = StreamReader.open(open_store(str(tmp_path)))
    found, _ = holding()
    load(reader, reader.position(1), found, [], pool)
    check(found, whole)


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    whole = published(tmp_path, 3)
    with Publisher(str(tmp_path), PublisherSettings(threads=1)) as publisher:
        publisher.snapshot()
    reader = StreamReader.open(open_store(str(tmp_path)))
    newest = reader.snapshot_keys()[0][1]
    assert newest.startswith("snapshots/000000000003")
    (file,) = (tmp_path / newest).parent.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    shutil.copy(file, file.with_suffix(".kept"))
    file.unlink()
    file.write_bytes(data)
    found, _ = holding()
    load(reader, reader.position(3), found, [], pool)
    check(found, whole)


def test_groups_are_cut_where_no_row_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_BYTES", 1000)
    sizes = [10, 600, 600, 70_000, 70_000, 5, 5, 70_000]
    geometry = Geometry(Layout.of(TensorSpec(f"{i}", "U8", (n,)) for i, n in enumerate(sizes)))
    assert [[s.elements for s in g] for g in tensor_groups(geometry, 1 << 16)] == [
        [10, 600, 600], [70_000], [70_000, 5, 5], [70_000],
    ]  # fmt: skip
    assert len(tensor_groups(geometry, 1 << 20)) == 1
