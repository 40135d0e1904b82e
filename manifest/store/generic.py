"""Backends over nothing but fsspec's own interface: memory, Google Cloud Storage, Azure, and what a caller
passes in.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from datetime import UTC, datetime
from typing import Any, Final

from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from .backend import Page
from .errors import Failure, Kind, classify, http_answer
from .types import Entry

RANGE_BYTES: Final = 8 << 20
"""Bytes of one ranged read."""

_LIBRARY_ERRORS: Final = {
    "gs": (
        "aiohttp.ClientError",
        "gcsfs.retry.HttpError",
        "gcsfs.retry.ChecksumError",
        "google.auth.exceptions.GoogleAuthError",
    ),
    "az": ("aiohttp.ClientError", "azure.core.exceptions.AzureError"),
}
_CONNECTION_ERRORS: Final = frozenset(
    {"ClientError", "ServiceRequestError", "ServiceResponseError", "TransportError"}
)
"""Base classes of lost connections that are no OSError: aiohttp's, azure's, google-auth's."""


def library_errors(scheme: str) -> tuple[type[Exception], ...]:
    """What the libraries behind `scheme` raise beside OSError."""
    found: list[type[Exception]] = [OSError]
    for name in _LIBRARY_ERRORS.get(scheme, ()):
        module, _, attribute = name.rpartition(".")
        found.append(getattr(importlib.import_module(module), attribute))
    return tuple(found)


class GenericUpload:
    """A file opened for writing that is committed by hand. The file system's own retries are all there
    are.
    """

    repeatable = False

    def __init__(self, fs: AbstractFileSystem, path: str) -> None:
        self._file: Any = fs.open(path, "wb", autocommit=False)

    def write(self, number: int, data: bytes) -> None:
        """Append."""
        self._file.write(data)

    def finish(self, number: int, data: bytes) -> None:
        """Append, close, commit."""
        self._file.write(data)
        self._file.close()
        self._file.commit()

    def abort(self) -> None:
        """Discard, and keep the file object from uploading its buffer when it is collected."""
        try:
            self._file.discard()
        finally:
            self._file.closed = True


class GenericBackend:
    """Any fsspec file system whose `pipe_file(mode="create")` is a precondition, as gcsfs and adlfs have
    it.
    """

    def __init__(self, fs: AbstractFileSystem, scheme: str = "") -> None:
        self.fs = fs
        self.errors: tuple[type[Exception], ...] = library_errors(scheme)
        self._scheme = scheme

    def classify(self, error: Exception) -> Failure:
        """By type and HTTP status; a lost connection is told by the name of its base class."""
        if http_answer(error) is None and not isinstance(error, OSError):
            names = {base.__name__ for base in type(error).__mro__}
            if names & _CONNECTION_ERRORS:
                return Failure(Kind.TRANSIENT, type(error).__name__)
            if "ChecksumError" in names:
                return Failure(Kind.DAMAGED, type(error).__name__)
        return classify(error)

    def read(self, path: str, start: int, stop: int | None = None, *, bulk: bool = False) -> Generator[bytes]:
        """Ranges, one after the other, until one comes back short. An object must not be overwritten
        meanwhile.
        """
        while stop is None or start < stop:
            end = start + RANGE_BYTES if stop is None else min(start + RANGE_BYTES, stop)
            try:
                piece: bytes = self.fs.cat_file(path, start=start, end=end)
            except self.errors as error:
                answer = http_answer(error)
                if answer is None or answer.status != 416:
                    raise
                return  # the range begins at the object's end
            if piece:
                yield piece
            if len(piece) < end - start:
                return
            start += len(piece)

    def write(self, path: str, data: bytes) -> None:
        """One request below the file system's limit."""
        self.fs.pipe_file(path, data, mode="overwrite", **self._headers(path))

    def create(self, path: str, data: bytes) -> None:
        """The file system's own precondition (`ifGenerationMatch=0`, `If-None-Match: *`)."""
        self.fs.pipe_file(path, data, mode="create", **self._headers(path))

    def _headers(self, path: str) -> dict[str, Any]:
        """A neutral content type; documents must not be served from caches."""
        cache = {"cache_control": "no-cache"} if path.endswith(".json") else {}
        if self._scheme == "gs":
            return {"content_type": "application/octet-stream", "fixed_key_metadata": cache}
        if self._scheme == "az":
            return {"content_settings": {"content_type": "application/octet-stream", **cache}}
        return {}

    def upload(self, path: str) -> GenericUpload:
        """An uncommitted file."""
        return GenericUpload(self.fs, path)

    def size(self, path: str) -> int:
        """By a fresh look."""
        self.fs.invalidate_cache()
        return int(self.fs.info(path)["size"])

    def page(self, root: str, prefix: str, after: str, token: str | None) -> Page:
        """Everything in one page; the file system pages by itself."""
        self.fs.invalidate_cache()
        folder = f"{root}/{prefix.rpartition('/')[0]}".rstrip("/")
        try:
            found: dict[str, dict[str, Any]] = self.fs.find(folder, detail=True)
        except FileNotFoundError:
            found = {}
        entries = []
        for path, info in found.items():
            if path.startswith(f"{root}/{prefix}") and info.get("type", "file") == "file":
                entries.append(Entry(path[len(root) + 1 :], int(info.get("size") or 0), modified_of(info)))
        return Page(entries)

    def delete(self, path: str) -> None:
        """One object; `rm_file` takes names literally, `rm` would expand patterns."""
        self.fs.rm_file(path)


