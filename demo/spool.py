"""The folder through which rollout processes on the same machine hand their batches to the trainer.

A batch is written under a temporary name and renamed, so the trainer only ever sees whole files. A rollout
process that runs ahead looks at `waiting` and pauses, so the folder stays small.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from weightcast.schemas.errors import Corrupt, UsageError

from .rollout import HINT, Rollouts, decode, encode

MAX_FILE_BYTES: Final = 16 << 20  # bytes; 512 answers of the demo take about 30 KiB
_WORKER = re.compile(r"^[A-Za-z0-9_-]{1,64}$")


class Spool:
    """One folder of batches, created if it is missing.

    Any number of workers may `put`; one trainer may `take`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, rollouts: Rollouts, *, worker: str, sequence: int) -> Path:
        """Write one batch and return its path; a batch of the same worker and sequence is replaced.

        Args:
            rollouts: what to hand over.
            worker: name of the writing process; letters, digits, `_` and `-`.
            sequence: the worker's own count of batches, so that they are taken in order.

        Raises:
            UsageError: the worker's name is not a plain one, or the sequence is negative.
        """
        if not _WORKER.match(worker) or sequence < 0:
            raise UsageError(f"spool worker {worker!r}, sequence {sequence}: expected a name and a count")
        target = self.folder / f"{sequence:012d}-{worker}.safetensors"
        temporary = self.folder / f".{target.name}.tmp"
        temporary.write_bytes(encode(rollouts))
        os.replace(temporary, target)
        return target

    def waiting(self, worker: str) -> int:
        """Return how many batches of `worker` nobody has taken yet."""
        return len(list(self.folder.glob(f"{'[0-9]' * 12}-{worker}.safetensors")))

    def take(self) -> Rollouts | None:
        """Remove and return the batch with the lowest sequence, or None if none is there.

        Raises:
            Corrupt: the file is too large or holds no rollouts; it is removed all the same.
        """
        oldest = min(self.folder.glob("[0-9]*.safetensors"), default=None)
        return None if oldest is None else _take(oldest)


def _take(path: Path) -> Rollouts:
    """Read and remove one file."""
    size = path.stat().st_size
    data = path.read_bytes() if size <= MAX_FILE_BYTES else b""
    path.unlink()
    if size > MAX_FILE_BYTES:
        raise Corrupt(f"rollouts {path.name} have {size} bytes, the limit is {MAX_FILE_BYTES}", hint=HINT)
    return decode(data)
