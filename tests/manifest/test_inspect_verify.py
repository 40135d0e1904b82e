"""Verification finds every kind of damage, goes on, and says what it did not look at."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from weightcast.codec import Box
from weightcast.manifest.commit import commit, put_shard
from weightcast.manifest.inspect.verify import Problem, VerifyReport, verify
from weightcast.manifest.retention import prune
from weightcast.manifest.store import Store, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.schemas.errors import NotFound, StorageError
from weightcast.schemas.names import version_key
from weightcast.schemas.shard import features_of

from .. import sample
from .author import Author, Tensors


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample stream; not to be changed."""
    folder = tmp_path_factory.mktemp("verify") / "stream"
    sample.publish_sample(folder)
    return folder


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the sample stream, to damage."""
    return sample.copied(root, tmp_path / "stream")


def _verify(root: Path, version: int | None = None, *, deep: bool = False) -> VerifyReport:
    return verify(sample.reader_of(root), version, deep, threads=2)


def _brief(report: VerifyReport) -> set[tuple[int | None, str, str]]:
    return {(p.version, p.object, p.kind) for p in report.problems}


def _key(root: Path, path: Path) -> str:
    return str(path.relative_to(root))


def test_a_sound_stream(root: Path) -> None:
    report = _verify(root)
    assert report.ok
    assert (report.version, report.manifests, report.shards, report.snapshots) == (4, 5, 3, 2)
    assert report.rebuilt == 0
    fetched = [*(root / "data").rglob("*.arrow"), *(root / "snapshots").rglob("*")]
    assert report.bytes == sum(p.stat().st_size for p in fetched if p.is_file() and p.name != "manifest.json")
    assert any("--deep" in sentence for sentence in report.unchecked)


def test_deep_rebuilds_every_version(root: Path) -> None:
    report = _verify(root, deep=True)
    assert (report.ok, report.rebuilt, report.unchecked) == (True, 5, ())


def test_b135_a_missing_and_a_flipped_shard_are_both_listed(copy: Path) -> None:
    missing, flipped = sample.shard_path(copy, 1), sample.shard_path(copy, 3)
    missing.unlink()
    sample.flip(flipped)
    expected = {(1, _key(copy, missing), "gap"), (3, _key(copy, flipped), "corrupt")}
    assert _brief(_verify(copy)) == expected
    deep = _verify(copy, deep=True)
    # Version 3 has a snapshot of its own, so that only 1 and 2 are lost.
    assert _brief(deep) == expected | {(1, "versions 1 to 2", "gap")}
    assert deep.rebuilt == 3


@pytest.mark.parametrize("feature", ["boxes", "class", "packed", "pairs"])
def test_a_feature_that_shards_have_and_the_manifest_does_not_list(feature: str) -> None:
    """An older release could not say what it is that it cannot read."""
    author = Author(open_store(f"memory://{uuid.uuid4().hex}"))
    bits = np.random.default_rng(1).normal(0, 0.02, 20_000).astype(np.float32).view(np.uint32) >> 16
    author.reset(Tensors.of(w=("BF16", bits.reshape(100, 200))))
    bits[::100] += 1
    after = Tensors.of(w=("BF16", bits.reshape(100, 200)))
    rows = {
        "boxes": lambda: author.box_rows(
            after, [Box("BF16", 0, 10_000, 100, 200), Box("BF16", 100, 10_000, 100, 200)]
        ),
        "class": lambda: author.rows(after, coding="class", codec="class"),
        "packed": lambda: author.rows(after, coding="pairs"),
        "pairs": lambda: author.rows(after, coding="pairs"),
    }[feature]()
    shards = [put_shard(author.store, 1, author.writer.name, 0, rows)]
    needed = features_of(rows)
    assert feature in needed
    author.commit(after, shards=shards, features=sorted(needed - {feature}))
    (problem,) = verify(StreamReader.open(author.store), threads=2).problems
    assert (problem.version, problem.kind, problem.object) == (1, "corrupt", shards[0].key)
    assert f"needs the features ['{feature}']" in problem.message


def test_a_feature_that_the_layout_has_and_the_manifest_does_not_list() -> None:
    author = Author(open_store(f"memory://{uuid.uuid4().hex}"))
    tensors = Tensors.of(w=("BF16", [1, 2, 3]))
    author.reset(tensors)
    commit(author.store, author.manifest(tensors).model_copy(update={"features": []}))
    (problem,) = verify(StreamReader.open(author.store), threads=2).problems
    assert (problem.version, problem.kind, problem.object) == (1, "corrupt", version_key(1))
    assert "needs the features ['mix2']" in problem.message


def test_every_byte_of_a_manifest_is_covered_by_the_chain(copy: Path) -> None:
    path = sample.manifest_path(copy, 2)
    sample.edit_json(path, step=21)
    (problem,) = _verify(copy).problems
    assert (problem.version, problem.object, problem.kind) == (3, "versions/000000000003.json", "untrusted")
    assert "follows a manifest with SHA-256" in problem.message


def test_a_broken_and_a_missing_manifest(copy: Path) -> None:
    sample.manifest_path(copy, 1).write_bytes(b'{"kind": ')
    sample.manifest_path(copy, 3).unlink()
    report = _verify(copy, deep=True)
    assert _brief(report) == {
        (1, "versions/000000000001.json", "untrusted"),
        (3, "versions/000000000003.json", "gap"),
        (1, "versions 1 to 4", "gap"),
    }
    assert report.rebuilt == 1


def test_a_newer_format_is_named(copy: Path) -> None:
    sample.edit_json(sample.manifest_path(copy, 4), format=2)
    assert _brief(_verify(copy)) == {(4, "versions/000000000004.json", "unsupported")}


def test_damaged_snapshots(copy: Path) -> None:
    (first,) = (copy / "snapshots").glob("000000000000-*")
    weights = next(first.glob("*.safetensors"))
    sample.flip(weights)
    (first / "config.json").unlink()
    beside = copy / "snapshots" / "000000000003" / "model-00001-of-00001.safetensors"
    beside.write_bytes(beside.read_bytes()[:-1])
    report = _verify(copy, deep=True)
    assert _brief(report) == {
        (0, _key(copy, weights), "corrupt"),
        (0, _key(copy, first / "config.json"), "gap"),
        (3, _key(copy, beside), "corrupt"),
        (0, "versions 0 to 4", "gap"),
    }


def test_a_missing_snapshot_that_a_version_starts_from(copy: Path) -> None:
    (manifest,) = (copy / "snapshots").glob("000000000000-*/manifest.json")
    manifest.unlink()
    assert _brief(_verify(copy)) == {(0, _key(copy, manifest), "gap")}


def test_missing_layout_and_companion_files(copy: Path) -> None:
    layout = json.loads(sample.manifest_path(copy, 3).read_text())["layout"]["sha256"]
    (copy / "layouts" / f"{layout}.arrow").unlink()
    config = hashlib.sha256(b'{"a": 1}').hexdigest()
    sample.flip(copy / "files" / config)
    found = _brief(_verify(copy))
    assert (3, f"layouts/{layout}.arrow", "gap") in found
    assert (0, f"files/{config}", "corrupt") in found


def test_only_deep_proves_the_states(copy: Path) -> None:
    sample.edit_json(sample.manifest_path(copy, 4), digest_after="0" * 32)  # nothing refers to the newest one
    assert _verify(copy).ok
    (problem,) = (p for p in _verify(copy, deep=True).problems if p.object.endswith(".json"))
    assert (problem.version, problem.kind) == (4, "corrupt")
    assert "0" * 32 in problem.message


def test_deep_proves_snapshots(copy: Path) -> None:
    """A snapshot whose files and manifest agree, but which holds other bits than its version."""
    folder = copy / "snapshots" / "000000000003"
    weights, manifest = folder / "model-00001-of-00001.safetensors", folder / "manifest.json"
    sample.flip(weights)
    document = json.loads(manifest.read_text())
    document["weights"][0]["sha256"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(document))
    assert _verify(copy).ok
    deep = _verify(copy, deep=True)
    assert _brief(deep) == {(3, "snapshots/000000000003/manifest.json", "corrupt")}
    assert deep.rebuilt == 5  # the chain does not need it


def test_pruned_data_is_no_problem(copy: Path) -> None:
    result = prune(sample.reader_of(copy), keep=1, grace_s=0)
    assert result.plan.floor == 3
    report = _verify(copy, deep=True)
    assert (report.ok, report.floor, report.rebuilt, report.manifests) == (True, 3, 2, 5)
    assert report.unchecked == ("data of versions below 3, which may have been pruned",)
    (copy / "snapshots" / "000000000003" / "manifest.json").unlink()
    assert _brief(_verify(copy)) == {(3, "snapshots/000000000003/manifest.json", "gap")}


def test_a_version_in_the_past(copy: Path) -> None:
    sample.flip(sample.shard_path(copy, 4))
    report = _verify(copy, 3)
    assert (report.ok, report.version, report.manifests) == (True, 3, 4)
    assert "versions after 3" in report.unchecked
    assert not _verify(copy, 4).ok
    with pytest.raises(NotFound, match="version 5"):
        _verify(copy, 5)


def test_uncommitted_leftovers_are_no_problem(copy: Path) -> None:
    orphan = copy / "data" / "000000000009" / f"trainer-00000-{'ab' * 16}.arrow"
    orphan.parent.mkdir()
    orphan.write_bytes(b"x")
    folder = copy / "snapshots" / f"000000000003-{'cd' * 16}"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(b"{")
    assert _verify(copy, deep=True).ok


def test_an_object_that_cannot_be_read_is_listed(copy: Path) -> None:
    reader = sample.reader_of(copy)
    key = _key(copy, sample.shard_path(copy, 1))
    reader.store = _Failing(reader.store, lambda k: k == key)
    report = verify(reader, threads=2)
    assert [(p.version, p.object, p.kind) for p in report.problems] == [(1, key, "storage")]


def test_a_store_that_is_down_ends_the_search(copy: Path) -> None:
    reader: StreamReader = sample.reader_of(copy)
    for version in range(5, 20):  # so that there is enough to fail
        sample.manifest_path(copy, version).write_bytes(b"{")
    reader.store = _Failing(
        reader.store, lambda key: key.startswith("versions/") and not key.endswith("19.json")
    )
    with pytest.raises(StorageError, match="down"):
        verify(reader, 19, threads=2)


class _Failing:
    """A store whose reads of some keys fail."""

    def __init__(self, inner: Store, fails: Callable[[str], bool]) -> None:
        self._inner = inner
        self._fails = fails

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if self._fails(key):
            raise StorageError(f"{key}: the store is down")
        return self._inner.get(key, max_bytes=max_bytes)

    def fetch(self, key: str, *, size: int, sha256: str) -> bytes:
        if self._fails(key):
            raise StorageError(f"{key}: the store is down")
        return self._inner.fetch(key, size=size, sha256=sha256)


def test_problems_are_ordered_by_version(copy: Path) -> None:
    for version in (4, 1, 3):
        sample.shard_path(copy, version).unlink()
    problems = _verify(copy).problems
    assert [p.version for p in problems] == [1, 3, 4]
    assert all(isinstance(p, Problem) and p.message for p in problems)
