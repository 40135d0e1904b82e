"""Objects as files of a folder, made visible by a link or a rename only when they are complete and on
disk.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Generator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from weightcast.schemas.errors import StorageError

from .backend import Page
from .errors import Failure, classify
from .types import PIECE_BYTES, Entry

_NO_LINKS: Final = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
)
"""What link() answers on file systems without hard links (FUSE, exFAT, some SMB mounts)."""


def temporary_beside(path: str) -> str:
    """A name for an unfinished file in `path`'s own folder, so that renaming it stays on one disk. Never
    listed.
    """
    return os.path.join(os.path.dirname(path), f".{uuid.uuid4().hex}.tmp")


def sync_folder(folder: str) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: str) -> None:
    """Create `folder` and its parents, durably."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for child in reversed(missing):
        Path(child).mkdir(exist_ok=True)
        sync_folder(os.path.dirname(child))


def write_temporary(path: str, data: bytes) -> str:
    """Write and sync `data` beside `path`; returns the temporary name. Leaves nothing behind when it
    fails.
    """
    make_folders(os.path.dirname(path))
    temporary = temporary_beside(path)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        discard(temporary)
        raise
    return temporary


def discard(path: str) -> None:
    """Remove a file that may be gone already."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def publish(temporary: str, path: str) -> None:
    """Rename a synced temporary file to its final name, durably."""
    os.replace(temporary, path)
    sync_folder(os.path.dirname(path))


class LocalUpload:
    """A file that grows beside its target."""

    repeatable = False

    def __init__(self, path: str) -> None:
        make_folders(os.path.dirname(path))
        self._path = path
        self._temporary = temporary_beside(path)
        self._file = open(self._temporary, "xb")  # noqa: SIM115 - lives until finish or abort

    def write(self, number: int, data: bytes) -> None:
        """Append."""
        self._file.write(data)

    def finish(self, number: int, data: bytes) -> None:
        """Append, sync, rename."""
        self._file.write(data)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        publish(self._temporary, self._path)

    def abort(self) -> None:
        """Remove the temporary file."""
        self._file.close()
        discard(self._temporary)


class LocalBackend:
    """A folder. Create-only by `link()`, which fails if the name exists, on every POSIX file system that has
    links.
    """

    errors: tuple[type[Exception], ...] = (OSError,)

    def classify(self, error: Exception) -> Failure:
        """By errno."""
        return classify(error)

    def read(self, path: str, start: int, stop: int | None = None, *, bulk: bool = False) -> Generator[bytes]:
        """Through one open file: a file that is replaced meanwhile is read to its old end."""
        with open(path, "rb") as file:
            file.seek(start)
            while piece := file.read(PIECE_BYTES if stop is None else min(PIECE_BYTES, stop - start)):
                yield piece
                start += len(piece)

    def write(self, path: str, data: bytes) -> None:
        """Temporary file, fsync, rename, fsync of the folder."""
        temporary = write_temporary(path, data)
        try:
            publish(temporary, path)
        finally:
            discard(temporary)

    def create(self, path: str, data: bytes) -> None:
        """Temporary file, fsync, link, fsync of the folder.

        Raises:
            FileExistsError: the name is taken.
            StorageError: the file system has no hard links. Renaming would replace another writer's file, so
                the call is refused.
        """
        temporary = write_temporary(path, data)
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise StorageError(
                    f"cannot create {path} only if it is absent: expected a file system with hard links, "
                    f"found {error.strerror}",
                    hint="use another file system or an object store, or state that there is a single writer",
                ) from error
            raise
        finally:
            discard(temporary)
        sync_folder(os.path.dirname(path))

    def upload(self, path: str) -> LocalUpload:
        """A growing temporary file."""
        return LocalUpload(path)

    def size(self, path: str) -> int:
        """By stat."""
        return os.stat(path).st_size

    def page(self, root: str, prefix: str, after: str, token: str | None) -> Page:
        """Everything in one page. Links and special files are not objects."""
        folder = os.path.join(root, os.path.dirname(prefix)) if "/" in prefix else root
        entries: list[Entry] = []
        _walk(folder, len(root) + 1, prefix, entries)
        return Page(entries)

    def delete(self, path: str) -> None:
        """Unlink; folders stay."""
        os.unlink(path)


def _walk(folder: str, skip: int, prefix: str, entries: list[Entry]) -> None:
    """Append the files below `folder` whose path after `skip` characters starts with `prefix`."""
    try:
        children = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for child in children:
        key = child.path[skip:]
        if child.is_dir(follow_symlinks=False):
            if key.startswith(prefix) or prefix.startswith(key + "/"):
                _walk(child.path, skip, prefix, entries)
        elif key.startswith(prefix) and child.is_file(follow_symlinks=False):
            try:
                status = child.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted, or a temporary that got its name, since the scan
                continue
            entries.append(Entry(key, status.st_size, datetime.fromtimestamp(status.st_mtime, UTC)))
