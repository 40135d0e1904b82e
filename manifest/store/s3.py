"""S3 through s3fs: one request a call, whole bodies in one stream, our own multipart upload and listing
pages.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from typing import Any, Final

import aiohttp
import s3fs
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    TokenRetrievalError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError
from fsspec.asyn import sync

from .backend import Page
from .errors import Failure, Kind, classify, http_answer
from .types import PIECE_BYTES, Entry, StoreSettings
from .url import Location

SINGLE_PUT_BYTES: Final = 5 << 30
"""Largest body of one PUT."""

KEEP_ALIVE_S: Final = 60.0
"""A connection is kept for so long after its last request: a new one costs a round trip, or three with TLS, and
starts slowly. The client's own 12 s are less than many training steps take."""

_LOST = (BotoConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError, aiohttp.ClientError)
_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError, TokenRetrievalError)


def s3_filesystem(location: Location, settings: StoreSettings) -> s3fs.S3FileSystem:
    """An S3 file system without caches and without retries of its own."""
    config: dict[str, Any] = {
        "retries": {"max_attempts": 0},
        "connect_timeout": settings.connect_timeout_s,
        "read_timeout": settings.read_timeout_s,
        "max_pool_connections": 64,
        "connector_args": {"keepalive_timeout": KEEP_ALIVE_S},
    }
    if settings.checksum == "when_required":
        config["request_checksum_calculation"] = "when_required"
        config["response_checksum_validation"] = "when_required"
    options: dict[str, Any] = {"client_kwargs": {}, "config_kwargs": config}
    if settings.endpoint_url:
        options["endpoint_url"] = settings.endpoint_url
    if settings.region:
        options["client_kwargs"]["region_name"] = settings.region
    for name, value in settings.storage_options.items():
        nested = options.get(name)
        options[name] = (
            {**nested, **value} if isinstance(nested, dict) and isinstance(value, Mapping) else value
        )
    _set_addressing(options, location, settings)
    options |= {"use_listings_cache": False, "skip_instance_cache": True, "max_concurrency": 1}
    fs = s3fs.S3FileSystem(**options)
    fs.retries = 1
    return fs


def _set_addressing(options: dict[str, Any], location: Location, settings: StoreSettings) -> None:
    """Path style for custom endpoints, which seldom have a host name a bucket, and for dots, which break TLS
    names.
    """
    style: str = settings.addressing
    if style == "auto":
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL")
        custom = (
            options.get("endpoint_url")
            or options["client_kwargs"].get("endpoint_url")
            or any(map(os.environ.get, names))
        )
        style = "path" if custom or "." in location.bucket else "auto"
    if style != "auto":
        s3 = dict(options["config_kwargs"].get("s3") or {})
        options["config_kwargs"]["s3"] = {"addressing_style": style} | s3


