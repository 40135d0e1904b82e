"""Snapshots are plain checkpoints that any safetensors reader opens; fetching one is checked and may be
repeated.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from weightcast.manifest.commit import put_layout
from weightcast.manifest.snapshot import fetch_weights, write_snapshot
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import Snapshot, StreamReader
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.errors import Corrupt, NotFound, UsageError
from weightcast.schemas.layout import TensorSpec

from .author import POOL, Author, CountingStore, Tensors

DTYPES = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64", "C64")
MODEL = Tensors.of(
    {"tied": "F32"},
    **{d: (d, np.arange(6).reshape(2, 3) % (2 if d == "BOOL" else 1 << 30)) for d in DTYPES},
    scalar=("F32", 7),
    empty=("F16", np.zeros((0, 4))),
)


@pytest.fixture(params=["memory", "local"])
def author(request: pytest.FixtureRequest, tmp_path: Path) -> Author:
    author = Author(
        open_store(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "store"))
    )
    author.reset(MODEL)
    return author


def write(author: Author, folder: str, **changes: Any) -> None:
    layout = MODEL.layout

    def read(spec: TensorSpec, begin: int, end: int) -> bytes:
        return MODEL.bits[spec.name].reshape(-1)[begin:end].tobytes()

    standard: dict[str, Any] = {
        "stream": author.reader.stream.stream,
        "version": 0,
        "layout": layout,
        "layout_ref": put_layout(author.store, layout),
        "digest": author.positions[0].manifest.digest_after,
        "read": read,
        "files": {"config.json": b"{}"},
        "writer": author.writer,
        "max_file_bytes": 100,
    }
    write_snapshot(author.store, folder, **{**standard, **changes})


def own_snapshot(author: Author) -> Snapshot:
    found = author.reader.own_snapshot(author.positions[0])
    assert found is not None
    return found


def contents(author: Author, folder: str) -> dict[str, bytes]:
    return {
        e.key.rpartition("/")[2]: author.store.get(e.key, max_bytes=1 << 20)
        for e in author.store.list(f"{folder}/")
    }


def test_safetensors_reads_every_tensor(author: Author, tmp_path: Path) -> None:
    folder = f"snapshots/{0:012d}"
    write(author, folder)
    found = contents(author, folder)
    for name, data in found.items():
        (tmp_path / name).write_bytes(data)
    index = json.loads(found["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == MODEL.layout.nbytes
    assert set(index["weight_map"]) == set(MODEL.bits), "tied tensors are left out"
    assert len(set(index["weight_map"].values())) > 1
    for name, bits in MODEL.bits.items():
        path = tmp_path / index["weight_map"][name]
        if MODEL.dtypes[name] == "C64":
            continue  # the numpy reader of safetensors does not know it; its bytes are checked below
        with safe_open(path, "numpy") as file:
            tensor = file.get_tensor(name)
        assert (tensor.tobytes(), tensor.shape) == (bits.tobytes(), bits.shape)
    assert found["config.json"] == b"{}"


def test_every_tensor_is_aligned(author: Author) -> None:
    folder = f"snapshots/{0:012d}"
    write(author, folder)
    for name, data in contents(author, folder).items():
        if not name.endswith(".safetensors"):
            continue
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert (8 + length) % 8 == 0
        for tensor, item in header.items():
            if tensor != "__metadata__":
                begin, end = item["data_offsets"]
                assert begin % WIDTHS[item["dtype"]] == 0
                assert data[8 + length + begin : 8 + length + end] == MODEL.bits[tensor].tobytes()


def test_repeating_writes_the_same_files(author: Author) -> None:
    folder = f"snapshots/{0:012d}"
    write(author, folder)
    first = contents(author, folder)
    write(author, folder)
    second = contents(author, folder)
    assert {n: d for n, d in first.items() if n != "manifest.json"} == {
        n: d for n, d in second.items() if n != "manifest.json"
    }
    assert set(first) == set(second)


def test_the_manifest_comes_last(author: Author) -> None:
    counting = CountingStore(author.store)
    other = Author.__new__(Author)
    other.__dict__.update(author.__dict__, store=counting)
    write(other, f"snapshots/{0:012d}")
    written = [k for m, k in counting.calls if m in ("put", "put_stream") and k.startswith("snapshots/")]
    assert written[-1].endswith("/manifest.json")
    assert len(written) == len(set(written)) >= 4


def test_companions_may_not_take_the_names_of_the_snapshot(author: Author) -> None:
    for name in ("manifest.json", "model.safetensors.index.json", "model-00001-of-00004.safetensors"):
        before = {e.key for e in author.store.list("snapshots/")}
        count = len(own_snapshot(author).manifest.weights)
        name = name.replace("00004", f"{count:05d}")
        with pytest.raises(UsageError, match=name):
            write(author, f"snapshots/{0:012d}", files={name: b""}, max_file_bytes=1 << 20)
        assert {e.key for e in author.store.list("snapshots/")} == before, "found before anything is written"


def test_pieces_of_a_large_tensor_are_read_in_order(author: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcast.manifest.snapshot.PIECE_BYTES", 16)
    folder = f"snapshots/{0:012d}"
    write(author, folder)
    monkeypatch.undo()
    pieces = contents(author, folder)
    write(author, folder)
    assert {n: d for n, d in contents(author, folder).items() if n != "manifest.json"} == {
        n: d for n, d in pieces.items() if n != "manifest.json"
    }


def test_fetching_keeps_what_is_right_and_replaces_what_is_not(author: Author, tmp_path: Path) -> None:
    write(author, f"snapshots/{0:012d}")
    snapshot = author.reader.snapshot(f"snapshots/{0:012d}/manifest.json", author.positions[0])
    counting = CountingStore(author.store)
    reader = StreamReader(counting, author.reader.stream)
    paths = fetch_weights(reader, snapshot, tmp_path / "new", POOL)
    assert [p.name for p in paths] == [f.name for f in snapshot.manifest.weights]
    assert len(paths) >= 3
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    flipped = bytearray(paths[1].read_bytes())
    flipped[-1] ^= 1
    paths[1].write_bytes(bytes(flipped))
    counting.calls.clear()
    fetch_weights(reader, snapshot, tmp_path / "new", POOL)
    assert sorted(k.rpartition("/")[2] for _, k in counting.calls) == [p.name for p in paths[:2]]
    for path, ref in zip(paths, snapshot.manifest.weights, strict=True):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == ref.sha256


def test_b126_a_missing_or_damaged_file_is_an_error_and_nothing_is_left(
    author: Author, tmp_path: Path
) -> None:
    snapshot = own_snapshot(author)
    key = f"{snapshot.folder}/{snapshot.manifest.weights[0].name}"
    good = author.store.get(key, max_bytes=1 << 20)
    author.store.delete(key)
    with pytest.raises(NotFound, match=key):
        fetch_weights(author.reader, snapshot, tmp_path / "new", POOL)
    author.store.put(key, good[:-1])
    with pytest.raises(Corrupt, match=key):
        fetch_weights(author.reader, snapshot, tmp_path / "new", POOL)
    assert list((tmp_path / "new").iterdir()) == []
    author.store.put(key, good)
    assert len(fetch_weights(author.reader, snapshot, tmp_path / "new", POOL)) == len(
        snapshot.manifest.weights
    )


def test_a_model_without_tensors(author: Author) -> None:
    author.reset(Tensors.of())
    assert author.reader.own_snapshot(author.positions[1]).manifest.bytes > 0  # type: ignore[union-attr]
