"""The versions that a target has yet to go through: their manifests, read ahead of what is applied."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Final

from weightcast.manifest.chain import Position
from weightcast.manifest.stream import StreamReader

from .lookout import Lookout

_WIDEN: Final = 2  # manifests asked for at once grow by this factor while a reader catches up
_MAX_WIDTH: Final = 32  # up to this many


class Backlog:
    """Reads manifests, each once, though the versions are applied in several steps. Used by one thread.

    Args:
        reader: the stream.
        lookout: has the next manifest, or asks for it.
        requests: asks for several at once.
    """

    def __init__(self, reader: StreamReader, lookout: Lookout, requests: Executor) -> None:
        self._reader = reader
        self._lookout = lookout
        self._requests = requests
        self._read: list[Position] = []  # versions in a row

    def after(self, at: Position, most: int) -> list[Position]:
        """The versions after `at`: those that were read before, or else `most` as far as they exist.

        That is one request if there is none.

        Raises:
            Untrusted: one does not follow the one before.
            StorageError: the store failed.
        """
        known = [position for position in self._read if position.version > at.version]
        if known and known[0].manifest.parent == at.as_parent:
            return known
        chain = self._reader.chain(at)
        self._read = run = list[Position]()
        width = 1
        while len(run) < most:
            first = at.version + 1 + len(run)
            for data in self._manifests(range(first, first + width)):
                if data is None:
                    return run
                run.append(chain.extend(data))
            width = min(width * _WIDEN, _MAX_WIDTH)
        return run

    def forget(self) -> None:
        """Read them again."""
        self._read = []

    def _manifests(self, versions: range) -> list[bytes | None]:
        if len(versions) == 1:
            return [self._lookout.get(versions[0])]
        return list(self._requests.map(self._reader.manifest_bytes, versions))
