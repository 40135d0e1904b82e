"""A real S3 server behind a proxy that fails."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from weightcast.manifest.store import Pacing, Store, StoreSettings, open_store
from weightcast.schemas.errors import Corrupt, NotFound, StorageError, Untrusted

from ..faultproxy import Fault, FaultProxy
from ..servers import S3Server

Open = Callable[..., Store]


class Clock:
    """Virtual time: sleeping moves it. `naps` holds every sleep; `chance` is what random() gives."""

    def __init__(self, chance: float = 0.5) -> None:
        self.time = 0.0
        self.naps: list[float] = []
        self.chance = chance
        self.on_sleep: Callable[[], object] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.time += seconds
        self.on_sleep()

    @property
    def pacing(self) -> Pacing:
        return Pacing(self.sleep, lambda: self.chance, lambda: self.time)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_faulty(s3_url: str, fault_proxy: FaultProxy, clock: Clock) -> Open:
    """Opens the test's root through the proxy, in virtual time."""

    def open_it(**settings: object) -> Store:
        given = StoreSettings(endpoint_url=fault_proxy.endpoint_url, **settings)  # type: ignore[arg-type]
        return open_store(s3_url, settings=given, pacing=clock.pacing)

    return open_it


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def methods(proxy: FaultProxy) -> list[str]:
    return [line.split(" ")[0] for line in proxy.requests]


MANIFEST = "versions/000000000006.json"


def test_b084_a_lost_reply_to_a_create_is_recognised_as_ours(
    open_faulty: Open, fault_proxy: FaultProxy
) -> None:
    store = open_faulty()
    fault = fault_proxy.add(Fault("lost", match="^PUT .*versions", times=1))
    assert store.create(MANIFEST, b"mine")
    assert fault.hits == 1
    assert methods(fault_proxy)[-1] == "GET", "read back"
    assert not store.create(MANIFEST, b"theirs")
    assert store.get(MANIFEST, max_bytes=10) == b"mine"


def test_b084_the_retry_meets_our_own_object(open_faulty: Open, fault_proxy: FaultProxy) -> None:
    """The reading back fails too, so the create is sent again and answered with 412."""
    store = open_faulty()
    fault_proxy.add(Fault("lost", match="^PUT .*versions", times=3))
    fault_proxy.add(Fault("reset", match="^GET .*versions", times=2))
    assert store.create(MANIFEST, b"mine")
    assert methods(fault_proxy).count("PUT") >= 2


def test_b084_a_lost_reply_to_a_lost_race_is_not_ours(open_faulty: Open, fault_proxy: FaultProxy) -> None:
    store = open_faulty()
    assert store.create(MANIFEST, b"theirs")
    fault_proxy.add(Fault("lost", match="^PUT .*versions", times=1))
    assert not store.create(MANIFEST, b"mine")


@pytest.mark.parametrize(
    ("status", "code"), [(409, "ConditionalRequestConflict"), (500, "InternalError"), (503, "SlowDown")]
)
def test_a_create_is_sent_again_until_it_is_settled(
    open_faulty: Open, fault_proxy: FaultProxy, status: int, code: str
) -> None:
    store = open_faulty()
    fault_proxy.add(Fault("status", match="^PUT", status=status, code=code, times=3))
    assert store.create(MANIFEST, b"mine")
    assert methods(fault_proxy).count("PUT") == 4
    assert store.get(MANIFEST, max_bytes=10) == b"mine"


def test_b085_an_unsettled_create_says_so_and_is_ours_when_tried_again(
    open_faulty: Open, fault_proxy: FaultProxy, clock: Clock
) -> None:
    store = open_faulty(deadline_s=20)
    fault_proxy.add(Fault("lost", match="^(PUT|GET)"))
    with pytest.raises(StorageError, match="outcome unknown") as caught:
        store.create(MANIFEST, b"mine")
    assert MANIFEST in str(caught.value)
    assert 10 < clock.time <= 20
    assert "DELETE" not in methods(fault_proxy)
    fault_proxy.clear()
    assert open_faulty().create(MANIFEST, b"mine"), "after a restart it is found as its own"
    assert store.get(MANIFEST, max_bytes=10) == b"mine"


