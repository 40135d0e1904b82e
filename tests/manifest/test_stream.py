"""Finding the head, the floor, layouts, snapshots and readers of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightcast.manifest.commit import new_token, now, put_files
from weightcast.manifest.store import Entry, StoreSettings, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Corrupt, NotFound, Untrusted
from weightcast.schemas.manifest import Floor, Head, LayoutRef, ObjectRef, Reader
from weightcast.schemas.names import FLOOR_KEY, HEAD_KEY, STREAM_KEY, version_key

from .author import Author, CountingStore, Tensors

START = Tensors.of(w=("BF16", [1, 2, 3, 4]))


@pytest.fixture(params=["memory", "local"])
def author(request: pytest.FixtureRequest, tmp_path: Any) -> Author:
    """A stream with no version, in memory and in a folder."""
    return Author(
        open_store(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "store"))
    )


def quickly(author: Author, key: str, data: bytes) -> None:
    """Put an object, without waiting for the disk where the store is a folder."""
    if author.store.url.startswith("memory"):
        author.store.put(key, data)
        return
    path = Path(author.store.url.removeprefix("file://")) / key
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def extend(author: Author, versions: int) -> None:
    if not author.positions:
        author.reset(START)
    while len(author.positions) < versions:
        author.publish(author.tensors[-1].changed("w", (0, 100 + len(author.positions))))


def test_no_stream() -> None:
    with pytest.raises(NotFound, match="no stream at memory://"):
        StreamReader.open(open_store(f"memory://{uuid.uuid4().hex}"))


def test_opening_reads_the_document(author: Author) -> None:
    assert StreamReader.open(author.store).stream == author.reader.stream
    author.store.put(STREAM_KEY, b"{}")
    with pytest.raises(Untrusted, match=r"stream\.json"):
        StreamReader.open(author.store)


def test_an_empty_stream_has_no_head(author: Author) -> None:
    assert author.reader.head() is None
    author.store.put(HEAD_KEY, Head(version=9).encode())
    assert author.reader.head() is None


@pytest.mark.parametrize(
    "hint",
    [
        Head(version=7).encode(),
        Head(version=9).encode(),
        b"",
        None,
        b"{",
        Head(version=10**12 - 1).encode(),
        b"x" * 5000,
    ],
)
def test_b118_a_hint_is_never_trusted(author: Author, hint: bytes | None) -> None:
    """B118: stale, ahead, empty, missing, cut, absurd and too long; the head is 8."""
    extend(author, 9)
    if hint is not None:
        author.store.put(HEAD_KEY, hint)
    assert author.reader.head() == 8


class StaleListing(CountingStore):
    """A listing that lags, or is in no order."""

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        found = [e for e in self.inner.list(prefix, after=after) if e.key <= version_key(3)]
        return iter(found[::-1])


def test_a_stale_listing_does_not_set_the_head_back(author: Author) -> None:
    extend(author, 12)
    author.store.put(HEAD_KEY, Head(version=5).encode())
    reader = StreamReader.open(StaleListing(author.store))
    assert reader.head() == 11
    author.store.delete(HEAD_KEY)
    assert reader.head() == 11


def test_b118_a_good_hint_costs_three_requests(author: Author) -> None:
    extend(author, 9)
    author.store.put(HEAD_KEY, Head(version=8).encode())
    counting = CountingStore(author.store)
    assert StreamReader.open(counting).head() == 8
    assert [k for _, k in counting.calls] == [STREAM_KEY, HEAD_KEY, version_key(8), version_key(9)]


def test_b141_many_versions_are_all_seen(author: Author) -> None:
    """B141: 1,204 manifests, read through small pages where the store has pages; order plays no part."""
    for version in range(1204):
        quickly(author, version_key(version), b"{}")
    author.store.put("versions/README.md", b"not ours")
    author.store.put("versions/000000009999.json.bak", b"not ours")
    assert author.reader.listed_versions() == list(range(1204))
    assert author.reader.head() == 1203


@pytest.mark.parametrize("page", [1000, 7])
def test_b141_pages(moto_server: Any, aws: Any, page: int) -> None:
    """B141: over an S3 server with pages of 1,000 and of 7."""
    aws(moto_server)
    store = open_store(
        f"s3://{moto_server.bucket}/{uuid.uuid4().hex}", settings=StoreSettings(list_page=page)
    )
    for version in range(30):
        store.put(version_key(version), b"{}")
    reader = Author(store).reader
    assert reader.head() == 29
    assert len(reader.listed_versions()) == 30


def test_b112_a_hole_does_not_hide_the_head(author: Author) -> None:
    """B112: version 6 is missing, and the hint leads past it."""
    extend(author, 9)
    author.store.put(HEAD_KEY, Head(version=8).encode())
    author.store.delete(version_key(6))
    assert author.reader.head() == 8
    assert author.reader.manifest_bytes(6) is None
    with pytest.raises(NotFound, match="version 6 does not exist"):
        author.reader.position(6)


def test_position_and_manifest(author: Author) -> None:
    extend(author, 3)
    assert author.reader.position(2) == author.positions[2]
    assert author.reader.manifest(1).version == 1


def test_floor(author: Author) -> None:
    assert author.reader.floor() == 0
    author.store.put(FLOOR_KEY, Floor(version=4, time=now()).encode())
    assert author.reader.floor() == 4
    author.store.put(FLOOR_KEY, b'{"kind":"floor"}')
    with pytest.raises(Untrusted, match=r"floor\.json"):
        author.reader.floor()


def test_layouts_are_checked_and_kept(author: Author) -> None:
    extend(author, 2)
    counting = CountingStore(author.store)
    reader = StreamReader(counting, author.reader.stream)
    ref = author.positions[1].manifest.layout
    assert reader.layout(ref).tensors == START.layout.tensors
    reader.layout(ref)
    assert len(counting.keys("layouts/")) == 1
    with pytest.raises(Untrusted, match="at most"):
        reader.layout(LayoutRef(sha256="1" * 64, size=(1 << 30) + 1, tensors=1))
    author.store.put(f"layouts/{ref.sha256}.arrow", b"x" * ref.size)
    with pytest.raises(Corrupt):
        StreamReader(author.store, author.reader.stream).layout(ref)


def test_files(author: Author) -> None:
    author.reset(START, files={"config.json": b"{}", "tokenizer.model": b"t"})
    listed = author.reader.files(author.positions[0].manifest.files)
    assert [(f.name, f.size) for f in listed.files] == [("config.json", 2), ("tokenizer.model", 1)]
    assert author.reader.files(None).files == []
    assert put_files(author.store, {}, None) is None
    with pytest.raises(Untrusted, match="not content-addressed"):
        author.reader.files(ObjectRef(key="data/x", size=1, sha256="0" * 64))


def test_snapshots_are_found_newest_first(author: Author) -> None:
    extend(author, 4)
    author.snapshot(2)
    author.store.put(f"snapshots/{3:012d}/model.safetensors", b"unfinished")
    author.store.put("snapshots/README.md", b"not ours")
    named = author.positions[0].manifest.snapshot
    assert named is not None
    assert author.reader.snapshot_keys() == [(2, f"snapshots/{2:012d}/manifest.json"), (0, named.key)]
    snapshot = author.reader.own_snapshot(author.positions[2])
    assert snapshot is not None
    assert snapshot.manifest.digest == author.positions[2].manifest.digest_after
    assert author.reader.own_snapshot(author.positions[3]) is None


def test_a_snapshot_of_an_attempt_that_lost_does_not_exist(author: Author) -> None:
    extend(author, 3)
    data = author.store.get(author.positions[0].manifest.snapshot.key, max_bytes=10_000)  # type: ignore[union-attr]
    for version in (0, 2, 3):  # another reset's, a delta's, and one that is not committed
        author.store.put(f"snapshots/{version:012d}-{new_token()}/manifest.json", data)
    author.store.put(version_key(9), b'{"format":2}')  # a version of a newer format must not hide the others
    author.store.put(f"snapshots/{9:012d}-{new_token()}/manifest.json", data)
    assert [v for v, _ in author.reader.snapshot_keys()] == [0]


def test_a_snapshot_must_be_of_the_version_it_claims(author: Author) -> None:
    extend(author, 4)
    author.snapshot(2)
    key = f"snapshots/{2:012d}/manifest.json"
    good = author.store.get(key, max_bytes=10_000)
    with pytest.raises(Untrusted, match="version 2, expected"):
        author.reader.snapshot(key, author.positions[3])
    for old, new, match in [
        (author.reader.stream.stream, "0" * 32, "is of stream"),
        (author.positions[2].manifest.digest_after, "0" * 32, "holds state 0000"),
        ('"tensors":1', '"tensors":2', "holds state"),
        ("model-00001", "../model", "not a plain name"),
        ("config.json", "model-00001-of-00001.safetensors", "same name"),
    ]:
        author.store.put(key, good.decode().replace(old, new, 1).encode())
        with pytest.raises(Untrusted, match=match):
            author.reader.snapshot(key, author.positions[2])
    named = author.positions[0].manifest.snapshot
    assert named is not None
    author.store.put(
        named.key, author.store.get(named.key, max_bytes=10_000).replace(b'"author"', b'"other!"')
    )
    with pytest.raises(Untrusted, match="version 0 names"):
        author.reader.snapshot(named.key, author.positions[0])


def test_readers_are_hints(author: Author) -> None:
    one = Reader(reader=new_token(), version=3, time=now())
    author.store.put(f"readers/{one.reader}.json", one.encode())
    author.store.put(f"readers/{new_token()}.json", b"broken")
    author.store.put("readers/README.md", b"not ours")
    author.store.put("readers/sub/x.json", b"not ours")
    assert author.reader.readers() == [one]
