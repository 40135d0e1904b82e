"""Memory that was used and will be again: to ask the system for pages takes longer than to fill them."""

from __future__ import annotations

import threading
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]


class Spare:
    """Buffers that nobody uses at the moment. Of all of them the smallest are let go where they exceed `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._buffers: list[Buffer] = []  # from small to large
        self._bytes = 0

    def take(self, nbytes: int) -> Buffer:
        """uint8 [at least `nbytes`], with anything in it; for the caller alone until it is given back, or for ever."""
        with self._lock:
            at = bisect_left(self._buffers, nbytes, key=len)
            if at < len(self._buffers):
                found = self._buffers.pop(at)
                self._bytes -= len(found)
                return found
        return np.empty(nbytes + nbytes // 4, np.uint8)  # the next row may have a few changes more

    def give(self, buffer: Buffer) -> None:
        """Give back what `take` gave; nothing may refer to it any more."""
        with self._lock:
            self._buffers.insert(bisect_left(self._buffers, len(buffer), key=len), buffer)
            self._bytes += len(buffer)
            while self._bytes > self._most_bytes:
                self._bytes -= len(self._buffers.pop(0))