def modified_of(info: dict[str, Any]) -> datetime | None:
    """The modification time in an fsspec description, under any of the names in use."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = info.get(name)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, (int, float)):
            value = datetime.fromtimestamp(value, UTC)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
    return None


class MemoryUpload:
    """Pieces, joined at the end."""

    repeatable = True

    def __init__(self, backend: MemoryBackend, path: str) -> None:
        self._backend = backend
        self._path = path
        self._pieces: dict[int, bytes] = {}

    def write(self, number: int, data: bytes) -> None:
        """Keep."""
        self._pieces[number] = bytes(data)

    def finish(self, number: int, data: bytes) -> None:
        """Join and store."""
        self.write(number, data)
        self._backend.write(self._path, b"".join(self._pieces[i] for i in sorted(self._pieces)))

    def abort(self) -> None:
        """Forget."""
        self._pieces.clear()


class MemoryBackend(GenericBackend):
    """fsspec's memory file system: one dictionary for the whole process.

    Its own create looks first and stores then. Here both steps are one `dict.setdefault`, which is atomic.
    """

    fs: MemoryFileSystem

    def write(self, path: str, data: bytes) -> None:
        """One assignment."""
        self.fs.store[path] = MemoryFile(self.fs, path, bytes(data))

    def create(self, path: str, data: bytes) -> None:
        """One `setdefault`."""
        mine = MemoryFile(self.fs, path, bytes(data))
        if self.fs.store.setdefault(path, mine) is not mine:
            raise FileExistsError(path)

    def upload(self, path: str) -> MemoryUpload:  # type: ignore[override]
        """Pieces in memory."""
        return MemoryUpload(self, path)

    def page(self, root: str, prefix: str, after: str, token: str | None) -> Page:
        """Of a copy, whose making is atomic: other threads write meanwhile."""
        start = f"{root}/{prefix}"
        found = [(path, file) for path, file in self.fs.store.copy().items() if path.startswith(start)]
        return Page([Entry(path[len(root) + 1 :], int(file.size), file.modified) for path, file in found])

    def size(self, path: str) -> int:
        """Without fsspec's search for folders, which looks at every object."""
        try:
            return int(self.fs.store[path].size)
        except KeyError:
            raise FileNotFoundError(path) from None
