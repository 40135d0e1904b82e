"""Log, show and status against a stream whose every figure is known."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from weightcast.manifest.commit import create_stream
from weightcast.manifest.inspect import log, show, status
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import Corrupt, Gap, NotFound, Untrusted
from weightcast.schemas.manifest import Reader

from .. import sample


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample stream; not to be changed."""
    folder = tmp_path_factory.mktemp("inspect") / "stream"
    sample.publish_sample(folder)
    return folder


@pytest.fixture
def reader(root: Path) -> StreamReader:
    return sample.reader_of(root)


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the sample stream, to damage."""
    return sample.copied(root, tmp_path / "stream")


def test_log_lists_newest_first_with_figures(reader: StreamReader) -> None:
    entries = log(reader)
    assert [e.version for e in entries] == [4, 3, 2, 1, 0]
    assert [e.step for e in entries] == [40, 30, 20, 10, 0]
    assert [e.kind for e in entries] == ["delta"] * 4 + ["snapshot"]
    assert [e.relaid for e in entries] == [False, True, False, False, True]
    assert [e.changed for e in entries] == [53, 13, 0, 54, sample.ELEMENTS_0]
    assert [e.elements for e in entries] == [sample.ELEMENTS_3] * 2 + [sample.ELEMENTS_0] * 3
    assert [e.shards for e in entries] == [1, 1, 0, 1, 0]
    assert {e.writer for e in entries} == {"trainer-a"}


def test_log_bytes_are_those_of_the_shards(reader: StreamReader, root: Path) -> None:
    by_version = {e.version: e for e in log(reader)}
    assert by_version[1].bytes == sample.shard_path(root, 1).stat().st_size
    assert by_version[2].bytes == 0
    dense = sum(t.numel() * t.element_size() for n, t in sample.states()[1].items() if n != "lm_head.weight")
    assert by_version[1].dense_bytes == dense


@pytest.mark.parametrize(
    ("limit", "before", "versions"),
    [(2, None, [4, 3]), (2, 3, [2, 1]), (9, 1, [0]), (1, 99, [4]), (5, 0, [])],
)
def test_log_pages(reader: StreamReader, limit: int, before: int | None, versions: list[int]) -> None:
    assert [e.version for e in log(reader, limit, before)] == versions


def test_log_of_a_page_knows_whether_its_oldest_version_is_relaid(reader: StreamReader) -> None:
    assert [e.relaid for e in log(reader, 1, 4)] == [True]
    assert [e.relaid for e in log(reader, 1, 3)] == [False]


def test_log_of_a_stream_without_versions_is_empty(tmp_path: Path) -> None:
    assert log(create_stream(open_store(str(tmp_path / "new")))) == []


def test_log_names_a_missing_manifest(copy: Path) -> None:
    sample.manifest_path(copy, 2).unlink()
    with pytest.raises(Gap, match=r"versions/000000000002\.json is missing"):
        log(sample.reader_of(copy))


def test_log_refuses_a_rewritten_history(copy: Path) -> None:
    sample.edit_json(sample.manifest_path(copy, 2), step=7)
    with pytest.raises(Untrusted, match=r"versions/000000000003\.json follows"):
        log(sample.reader_of(copy))


def test_show_counts_changes_of_each_tensor(reader: StreamReader) -> None:
    details = show(reader, 1, tensors=True)
    assert details.tensors is not None
    counts = {t.name: t.changed for t in details.tensors}
    expected = dict.fromkeys(sample.states()[1], 0) | sample.CHANGES_1 | {"lm_head.weight": 50}
    assert counts == expected
    tied = next(t for t in details.tensors if t.name == "lm_head.weight")
    assert (tied.tied_to, tied.shape, tied.dtype) == ("embed.weight", (300, 256), "BF16")


def test_show_counts_in_a_changed_layout(reader: StreamReader) -> None:
    details = show(reader, 3, tensors=True)
    assert details.tensors is not None
    assert {t.name: t.changed for t in details.tensors if t.changed} == sample.CHANGES_3
    assert "small.9.weight" not in {t.name for t in details.tensors}


def test_show_of_a_reset_counts_everything(reader: StreamReader) -> None:
    details = show(reader, 0, tensors=True)
    assert details.tensors is not None
    assert all(t.changed == t.elements for t in details.tensors)
    assert details.snapshot is not None
    assert details.snapshot.startswith("snapshots/000000000000-")
    assert (details.parent_sha256, details.digest_before) == (None, None)


def test_show_tells_where_a_version_comes_from(reader: StreamReader, root: Path) -> None:
    details = show(reader, 3)
    assert details.tensors is None
    assert details.manifest_bytes == sample.manifest_path(root, 3).stat().st_size
    assert details.parent_sha256 == show(reader, 2).manifest_sha256
    assert details.digest_before == show(reader, 2).entry.digest
    assert (details.metadata, details.files) == ({"loss": 0.5}, ("config.json", "tokenizer.json"))
    assert (details.snapshot, details.pruned) == ("snapshots/000000000003", False)
    assert [s.key for s in details.shards] == [str(sample.shard_path(root, 3).relative_to(root))]


def test_show_of_a_version_after_a_damaged_one_still_works(copy: Path) -> None:
    sample.manifest_path(copy, 2).write_bytes(b"{")
    assert show(sample.reader_of(copy), 3).entry.version == 3


def test_show_of_what_is_not_there(reader: StreamReader, copy: Path) -> None:
    with pytest.raises(NotFound, match="version 5 does not exist"):
        show(reader, 5)
    sample.shard_path(copy, 1).unlink()
    with pytest.raises(NotFound):
        show(sample.reader_of(copy), 1, tensors=True)
    sample.flip(sample.shard_path(copy, 4))
    with pytest.raises(Corrupt):
        show(sample.reader_of(copy), 4, tensors=True)


def test_status_figures(copy: Path) -> None:
    reader = sample.reader_of(copy)
    now = datetime.now(UTC)
    lease = Reader(reader="ab" * 16, version=1, time=(now - timedelta(seconds=90)).isoformat())
    reader.store.put(f"readers/{lease.reader}.json", lease.encode())
    found = status(reader, now)
    assert found.head == log(reader, 1)[0]
    assert (found.snapshot, found.behind_snapshot, found.floor) == (3, 1, 0)
    assert found.chain_bytes == sample.shard_path(copy, 4).stat().st_size
    assert found.delta_bytes == sum(p.stat().st_size for p in (copy / "data").rglob("*.arrow"))
    assert found.snapshot_bytes == sum(
        p.stat().st_size for p in (copy / "snapshots").rglob("*") if p.is_file()
    )
    (seen,) = found.readers
    assert (seen.reader, seen.version, seen.lag) == (lease.reader, 1, 3)
    assert seen.age_s == pytest.approx(90)
    assert found.age_s is not None
    assert 0 <= found.age_s < 120


def test_status_does_not_rely_on_times_that_others_wrote(copy: Path) -> None:
    reader = sample.reader_of(copy)
    lease = Reader(reader="cd" * 16, version=4, time="last tuesday")
    reader.store.put(f"readers/{lease.reader}.json", lease.encode())
    (seen,) = status(reader, datetime.now(UTC)).readers
    assert (seen.age_s, seen.time, seen.lag) == (None, "last tuesday", 0)


def test_status_of_a_stream_without_versions(tmp_path: Path) -> None:
    found = status(create_stream(open_store(str(tmp_path / "new"))), datetime.now(UTC))
    assert (found.head, found.age_s, found.snapshot, found.readers) == (None, None, None, ())
