"""The golden stream with rows in the coding `class` stays readable for ever, as `v1` does."""

from __future__ import annotations

import pytest

from weightcast.codec.classes import EXPONENTS
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.stream import StreamReader
from weightcast.schemas import manifest as documents
from weightcast.schemas.errors import Unsupported

from ..manifest.author import POOL
from .streams import CLASSES

STORE = CLASSES.store
VERSIONS = range(len(CLASSES.expected))


@pytest.fixture
def reader() -> StreamReader:
    return CLASSES.reader


def test_it_covers_the_coding(reader: StreamReader) -> None:
    manifests = [reader.manifest(v) for v in VERSIONS]
    assert [m.features for m in manifests] == [[], ["class"], ["class"], ["class"], []]
    fetcher = DeltaFetcher(reader.store, POOL, 1 << 20)
    rows = [r for m in manifests for r in fetcher.rows(m) if r.coding == "class"]
    assert {r.dtype for r in rows} == set(EXPONENTS)
    assert {r.gaps[1] for r in rows} == {0, 1}
    assert any(r.offset % r.shape[-1] for r in rows), "a row that begins within a line"
    assert any(len(r.shape) == 4 for r in rows)
    assert any(8 * len(r.steps) > 5 * r.count for r in rows), "steps of all sizes"


def test_a_release_that_does_not_know_it_refuses_by_name(
    reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "FEATURES", frozenset())
    data = (STORE / f"versions/{1:012d}.json").read_bytes()
    with pytest.raises(Unsupported, match=r"needs features \['class'\]"):
        documents.decode(documents.VersionManifest, data, "versions/1")
    assert reader.manifest(4).features == []
