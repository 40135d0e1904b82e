"""File systems that are not run for real here: Google Cloud Storage and Azure by fakes, and broken ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from weightcast.manifest.store import Pacing, Store, StoreSettings, open_store
from weightcast.manifest.store.generic import GenericBackend
from weightcast.schemas.errors import Corrupt, NotFound, StorageError

from ..fakegcs import FakeGcs, fake_gcs

QUICK = Pacing(sleep=lambda _: None)


@pytest.fixture
def gcs() -> Iterator[FakeGcs]:
    with fake_gcs() as server:
        yield server


@pytest.fixture
def gcs_store(gcs: FakeGcs) -> Store:
    options = {"endpoint_url": gcs.endpoint_url, "token": "anon"}
    return open_store("gs://bucket/run", settings=StoreSettings(storage_options=options), pacing=QUICK)


def test_gcs_objects_and_listing(gcs_store: Store, gcs: FakeGcs) -> None:
    data = b"\r\n" + bytes(range(256)) * 40000
    gcs_store.put("data/a", data)
    assert gcs_store.fetch("data/a", size=len(data), sha256=hashlib.sha256(data).hexdigest()) == data
    assert gcs_store.get("data/a", max_bytes=1 << 30) == data
    gcs_store.put("head.json", b"{}")
    assert gcs_store.get("head.json", max_bytes=10) == b"{}"
    assert {e.key: e.size for e in gcs_store.list("")} == {"data/a": len(data), "head.json": 2}
    assert gcs_store.clock() is not None
    gcs_store.delete("data/a")
    gcs_store.delete("data/a")
    with pytest.raises(NotFound):
        gcs_store.get("data/a", max_bytes=1)
    assert gcs.objects["run/head.json"]["cacheControl"] == "no-cache"
    assert gcs.objects["run/head.json"]["contentType"] == "application/octet-stream"


def test_gcs_create_only(gcs_store: Store) -> None:
    assert gcs_store.create("versions/1.json", b"mine")
    assert not gcs_store.create("versions/1.json", b"theirs")
    assert gcs_store.create("versions/1.json", b"mine")
    assert gcs_store.get("versions/1.json", max_bytes=10) == b"mine"


def test_b084_gcs_lost_reply(gcs_store: Store, gcs: FakeGcs) -> None:
    gcs.lose = 1
    assert gcs_store.create("versions/1.json", b"mine")
    gcs.lose = 1
    assert not gcs_store.create("versions/1.json", b"theirs")
    assert gcs_store.get("versions/1.json", max_bytes=10) == b"mine"


def test_gcs_stream_and_its_end_by_an_exception(gcs_store: Store) -> None:
    chunks = [bytes([n]) * (3 << 20) for n in range(4)]
    data = b"".join(chunks)
    digest = hashlib.sha256(data).hexdigest()
    assert gcs_store.put_stream("data/a", chunks) == (len(data), digest)
    assert gcs_store.fetch("data/a", size=len(data), sha256=digest) == data

    def broken() -> Iterator[bytes]:
        yield b"x" * (9 << 20)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        gcs_store.put_stream("data/b", broken())
    with pytest.raises(NotFound):
        gcs_store.get("data/b", max_bytes=1)


def test_gcs_probe(gcs_store: Store, gcs: FakeGcs) -> None:
    assert gcs_store.probe().usable
    assert gcs.objects == {}


def test_gcs_forbidden_is_not_missing(gcs_store: Store, gcs: FakeGcs) -> None:
    gcs_store.put("a", b"1")
    gcs.fail = [403]
    with pytest.raises(StorageError):
        gcs_store.get("a", max_bytes=1)
    gcs.fail = [403]
    with pytest.raises(StorageError):
        list(gcs_store.list(""))


class Recorder(MemoryFileSystem):  # type: ignore[misc]
    """Notes what is asked of `pipe_file`, as adlfs and gcsfs would get it, and answers as they do."""

    protocol = "recorder"
    cachable = False

    def __init__(self) -> None:
        super().__init__(global_store=False)
        self.calls: list[dict[str, Any]] = []

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.calls.append({"mode": mode, **kwargs})
        super().pipe_file(path, value, mode=mode)


def test_azure_is_asked_for_its_precondition() -> None:
    fs = Recorder()
    backend = GenericBackend(fs, "az")
    backend.create("/c/versions/1.json", b"1")
    with pytest.raises(FileExistsError):
        backend.create("/c/versions/1.json", b"2")
    backend.write("/c/data/a", b"1")
    neutral = {"content_type": "application/octet-stream"}
    assert fs.calls == [
        {"mode": "create", "content_settings": {**neutral, "cache_control": "no-cache"}},
        {"mode": "create", "content_settings": {**neutral, "cache_control": "no-cache"}},
        {"mode": "overwrite", "content_settings": neutral},
    ]


def test_azure_errors_are_understood() -> None:
    from azure.core.exceptions import HttpResponseError, ServiceRequestError, ServiceResponseError

    backend = GenericBackend(Recorder(), "az")
    busy = HttpResponseError("busy")
    busy.status_code = 503
    forbidden = HttpResponseError("no")
    forbidden.status_code = 403
    found = [
        backend.classify(e).kind.value
        for e in (busy, forbidden, ServiceRequestError("x"), ServiceResponseError("y"))
    ]
    assert found == ["transient", "refused", "transient", "transient"]


class Broken(Recorder):
    """Every look at an object fails with `error`, while version 6 exists."""

    error: Exception | None = None

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    def info(self, path: str, **kwargs: Any) -> Any:
        self._fail()
        return super().info(path, **kwargs)

    def exists(self, path: str, **kwargs: Any) -> bool:
        try:
            self.info(path)
        except (OSError, ValueError):
            return False  # what fsspec does with every error
        return True

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._fail()
        return bytes(super().cat_file(path, start=start, end=end))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._fail()
        super().pipe_file(path, value, mode=mode, **kwargs)


@pytest.mark.parametrize(
    "error", [PermissionError("denied"), ConnectionError("reset"), OSError("something else")]
)
@pytest.mark.parametrize("single_writer", [False, True])
def test_b144_no_error_is_taken_for_an_empty_place(error: Exception, single_writer: bool) -> None:
    fs = Broken()
    settings = StoreSettings(single_writer=single_writer, deadline_s=0.01)
    store = open_store("memory://run", filesystem=fs, settings=settings, pacing=QUICK)
    assert store.create("versions/6.json", b"theirs")
    writes = len(fs.calls)
    fs.error = error
    with pytest.raises(StorageError):
        store.get("versions/6.json", max_bytes=10)
    with pytest.raises(StorageError):
        store.create("versions/6.json", b"mine")
    fs.error = None
    assert store.get("versions/6.json", max_bytes=10) == b"theirs"
    assert len(fs.calls) == writes


class Framing(Recorder):
    """Stores the framing of chunked bodies as if it belonged to them."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, b"%x\r\n%s\r\n0\r\n\r\n" % (len(value), value), mode=mode)


