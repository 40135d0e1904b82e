"""Zstandard frames: one that is read without trust, and shards that are one."""

from __future__ import annotations

import threading
from typing import Final

import zstandard

MAGIC: Final = b"\x28\xb5\x2f\xfd"  # RFC 8878, 3.1.1; rules out skippable frames

_MAX_WINDOW_BYTES: Final = 1 << 28  # a row's largest plane is 2^24 elements of 8 bytes

_WINDOW_LOG: Final = 12
"""Of a shard's frame: 4 KiB, and so are its blocks. What is alike in a table is near. zstd leaves a block as it is
unless that saves 1/64: in one of 128 KiB a short table would stay as it is among planes, which nothing shortens."""

_LEVEL: Final = 1


class _PerThread(threading.local):
    """zstd contexts, which must not be shared between threads that run at once."""

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters.from_level(_LEVEL, window_log=_WINDOW_LOG)
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


_contexts = _PerThread()


def stated_bytes(data: bytes | bytearray) -> int:
    """Bytes of content that a frame says it has; -1 if this is none, or says nothing.

    Raises:
        ValueError: its header is broken.
    """
    try:
        return zstandard.frame_content_size(data) if data[: len(MAGIC)] == MAGIC else -1
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error


def expand(frame: bytes | bytearray, content_bytes: int) -> bytes:
    """The content of a single frame, which is to be as long as the frame states. No more than that is allocated.

    Raises:
        ValueError: it is no such frame.
    """
    try:
        content = _contexts.decompressor.decompress(
            frame, max_output_size=content_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(content) != content_bytes:
        raise ValueError(f"{len(content)} bytes in a frame of {content_bytes}")
    return content


def frame_of(data: bytes) -> bytes:
    """`data`, part of which may be noise, as one frame; the same bytes give the same frame."""
    return _contexts.compressor.compress(data)
