"""The golden stream that goes over to another digest stays readable for ever, as `v1` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcast.manifest.inspect.verify import verify
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas import manifest as documents
from weightcast.schemas.errors import Unsupported, Untrusted
from weightcast.schemas.layout import Layout

from .streams import MIX

FEATURES = [[], [], ["mix2"], ["boxes", "mix2", "packed", "pairs"], ["mix2"], []]


@pytest.fixture
def reader() -> StreamReader:
    return MIX.reader


def test_it_covers_the_feature(reader: StreamReader) -> None:
    manifests = [reader.manifest(v) for v in range(len(MIX.expected))]
    assert [m.features for m in manifests] == FEATURES
    assert [reader.layout(m.layout).mix for m in manifests] == [1, 1, 2, 2, 2, 1]


def test_all_of_it_verifies() -> None:
    assert verify(StreamReader.open(open_store(str(MIX.store)))).ok


def test_a_release_that_does_not_know_it_refuses_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "FEATURES", frozenset({"boxes", "class", "packed", "pairs"}))
    data = (MIX.store / f"versions/{3:012d}.json").read_bytes()
    with pytest.raises(Unsupported, match=r"needs features \['mix2'\]"):
        documents.decode(documents.VersionManifest, data, "versions/3")


def test_a_mix_of_a_newer_release_is_refused_by_name(reader: StreamReader) -> None:
    ref = reader.manifest(2).layout
    data = Path(MIX.store / f"layouts/{ref.sha256}.arrow").read_bytes()
    assert data.count(b"mix\0") == 2, "schema message and footer"
    with pytest.raises(Untrusted, match=r"made by mix b'7', this release knows 1 and 2"):
        Layout.decode(_with_mix(data, b"7"), "layouts/x")


def _with_mix(data: bytes, mix: bytes) -> bytes:
    """The same file with another number, which Arrow keeps as text of one character behind its length."""
    found = b"\x01\0\0\0" + b"2"
    assert data.count(found) >= 2
    return data.replace(found, b"\x01\0\0\0" + mix)