def test_b148_stored_framing_is_found_by_the_probe() -> None:
    result = open_store("memory://run", filesystem=Framing(), pacing=QUICK).probe()
    assert not result.usable
    assert not result.bodies_intact
    assert any("when_required" in problem for problem in result.problems)


class Careless(Recorder):
    """Ignores the condition, as some S3-compatible servers do."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode="overwrite")


def test_a_store_that_ignores_conditions_is_found_by_the_probe() -> None:
    store = open_store("memory://run", filesystem=Careless(), pacing=QUICK)
    result = store.probe()
    assert (result.create_only, result.usable) == (False, False)
    assert result.bodies_intact
    alone = open_store("memory://run", filesystem=Careless(), settings=StoreSettings(single_writer=True))
    assert alone.create("v", b"1")
    assert not alone.create("v", b"2")
    assert not alone.probe().create_only, "what the user states does not hide what the store does"


class Shrinking(MemoryFileSystem):  # type: ignore[misc]
    """Loses the end of large writes."""

    protocol = "shrinking"
    cachable = False

    def info(self, path: str, **kwargs: Any) -> Any:
        found = super().info(path, **kwargs)
        return {**found, "size": found["size"] - 1}


def test_b133_a_large_object_of_another_size_than_sent_is_an_error() -> None:
    store = open_store("memory://run", filesystem=Shrinking(global_store=False), pacing=QUICK)
    with pytest.raises(Corrupt, match="expected 5 bytes to be stored, found 4"):
        store.put_stream("a", [b"12345"])
