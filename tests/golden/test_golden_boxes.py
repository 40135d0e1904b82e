"""The golden stream with box rows stays readable for ever, as `v1` does."""

from __future__ import annotations

import pyarrow as pa
import pytest

from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.inspect.verify import verify
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas import manifest as documents
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.errors import Unsupported

from ..manifest.author import POOL
from .streams import BOXES

STORE = BOXES.store
VERSIONS = range(len(BOXES.expected))
FEATURES = [[], ["boxes"], ["boxes"], ["boxes"], ["boxes", "class"], [], ["boxes"]]


@pytest.fixture
def reader() -> StreamReader:
    return BOXES.reader


def test_it_covers_what_boxes_can_be(reader: StreamReader) -> None:
    manifests = [reader.manifest(v) for v in VERSIONS]
    assert [m.features for m in manifests] == FEATURES
    fetcher = DeltaFetcher(reader.store, POOL, 1 << 20)
    rows = [r for m in manifests for r in fetcher.rows(m) if r.is_box]
    assert {r.coding for r in rows} == {"gap", "dense", "whole", "class"}
    assert {WIDTHS[r.dtype] for r in rows} == {1, 2, 4, 8}
    by_class = [r for r in rows if r.coding == "class"]
    assert {r.gaps[1] for r in by_class} == {0, 1}, "lines listed, and not"
    assert any(r.run % 128 == 0 and r.shape[-1] == 128 for r in by_class), "runs that are lines of the tensor"
    assert any(r.run < 64 for r in by_class), "lines that are several runs"
    assert any(r.run == 1 for r in rows)
    assert any((r.offset * WIDTHS[r.dtype]) % 8 for r in rows), "runs that begin within a word"


def test_columns_are_written_where_there_are_boxes_alone(reader: StreamReader) -> None:
    found: dict[tuple[int, bool], int] = {}
    for version in VERSIONS:
        for shard in reader.manifest(version).shards:
            with pa.ipc.open_file(STORE / shard.key) as file:
                has = file.schema.names[-2:] == ["run", "stride"]
                assert has == any(r > 0 for r in (file.read_all()["run"].to_pylist() if has else []))
            found[version, has] = found.get((version, has), 0) + 1
    assert (5, True) not in found
    assert found[2, True] > 0 < found[2, False]


def test_all_of_it_verifies() -> None:
    assert verify(StreamReader.open(open_store(str(STORE)))).ok


def test_a_release_that_does_not_know_boxes_refuses_by_name(
    reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "FEATURES", frozenset({"class"}))
    for version in VERSIONS:
        data = (STORE / f"versions/{version:012d}.json").read_bytes()
        if "boxes" not in FEATURES[version]:
            documents.decode(documents.VersionManifest, data, "x")
            continue
        with pytest.raises(Unsupported, match=r"needs features \['boxes'\]"):
            documents.decode(documents.VersionManifest, data, "x")
