"""What every store must do, over memory, a local folder, an emulator and a real S3 server."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from weightcast.manifest.store import Store
from weightcast.schemas.errors import Corrupt, NotFound, Untrusted

MakeStore = Callable[..., Store]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    return make_store()


def test_put_get_and_overwrite(store: Store) -> None:
    store.put("head.json", b"one")
    assert store.get("head.json", max_bytes=3) == b"one"
    store.put("head.json", b"three")
    assert store.get("head.json", max_bytes=100) == b"three"


def test_empty_object(store: Store) -> None:
    store.put("empty", b"")
    assert store.get("empty", max_bytes=0) == b""
    assert store.fetch("empty", size=0, sha256=sha256(b"")) == b""
    assert store.put_stream("stream", []) == (0, sha256(b""))
    assert store.get("stream", max_bytes=0) == b""


def test_missing_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"versions/000000000007\.json"):
        store.get("versions/000000000007.json", max_bytes=10)
    with pytest.raises(NotFound):
        store.fetch("data/a", size=1, sha256=sha256(b"a"))
    with pytest.raises(NotFound):
        store.download("data/a", tmp_path / "a", size=1, sha256=sha256(b"a"))
    assert list(tmp_path.glob("*a*")) == []


def test_a_folder_is_not_an_object(store: Store) -> None:
    store.put("data/x/y.bin", b"1")
    with pytest.raises(NotFound):
        store.get("data/x", max_bytes=10)


def test_get_is_bounded(store: Store) -> None:
    store.put("a.json", b"x" * 1001)
    assert len(store.get("a.json", max_bytes=1001)) == 1001
    with pytest.raises(Untrusted, match="1000 bytes"):
        store.get("a.json", max_bytes=1000)


def test_fetch_and_download_check_size_and_hash(store: Store, tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000
    store.put("data/a.bin", data)
    assert store.fetch("data/a.bin", size=len(data), sha256=sha256(data)) == data
    target = tmp_path / "new" / "a.bin"
    store.download("data/a.bin", target, size=len(data), sha256=sha256(data))
    assert target.read_bytes() == data
    for size, digest in (
        (len(data) - 1, sha256(data)),
        (len(data) + 1, sha256(data)),
        (len(data), sha256(b"")),
    ):
        with pytest.raises(Corrupt, match=r"data/a\.bin"):
            store.fetch("data/a.bin", size=size, sha256=digest)
        with pytest.raises(Corrupt):
            store.download("data/a.bin", target, size=size, sha256=digest)
    assert target.read_bytes() == data
    assert [p.name for p in target.parent.iterdir()] == ["a.bin"]


def test_create_once(store: Store) -> None:
    assert store.create("versions/000000000001.json", b"mine")
    assert not store.create("versions/000000000001.json", b"theirs")
    assert store.create("versions/000000000001.json", b"mine"), "the same bytes are ours"
    assert not store.create("versions/000000000001.json", b"mine, and more")
    assert not store.create("versions/000000000001.json", b"")
    assert store.get("versions/000000000001.json", max_bytes=100) == b"mine"


def test_create_race_of_threads_has_one_winner(store: Store) -> None:
    for round_ in range(10):
        key, gate = f"versions/{round_:012d}.json", threading.Barrier(2)

        def race(body: bytes, key: str = key, gate: threading.Barrier = gate) -> bool:
            gate.wait()
            return store.create(key, body)

        with ThreadPoolExecutor(2) as pool:
            won = list(pool.map(race, (b"left", b"right")))
        assert sum(won) == 1
        assert store.get(key, max_bytes=10) == (b"left" if won[0] else b"right")


def test_put_stream_in_pieces(make_store: MakeStore) -> None:
    store = make_store(part_bytes=5 << 20)
    chunks = [bytes([n]) * (3 << 20) for n in range(5)]
    data = b"".join(chunks)
    assert store.put_stream("snapshots/1/model.safetensors", iter(chunks)) == (len(data), sha256(data))
    assert store.fetch("snapshots/1/model.safetensors", size=len(data), sha256=sha256(data)) == data


def test_put_stream_of_exactly_whole_pieces(make_store: MakeStore) -> None:
    store = make_store(part_bytes=5 << 20)
    data = b"ab" * (5 << 20)
    assert store.put_stream("a", [data]) == (len(data), sha256(data))
    assert store.fetch("a", size=len(data), sha256=sha256(data)) == data


def test_b093_an_exception_while_writing_stores_nothing(make_store: MakeStore) -> None:
    store = make_store(part_bytes=5 << 20)

    def broken() -> Iterator[bytes]:
        yield b"x" * (6 << 20)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        store.put_stream("data/a.bin", broken())
    with pytest.raises(NotFound):
        store.get("data/a.bin", max_bytes=1 << 30)
    assert list(store.list("")) == []
    assert store.put_stream("data/a.bin", [b"whole"]) == (5, sha256(b"whole"))


def test_list_by_literal_prefix(store: Store) -> None:
    keys = ["data/1/a", "data/1/b", "data/10/c", "data2/d", "head.json"]
    for key in keys:
        store.put(key, key.encode())
    assert sorted(e.key for e in store.list("")) == sorted(keys)
    assert sorted(e.key for e in store.list("data/")) == ["data/1/a", "data/1/b", "data/10/c"]
    assert sorted(e.key for e in store.list("data/1")) == ["data/1/a", "data/1/b", "data/10/c"]
    assert sorted(e.key for e in store.list("data/1/")) == ["data/1/a", "data/1/b"]
    assert sorted(e.key for e in store.list("data", after="data/1/a")) == ["data/1/b", "data/10/c", "data2/d"]
    assert list(store.list("nothing/")) == []
    assert {e.key: e.size for e in store.list("data2/")} == {"data2/d": 7}


def test_list_tells_times_of_the_stores_clock(store: Store) -> None:
    store.put("a", b"1")
    (entry,) = store.list("a")
    assert entry.modified is not None
    assert abs(entry.modified - datetime.now(UTC)) < timedelta(seconds=5)
    assert timedelta(seconds=-1.5) < store.clock() - entry.modified < timedelta(seconds=5)
    assert [e.key for e in store.list("")] == ["a"]


def test_delete_and_delete_again(store: Store) -> None:
    store.put("a", b"1")
    store.put("ab", b"2")
    store.delete("a")
    store.delete("a")
    store.delete("never/was")
    assert [e.key for e in store.list("")] == ["ab"]


BAD_KEYS = (
    *("../x", "/etc/hosts", "a//b", "a/../b", "", "a/", ".hidden", "a\\b", "C:/x", "a b", "x*", "a\n"),
    *("http://127.0.0.1:1/x", "s3://other/x", "file:///etc/hosts", "simplecache::file:///etc/hosts"),
)
BAD_PREFIXES = ("../", "/", "a//", "*", "a/../", "..")


def test_b172_keys_are_plain_paths(store: Store, tmp_path: Path) -> None:
    calls: list[Callable[[str], object]] = [
        lambda key: store.get(key, max_bytes=10),
        lambda key: store.fetch(key, size=1, sha256="0" * 64),
        lambda key: store.download(key, tmp_path / "x", size=1, sha256="0" * 64),
        lambda key: store.put(key, b""),
        lambda key: store.put_stream(key, [b""]),
        lambda key: store.create(key, b""),
        store.delete,
    ]
    for key in BAD_KEYS:
        for call in calls:
            with pytest.raises(Untrusted):
                call(key)
    for prefix in BAD_PREFIXES:
        with pytest.raises(Untrusted):
            list(store.list(prefix))
    assert list(store.list("")) == []


def test_b037_patterns_in_the_root_are_literal(store_url: str, make_store: MakeStore) -> None:
    """The root `run[1]/what?*` works; the neighbours that it would match as a pattern are neither read nor
    deleted.
    """
    neighbours = {
        name: make_store(f"{store_url}/{name}") for name in ("run1/whatXY", "run[1]/whatXY", "run1/what?*")
    }
    for neighbour in neighbours.values():
        neighbour.put("data/a", b"neighbour")
    store = make_store(f"{store_url}/run[1]/what?*")
    with pytest.raises(NotFound):
        store.get("data/a", max_bytes=10)
    assert list(store.list("")) == []
    store.delete("data/a")
    assert store.create("versions/1.json", b"v")
    store.put("data/a", b"own")
    assert store.put_stream("data/b", [b"own"])[0] == 3
    assert store.get("data/a", max_bytes=10) == b"own"
    assert sorted(e.key for e in store.list("data/")) == ["data/a", "data/b"]
    for key in ("data/a", "data/b", "versions/1.json"):
        store.delete(key)
    assert list(store.list("")) == []
    for neighbour in neighbours.values():
        assert neighbour.get("data/a", max_bytes=10) == b"neighbour"


def test_b136_objects_of_another_client_are_seen_at_once(store_url: str, make_store: MakeStore) -> None:
    """Two clients in one process, where fsspec shares instances and listings by default."""
    reader, writer = make_store(store_url), make_store(store_url)
    for n in range(3):
        key = f"versions/{n:012d}.json"
        with pytest.raises(NotFound):
            reader.get(key, max_bytes=10)
        assert len(list(reader.list("versions/"))) == n
        writer.create(key, b"%d" % n)
        assert reader.get(key, max_bytes=10) == b"%d" % n
        assert len(list(reader.list("versions/"))) == n + 1
        writer.put("head.json", b"%d" % n)
        assert reader.get("head.json", max_bytes=10) == b"%d" % n


def test_b141_more_objects_than_a_page_holds(
    store: Store, make_store: MakeStore, store_url: str, request: pytest.FixtureRequest
) -> None:
    """1,204 objects, more than the 1,000 of a page; the emulator, which is slow, gets pages of 7 alone."""
    count = 120 if request.node.callspec.params["store_url"] == "moto" else 1204
    keys = [f"versions/{n:012d}.json" for n in range(count)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"{}"), keys))
    assert sorted(e.key for e in store.list("versions/")) == keys
    by_sevens = make_store(store_url, list_page=7)
    assert sorted(e.key for e in by_sevens.list("versions/0000000000")) == keys[:100]
    assert sorted(e.key for e in by_sevens.list("versions/", after=keys[-20])) == keys[-19:]


def test_b150_slashes_are_normalised(store_url: str, make_store: MakeStore) -> None:
    scheme, rest = store_url.split("://")
    bucket, _, path = rest.lstrip("/").partition("/")
    lead = "/" if scheme == "file" else ""
    store = make_store(f"{store_url}/")
    store.put("a/b", b"1")
    assert make_store(store_url).get("a/b", max_bytes=1) == b"1"
    doubled = make_store(f"{scheme}://{lead}{bucket}//{path.replace('/', '//')}//")
    assert doubled.get("a/b", max_bytes=1) == b"1"
    assert doubled.url == store.url == store_url
    assert [e.key for e in doubled.list("")] == ["a/b"]


def test_probe_finds_a_usable_store_and_cleans_up(store: Store) -> None:
    result = store.probe()
    assert result.usable
    assert result.problems == ()
    assert min(result.put_latency_s, result.get_latency_s, result.write_bytes_s, result.read_bytes_s) > 0
    assert list(store.list("")) == []


def test_many_threads(store: Store) -> None:
    """Writers and readers of small and larger objects, all at once."""

    def work(n: int) -> bool:
        body = bytes([n]) * (10 + n * 30000)
        store.put(f"data/{n}", body)
        found = store.fetch(f"data/{n}", size=len(body), sha256=sha256(body))
        return found == body and store.get(f"data/{n}", max_bytes=1 << 30) == body

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(48)))
    assert len(list(store.list("data/"))) == 48
