"""The tensors of safetensors files that are held open: read piece by piece, and proved to be of one save.

Tensors are read, not mapped: a trainer that saves over its last checkpoint cuts the file first, and a process
that reads a mapping past the new end is killed (SIGBUS).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightcast.manifest.tensorfile import Entry
from weightcast.schemas.errors import Corrupt, NotFound, StorageError

from .sources import Item

Weights = tuple[tuple[Path, tuple[Entry, ...]], ...]
"""Weight files, each with its tensors."""

Stamp = tuple[str, int, int, int]
"""A file's name, inode, size in bytes, and modification time in nanoseconds."""


def stamp(name: str, stat: os.stat_result) -> Stamp:
    """What tells one save of a file from another."""
    return name, stat.st_ino, stat.st_size, stat.st_mtime_ns


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Turn what the file system says about `path` into our errors."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{path} is gone", hint="the trainer rotated the checkpoint away") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


class Contents(Mapping[str, Item]):
    """The tensors of a checkpoint whose files are held open, so that a deletion does no harm.

    Each tensor is read into memory of its own when it is asked for; only the caller keeps it. Going through
    all of them ends with a check that no file was written to meanwhile. Before that, nothing that was read
    may be committed.

    Raises, when a tensor is read or at the end:
        Corrupt: a file was written to.
        StorageError: a file cannot be read.
    """

    def __init__(self, files: Mapping[Path, int], weights: Weights, stamps: Mapping[str, Stamp]) -> None:
        self._files = files
        self._stamps = stamps
        self._entries = {e.spec.name: (path, e) for path, entries in weights for e in entries}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        self.check()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Item:
        path, entry = self._entries[name]
        array: npt.NDArray[np.uint8] = np.empty(entry.end - entry.begin, np.uint8)
        _read(path, self._files[path], array, entry.begin)
        return Item(entry.spec, array.ctypes.data if array.size else 0, array, False, None)

    def check(self) -> None:
        """Raise Corrupt if a file is not what it was when the checkpoint was looked at."""
        for path, descriptor in self._files.items():
            if stamp(path.name, os.fstat(descriptor)) != self._stamps[path.name]:
                raise Corrupt(
                    f"{path} was written to while it was read", hint="the trainer is saving over it"
                )


def _read(path: Path, descriptor: int, array: npt.NDArray[np.uint8], offset: int) -> None:
    view, done = array.data, 0
    try:
        while done < array.size:  # one call reads at most 2 GiB
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                raise Corrupt(
                    f"{path} shrank to {offset + done} bytes while it was read",
                    hint="the trainer is saving over it",
                )
            done += count
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
