"""Who may touch a kept folder when: one subscriber at a time, and loaders that hold it still while they read."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from weightcast.schemas.errors import StorageError, UsageError

OWN_NAME: Final = ".weightcast"
"""The sub-folder in which a subscriber keeps what is its own."""

_READING: Final = "reading.lock"


@contextmanager
def only_subscriber(folder: Path) -> Iterator[None]:
    """Keep every other subscriber away from `folder`, which is made if need be.

    Raises:
        UsageError: it cannot be written to; says which folder must be.
        StorageError: instead of whatever OSError is raised inside.
    """
    own = folder / OWN_NAME
    try:
        (own / "hidden").mkdir(parents=True, exist_ok=True)
        (own / _READING).open("a").close()
        lock = (own / "lock").open("w")
    except OSError as error:
        raise UsageError(
            f"{own} cannot be written: {error.strerror}",
            hint="a subscriber needs a folder that it may write to",
        ) from error
    with lock, _held(lock, fcntl.LOCK_EX):
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{folder} cannot be changed: {error.strerror or error} ({error.filename})"
            ) from error


@contextmanager
def readers_away(folder: Path) -> Iterator[None]:
    """Wait for all who are inside `reading`, and keep others out."""
    with (folder / OWN_NAME / _READING).open("a") as lock, _held(lock, fcntl.LOCK_EX):
        yield


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Load from a kept folder inside this context, and the weights stay at one version meanwhile.

    The subscriber waits for it before it changes a byte, so do not stay longer than loading takes.

    Raises:
        UsageError: the folder is not kept by a subscriber.
    """
    folder = Path(path)
    try:
        lock = (folder / OWN_NAME / _READING).open("rb")
    except OSError as error:
        raise UsageError(f"{folder} is not kept by a subscriber: {error.strerror}") from error
    with lock, _held(lock, fcntl.LOCK_SH):
        yield folder


@contextmanager
def _held(lock: IO[str] | IO[bytes], how: int) -> Iterator[None]:
    """Hold a lock, which the kernel drops with its holder. Dropped by hand too: a forked child has the file open."""
    fcntl.flock(lock, how)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)