def test_a_refused_create_is_not_in_doubt(open_faulty: Open, fault_proxy: FaultProxy) -> None:
    store = open_faulty()
    fault_proxy.add(Fault("status", match="^PUT", status=403, code="AccessDenied"))
    with pytest.raises(StorageError, match="permission denied") as caught:
        store.create(MANIFEST, b"mine")
    assert "unknown" not in str(caught.value)
    assert methods(fault_proxy) == ["PUT", "GET"], "seen to be absent, not tried again"


def test_a_create_refused_after_a_lost_reply_is_in_doubt(open_faulty: Open, fault_proxy: FaultProxy) -> None:
    store = open_faulty()
    fault_proxy.add(Fault("lost", match="^PUT", times=1))
    fault_proxy.add(Fault("status", match="^(PUT|GET)", status=403, code="AccessDenied"))
    with pytest.raises(StorageError, match="outcome unknown"):
        store.create(MANIFEST, b"mine")


def test_b095_a_refused_upload_names_the_object_and_is_not_repeated(
    open_faulty: Open, fault_proxy: FaultProxy
) -> None:
    store = open_faulty()
    store.put("data/1", b"shard 1")
    fault_proxy.clear()
    fault_proxy.add(Fault("status", match="^PUT .*data/2", status=403, code="AccessDenied"))
    with pytest.raises(StorageError, match=r"data/2: .*permission denied \(HTTP 403 AccessDenied\)"):
        store.put("data/2", b"shard 2")
    assert methods(fault_proxy) == ["PUT"]


@pytest.mark.parametrize("checksum", ["auto", "when_required"])
def test_b128_a_flipped_bit_is_fetched_anew_once(
    open_faulty: Open, fault_proxy: FaultProxy, tmp_path: Path, checksum: str
) -> None:
    store, data = open_faulty(checksum=checksum), bytes(range(250)) * 12000
    store.put("data/a", data)
    for after in (0, 100, 1_500_000, len(data) - 1):
        fault_proxy.clear()
        fault_proxy.add(Fault("flip", match="^GET", after=after, times=1))
        assert store.fetch("data/a", size=len(data), sha256=sha256(data)) == data
        fault_proxy.clear()
        fault_proxy.add(Fault("flip", match="^GET", after=after))
        with pytest.raises(Corrupt, match="data/a"):
            store.download("data/a", tmp_path / "a", size=len(data), sha256=sha256(data))
        assert methods(fault_proxy) == ["GET", "GET"]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("action", ["truncate", "reset"])
def test_b130_a_short_body_is_continued_where_it_broke(
    open_faulty: Open, fault_proxy: FaultProxy, tmp_path: Path, action: str
) -> None:
    store, data = open_faulty(), bytes(range(250)) * 12000
    store.put("data/a", data)
    fault_proxy.clear()
    ranges: list[Fault] = [fault_proxy.add(Fault(action, match="^GET", after=len(data) - 10, times=1))]  # type: ignore[arg-type]
    store.download("data/a", tmp_path / "a", size=len(data), sha256=sha256(data))
    assert (tmp_path / "a").read_bytes() == data
    assert ranges[0].hits == 1
    assert methods(fault_proxy) == ["GET", "GET"]


