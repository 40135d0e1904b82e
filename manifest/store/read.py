"""Streamed reads whose size and SHA-256 are known beforehand: resumed where they broke, repeated once if
they differ.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Protocol

from weightcast.schemas.errors import Corrupt, StorageError

from .errors import HINT_DAMAGED, Failure, Kind, to_error
from .local import publish, temporary_beside
from .retry import Retrier


class Sink(Protocol):
    """Where pieces go."""

    def reset(self) -> None:
        """Forget what was written: the object is sent anew."""

    def write(self, piece: bytes) -> None:
        """Append."""


class MemorySink:
    """Pieces in memory."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def reset(self) -> None:
        """Forget."""
        self._pieces.clear()

    def write(self, piece: bytes) -> None:
        """Keep."""
        self._pieces.append(piece)

    def value(self) -> bytes:
        """All of them."""
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


class FileSink:
    """A temporary file beside its target, which takes the target's name by `commit` alone."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._temporary = temporary_beside(self._path)

    def __enter__(self) -> FileSink:
        try:
            os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
            self._file = open(self._temporary, "xb")
        except OSError as error:
            raise self._failed(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        finally:
            Path(self._temporary).unlink(missing_ok=True)

    def reset(self) -> None:
        """Empty the file."""
        self._file.seek(0)
        self._file.truncate()

    def write(self, piece: bytes) -> None:
        """Append."""
        try:
            self._file.write(piece)
        except OSError as error:
            raise self._failed(error) from error

    def commit(self) -> None:
        """Sync, rename."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            publish(self._temporary, os.path.abspath(self._path))
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write {self._path}: {error.strerror}", hint="check space and permissions of that folder"
        )


def receive(retrier: Retrier, name: str, path: str, *, size: int, sha256: str, sink: Sink) -> None:
    """Stream an object into `sink`. Stops at the first piece that goes beyond `size`.

    Raises:
        NotFound, StorageError: as `Retrier.run`; attempts and time count from the last progress.
        Corrupt: size or hash differ, twice.
    """
    budget = retrier.budget()
    while found := _differs(retrier, name, path, size, sha256, sink):
        if not budget.wait(Failure(Kind.DAMAGED, found)):
            raise Corrupt(
                f"{name}: expected {size} bytes with SHA-256 {sha256}, found {found}", hint=HINT_DAMAGED
            )


def receive_part(retrier: Retrier, name: str, path: str, start: int, stop: int) -> bytes:
    """The bytes from `start` to `stop` of an object, unchecked but for their number.

    Raises:
        NotFound, StorageError: as `receive`.
        Corrupt: the object is shorter, or the store sends another part of it.
    """
    pieces, got = [], 0
    try:
        with closing(_pieces(retrier, name, path, start, stop)) as stream:
            for piece in stream:
                pieces.append(piece)
                got += len(piece)
                if got > stop - start:
                    break
    except _Damaged as damaged:
        raise Corrupt(f"{name}: cannot read bytes {start} to {stop}: {damaged.found}") from damaged
    if got != stop - start:
        raise Corrupt(f"{name}: expected {stop - start} bytes from {start} on, found {got}")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _differs(retrier: Retrier, name: str, path: str, size: int, sha256: str, sink: Sink) -> str:
    """One transfer from the first byte: "" if it is right, else what was found."""
    sink.reset()
    digest, got = hashlib.sha256(), 0
    try:
        with closing(_pieces(retrier, name, path)) as pieces:
            for piece in pieces:
                got += len(piece)
                if got > size:
                    return f"more than {size} bytes"
                digest.update(piece)
                sink.write(piece)
    except _Damaged as damaged:
        return damaged.found
    if got != size:
        return f"{got} bytes"
    return "" if digest.hexdigest() == sha256 else f"{got} bytes with SHA-256 {digest.hexdigest()}"


class _Damaged(Exception):
    """The transfer cannot be resumed."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


def _pieces(
    retrier: Retrier, name: str, path: str, start: int = 0, stop: int | None = None
) -> Generator[bytes]:
    """The object's bytes. A lost connection is taken up again at the byte where it broke."""
    budget, got, done = retrier.budget(), start, False
    while not done:
        backend = retrier.backend()
        with closing(backend.read(path, got, stop, bulk=True)) as stream:
            while True:
                try:
                    piece = next(stream, b"")
                except backend.errors as error:
                    failure = retrier.judge(backend, error)
                    if failure.kind is Kind.DAMAGED or (got and failure.kind is Kind.REFUSED):
                        raise _Damaged(failure.found) from error
                    if not budget.wait(failure):
                        raise to_error(failure, f"read {name}", budget.story) from error
                    break
                if not piece:
                    done = True
                    break
                got += len(piece)
                budget.progress()
                yield piece
                if got == stop:
                    return
