"""The writes that make things exist."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

import pytest

from weightcast.manifest.commit import (
    Writer,
    commit,
    create_stream,
    hint_head,
    put_files,
    put_layout,
    put_shard,
)
from weightcast.manifest.store import open_store
from weightcast.schemas.errors import Conflict, StorageError, Untrusted, UsageError
from weightcast.schemas.layout import Layout
from weightcast.schemas.manifest import Head, VersionManifest, decode
from weightcast.schemas.names import HEAD_KEY, layout_key, parse_data_key, version_key
from weightcast.schemas.shard import decode_shard

from .author import Author, CountingStore, Tensors

START = Tensors.of(w=("BF16", [1, 2, 3, 4]))


@pytest.fixture(params=["memory", "local"])
def author(request: pytest.FixtureRequest, tmp_path: Any) -> Author:
    """A stream with version 0, in memory and in a folder."""
    author = Author(
        open_store(f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "store"))
    )
    author.reset(START)
    return author


def test_a_stream_is_made_once(author: Author) -> None:
    assert create_stream(author.store).stream == author.reader.stream
    assert author.reader.stream.single_writer is True
    fresh = create_stream(open_store(f"memory://{uuid.uuid4().hex}"))
    assert fresh.stream.single_writer is False
    assert fresh.stream.stream != author.reader.stream.stream


class NeverExclusive(CountingStore):
    """A store on which a second create wins as well."""

    def probe(self) -> Any:
        class Seen:
            create_only = False

        return Seen()


def test_a_store_without_create_only_is_refused(author: Author) -> None:
    store = NeverExclusive(open_store(f"memory://{uuid.uuid4().hex}"))
    with pytest.raises(UsageError, match="does not honour create-only"):
        create_stream(store)
    assert list(store.inner.list("")) == []
    assert create_stream(store, single_writer=True).stream.single_writer


def test_layouts_lie_under_their_hash(author: Author) -> None:
    ref = put_layout(author.store, START.layout)
    data = author.store.fetch(layout_key(ref.sha256), size=ref.size, sha256=ref.sha256)
    assert Layout.decode(data).tensors == START.layout.tensors
    assert (ref.tensors, hashlib.sha256(data).hexdigest()) == (1, ref.sha256)


def test_files_lie_under_their_hash_and_equal_ones_once(author: Author) -> None:
    before = {e.key for e in author.store.list("files/")}
    ref = put_files(author.store, {"b.json": b"same", "a.json": b"same"}, None)
    assert ref is not None
    assert [f.name for f in author.reader.files(ref).files] == ["a.json", "b.json"]
    assert len({e.key for e in author.store.list("files/")} - before) == 2
    with pytest.raises(Untrusted, match="not a plain name"):
        put_files(author.store, {"../a": b""}, None)


def test_files_that_did_not_change_are_not_sent_again(author: Author) -> None:
    before = put_files(author.store, {"a.json": b"1"}, None)
    counting = CountingStore(author.store)
    assert put_files(counting, {"a.json": b"1"}, before) == before
    assert counting.calls == []
    after = put_files(counting, {"a.json": b"2"}, before)
    assert after != before
    assert len(counting.calls) == 2


def test_each_attempt_at_a_shard_has_a_key_of_its_own(author: Author) -> None:
    rows = author.rows(START.changed("w", (1, 9)))
    one, two = (put_shard(author.store, 1, "w", 0, rows) for _ in range(2))
    assert one.key != two.key
    assert parse_data_key(one.key) == 1
    assert (one.rows, one.elements, one.changed, one.sha256) == (1, 4, 1, two.sha256)
    assert decode_shard(author.store.fetch(one.key, size=one.size, sha256=one.sha256), one.key) == rows


def test_commit_is_final_and_may_be_repeated(author: Author) -> None:
    manifest = author.manifest(START)
    first = commit(author.store, manifest)
    assert commit(author.store, manifest) == first
    assert author.reader.position(1) == first


def test_the_loser_learns_who_won(author: Author) -> None:
    mine, theirs = author.manifest(START, writer="mine"), author.manifest(START, writer="theirs")
    commit(author.store, theirs)
    with pytest.raises(
        Conflict, match=f"version 1 was committed by 'theirs' run {author.writer.run}"
    ) as caught:
        commit(author.store, mine)
    assert "restart it to continue" in caught.value.hint
    assert author.reader.manifest(1) == theirs
    author.store.delete(version_key(1))
    author.store.put(version_key(1), b"unreadable")
    with pytest.raises(Conflict, match="another publisher"):
        commit(author.store, mine)


def test_what_no_reader_accepts_is_not_committed(author: Author) -> None:
    broken = author.manifest(START).model_copy(update={"digest_before": None})
    with pytest.raises(Untrusted, match="no digest before"):
        commit(author.store, broken)
    large = author.manifest(START).model_copy(update={"metadata": {"a": "x" * (8 << 20)}})
    with pytest.raises(UsageError, match="at most 8388608"):
        commit(author.store, large)
    assert author.reader.manifest_bytes(1) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"bytes", "\ud800", "x" * 70_000])
def test_metadata_that_is_no_json_is_refused_before_anything_is_written(
    author: Author, value: object
) -> None:
    with pytest.raises(ValueError, match="metadata"):
        author.manifest(START, metadata={"a": value})


def test_metadata_of_any_json_comes_back(author: Author) -> None:
    metadata = {"loss": 0.1, "none": None, "nested": {"a": [1, None, {"b": None}]}, "é.重み": "\x1b[0m"}
    commit(author.store, author.manifest(START, metadata=metadata, step=-5))
    assert (author.reader.manifest(1).metadata, author.reader.manifest(1).step) == (metadata, -5)


def test_the_head_is_hinted_and_a_failure_does_no_harm(author: Author) -> None:
    hint_head(author.store, 7)
    assert decode(Head, author.store.get(HEAD_KEY, max_bytes=100), HEAD_KEY).version == 7

    class Failing(CountingStore):
        def put(self, key: str, data: bytes) -> None:
            raise StorageError("no")

    hint_head(Failing(author.store), 8)
    assert decode(Head, author.store.get(HEAD_KEY, max_bytes=100), HEAD_KEY).version == 7


def test_writers_have_runs_of_their_own() -> None:
    assert Writer.fresh("a").run != Writer.fresh("a").run


def test_documents_encode_the_same_every_time(author: Author) -> None:
    manifest = author.positions[0].manifest
    assert manifest.encode() == author.reader.manifest_bytes(0)
    assert decode(VersionManifest, manifest.encode(), "x") == manifest
