"""The store seam: everything that touches shared storage goes through `Store`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Protocol

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from weightcast.schemas.errors import UsageError

from .backend import Backend
from .generic import GenericBackend, MemoryBackend
from .local import LocalBackend
from .objects import FsspecStore
from .types import Entry, Pacing, ProbeResult, StoreSettings
from .url import Location, parse_location

__all__ = ["Entry", "FsspecStore", "Pacing", "ProbeResult", "Store", "StoreSettings", "open_store"]

_PLUGINS: Final = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
_EXTRAS: Final = {"s3": "weightcast", "gs": "weightcast[gcs]", "az": "weightcast[azure]"}


class Store(Protocol):
    """Objects under one root, by relative keys (`schemas.names.check_key`).

    Every method may be called by several threads at once, and after a fork.

    Retries. Each call repeats what is worth repeating (HTTP 408, 409, 425, 429, 500, 502, 503, 504,
    time-outs, resets, short bodies) after `min(5 s, 0.1 s * 2^n)` times a random number in [0, 1), and not
    before a `Retry-After`. It ends after `StoreSettings.max_attempts` tries or `deadline_s` seconds. Expired
    credentials are tried again once, with a session that reads them anew; so does the next call. A refusal
    (403, a missing bucket, a full disk) is never tried again.

    Errors, for all methods: StorageError if the store fails or refuses; Untrusted for a key that is not a
    plain relative path. No error, log record or repr shows credentials.
    """

    url: str
    """The root, normalised, without credentials."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """A small object, whole, as it is now (no cache). At most `max_bytes` and one buffer are read.

        Raises:
            NotFound: the store says that it is not there; no other failure is ever taken for that.
            Untrusted: longer than `max_bytes`.
        """

    def fetch(self, key: str, *, size: int, sha256: str) -> bytes:
        """An immutable object into memory, checked. One fresh try if it differs; lost connections are
        resumed.

        Raises:
            NotFound: it is not there.
            Corrupt: size or SHA-256 differ, twice.
        """

    def fetch_part(self, key: str, *, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop` of an immutable object, whose hash the caller has yet to check.

        Lost connections are resumed. `start` must be less than `stop`.

        Raises:
            NotFound: it is not there.
            Corrupt: it is shorter, or the store sends something else than was asked for.
        """

    def download(self, key: str, path: Path, *, size: int, sha256: str) -> None:
        """Like `fetch`, into a file: a temporary one beside `path`, synced, then renamed. `path` is whole or
        untouched.

        Raises:
            NotFound, Corrupt: as `fetch`.
        """

    def put(self, key: str, data: bytes) -> None:
        """Write an object of at most 5 GiB. A reader sees it whole or not at all.

        May be repeated with the same bytes. Documents (`*.json`) are stored with `Cache-Control: no-cache`
        where the store knows it.
        """

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> tuple[int, str]:
        """Write a large object in pieces; memory is one piece (`StoreSettings.part_bytes`). Returns (size,
        SHA-256 in hex).

        Visible only when complete and of the right size. Whatever `chunks` raises goes through, and nothing
        becomes visible.

        Raises:
            Corrupt: the store holds another size than was sent.
        """

    def create(self, key: str, data: bytes) -> bool:
        """Write an object only if there is none, in one conditional request: the commit.

        `data` must be unlike any other writer's (documents carry a token). After any answer that leaves the
        outcome open the same bytes are sent again and the object is read back, until
        `StoreSettings.deadline_s`. Calling again with the same bytes is safe and gives the same result.

        Returns:
            True: the object has these bytes, by this call or an earlier one. False: it has others; the
                winner's stay.

        Raises:
            StorageError: refused, nothing was written; or, if the message says "outcome unknown", it could
                not be settled. Then nothing may be deleted.
        """

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """All objects whose keys start with `prefix` literally and come after `after` in code-point order.

        In no order, all pages, never from a cache. Names that are no plain keys (temporary files, foreign
        objects) are left out.
        """

    def delete(self, key: str) -> None:
        """Remove an object. A missing one is fine."""

    def clock(self) -> datetime:
        """The store's clock, which `Entry.modified` is in. Writes and removes a small object."""

    def probe(self) -> ProbeResult:
        """Try what a stream needs, measure, and clean up. Takes some thirty small requests and 8 MiB."""


def open_store(
    url: str | os.PathLike[str],
    *,
    settings: StoreSettings | None = None,
    filesystem: AbstractFileSystem | None = None,
    pacing: Pacing | None = None,
    option: str = "--store",
) -> Store:
    """Open a store without touching it.

    Args:
        url: a folder, or `file://`, `s3://`, `gs://`, `az://`, `memory://`; see `parse_location`.
        settings: how to reach it.
        filesystem: an fsspec file system to use instead of one made from `url`'s scheme and `settings`. It
            should not cache listings. Its own retries come on top.
        pacing: time and chance, for tests.
        option: the setting that `url` came from, for messages.

    Raises:
        UsageError: the URL is not one, or a package is not installed; in one line.
    """
    settings = settings or StoreSettings()
    location = parse_location(os.fspath(url), option)
    make = (
        _given(filesystem, location, settings)
        if filesystem is not None
        else _made(location, settings, option)
    )
    return FsspecStore(location, settings, make, pacing or Pacing())


def _made(location: Location, settings: StoreSettings, option: str) -> Callable[[], Backend]:
    """How to make the backend of a scheme."""
    if location.scheme == "file":
        return LocalBackend
    if location.scheme == "memory":
        return lambda: MemoryBackend(MemoryFileSystem())
    try:
        plugin = _plugin(location.scheme)
        if location.scheme == "s3":
            from .s3 import S3Backend, s3_filesystem

            def made() -> Backend:
                fs, bulk = (s3_filesystem(location, settings) for _ in range(2))
                return S3Backend(fs, bulk, settings)

            return made
    except ImportError as error:
        package = _PLUGINS[location.scheme]
        raise UsageError(
            f"{option} {location.url} needs the package {package}, which is not installed",
            hint=f"pip install '{_EXTRAS[location.scheme]}' (or pip install {package})",
        ) from error
    options: dict[str, Any] = {"account_name": location.account} if location.account else {}
    options |= {"use_listings_cache": False, "skip_instance_cache": True, **settings.storage_options}
    return lambda: GenericBackend(plugin(**options), location.scheme)


def _plugin(scheme: str) -> type[AbstractFileSystem]:
    """The class behind a scheme. gcsfs' default one asks another API, over gRPC, what kind of bucket it
    has.
    """
    if scheme == "gs":
        plugin: type[AbstractFileSystem] = importlib.import_module("gcsfs.core").GCSFileSystem
    else:
        plugin = fsspec.get_filesystem_class(scheme)
    return plugin


def _given(fs: AbstractFileSystem, location: Location, settings: StoreSettings) -> Callable[[], Backend]:
    """How to make the backend of a given file system: the first time around it, later around a copy (fork,
    credentials).
    """
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
    fresh = [fs]

    def current() -> AbstractFileSystem:
        return (
            fresh.pop()
            if fresh
            else type(fs)(*fs.storage_args, **{**fs.storage_options, "skip_instance_cache": True})
        )

    if type(fs) is LocalFileSystem:
        return LocalBackend
    if type(fs) is MemoryFileSystem:
        return lambda: MemoryBackend(fs)
    if "s3" in protocols:
        from .s3 import S3Backend

        return lambda: S3Backend(both := current(), both, settings)
    return lambda: GenericBackend(current() if fs.async_impl else fs, location.scheme)
