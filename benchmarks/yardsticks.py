"""What else could be done with the same two arrays, to compare with: copy, scan, and the wire formats of others."""

from __future__ import annotations

import importlib.util
from typing import Any, Final, Protocol

import numba
import numpy as np
import numpy.typing as npt
import zstandard

from weightcast.codec.jit import prefetch
from weightcast.codec.kernels import FETCHED

U16 = npt.NDArray[np.uint16]

_FAR: Final = 0xFFFF
"""A u16 gap of this value: so many elements, and no change at the end of them."""


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def scan(left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64]) -> Any:
    """Read both arrays once: as fast as these cores can look at all bits."""
    total = np.uint64(0)
    for i in range(left.size):
        total |= left[i] ^ right[i]
    return total


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def touch(bits: U16, positions: npt.NDArray[np.int64]) -> None:
    """Read and write elements where they lie: as fast as these cores can bring changes into memory."""
    base = np.uint64(bits.ctypes.data)
    for i in range(positions.size):
        if i + FETCHED < positions.size:
            prefetch(base + np.uint64(2 * positions[i + FETCHED]))
        bits[positions[i]] ^= np.uint16(1)


class Format(Protocol):
    """Somebody else's way from old to new bits.

    Attributes:
        name: in figures.
        title: in tables.
        by_tensor: whether it is given whole tensors in their shape, not flat slices.
    """

    name: str
    title: str
    by_tensor: bool

    def encode(self, old: U16, new: U16) -> bytes:
        """What goes over the wire."""

    def apply(self, frame: bytes, target: U16) -> None:
        """Bring `target`, which holds the old bits, to the new ones."""


def compress(raw: bytes | memoryview) -> bytes:
    """Zstandard level 1, as all of them use it."""
    return zstandard.ZstdCompressor(level=1).compress(raw)


def decompress(frame: bytes) -> bytes:
    """Inverse of `compress`."""
    return zstandard.ZstdDecompressor().decompress(frame)


class XorZstd:
    """Dense XOR through zstd level 1 (slime, miles, SkyRL, ModelExpress)."""

    name, title, by_tensor = "xor_zstd", "XOR + zstd-1", False

    def encode(self, old: U16, new: U16) -> bytes:
        return compress((old ^ new).data)

    def apply(self, frame: bytes, target: U16) -> None:
        np.bitwise_xor(target, np.frombuffer(decompress(frame), np.uint16), out=target)


class IndexValue:
    """int32 index and bf16 value of each change, through zstd level 1 (AReaL-DTE)."""

    name, title, by_tensor = "index_value", "int32 index + value + zstd-1", False

    def encode(self, old: U16, new: U16) -> bytes:
        changed = np.flatnonzero(old != new).astype(np.int32)
        return compress(changed.tobytes() + new[changed].tobytes())

    def apply(self, frame: bytes, target: U16) -> None:
        raw = decompress(frame)
        count = len(raw) // 6
        target[np.frombuffer(raw, np.int32, count)] = np.frombuffer(raw, np.uint16, count, 4 * count)


class GapXor:
    """u16 gap and XOR of each change, through zstd level 1 (NeMo-RL's sparse refit)."""

    name, title, by_tensor = "gap_xor", "u16 gap + XOR + zstd-1", False

    def encode(self, old: U16, new: U16) -> bytes:
        changed = np.flatnonzero(old != new)
        gaps = np.diff(changed, prepend=-1) - 1
        far = gaps // _FAR
        stream = np.full(len(gaps) + int(far.sum()), _FAR, np.uint16)
        stream[np.arange(len(gaps)) + np.cumsum(far)] = gaps % _FAR
        return compress(stream.tobytes() + (old[changed] ^ new[changed]).tobytes())

    def apply(self, frame: bytes, target: U16) -> None:
        raw = np.frombuffer(decompress(frame), np.uint16)
        # All but the values, of which there is one for each gap that is not far: the stream ends where both fit.
        ends = np.cumsum(raw != _FAR) + np.arange(1, len(raw) + 1)
        stream = raw[: int(np.searchsorted(ends, len(raw))) + 1]
        near = stream != _FAR
        changed = np.cumsum(np.where(near, stream.astype(np.int64) + 1, _FAR))[near] - 1
        target[changed] ^= raw[len(stream) :]


class Arc:
    """`arc_v3` of the package `fireworks-delta-compression`, where that is installed. Unpickles what it wrote."""

    name, title, by_tensor = "arc", "arc_v3 (fireworks-delta-compression)", True
    PACKAGE: Final = "fireworks_delta_compression"

    def __init__(self) -> None:
        from importlib import import_module

        self._module = import_module(self.PACKAGE)

    @classmethod
    def installed(cls) -> bool:
        """Whether it can be used."""
        return importlib.util.find_spec(cls.PACKAGE) is not None

    def encode(self, old: U16, new: U16) -> bytes:
        diff, checksum = self._module.delta_compress(
            src=_tensor(old), dst=_tensor(new), compression_format="arc_v3"
        )
        return int(checksum).to_bytes(4, "little") + bytes(diff.numpy())

    def apply(self, frame: bytes, target: U16) -> None:
        import torch

        found = self._module.delta_decompress(
            src=_tensor(target),
            compressed_diff=torch.frombuffer(bytearray(frame[4:]), dtype=torch.uint8),
            checksum=str(int.from_bytes(frame[:4], "little")),
            compression_format="arc_v3",
        )
        target[...] = found.view(torch.int16).numpy().view(np.uint16)


def _tensor(bits: U16) -> Any:
    import torch

    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def formats(*, slow: bool) -> list[Format]:
    """The formats to race against; with `slow`, also the one that takes 15 s a GB, if it is installed."""
    found: list[Format] = [XorZstd(), IndexValue(), GapXor()]
    return [*found, Arc()] if slow and Arc.installed() else found
