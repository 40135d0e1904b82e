"""The store's promises on top of a backend's single tries: bounds, hashes, retries, settled creates,
forks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path

from weightcast.schemas.errors import Corrupt, NotFound, StorageError, Untrusted
from weightcast.schemas.names import check_key

from .backend import Backend, Upload
from .create import Creator
from .errors import HINT_DAMAGED, Redactor
from .probe import probe_store
from .read import FileSink, MemorySink, receive, receive_part
from .retry import Retrier
from .types import Entry, Pacing, ProbeResult, StoreSettings
from .url import Location

_log = logging.getLogger(__name__)


class FsspecStore:
    """A `Store` over a backend. See the protocol for what each method promises."""

    def __init__(
        self, location: Location, settings: StoreSettings, make_backend: Callable[[], Backend], pacing: Pacing
    ) -> None:
        self.url = location.url
        self._root = location.path
        self._settings = settings
        self._make_backend = make_backend
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._inherited: list[Backend] = []
        self._current: Backend | None = make_backend()
        self._pacing = pacing
        self._retrier = Retrier(
            settings, pacing, self._backend, self._renew, Redactor(settings.storage_options)
        )

    def __repr__(self) -> str:
        return f"FsspecStore({self.url!r})"

    def _backend(self) -> Backend:
        """The backend of this process. After a fork, and after expired credentials, a new one."""
        if self._pid != os.getpid():
            self._lock = threading.Lock()  # the parent's may be held by a thread that does not live here
            if self._current is not None:
                self._inherited.append(self._current)  # collecting it would close the parent's connections
            self._current, self._pid = None, os.getpid()
        current = self._current
        if current is None:
            with self._lock:
                current = self._current = self._current or self._make_backend()
        return current

    def _renew(self) -> None:
        """Have the next try build its session, and read its credentials, anew."""
        with self._lock:
            self._current = None

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store.get`."""
        path = self._path(key)

        def read(backend: Backend) -> bytes:
            pieces, got = [], 0
            with closing(backend.read(path, 0)) as stream:
                for piece in stream:
                    got += len(piece)
                    if got > max_bytes:
                        raise Untrusted(f"{self._name(key)}: expected at most {max_bytes} bytes, found more")
                    pieces.append(piece)
            return b"".join(pieces)

        return self._retrier.run(f"read {self._name(key)}", read)

    def fetch(self, key: str, *, size: int, sha256: str) -> bytes:
        """See `Store.fetch`."""
        sink = MemorySink()
        receive(self._retrier, self._name(key), self._path(key), size=size, sha256=sha256, sink=sink)
        return sink.value()

    def fetch_part(self, key: str, *, start: int, stop: int) -> bytes:
        """See `Store.fetch_part`."""
        return receive_part(self._retrier, self._name(key), self._path(key), start, stop)

    def download(self, key: str, path: Path, *, size: int, sha256: str) -> None:
        """See `Store.download`."""
        source = self._path(key)
        with FileSink(path) as sink:
            receive(self._retrier, self._name(key), source, size=size, sha256=sha256, sink=sink)
            sink.commit()

    def put(self, key: str, data: bytes) -> None:
        """See `Store.put`."""
        path = self._path(key)
        self._retrier.write(f"write {self._name(key)}", lambda backend: backend.write(path, data))

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> tuple[int, str]:
        """See `Store.put_stream`."""
        what, path = f"write {self._name(key)}", self._path(key)
        upload = self._retrier.write(what, lambda backend: backend.upload(path))
        try:
            total, sha256 = self._send(what, upload, chunks)
        except BaseException:
            self._abort(what, upload)
            raise
        stored = self._retrier.write(what, lambda backend: backend.size(path))
        if stored != total:
            raise Corrupt(
                f"{self._name(key)}: expected {total} bytes to be stored, found {stored}", hint=HINT_DAMAGED
            )
        return total, sha256

    def _send(self, what: str, upload: Upload, chunks: Iterable[bytes]) -> tuple[int, str]:
        """Send all pieces and finish. Returns size and SHA-256."""
        digest, total, number, held = hashlib.sha256(), 0, 0, bytearray()
        attempts = None if upload.repeatable else 1
        for chunk in chunks:
            digest.update(chunk)
            total += len(chunk)
            held += chunk
            while len(held) >= self._settings.part_bytes:
                piece = bytes(memoryview(held)[: self._settings.part_bytes])
                del held[: self._settings.part_bytes]
                self._retrier.write(what, _sending(upload, number, piece), attempts=attempts)
                number += 1
        last = bytes(held)
        self._retrier.write(what, lambda _: upload.finish(number, last), attempts=attempts)
        return total, digest.hexdigest()

    def _abort(self, what: str, upload: Upload) -> None:
        """Abandon an upload; a failure leaves parts that nobody sees, and is only logged."""
        try:
            self._retrier.run(what, lambda _: upload.abort(), attempts=2)
        except (NotFound, StorageError) as error:
            _log.warning("an abandoned upload could not be removed: %s", error, extra={"store": self.url})

    def create(self, key: str, data: bytes) -> bool:
        """See `Store.create`."""
        path = self._path(key)
        creator = Creator(self._retrier, self._settings, self._name(key), path, bytes(data))
        return creator.single() if self._settings.single_writer else creator.create()

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See `Store.list`."""
        if prefix:
            check_key(prefix.removesuffix("/"))
        what, token = f"list {self._name(prefix)}", None
        while True:
            page = self._retrier.run(
                what,
                lambda backend, token=token: backend.page(self._root, prefix, after, token),  # type: ignore[misc]
            )
            for entry in page.entries:
                if entry.key.startswith(prefix) and entry.key > after and _is_plain(entry.key):
                    yield entry
            if page.token is None:
                return
            if page.token == token:
                raise StorageError(f"cannot {what}: expected the next page, found the same one again")
            token = page.token

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        path = self._path(key)
        try:
            self._retrier.run(f"delete {self._name(key)}", lambda backend: backend.delete(path))
        except NotFound:
            return

    def clock(self) -> datetime:
        """See `Store.clock`."""
        key = f"probe/{uuid.uuid4().hex}"
        self.put(key, b"clock")
        try:
            for entry in self.list(key):
                if entry.modified is not None:
                    return entry.modified
        finally:
            self.delete(key)
        raise StorageError(f"{self.url}: expected a modification time in listings, found none")

    def probe(self) -> ProbeResult:
        """See `Store.probe`."""

        def create(key: str, data: bytes) -> bool:
            return Creator(self._retrier, self._settings, self._name(key), self._path(key), data).create()

        return probe_store(self, create, self._pacing)


def _sending(upload: Upload, number: int, piece: bytes) -> Callable[[Backend], None]:
    """The operation that sends one piece."""
    return lambda _: upload.write(number, piece)


def _is_plain(key: str) -> bool:
    """Whether an object of that name can be one of a stream's."""
    try:
        check_key(key)
    except Untrusted:
        return False
    return True