class S3Upload:
    """A multipart upload. A single piece becomes a plain PUT."""

    repeatable = True

    def __init__(self, fs: s3fs.S3FileSystem, path: str) -> None:
        self._fs = fs
        bucket, key, _ = fs.split_path(path)
        self._where = {"Bucket": bucket, "Key": key}
        self._path = path
        self._upload_id = ""
        self._etags: dict[int, str] = {}
        self._completing = False

    def write(self, number: int, data: bytes) -> None:
        """Send a part; sending it again replaces it."""
        if not self._upload_id:
            started = self._fs.call_s3("create_multipart_upload", **self._where, ContentType=CONTENT_TYPE)
            self._upload_id = str(started["UploadId"])
        part = self._fs.call_s3(
            "upload_part", **self._where, UploadId=self._upload_id, PartNumber=number + 1, Body=data
        )
        self._etags[number + 1] = str(part["ETag"])

    def finish(self, number: int, data: bytes) -> None:
        """Complete the upload. If an earlier try did so and its answer was lost, the upload is no longer
        known.
        """
        if not self._upload_id:
            self._fs.pipe_file(self._path, data, chunksize=SINGLE_PUT_BYTES, ContentType=CONTENT_TYPE)
            return
        if data and number + 1 not in self._etags:
            self.write(number, data)
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in sorted(self._etags.items())]
        again, self._completing = self._completing, True
        try:
            self._fs.call_s3(
                "complete_multipart_upload",
                **self._where,
                UploadId=self._upload_id,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError as error:
            answer = http_answer(error)
            if not (again and answer and answer.code == "NoSuchUpload"):
                raise

    def abort(self) -> None:
        """Drop the parts."""
        if self._upload_id:
            self._fs.call_s3("abort_multipart_upload", **self._where, UploadId=self._upload_id)


CONTENT_TYPE: Final = "application/octet-stream"


BULK_BYTES: Final = 1 << 16
"""Bodies from here on are sent over the connections for bulk."""


class S3Backend:
    """An S3 or S3-compatible store.

    Args:
        fs: for small requests.
        bulk: for those that carry many bytes, over connections of its own: on a long link one that only saw small
            requests starts slowly, and one that waits for the answer to a poll is not there for a shard.
    """

    errors: tuple[type[Exception], ...] = (
        OSError,
        ClientError,
        BotoCoreError,
        ResponseParserError,
        aiohttp.ClientError,
    )

    def __init__(self, fs: s3fs.S3FileSystem, bulk: s3fs.S3FileSystem, settings: StoreSettings) -> None:
        self.fs = fs
        self._bulk = bulk
        self._page_size = settings.list_page

    def classify(self, error: Exception) -> Failure:
        """By HTTP status, then by botocore's and aiohttp's types."""
        if http_answer(error) is not None:
            return classify(error)
        if isinstance(error, FlexibleChecksumError):
            return Failure(Kind.DAMAGED, "bytes that fail the store's own checksum")
        if isinstance(error, _CREDENTIALS):
            return Failure(
                Kind.EXPIRED,
                f"no credentials ({type(error).__name__})",
                "set AWS_* variables, a profile, or a role",
            )
        if isinstance(error, _LOST):
            return Failure(Kind.TRANSIENT, type(error).__name__)
        return classify(error)

    def read(self, path: str, start: int, stop: int | None = None, *, bulk: bool = False) -> Generator[bytes]:
        """One GET, streamed; the client checks length and, for a whole object, the stored checksum."""
        fs = self._bulk if bulk else self.fs
        body, piece = sync(self.fs.loop, self._open, fs, path, start, stop)
        try:
            while piece:
                yield piece
                if len(piece) < PIECE_BYTES:
                    return
                piece = sync(self.fs.loop, self._fill, body)
        finally:
            sync(self.fs.loop, self._close, body)

    async def _open(
        self, fs: s3fs.S3FileSystem, path: str, start: int, stop: int | None
    ) -> tuple[Any, bytes]:
        bucket, key, _ = fs.split_path(path)
        last = "" if stop is None else stop - 1
        extra = {"Range": f"bytes={start}-{last}"} if start or stop is not None else {}
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **extra)
        body = answer["Body"]
        try:
            return body, await self._fill(body)
        except BaseException:
            body.close()
            raise

    @staticmethod
    async def _fill(body: Any) -> bytes:
        """A full piece, or what is left."""
        pieces, room = [], PIECE_BYTES
        while room and (piece := await body.read(room)):
            pieces.append(piece)
            room -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @staticmethod
    async def _close(body: Any) -> None:
        body.close()

    def write(self, path: str, data: bytes) -> None:
        """One PUT."""
        self._put(path, data, "overwrite")

    def create(self, path: str, data: bytes) -> None:
        """One PUT with `If-None-Match: *`; never multipart, where the condition is racy or ignored."""
        self._put(path, data, "create")

    def _put(self, path: str, data: bytes, mode: str) -> None:
        cache = {"CacheControl": "no-cache"} if path.endswith(".json") else {}
        fs = self._bulk if len(data) >= BULK_BYTES else self.fs
        fs.pipe_file(
            path, bytes(data), chunksize=SINGLE_PUT_BYTES, mode=mode, ContentType=CONTENT_TYPE, **cache
        )

    def upload(self, path: str) -> S3Upload:
        """A multipart upload."""
        return S3Upload(self._bulk, path)

    def size(self, path: str) -> int:
        """One HEAD."""
        bucket, key, _ = self.fs.split_path(path)
        return int(self.fs.call_s3("head_object", Bucket=bucket, Key=key)["ContentLength"])

    def page(self, root: str, prefix: str, after: str, token: str | None) -> Page:
        """One request of ListObjectsV2."""
        bucket, folder, _ = self.fs.split_path(root)
        base = f"{folder}/" if folder else ""
        more: dict[str, Any] = {"StartAfter": base + after} if after else {}
        if token is not None:
            more["ContinuationToken"] = token
        answer = self.fs.call_s3(
            "list_objects_v2", Bucket=bucket, Prefix=base + prefix, MaxKeys=self._page_size, **more
        )
        entries = [
            Entry(item["Key"][len(base) :], int(item["Size"]), item.get("LastModified"))
            for item in answer.get("Contents", [])
        ]
        return Page(entries, str(answer["NextContinuationToken"]) if answer.get("IsTruncated") else None)

    def delete(self, path: str) -> None:
        """One DELETE, which S3 answers alike for a missing key."""
        self.fs.rm_file(path)
