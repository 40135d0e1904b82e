"""The parts of tensors that an interval of the flat space is made of, and room for their old bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightcast.codec import FlatSpace, Geometry, Interval, Memory


class Piece(NamedTuple):
    """Elements [begin, end) of a tensor in C order, at `at` in their interval."""

    name: str
    begin: int
    end: int
    at: int


def pieces(space: FlatSpace, interval: Interval) -> Iterator[Piece]:
    """The pieces of `interval` in order; no empty ones."""
    for i in range(space.tensor_at(interval.start), space.tensor_at(interval.stop - 1) + 1):
        first, last = int(space.starts[i]), int(space.starts[i + 1])
        begin, end = max(first, interval.start), min(last, interval.stop)
        if begin < end:
            yield Piece(space.names[i], begin - first, end - first, begin - interval.start)


class Rooms:
    """Memory for the bits of intervals, used again and again; as much of it as there are threads at work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[npt.NDArray[np.uint8]] = []

    @contextmanager
    def room(self, nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """uint8 [nbytes], not cleared."""
        with self._lock:
            found = self._free.pop() if self._free else np.empty(0, np.uint8)
        if len(found) < nbytes:
            found = np.empty(nbytes, np.uint8)
        try:
            yield found[:nbytes]
        finally:
            with self._lock:
                self._free.append(found)


def memory_of(geometry: Geometry, interval: Interval, bits: npt.NDArray[np.uint8]) -> Memory:
    """Memory in which `interval`, and nothing else, has these bytes."""
    space = geometry[interval.dtype]
    base = bits.ctypes.data
    at = {p.name: base + (p.at - p.begin) * space.width for p in pieces(space, interval)}
    return Memory.at(geometry, at, bits)
