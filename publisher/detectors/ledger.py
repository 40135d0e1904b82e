"""The boundary ledger: bf16 bits of the few elements that undoing the next step may leave open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import zstandard

from .kernels import Bits, Positions, settle

DENSE_SHARE: Final = 16
"""From 1/16 of a piece on notes are kept compressed: such a piece is zeros, of which nothing is left then."""


@dataclass(frozen=True, slots=True)
class Notes:
    """What was noted of one piece of `length` elements: places (uint32, ascending) and bits, or both in one frame."""

    length: int
    places: Positions
    bits: Bits
    packed: bytes = b""

    @classmethod
    def of(cls, length: int, places: Positions, bits: Bits) -> Notes:
        """Note elements of a piece; `places` is copied, `bits` is not."""
        if len(places) * DENSE_SHARE < length:
            return cls(length, places.copy(), bits)
        gaps = np.diff(places, prepend=np.uint32(0)).astype(np.uint32)
        packed = zstandard.ZstdCompressor(level=1).compress(gaps.tobytes() + bits.tobytes())
        return cls(length, places[:0].copy(), bits[:0].copy(), packed)

    def read(self) -> tuple[Positions, Bits]:
        """Places and bits."""
        if not self.packed:
            return self.places, self.bits
        both = zstandard.ZstdDecompressor().decompress(self.packed, max_output_size=6 * self.length)
        count = len(both) // 6  # 4 bytes of place and 2 of bits
        gaps = np.frombuffer(both, np.uint32, count)
        return np.cumsum(gaps, dtype=np.uint32), np.frombuffer(both, np.uint16, count, 4 * count)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.places.nbytes + self.bits.nbytes + len(self.packed)


class Ledger:
    """Notes by tensor and first element of the piece. Pieces may be noted by several threads at once."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, int], Notes] = {}

    def note(self, name: str, begin: int, length: int, places: Positions, bits: Bits) -> None:
        """Note elements of the piece of tensor `name` that begins at element `begin`; `bits` is kept as it is."""
        self._notes[name, begin] = Notes.of(length, places, bits)

    def settle(self, name: str, begin: int, opens: Positions, bits: Bits) -> int:
        """Give open elements of a piece with these bits those that were noted; how many were not noted."""
        if not len(opens):
            return 0
        notes = self._notes.get((name, begin))
        if notes is None or notes.length != len(bits):
            return len(opens)
        return int(settle(opens, *notes.read(), bits))

    @property
    def nbytes(self) -> int:
        """Bytes that the notes take."""
        return sum(notes.nbytes for notes in self._notes.values())
