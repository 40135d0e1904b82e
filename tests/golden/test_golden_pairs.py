"""The golden stream with two steps in a byte stays readable for ever, as `v1` does."""

from __future__ import annotations

import pytest

from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.inspect.verify import verify
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas import manifest as documents
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.errors import Unsupported

from ..manifest.author import POOL
from .streams import PAIRS

FEATURES = [[], ["pairs"], ["pairs"], ["boxes", "pairs"], []]


@pytest.fixture
def reader() -> StreamReader:
    return PAIRS.reader


def test_it_covers_the_feature(reader: StreamReader) -> None:
    manifests = [reader.manifest(v) for v in range(len(PAIRS.expected))]
    assert [m.features for m in manifests] == FEATURES
    fetcher = DeltaFetcher(reader.store, POOL, 1 << 20)
    found = [list(fetcher.rows(m)) for m in manifests]
    pairs = [r for rows in found for r in rows if r.coding == "pairs"]
    assert {WIDTHS[r.dtype] for r in pairs} == {1, 2, 4, 8}
    assert {r.count % 2 for r in pairs} == {0, 1}
    assert {r.escaped > 0 for r in pairs} == {True, False}
    assert {len(r.steps) < -(-r.count // 2) for r in pairs} == {True, False}, "compressed, and raw"
    assert any(r.tensors > 1 for r in pairs)
    assert any(r.is_box for r in found[3])
    assert {r.coding for r in found[4]} == {"gap"}


def test_all_of_it_verifies() -> None:
    assert verify(StreamReader.open(open_store(str(PAIRS.store)))).ok


def test_a_release_that_does_not_know_it_refuses_by_name(
    reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "FEATURES", frozenset({"boxes", "class", "packed"}))
    data = (PAIRS.store / f"versions/{1:012d}.json").read_bytes()
    with pytest.raises(Unsupported, match=r"needs features \['pairs'\]"):
        documents.decode(documents.VersionManifest, data, "versions/1")
    assert reader.manifest(4).features == []
