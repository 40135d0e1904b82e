"""The golden stream with rows in the coding `class` stays readable for ever, as `v1` does."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from weightcast.codec.classes import EXPONENTS
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.rebuild import rebuild
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas import manifest as documents
from weightcast.schemas.errors import Unsupported

from ..manifest.author import POOL
from .make import make, write_classes
from .minireader import MiniReader, Model

GOLDEN = Path(__file__).parent / "v1-class"
STORE = GOLDEN / "store"
EXPECTED: list[dict[str, Any]] = json.loads((GOLDEN / "expected.json").read_text("utf-8"))["versions"]
VERSIONS = range(len(EXPECTED))


@pytest.fixture(scope="module")
def reader() -> StreamReader:
    return StreamReader.open(open_store(str(STORE)))


def all_of(store: Path) -> list[Model]:
    """All versions, by the reader that knows the document alone."""
    mini, found = MiniReader(store), list[Model]()
    for version in VERSIONS:
        found.append(mini.read(version, found[-1] if found else None))
    return found


@pytest.fixture(scope="module")
def models() -> list[Model]:
    return all_of(STORE)


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_rebuilds(reader: StreamReader, version: int) -> None:
    state = rebuild(reader, version, POOL)
    assert state.position.manifest.digest_after == EXPECTED[version]["digest"]
    hashes = {s.name: hashlib.sha256(state.memory.tensor(s.name)).hexdigest() for s in state.layout.stored}
    assert hashes == EXPECTED[version]["tensors"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_document_alone_leads_to_the_same_bits(models: list[Model], version: int) -> None:
    model = models[version]
    assert model.manifest["digest_after"] == EXPECTED[version]["digest"]
    own = [s.name for s in model.layout if s.tied_to is None]
    assert {n: hashlib.sha256(model.tensor(n)).hexdigest() for n in own} == EXPECTED[version]["tensors"]


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


def test_what_is_written_today_is_read_by_the_document(tmp_path: Path) -> None:
    make(tmp_path, write_classes)
    assert json.loads((tmp_path / "expected.json").read_text("utf-8"))["versions"] == EXPECTED
    assert [m.manifest["digest_after"] for m in all_of(tmp_path / "store")] == [e["digest"] for e in EXPECTED]


def test_the_mini_reader_asks_for_the_feature(tmp_path: Path, models: list[Model]) -> None:
    shutil.copytree(STORE, tmp_path / "store")
    path = tmp_path / f"store/versions/{1:012d}.json"
    path.write_text(path.read_text().replace('"features":["class"]', '"features":[]'))
    with pytest.raises(ValueError, match="feature"):
        MiniReader(tmp_path / "store").read(1, models[0])
