"""The files of a checkpoint folder that a subscriber keeps: where each tensor lies, and changing files safely."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.codec import Geometry, Memory
from weightcast.manifest.tensorfile import INDEX_NAME, SINGLE_NAME, Entry, encode_header, read_header
from weightcast.schemas.errors import Corrupt, StorageError, UsageError
from weightcast.schemas.layout import TensorSpec


@dataclass(frozen=True)
class Mapped:
    """A weight file, mapped: its tensors and its bytes."""

    path: Path
    entries: tuple[Entry, ...]
    array: np.ndarray[Any, np.dtype[np.uint8]]

    def address(self, entry: Entry) -> int:
        """Where the tensor lies in this process; 0 for an empty one."""
        return int(self.array.ctypes.data) + entry.begin if entry.spec.nbytes else 0


def map_file(path: Path, *, writable: bool) -> Mapped:
    """Map a whole safetensors file.

    Raises:
        Corrupt: it is not one.
    """
    entries = tuple(read_header(path))
    with path.open("r+b" if writable else "rb") as file:
        if writable:
            _fill_holes(file.fileno(), path)
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    return Mapped(path, entries, np.frombuffer(view, np.uint8))


def _fill_holes(handle: int, path: Path) -> None:
    """Reserve the blocks that a sparse file lacks: on a full disk, writing to a hole by a map kills the process."""
    stats = os.fstat(handle)
    if stats.st_blocks * 512 >= stats.st_size or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(handle, 0, stats.st_size)
    except OSError as error:
        if error.errno not in (
            errno.EOPNOTSUPP,
            errno.EINVAL,
        ):  # a file system that packs files, or cannot say
            raise StorageError(
                f"{path} ({stats.st_size} bytes, sparse) cannot be filled: {error.strerror}"
            ) from error


def weight_paths(folder: Path) -> list[Path]:
    """The weight files of a checkpoint folder: those its index names, else the single file; empty if there are none.

    Raises:
        Corrupt: the index is none.
        UsageError: it names files elsewhere, or does not name the single file beside it, so that loaders
            take one or the other.
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index.is_file():
        return [single] if single.is_file() else []
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{index} is not a checkpoint index: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
            raise UsageError(f"{index} names {name!r}, which is not a file beside it")
    if single.is_file() and SINGLE_NAME not in names:
        raise UsageError(
            f"{folder} has {SINGLE_NAME} and an {INDEX_NAME} that does not name it",
            hint="remove the one that is stale",
        )
    return [folder / name for name in names]


def place_all(geometry: Geometry, files: Iterable[Mapped], *, writable: bool) -> Memory:
    """Memory over mapped files; tensors that the geometry does not store are passed over.

    Raises:
        UsageError: a tensor that it does store is missing, or has another dtype or shape.
    """
    addresses: dict[str, int] = {}
    arrays = []
    wanted = dict(geometry.layout.stored_by_name)
    for file in files:
        base = int(file.array.ctypes.data)
        arrays.append(file.array)
        for entry in file.entries:
            spec = wanted.get(entry.spec.name)
            if spec is None:
                continue
            if spec != entry.spec:
                raise UsageError(
                    f"{file.path} has tensor {spec.name!r} as {entry.spec.dtype}{list(entry.spec.shape)}, "
                    f"the stream as {spec.dtype}{list(spec.shape)}"
                )
            addresses[spec.name] = base + entry.begin if entry.end > entry.begin else 0
            del wanted[spec.name]
    if wanted:
        raise UsageError(f"{len(wanted)} tensors of the stream are not in the folder: {sorted(wanted)[:5]}")
    return Memory.at(geometry, addresses, arrays, writable=writable)


def create_file(path: Path, specs: Sequence[TensorSpec]) -> Mapped:
    """A new file for `specs`, all zeros, its blocks reserved, so that writing through the map cannot run out of disk.

    Raises:
        StorageError: there is not enough room; says how much is needed and free.
    """
    header = encode_header(specs)
    size = len(header) + sum(s.nbytes for s in specs)
    check_room(path.parent, size)
    try:
        with path.open("w+b") as file:
            file.write(header)
            file.flush()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StorageError(f"{path} ({size} bytes) cannot be written: {error.strerror}") from error
    return map_file(path, writable=True)


def check_room(folder: Path, needed: int) -> None:
    """Refuse, before anything is written, what the disk has no room for."""
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if needed > free:
        raise StorageError(
            f"{folder} needs {needed} bytes, {free} are free",
            hint="make room; the version before stays in place",
        )


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file: whole or not at all, and on disk before this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{path} ({len(data)} bytes) cannot be written: {error.strerror}") from error


def sync_file(path: Path) -> None:
    """Make what was written to a file durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
