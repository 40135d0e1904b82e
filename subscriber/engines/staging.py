"""Files by which weights pass between a subscriber and the server beside it: in memory, under a folder that both see.

    STAGE/HASH/lock              one subscriber works on an engine at a time
    STAGE/HASH/layout-SHA.arrow  the tensor table that a plan is made for
    STAGE/HASH/positions, values a read: flat positions in, live bits out
    STAGE/HASH/staged.arrow      absolute values of an install
    STAGE/HASH/install.json      its request, for as long as its outcome is not known

STAGE is `WEIGHTCAST_STAGE`, by default `/dev/shm/weightcast-UID`; HASH is of the engine's URL. Nothing is synced: what
a host loses with its memory, the engine has lost, too. The server only reads these files, and fills `values`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from weightcast.codec import Changes
from weightcast.codec.memory import UNSIGNED
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.engine import InstallRequest
from weightcast.schemas.errors import Corrupt, StorageError, UsageError
from weightcast.schemas.layout import Layout

from ..folder_files import check_room
from ..journal import Journal, read_journal, write_journal

STAGE_VARIABLE: Final = "WEIGHTCAST_STAGE"

_ALIGNED: Final = 8  # bytes: each dtype's bits begin at a multiple of this in `values`
_LOCK_WAIT_S: Final = 60.0  # longer than any step of a subscriber that is well
_LOCK_POLL_S: Final = 0.02

Positions = Mapping[str, npt.NDArray[np.int64]]


def stage_folder(path: Path | None = None) -> Path:
    """The folder that subscriber and server share: `path`, else `WEIGHTCAST_STAGE`, else a default. Not made."""
    chosen = path or os.environ.get(STAGE_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(gettempdir())) / f"weightcast-{os.getuid()}"


def make_private(folder: Path) -> Path:
    """Make `folder` if it is missing, for this user alone.

    Raises:
        UsageError: it cannot be made, or another user could put files there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be made: {error.strerror}", hint=f"{STAGE_VARIABLE} names another folder"
        ) from error
    if found.st_uid not in (os.getuid(), 0):
        raise UsageError(
            f"{folder} belongs to user {found.st_uid}, not to {os.getuid()}",
            hint=f"{STAGE_VARIABLE} names another folder",
        )
    return folder


class Staging:
    """A subscriber's files for the engine at `url`. What a killed subscriber left is used or removed.

    Args:
        url: of the engine, however often it restarts.
        folder: see `stage_folder`.
    """

    def __init__(self, url: str, folder: Path | None = None) -> None:
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        self.folder = stage_folder(folder) / name
        self.staged = self.folder / "staged.arrow"
        self._request = self.folder / "install.json"
        self._url = url

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep every other subscriber of this engine on this host away.

        Raises:
            UsageError: the folder cannot be written to.
            StorageError: another one has been at work for too long; or instead of an OSError that is raised inside.
        """
        make_private(self.folder)
        try:
            lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be written: {error.strerror}") from error
        with lock:
            self._wait_for(lock.fileno())
            try:
                yield
            except OSError as error:
                raise StorageError(
                    f"{self.folder} cannot be used: {error.strerror or error} ({error.filename})"
                ) from error
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child has the file open, too

    def _wait_for(self, handle: int) -> None:
        until = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StorageError(
                        f"another subscriber has worked on {self._url} for {_LOCK_WAIT_S:g} s",
                        hint="one subscriber drives an engine: stop the other",
                    ) from None
                time.sleep(_LOCK_POLL_S)
            else:
                return

    def put_layout(self, layout: Layout) -> Path:
        """The file that holds `layout`, written if it is not there; those of other layouts are removed."""
        path = self.folder / f"layout-{layout.sha256}.arrow"
        if not path.is_file() or path.stat().st_size != len(layout.encoded):
            for other in self.folder.glob("layout-*.arrow"):
                other.unlink()
            _write(path, layout.encoded)
        return path

    @contextmanager
    def reading(self, positions: Positions) -> Iterator[tuple[Path, Path]]:
        """Files of a read: `positions`, and room for as many values; gone when the context ends.

        Raises:
            StorageError: there is no room.
        """
        at, values = self.folder / "positions", self.folder / "values"
        size = values_bytes({dtype: len(found) for dtype, found in positions.items()})
        try:
            check_room(self.folder, sum(p.nbytes for p in positions.values()) + size)
            with at.open("wb") as file:
                for found in positions.values():
                    file.write(np.ascontiguousarray(found).data)
            with values.open("wb") as file:
                file.truncate(size)
            yield at, values
        finally:
            for path in (at, values):
                path.unlink(missing_ok=True)

    def stage(self, journal: Journal) -> Path:
        """Write the absolute values of an install.

        Raises:
            StorageError: there is no room; nothing is there then.
        """
        self.forget()
        write_journal(self.staged, journal, durable=False)
        return self.staged

    def keep(self, request: InstallRequest) -> None:
        """Remember an install that is about to be asked for, until `forget`."""
        _write(self._request, request.model_dump_json().encode())

    def kept(self) -> InstallRequest | None:
        """The install whose outcome is not known; its values are staged still. None if there is none."""
        try:
            request = InstallRequest.model_validate_json(self._request.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:  # of another release
            return None
        return request if Path(request.staged).is_file() else None

    def forget(self) -> None:
        """Remove an install: its outcome is known, or does not matter any more."""
        for path in (self._request, self.staged):
            path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what subscribers that are no more left in the middle of something other than an install."""
        for name in ("positions", "values", *(p.name for p in self.folder.glob(".*.tmp"))):
            (self.folder / name).unlink(missing_ok=True)
        if self.kept() is None:
            self.forget()