def test_b130_a_body_that_always_ends_early_is_never_a_file(
    open_faulty: Open, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    store, data = open_faulty(max_attempts=3), b"x" * 1000
    store.put("data/a", data)
    fault_proxy.add(Fault("truncate", match="^GET", after=990))
    with pytest.raises(StorageError, match="data/a"):
        store.download("data/a", tmp_path / "a", size=1000, sha256=sha256(data))
    assert list(tmp_path.iterdir()) == []


def test_a_small_document_cut_short_is_read_again(open_faulty: Open, fault_proxy: FaultProxy) -> None:
    store = open_faulty()
    store.put("head.json", b"0123456789")
    fault_proxy.add(Fault("truncate", match="^GET", after=5, times=2))
    assert store.get("head.json", max_bytes=100) == b"0123456789"


def test_a_stalled_body_is_continued(open_faulty: Open, fault_proxy: FaultProxy) -> None:
    store, data = open_faulty(read_timeout_s=0.4), b"0123456789" * 300000
    store.put("data/a", data)
    fault_proxy.add(Fault("stall", match="^GET", after=1_200_000, times=1))
    assert store.fetch("data/a", size=len(data), sha256=sha256(data)) == data


@pytest.mark.parametrize("match", ["^PUT .*partNumber=2", "^POST .*uploadId", "^POST .*uploads"])
def test_b133_a_lost_reply_within_a_large_upload_changes_nothing(
    open_faulty: Open, fault_proxy: FaultProxy, match: str
) -> None:
    store = open_faulty(part_bytes=5 << 20)
    chunks = [bytes([n]) * (4 << 20) for n in range(4)]
    data = b"".join(chunks)
    fault = fault_proxy.add(Fault("lost", match=match, times=1))
    assert store.put_stream("data/a", chunks) == (len(data), sha256(data))
    assert fault.hits == 1
    assert store.fetch("data/a", size=len(data), sha256=sha256(data)) == data


def test_b093_a_failed_large_upload_leaves_nothing(open_faulty: Open, fault_proxy: FaultProxy) -> None:
    store = open_faulty(part_bytes=5 << 20)
    fault_proxy.add(Fault("status", match="^PUT .*partNumber=2", status=403, code="AccessDenied"))
    with pytest.raises(StorageError, match="data/a"):
        store.put_stream("data/a", [b"x" * (12 << 20)])
    assert methods(fault_proxy)[-1] == "DELETE", "the upload is aborted"
    with pytest.raises(NotFound):
        store.get("data/a", max_bytes=1)


def test_b140_a_recoded_body_is_refused_and_transcoding_is_named(
    open_faulty: Open, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    store, plain = open_faulty(), b"0123456789" * 100
    packed = gzip.compress(plain)
    store.put("data/a", packed)
    fault_proxy.add(Fault("replace", match="^GET", body=plain))
    with pytest.raises(Corrupt, match="transcoding"):
        store.fetch("data/a", size=len(packed), sha256=sha256(packed))
    with pytest.raises(Corrupt, match="transcoding"):
        store.download("data/a", tmp_path / "a", size=len(packed), sha256=sha256(packed))


@pytest.mark.parametrize(
    ("status", "headers"), [(503, {}), (503, {"Retry-After": "2"}), (429, {"Retry-After": "1"})]
)
def test_b142_every_third_request_is_refused_for_load(
    open_faulty: Open, fault_proxy: FaultProxy, clock: Clock, status: int, headers: dict[str, str]
) -> None:
    store = open_faulty()
    fault = fault_proxy.add(Fault("status", every=3, status=status, headers=headers))
    for n in range(10):
        store.put(f"data/{n}", b"%d" % n)
        assert store.create(f"versions/{n}.json", b"%d" % n)
        assert store.get(f"data/{n}", max_bytes=9) == b"%d" % n
    assert len(list(store.list("data/"))) == 10
    assert fault.hits >= 10
    assert len(clock.naps) == fault.hits
    assert min(clock.naps) >= float(headers.get("Retry-After", 0))


def test_b142_after_the_limit_there_is_a_clear_error_and_the_next_try_works(
    open_faulty: Open, fault_proxy: FaultProxy, clock: Clock
) -> None:
    clock.chance = 0.999
    store = open_faulty(max_attempts=10, deadline_s=60)
    fault_proxy.add(Fault("status"))
    with pytest.raises(StorageError, match=r"HTTP 503 SlowDown after 10 tries") as caught:
        store.put("data/a", b"1")
    assert caught.value.retryable
    assert len(fault_proxy.requests) == 10
    assert clock.naps == pytest.approx([0.0999, 0.1998, 0.3996, 0.7992, 1.5984, 3.1968, 4.995, 4.995, 4.995])
    fault_proxy.clear()
    store.put("data/a", b"1")
    assert store.get("data/a", max_bytes=1) == b"1"


def test_b142_time_is_bounded_too(open_faulty: Open, fault_proxy: FaultProxy, clock: Clock) -> None:
    clock.chance = 0.999
    store = open_faulty(max_attempts=1000, deadline_s=60)
    fault_proxy.add(Fault("status"))
    with pytest.raises(StorageError):
        store.put("data/a", b"1")
    assert 50 < clock.time <= 60
    with pytest.raises(StorageError, match="outcome unknown"):
        store.create("versions/1.json", b"1")
    assert clock.time <= 120
    fault_proxy.clear()
    fault_proxy.add(Fault("status", headers={"Retry-After": "61"}))
    before = clock.time
    with pytest.raises(StorageError):
        store.put("data/a", b"1")
    assert clock.time == before, "a wait that does not fit is not begun"


def test_full_jitter(open_faulty: Open, fault_proxy: FaultProxy, clock: Clock) -> None:
    clock.chance = 0.0
    store = open_faulty()
    fault_proxy.add(Fault("status", times=5))
    store.put("data/a", b"1")
    assert clock.naps == [0.0] * 5


def test_a_server_that_is_not_there(s3_url: str, clock: Clock) -> None:
    settings = StoreSettings(endpoint_url="http://127.0.0.1:9", max_attempts=3)
    store = open_store(s3_url, settings=settings, pacing=clock.pacing)
    with pytest.raises(StorageError, match="EndpointConnectionError after 3 tries"):
        store.get("a", max_bytes=1)
    with pytest.raises(StorageError):
        list(store.list(""))


def test_b141_a_failing_page_fails_the_listing_or_is_asked_again(
    open_faulty: Open, fault_proxy: FaultProxy
) -> None:
    store = open_faulty(list_page=4, max_attempts=3)
    for n in range(10):
        store.put(f"a/{n}", b"")
    fault_proxy.add(Fault("status", match="^GET .*continuation-token", times=2))
    assert len(list(store.list("a/"))) == 10
    fault_proxy.add(Fault("status", match="^GET .*continuation-token"))
    with pytest.raises(StorageError):
        list(store.list("a/"))


def test_b173_an_endless_body_is_cut_off(open_faulty: Open, fault_proxy: FaultProxy, tmp_path: Path) -> None:
    store, data = open_faulty(), b"x" * 1000
    store.put("data/a", data)
    fault = fault_proxy.add(Fault("endless", match="^GET"))
    with pytest.raises(Corrupt, match="more than 1000 bytes"):
        store.download("data/a", tmp_path / "a", size=1000, sha256=sha256(data))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Corrupt, match="more than 1000 bytes"):
        store.fetch("data/a", size=1000, sha256=sha256(data))
    with pytest.raises(Untrusted, match="at most 1000 bytes"):
        store.get("data/a", max_bytes=1000)
    assert fault.hits == 5
    assert fault.after < 5 * (1 << 20) + 5 * (16 << 20), (
        "a piece, and what the sockets hold, for each request"
    )


def credentials(path: Path, key: str, secret: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")


@pytest.mark.parametrize(
    ("status", "code"), [(403, "ExpiredToken"), (400, "ExpiredToken"), (403, "InvalidAccessKeyId")]
)
def test_b146_expired_credentials_are_named_and_new_ones_picked_up(
    open_faulty: Open,
    fault_proxy: FaultProxy,
    seaweedfs: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    clock: Clock,
    status: int,
    code: str,
) -> None:
    path = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    credentials(path, "oldkey", "oldsecret")
    fault_proxy.add(Fault("status", match="Credential=oldkey", status=status, code=code))
    store = open_faulty()
    with pytest.raises(StorageError, match="expired") as caught:
        store.put("data/a", b"1")
    assert "oldsecret" not in str(caught.value)
    with pytest.raises(StorageError, match="expired"):
        store.get("data/a", max_bytes=1)
    credentials(path, seaweedfs.key, seaweedfs.secret)
    store.put("data/a", b"1")
    assert store.get("data/a", max_bytes=1) == b"1"

    credentials(path, "oldkey", "oldsecret")
    late = open_faulty()
    clock.on_sleep = lambda: credentials(path, seaweedfs.key, seaweedfs.secret)
    assert late.create("versions/1.json", b"1"), "renewed between two tries of one call"


def test_b148_refused_checksum_headers_name_the_setting(open_faulty: Open, fault_proxy: FaultProxy) -> None:
    fault_proxy.add(
        Fault(
            "status",
            match="^(x-amz-sdk-checksum-algorithm|x-amz-checksum-.*|content-encoding: aws-chunked)",
            status=400,
            code="InvalidArgument",
        )
    )
    for write in (
        lambda s: s.put("data/a", b"1"),
        lambda s: s.create("v.json", b"1"),
        lambda s: s.put_stream("b", [b"1"]),
    ):
        with pytest.raises(StorageError, match="set checksum to when_required"):
            write(open_faulty())
    store = open_faulty(checksum="when_required", part_bytes=5 << 20)
    store.put("data/a", b"1")
    assert store.create("v.json", b"1")
    assert store.put_stream("b", [b"1" * (6 << 20)])[0] == 6 << 20
    assert store.probe().usable


@pytest.mark.parametrize("way", ["setting", "environment", "storage_options"])
def test_b149_a_bucket_with_dots_at_a_custom_endpoint(
    way: str,
    seaweedfs: S3Server,
    fault_proxy: FaultProxy,
    aws: Callable[[S3Server], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    aws(seaweedfs)
    seaweedfs.make_bucket("my.bucket.v1")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    settings = StoreSettings()
    if way == "setting":
        settings = StoreSettings(endpoint_url=fault_proxy.endpoint_url, region="us-east-1")
    elif way == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL", fault_proxy.endpoint_url)
    else:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        options = {"endpoint_url": fault_proxy.endpoint_url, "key": seaweedfs.key, "secret": seaweedfs.secret}
        settings = StoreSettings(storage_options=options)
    caplog.set_level("DEBUG", logger="weightcast")
    store = open_store(f"s3://my.bucket.v1/{tmp_path.name}{way}", settings=settings)
    store.put("a", b"1")
    assert [e.key for e in store.list("")] == ["a"]
    store.delete("a")
    assert len(fault_proxy.requests) == 3
    assert all(re.match(r"\w+ /my\.bucket\.v1[/?]", line) for line in fault_proxy.requests)
    fault_proxy.add(Fault("status", status=403, code="SignatureDoesNotMatch"))
    with pytest.raises(StorageError) as caught:
        store.put("a", b"1")
    shown = f"{caught.value} {caught.value!r} {store!r} {settings!r} {caplog.text}"
    assert seaweedfs.secret not in shown
    assert seaweedfs.key not in shown


def test_a_missing_bucket_is_no_missing_object(
    moto_server: S3Server, aws: Callable[[S3Server], None]
) -> None:
    aws(moto_server)
    store = open_store("s3://no-such-bucket/x")
    for call in (
        lambda: store.get("a", max_bytes=1),
        lambda: store.put("a", b""),
        lambda: store.create("a", b"1"),
    ):
        with pytest.raises(StorageError, match="bucket"):
            call()


def test_b138_documents_are_stored_uncached_and_bodies_neutral(
    moto_server: S3Server, aws: Callable[[S3Server], None]
) -> None:
    import boto3

    aws(moto_server)
    store = open_store(f"s3://{moto_server.bucket}/b138")
    store.put("head.json", b"{}")
    store.create("versions/1.json", b"{}")
    store.put("data/a.arrow", b"1")
    store.put_stream("data/b.zst", [b"1"])
    client = boto3.client("s3", endpoint_url=moto_server.endpoint_url)
    found = {}
    for key in ("head.json", "versions/1.json", "data/a.arrow", "data/b.zst"):
        head = client.head_object(Bucket=moto_server.bucket, Key=f"b138/{key}")
        assert head["ContentType"] == "application/octet-stream"
        assert not head.get("ContentEncoding")
        found[key] = head.get("CacheControl")
    assert found == {
        "head.json": "no-cache",
        "versions/1.json": "no-cache",
        "data/a.arrow": None,
        "data/b.zst": None,
    }


def test_an_empty_poll_is_one_request(open_faulty: Open, fault_proxy: FaultProxy) -> None:
    store = open_faulty()
    store.put("a", b"1")
    fault_proxy.clear()
    with pytest.raises(NotFound):
        store.get(MANIFEST, max_bytes=100)
    assert methods(fault_proxy) == ["GET"]
    store.get("a", max_bytes=100)
    assert store.create("b", b"1")
    store.put("c", b"1")
    list(store.list(""))
    assert methods(fault_proxy) == ["GET", "GET", "PUT", "PUT", "GET"]


def test_many_bytes_go_over_connections_that_small_requests_leave_alone(
    open_faulty: Open, fault_proxy: FaultProxy
) -> None:
    """One that only saw polls would start slowly on a long link, and one that waits for a poll is not there."""
    store = open_faulty()
    large, small = bytes(1 << 20), b"{}"
    store.put("data/1", large)
    store.put("versions/1.json", small)
    store.create("versions/2.json", small)
    for _ in range(3):
        store.fetch("data/1", size=len(large), sha256=sha256(large))
        store.get("versions/1.json", max_bytes=100)
        store.fetch_part("data/1", start=0, stop=1 << 19)
        list(store.list("data/"))
    used: dict[bool, set[int]] = {True: set(), False: set()}
    for line, caller in zip(fault_proxy.requests, fault_proxy.callers, strict=True):
        used["/data/1" in line].add(caller)
    assert len(used[True]) == len(used[False]) == 1, "and they are kept"
    assert used[True].isdisjoint(used[False])
