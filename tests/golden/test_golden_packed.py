"""The golden stream with packed shards stays readable for ever, as `v1` does."""

from __future__ import annotations

import pytest

from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.inspect.verify import verify
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas import manifest as documents
from weightcast.schemas.errors import Unsupported
from weightcast.schemas.frames import MAGIC

from ..manifest.author import POOL
from .streams import PACKED

STORE = PACKED.store
FEATURES = [[], ["class", "packed"], ["class", "packed"], [], ["boxes", "class", "packed"]]


@pytest.fixture
def reader() -> StreamReader:
    return PACKED.reader


def test_it_covers_the_feature(reader: StreamReader) -> None:
    manifests = [reader.manifest(v) for v in range(len(PACKED.expected))]
    assert [m.features for m in manifests] == FEATURES
    packed = [[(STORE / s.key).read_bytes()[: len(MAGIC)] == MAGIC for s in m.shards] for m in manifests]
    assert {True, False} == set(packed[1]), "a shard that is not packed beside one that is"
    assert packed[2:] == [[True], [False], [True]]
    rows = list(DeltaFetcher(reader.store, POOL, 1 << 20).rows(manifests[2]))
    assert {r.coding for r in rows} == {"class", "gap"}


def test_all_of_it_verifies() -> None:
    assert verify(StreamReader.open(open_store(str(STORE)))).ok


def test_a_release_that_does_not_know_it_refuses_by_name(
    reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "FEATURES", frozenset({"boxes", "class"}))
    data = (STORE / f"versions/{1:012d}.json").read_bytes()
    with pytest.raises(Unsupported, match=r"needs features \['packed'\]"):
        documents.decode(documents.VersionManifest, data, "versions/1")
    assert reader.manifest(3).features == []
