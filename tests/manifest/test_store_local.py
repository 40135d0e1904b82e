"""A folder as a store."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from weightcast.manifest.store import Pacing, Store, StoreSettings, open_store
from weightcast.schemas.errors import Corrupt, NotFound, StorageError, UsageError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> Store:
    return open_store(root, pacing=Pacing(sleep=lambda _: None))


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("way", ["put", "create", "put_stream"])
def test_b088_a_reader_sees_the_whole_object_or_nothing(store: Store, root: Path, way: str) -> None:
    size, sizes, done = 30 << 20, set(), threading.Event()
    path = root / "data" / "a.bin"

    def poll() -> None:
        while not done.is_set():
            if path.exists():
                sizes.add(path.stat().st_size)

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        if way == "put_stream":
            store.put_stream("data/a.bin", (b"x" * (1 << 20) for _ in range(30)))
        else:
            getattr(store, way)("data/a.bin", b"x" * size)
    finally:
        done.set()
        reader.join()
    assert sizes <= {size}
    assert path.stat().st_size == size
    assert files(root) == ["data/a.bin"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_b089_without_hard_links_a_create_is_refused(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Renaming would replace another writer's file, so there is no winner rather than two."""

    def no_link(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code), source, None, target)

    monkeypatch.setattr(os, "link", no_link)
    for _ in range(2):
        with pytest.raises(StorageError, match="hard links"):
            store.create("versions/000000000006.json", b"mine")
    assert files(root) == []
    with pytest.raises(StorageError, match="single writer"):
        store.probe()
    alone = open_store(root, settings=StoreSettings(single_writer=True))
    assert alone.create("versions/000000000006.json", b"mine")
    assert alone.create("versions/000000000006.json", b"mine")
    assert not alone.create("versions/000000000006.json", b"other")
    assert files(root) == ["versions/000000000006.json"]


def test_b093_a_full_disk_leaves_nothing(store: Store, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    root.mkdir()
    (root / "data").mkdir()
    for write in (store.put, store.create, lambda key, data: store.put_stream(key, [data])):
        with pytest.raises(StorageError, match="no space left"):
            write("data/a", b"x" * 200)
    assert files(root) == []


def test_b099_a_file_that_is_completed_meanwhile_is_read_again(root: Path) -> None:
    """Somebody else's tool copies the folder and has written 200 bytes so far."""
    whole, path = b"0123456789" * 100, root / "data" / "a"
    path.parent.mkdir(parents=True)
    path.write_bytes(whole[:200])
    store = open_store(root, pacing=Pacing(sleep=lambda _: path.write_bytes(whole) and None))
    assert store.fetch("data/a", size=len(whole), sha256=sha256(whole)) == whole


def test_b099_a_file_that_stays_cut_is_named(store: Store, root: Path) -> None:
    whole, path = b"0123456789" * 100, root / "data" / "a"
    path.parent.mkdir(parents=True)
    path.write_bytes(whole[:200])
    with pytest.raises(Corrupt, match=r"data/a: expected 1000 bytes .* found 200 bytes"):
        store.fetch("data/a", size=len(whole), sha256=sha256(whole))


@pytest.mark.parametrize("position", [0, 60, 500, 999])
def test_b128_a_flipped_bit_in_a_file_is_refused(store: Store, root: Path, position: int) -> None:
    data = bytearray(b"0123456789" * 100)
    digest = sha256(bytes(data))
    data[position] ^= 1
    store.put("data/a", bytes(data))
    with pytest.raises(Corrupt, match="data/a"):
        store.fetch("data/a", size=1000, sha256=digest)


def test_b162_temporary_files_lie_beside_their_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder for temporary files is on another disk, where a rename would fail."""
    shm = Path("/dev/shm") / f"weightcast-{os.getpid()}"
    shm.mkdir()
    try:
        assert shm.stat().st_dev != tmp_path.stat().st_dev
        for here, there in ((shm, tmp_path), (tmp_path, shm)):
            monkeypatch.setenv("TMPDIR", str(there))
            store = open_store(here / "store")
            store.put("a", b"1")
            assert store.create("b", b"2")
            store.put_stream("c", [b"3"])
            store.download("c", there / "cache" / "c", size=1, sha256=sha256(b"3"))
            assert (there / "cache" / "c").read_bytes() == b"3"
            assert files(here / "store") == ["a", "b", "c"]
    finally:
        for path in sorted(shm.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        shm.rmdir()


def test_left_over_temporary_files_are_no_objects(store: Store, root: Path) -> None:
    store.put("data/a", b"1")
    (root / "data" / ".0123.tmp").write_bytes(b"half")
    (root / ".hidden").mkdir()
    (root / ".hidden" / "x").write_bytes(b"1")
    (root / "data" / "link").symlink_to("/etc/hosts")
    (root / "data" / "way out").write_bytes(b"1")
    assert [e.key for e in store.list("")] == ["data/a"]


def test_files_get_the_users_own_permissions(store: Store, root: Path) -> None:
    """Not the 0600 of temporary files: other users read the store."""
    before = os.umask(0o022)
    try:
        store.put("a", b"1")
        store.create("b", b"1")
        store.put_stream("c", [b"1"])
        store.download("c", root / "d", size=1, sha256=sha256(b"1"))
    finally:
        os.umask(before)
    assert {(root / name).stat().st_mode & 0o777 for name in "abcd"} == {0o644}


def test_an_unreadable_file_is_not_a_missing_one(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B144 for folders; the tests may run as root, for whom no file is unreadable."""
    store.put("versions/6.json", b"theirs")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(StorageError, match="permission denied"):
        store.get("versions/6.json", max_bytes=10)
    with pytest.raises(StorageError):
        store.create("versions/6.json", b"mine")
    monkeypatch.undo()
    assert store.get("versions/6.json", max_bytes=10) == b"theirs"


def test_nothing_is_touched_by_opening(root: Path) -> None:
    store = open_store(root)
    assert not root.exists()
    assert list(store.list("")) == []
    with pytest.raises(NotFound):
        store.get("stream.json", max_bytes=10)
    assert not root.exists()


def test_a_download_that_cannot_be_written_says_where(store: Store, tmp_path: Path) -> None:
    store.put("a", b"1")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file/a"):
        store.download("a", tmp_path / "file" / "a", size=1, sha256=sha256(b"1"))


def test_settings_are_checked() -> None:
    for wrong in ({"max_attempts": 0}, {"deadline_s": -1.0}, {"addressing": "dns"}, {"checksum": "never"}):
        with pytest.raises(UsageError):
            StoreSettings(**wrong)  # type: ignore[arg-type]
