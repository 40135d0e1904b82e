"""The state digest as a value. How it is computed is `weightcast.codec.digest`'s business."""

from __future__ import annotations

from dataclasses import dataclass

MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Digest:
    """128 bits that say which bits a set of tensors has: two lanes, each a sum modulo 2^64.

    Linear: digests of disjoint parts add up to the digest of the whole, and a change moves the digest by the
    digest of the change. The empty model has the digest zero.
    """

    lane0: int = 0
    lane1: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.lane0 + other.lane0) & MASK64, (self.lane1 + other.lane1) & MASK64)

    def __sub__(self, other: Digest) -> Digest:
        return Digest((self.lane0 - other.lane0) & MASK64, (self.lane1 - other.lane1) & MASK64)

    @property
    def hex(self) -> str:
        """32 hex digits: lane 0, then lane 1, each as a big-endian number."""
        return f"{self.lane0:016x}{self.lane1:016x}"

    def to_bytes(self) -> bytes:
        """16 bytes: lane 0, then lane 1, each little-endian."""
        return self.lane0.to_bytes(8, "little") + self.lane1.to_bytes(8, "little")

    @classmethod
    def from_hex(cls, text: str) -> Digest:
        """Inverse of `hex`.

        Raises:
            ValueError: `text` is not 32 lower-case hex digits.
        """
        if len(text) != 32 or any(c not in "0123456789abcdef" for c in text):
            raise ValueError(f"{text[:80]!r} is not a digest of 32 hex digits")
        return cls(int(text[:16], 16), int(text[16:], 16))

    @classmethod
    def from_bytes(cls, data: bytes) -> Digest:
        """Inverse of `to_bytes`."""
        if len(data) != 16:
            raise ValueError(f"a digest has 16 bytes, found {len(data)}")
        return cls(int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little"))

    def __str__(self) -> str:
        return self.hex
