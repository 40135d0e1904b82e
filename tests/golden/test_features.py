"""Golden streams of features stay readable for ever, as `v1` does."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from weightcast.manifest.rebuild import rebuild

from ..manifest.author import POOL
from .make import make
from .minireader import MiniReader
from .streams import FEATURES, Golden

VERSIONS = [
    pytest.param(golden, version, id=f"{golden.feature}-{version}")
    for golden in FEATURES
    for version in range(len(golden.expected))
]
EACH = pytest.mark.parametrize("golden", FEATURES, ids=lambda golden: golden.feature)


@pytest.mark.parametrize(("golden", "version"), VERSIONS)
def test_each_version_rebuilds(golden: Golden, version: int) -> None:
    state = rebuild(golden.reader, version, POOL)
    assert state.position.manifest.digest_after == golden.expected[version]["digest"]
    hashes = {s.name: hashlib.sha256(state.memory.tensor(s.name)).hexdigest() for s in state.layout.stored}
    assert hashes == golden.expected[version]["tensors"]


@pytest.mark.parametrize(("golden", "version"), VERSIONS)
def test_the_document_alone_leads_to_the_same_bits(golden: Golden, version: int) -> None:
    model = golden.models[version]
    assert model.manifest["digest_after"] == golden.expected[version]["digest"]
    own = [s.name for s in model.layout if s.tied_to is None]
    hashes = {n: hashlib.sha256(model.tensor(n)).hexdigest() for n in own}
    assert hashes == golden.expected[version]["tensors"]


@EACH
def test_what_is_written_today_is_read_by_the_document(golden: Golden, tmp_path: Path) -> None:
    make(tmp_path, golden.write)
    assert json.loads((tmp_path / "expected.json").read_text("utf-8"))["versions"] == golden.expected
    found = [m.manifest["digest_after"] for m in golden.read(tmp_path / "store")]
    assert found == [e["digest"] for e in golden.expected]


@EACH
def test_the_mini_reader_asks_for_the_feature(golden: Golden, tmp_path: Path) -> None:
    shutil.copytree(golden.store, tmp_path / "store")
    version = next(v for v, m in enumerate(golden.models) if golden.feature in m.manifest["features"])
    path = tmp_path / f"store/versions/{version:012d}.json"
    manifest = json.loads(path.read_bytes())
    manifest["features"].remove(golden.feature)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="feature"):
        MiniReader(tmp_path / "store").read(version, golden.models[version - 1])
