"""What else could be done with the same two arrays, to compare with: copy, scan, and the wire formats of others."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import zstandard

U16 = npt.NDArray[np.uint16]


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def scan(left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64]) -> Any:
    """Read both arrays once: as fast as these cores can look at all bits."""
    total = np.uint64(0)
    for i in range(left.size):
        total |= left[i] ^ right[i]
    return total


def dense_copy(new: U16, target: U16) -> None:
    """Ship everything: one copy in memory, before any compression or network."""
    np.copyto(target, new)


def xor_zstd(old: U16, new: U16) -> bytes:
    """Dense XOR through zstd level 1."""
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).data)


def xor_zstd_decode(old: U16, frame: bytes) -> U16:
    """Inverse of `xor_zstd`."""
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint16) ^ old


def index_value_zstd(old: U16, new: U16) -> bytes:
    """int32 index and bf16 value of each change, through zstd level 1."""
    changed = np.flatnonzero(old != new).astype(np.int32)
    return zstandard.ZstdCompressor(level=1).compress(changed.tobytes() + new[changed].tobytes())


def index_value_zstd_decode(old: U16, frame: bytes) -> U16:
    """Inverse of `index_value_zstd`: writes into `old`."""
    raw = zstandard.ZstdDecompressor().decompress(frame)
    count = len(raw) // 6
    old[np.frombuffer(raw, np.int32, count)] = np.frombuffer(raw, np.uint16, count, 4 * count)
    return old


def gap_xor_zstd(old: U16, new: U16) -> bytes:
    """u16 gap (65,535: that many elements and no change) and XOR of each change, through zstd level 1."""
    changed = np.flatnonzero(old != new)
    gaps = np.diff(changed, prepend=-1) - 1
    spans = np.repeat(np.uint16(0xFFFF), int((gaps // 0xFFFF).sum()))
    small = (gaps % 0xFFFF).astype(np.uint16)
    raw = small.tobytes() + spans.tobytes() + (old[changed] ^ new[changed]).tobytes()
    return zstandard.ZstdCompressor(level=1).compress(raw)
