"""How a plane is laid out for compression, compressed and, with bounds, expanded."""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

from weightcast.schemas.errors import Corrupt
from weightcast.schemas.frames import expand, stated_bytes

MIN_COMPRESSED_BYTES: Final = 64
"""Planes below this stay raw: a frame's headers and table take about as much as it could save."""

Bytes = npt.NDArray[np.uint8]


def parted_bytes(elements: npt.NDArray[Any]) -> Bytes:
    """The lowest bytes of all elements, then the next lowest, and so on: of small numbers the higher ones repeat."""
    return np.ascontiguousarray(elements.view(np.uint8).reshape(-1, elements.itemsize).T).reshape(-1)


def joined_bytes(data: Bytes, width: int) -> Bytes:
    """Undo `parted_bytes`."""
    return np.ascontiguousarray(data.reshape(width, -1).T).reshape(-1)


_HUFFMAN: Final = {
    "window_log": 17,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
    "strategy": zstandard.STRATEGY_FAST,
}
"""As close to Huffman coding alone as zstd comes: gaps and steps repeat by chance only, and each match that
is taken costs more than it saves. Against level 1 on settled AdamW data: steps, a byte each, 2.28 instead of 2.48 bits,
gaps the same, in less time (`benchmarks/parts/race.py`)."""


class _PerThread(threading.local):
    """zstd contexts, which must not be shared between threads that run at once."""

    def __init__(self) -> None:
        self.compressors: dict[int | None, zstandard.ZstdCompressor] = {}

    def compressor(self, level: int | None) -> zstandard.ZstdCompressor:
        """The compressor of a level; None stands for `_HUFFMAN`."""
        if level not in self.compressors:
            parameters = zstandard.ZstdCompressionParameters(**_HUFFMAN)
            self.compressors[level] = (
                zstandard.ZstdCompressor(compression_params=parameters)
                if level is None
                else zstandard.ZstdCompressor(level=level)
            )
        return self.compressors[level]


_contexts = _PerThread()


def compress_plane(plane: npt.NDArray[Any], level: int, *, noisy: bool = True) -> bytes:
    """`plane` raw or as one frame, whichever is shorter; the same bytes give the same result.

    Args:
        plane: contiguous.
        level: of zstd.
        noisy: the plane is gaps or steps, for which level 1 does not look for repetitions.
    """
    raw = plane.view(np.uint8).data
    if len(raw) < MIN_COMPRESSED_BYTES:
        return bytes(raw)
    frame = _contexts.compressor(None if noisy and level == 1 else level).compress(raw)
    return frame if len(frame) < len(raw) else bytes(raw)


def expand_plane(data: bytes, raw_bytes: int, tensor: str, plane: str) -> Bytes:
    """Undo `compress_plane`. Nothing is allocated before the frame's stated size has been found right.

    Raises:
        Corrupt: not `raw_bytes` raw bytes nor one frame that states and has exactly that content.
    """
    if len(data) == raw_bytes:
        return np.frombuffer(data, np.uint8)
    try:
        stated = stated_bytes(data) if len(data) < raw_bytes else -1
        if stated == raw_bytes:
            return np.frombuffer(expand(data, raw_bytes), np.uint8)
        found = f"a content size of {stated}" if stated >= 0 else "no single frame"
    except ValueError as error:
        found = str(error)
    raise Corrupt(
        f"row of tensor {tensor!r}: plane {plane} of {len(data)} bytes, expected {raw_bytes} raw bytes "
        f"or one shorter zstd frame of them, found {found}"
    )