def _write(path: Path, data: bytes) -> None:
    """Replace a file: whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        check_room(path.parent, len(data))
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageError(f"{path} ({len(data)} bytes) cannot be written: {error.strerror}") from error


def values_bytes(counts: Mapping[str, int]) -> int:
    """Size of a `values` file."""
    return sum(_room(dtype, count) for dtype, count in counts.items())


def _room(dtype: str, count: int) -> int:
    return -(-count * WIDTHS[dtype] // _ALIGNED) * _ALIGNED


# What either side reads; all of it is mapped, not copied.


def read_layout(path: Path, sha256: str) -> Layout:
    """The layout in a file.

    Raises:
        Corrupt: it is not the one with this hash.
        StorageError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise Corrupt(f"{path} is not the layout {sha256}")
    return Layout.decode(data, str(path))


def read_staged(path: Path) -> dict[str, Changes]:
    """The absolute values of an install, by dtype, in the mapped file; they may only be read.

    Raises:
        Corrupt: the file is not whole.
        StorageError: there is none.
    """
    journal = read_journal(path, mapped=True)
    if journal is None:
        raise StorageError(f"{path} does not exist")
    return dict(journal.changes)


def map_positions(path: Path, counts: Mapping[str, int]) -> dict[str, npt.NDArray[np.int64]]:
    """The positions of a read, by dtype, in the mapped file; they may only be read.

    Raises:
        Corrupt: the file has another size.
        StorageError: it cannot be read.
    """
    whole = _mapped(path, 8 * sum(counts.values()), "r").view(np.int64)
    found, at = {}, 0
    for dtype, count in counts.items():
        found[dtype], at = whole[at : at + count], at + count
    return found


def map_values(path: Path, counts: Mapping[str, int], *, writable: bool) -> dict[str, npt.NDArray[Any]]:
    """The values of a read, unsigned, by dtype, in the mapped file. `writable`: by the server, which fills them.

    Raises:
        Corrupt: the file has another size.
        StorageError: it cannot be read.
    """
    whole = _mapped(path, values_bytes(counts), "r+" if writable else "r")
    found, at = {}, 0
    for dtype, count in counts.items():
        width = WIDTHS[dtype]
        found[dtype] = whole[at : at + count * width].view(UNSIGNED[width])
        at += _room(dtype, count)
    return found


def _mapped(path: Path, size: int, mode: str) -> npt.NDArray[np.uint8]:
    try:
        found = path.stat().st_size
        if found != size:
            raise Corrupt(f"{path} has {found} bytes, expected {size}")
        if not size:
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, "r+" if mode == "r+" else "r", shape=(size,))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
