"""The golden stream of format 1 stays readable for ever, by this package and by a reader written from the
document.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.rebuild import State, rebuild
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.layout import Layout
from weightcast.schemas.manifest import (
    Document,
    FileList,
    Floor,
    Head,
    Reader,
    SnapshotManifest,
    Stream,
    VersionManifest,
    decode,
)
from weightcast.schemas.shard import decode_shard

from ..manifest.author import POOL
from .make import make
from .minireader import MiniReader, Model

GOLDEN = Path(__file__).parent / "v1"
STORE = GOLDEN / "store"
EXPECTED: list[dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text("utf-8"))["versions"]
VERSIONS = range(len(EXPECTED))


@pytest.fixture(scope="module")
def reader() -> StreamReader:
    return StreamReader.open(open_store(str(STORE)))


@pytest.fixture(scope="module")
def models() -> list[Model]:
    """All versions, by the reader that knows the document alone."""
    mini, found = MiniReader(STORE), list[Model]()
    for version in VERSIONS:
        found.append(mini.read(version, found[-1] if found else None))
    return found


def check_state(state: State, version: int) -> None:
    wanted = EXPECTED[version]
    assert state.position.manifest.digest_after == wanted["digest"]
    assert [[s.name, s.dtype, list(s.shape), s.tied_to] for s in state.layout] == wanted["layout"]
    assert {
        s.name: hashlib.sha256(state.memory.tensor(s.name).tobytes()).hexdigest() for s in state.layout.stored
    } == wanted["tensors"]


def test_the_stream_is_whole_and_small() -> None:
    files = [p for p in GOLDEN.rglob("*") if p.is_file()]
    assert len(files) == 43
    assert sum(p.stat().st_size for p in files) < 200_000
    assert len(EXPECTED) == 9


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_rebuilds(reader: StreamReader, version: int) -> None:
    check_state(rebuild(reader, version, POOL), version)


def test_following_from_the_first_to_the_last(reader: StreamReader) -> None:
    state = rebuild(reader, 0, POOL)
    for version in VERSIONS:
        state = rebuild(reader, version, POOL, start=state)
        check_state(state, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_document_alone_leads_to_the_same_bits(models: list[Model], version: int) -> None:
    wanted, model = EXPECTED[version], models[version]
    assert model.manifest["digest_after"] == wanted["digest"]
    assert [[s.name, s.dtype, list(s.shape), s.tied_to] for s in model.layout] == wanted["layout"]
    own = [s.name for s in model.layout if s.tied_to is None]
    assert {n: hashlib.sha256(model.tensor(n)).hexdigest() for n in own} == wanted["tensors"]
    for spec in model.layout:
        if spec.tied_to is not None:
            assert model.tensor(spec.name) == model.tensor(spec.tied_to)


def test_the_mini_reader_is_independent() -> None:
    tree = ast.parse((Path(__file__).parent / "minireader.py").read_text("utf-8"))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported == {
        "__future__",
        "hashlib",
        "json",
        "dataclasses",
        "pathlib",
        "typing",
        "pyarrow",
        "zstandard",
    }


def test_every_object_is_understood(reader: StreamReader) -> None:
    """Each file is one of the documents or tables, and each document encodes to its own bytes again."""
    lists = {v.manifest.files.key for v in map(reader.position, VERSIONS) if v.manifest.files is not None}
    seen = set[str]()
    for path in sorted(p for p in STORE.rglob("*") if p.is_file()):
        key, data = path.relative_to(STORE).as_posix(), path.read_bytes()
        kind = key.split("/")[0]
        documents: dict[str, type[Document]] = {
            "stream.json": Stream,
            "head.json": Head,
            "floor.json": Floor,
            "versions": VersionManifest,
            "readers": Reader,
        }
        if kind in documents or key in lists or key.endswith("/manifest.json"):
            other = SnapshotManifest if kind == "snapshots" else FileList
            model = documents.get(kind, other)
            assert decode(model, data, key).encode() == data, key
        elif kind == "layouts":
            assert Layout.decode(data).sha256 == path.stem
        elif kind == "files":
            assert hashlib.sha256(data).hexdigest() == path.name
        elif kind == "data":
            assert decode_shard(data, key)
        else:
            assert kind == "snapshots", key
        seen.add(kind)
    assert seen == {
        "stream.json",
        "head.json",
        "floor.json",
        "versions",
        "readers",
        "layouts",
        "files",
        "data",
        "snapshots",
    }
    assert (reader.head(), reader.floor(), [r.version for r in reader.readers()]) == (8, 0, [3])
    assert [v for v, _ in reader.snapshot_keys()] == [6, 5, 0]


def test_it_covers_the_format(reader: StreamReader) -> None:
    rows = [r for v in VERSIONS for r in DeltaFetcher(reader.store, POOL, 1 << 20).rows(reader.manifest(v))]
    assert {r.coding for r in rows} == {"gap", "dense", "whole"}
    assert any(r.gap_shift for r in rows)
    assert any(r.escaped and r.coding == "gap" for r in rows)
    assert any(r.escaped and r.coding == "dense" for r in rows)
    assert any(r.tensors > 1 for r in rows)
    assert any(r.offset for r in rows)
    assert any(r.gap_bytes > r.count for r in rows), "a gap of more than one byte"
    assert any(r.coding == "dense" and len(r.steps) < r.length for r in rows), (
        "a compressed plane of each kind"
    )
    assert any(len(r.gaps) < r.gap_bytes for r in rows)
    assert any(len(r.escapes) < r.escaped * WIDTHS[r.dtype] for r in rows)
    assert {s.dtype for v in VERSIONS for s in reader.layout(reader.manifest(v).layout)} >= {
        "BF16",
        "F8_E4M3",
        "F32",
        "F64",
        "BOOL",
        "U8",
        "I64",
        "I16",
        "F16",
        "C64",
    }
    assert [v for v in VERSIONS if reader.manifest(v).reset] == [0, 6]
    assert not reader.manifest(3).shards


def test_companion_files(reader: StreamReader) -> None:
    mini = MiniReader(STORE)
    for version in VERSIONS:
        manifest = json.loads((STORE / f"versions/{version:012d}.json").read_bytes())
        wanted = b'{"model_type":"golden","reset":true}\n' if version >= 6 else b'{"model_type":"golden"}\n'
        assert mini.companions(manifest) == {"config.json": wanted}
        assert [f.name for f in reader.files(reader.manifest(version).files).files] == ["config.json"]


def test_what_is_written_today_is_read_by_the_document(tmp_path: Path) -> None:
    """The same states written by the code of today, whatever its libraries make of the bytes."""
    make(tmp_path)
    assert json.loads((tmp_path / "expected.json").read_text("utf-8"))["versions"] == EXPECTED
    mini, last = MiniReader(tmp_path / "store"), None
    for version in VERSIONS:
        last = mini.read(version, last)
        assert last.manifest["digest_after"] == EXPECTED[version]["digest"]


def test_the_mini_reader_can_fail(tmp_path: Path, models: list[Model]) -> None:
    """A flipped bit in any shard, and a wrong parent, are found by the rules of the document."""
    shutil.copytree(STORE, tmp_path / "store")
    for path in sorted((tmp_path / "store/data").rglob("*.arrow")):
        good = path.read_bytes()
        path.write_bytes(good[:700] + bytes([good[700] ^ 1]) + good[701:])
        version = int(path.parent.name)
        with pytest.raises(ValueError, match="data/"):
            MiniReader(tmp_path / "store").read(version, models[version - 1])
        path.write_bytes(good)
    with pytest.raises(ValueError, match="parent"):
        MiniReader(STORE).read(2, models[3])
    wrong = dataclasses.replace(models[0], bits={**models[0].bits, "bias": [1, 2, 3]})
    with pytest.raises(ValueError, match="digest"):
        MiniReader(STORE).read(1, wrong)
