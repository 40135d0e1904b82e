"""The coding `class` as docs/format.md words it: slow, plain, and what the tests hold the kernels to.

Nothing else uses this module. Numbers are Python integers; bits of elements and planes are sequences of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

EXPONENTS = {"BF16": (7, 8, 16), "F16": (10, 5, 16), "F8_E4M3": (3, 4, 8), "F8_E5M2": (2, 5, 8)}
"""s, k, and b: bits of an element."""


@dataclass(frozen=True)
class Shape:
    """What both planes of a row depend on beside its bits.

    Attributes:
        dtype: of the row.
        top: top exponent.
        line: elements in a line.
        phase: elements of the first line that lie before the row.
    """

    dtype: str
    top: int
    line: int
    phase: int

    @property
    def width(self) -> int:
        """Bits of an element."""
        return EXPONENTS[self.dtype][2]

    def exponent(self, bits: int) -> int:
        """x."""
        shift, size, _ = EXPONENTS[self.dtype]
        return (bits >> shift) % (1 << size)

    def kind(self, bits: int) -> int:
        """Class of an element."""
        return min(max(self.top - self.exponent(bits), 0), 11)

    def line_of(self, position: int) -> int:
        """Line of an element of the row."""
        return (position + self.phase) // self.line

    def lines(self, length: int) -> int:
        """L."""
        return self.line_of(length - 1) + 1


class BitWriter:
    """Lists of numbers, as bits."""

    def __init__(self) -> None:
        self.bits: list[int] = []

    def number(self, number: int, size: int) -> None:
        self.bits += [number >> i & 1 for i in range(size)]

    def write(self, numbers: Sequence[int], mean: int) -> int:
        """Append a list; its mean at the end."""
        for i, v in enumerate(numbers):
            d = max(1, (177 * mean + 49152) >> 16)
            q, r = divmod(v, d)
            b = (d - 1).bit_length()
            u = (1 << b) - d
            if q >= 32:
                self.number(0, 32)
                self.number(v, 24)
            else:
                self.number(1 << q, q + 1)
                if r < u:
                    self.number(r, b - 1)
                elif b:
                    self.number((r + u) >> 1, b - 1)
                    self.number((r + u) & 1, 1)
            mean += (256 * v - mean) >> min(6, 2 + (i + 1).bit_length())
        return mean

    def bytes(self) -> bytes:
        """All bits, and zeros to fill the last byte."""
        return sum(bit << i for i, bit in enumerate(self.bits)).to_bytes(-(-len(self.bits) // 8), "little")


class BitReader:
    """Undoes `BitWriter`."""

    def __init__(self, data: bytes) -> None:
        self.bits = int.from_bytes(data, "little")

    def number(self, size: int) -> int:
        number = self.bits % (1 << size)
        self.bits >>= size
        return number

    def read(self, count: int, mean: int) -> tuple[list[int], int]:
        """The next list, and its mean at the end."""
        numbers = []
        for i in range(count):
            d = max(1, (177 * mean + 49152) >> 16)
            b = (d - 1).bit_length()
            u = (1 << b) - d
            q = 0
            while q < 32 and not self.number(1):
                q += 1
            if q == 32:
                v = self.number(24)
            else:
                r = self.number(b - 1) if b else 0
                if b and r >= u:
                    r = 2 * r + self.number(1) - u
                v = q * d + r
            numbers.append(v)
            mean += (256 * v - mean) >> min(6, 2 + (i + 1).bit_length())
        return numbers, mean


@dataclass
class Chance:
    """A kept chance of a 1, in 2^-16."""

    p: int = 1 << 15
    uses: int = 0

    def adapt(self, bit: int) -> None:
        a = min(7, (self.uses + 1).bit_length())
        self.p += ((1 << 16) - self.p) >> a if bit else -(self.p >> a)
        self.uses += 1


@dataclass
class Interval:
    """The interval of the arithmetic coder."""

    low: int = 0
    high: int = (1 << 32) - 1

    def narrow(self, p: int, bit: int | None = None, code: int = 0) -> int:
        """Take the part of `bit`, or that in which `code` lies; the bit."""
        middle = self.low + ((self.high - self.low) * p >> 16)
        if bit is None:
            bit = int(code <= middle)
        if bit:
            self.high = middle
        else:
            self.low = middle + 1
        return bit

    def settled(self) -> Iterator[int]:
        """Bytes that both ends begin with."""
        while self.low >> 24 == self.high >> 24:
            yield self.low >> 24
            self.low = (self.low << 8) % (1 << 32)
            self.high = (self.high << 8) % (1 << 32) + 255


@dataclass
class Coder:
    """Codes bits, or reads them if there is `data`."""

    data: bytes | None = None
    interval: Interval = field(default_factory=Interval)
    out: bytearray = field(default_factory=bytearray)

    def bit(self, p: int, bit: int) -> int:
        """Code `bit`; or, of data, read one."""
        if self.data is not None:
            code = int.from_bytes(self.data[len(self.out) :][:4].ljust(4, b"\0"), "big")
            bit = self.interval.narrow(p, code=code)
        else:
            self.interval.narrow(p, bit)
        self.out += bytes(self.interval.settled())
        return bit

    def kept(self, chance: Chance, bit: int) -> int:
        """The same by a kept chance."""
        bit = self.bit(chance.p, bit)
        chance.adapt(bit)
        return bit

    def end(self) -> bytes:
        """The plane."""
        return bytes(self.out) + bytes([(self.interval.low >> 24) + 1])


def gap_plane(shape: Shape, old: Sequence[int], positions: Sequence[int], listed: bool) -> bytes:
    """The plane `gaps`."""
    live = sorted({shape.line_of(p) for p in positions})
    counted = [i for i in range(len(old)) if not listed or shape.line_of(i) in live]
    lists: list[list[int]] = [[] for _ in range(12)]
    since, changed = [0] * 12, set(positions)
    for i in counted:
        kind = shape.kind(old[i])
        if i in changed:
            lists[kind].append(since[kind])
            since[kind] = 0
        else:
            since[kind] += 1
    writer = BitWriter()
    head = [len(gaps) for gaps in lists] + ([len(live)] if listed else [])
    writer.write(head, 256 * len(positions) // 12)
    if listed:
        dead = [b - a - 1 for a, b in zip([-1, *live], live, strict=False)]
        writer.write(dead, 256 * shape.lines(len(old)) // len(live))
    mean = 64 * len(counted) // (len(lists[0]) + 1)
    for gaps in lists:
        mean = max(1, writer.write(gaps, mean) // 2)
    return bytes([shape.top, listed]) + writer.bytes()


def positions_of(shape: Shape, old: Sequence[int], count: int, gaps: bytes) -> list[int]:
    """Positions that a plane `gaps`, which must be valid, stands for."""
    reader, listed = BitReader(gaps[2:]), gaps[1] == 1
    head, _ = reader.read(12 + listed, 256 * count // 12)
    counted = list(range(len(old)))
    if listed:
        dead, _ = reader.read(head[12], 256 * shape.lines(len(old)) // head[12])
        live = {sum(dead[: i + 1]) + i for i in range(len(dead))}
        counted = [i for i in counted if shape.line_of(i) in live]
    found = []
    mean = 64 * len(counted) // (head[0] + 1)
    for kind in range(12):
        numbers, mean = reader.read(head[kind], mean)
        mean = max(1, mean // 2)
        inside, at = [i for i in counted if shape.kind(old[i]) == kind], -1
        for number in numbers:
            at += number + 1
            found.append(inside[at])
    return sorted(found)


def code_steps(
    shape: Shape, positions: Sequence[int], old: Sequence[int], new: Sequence[int], data: bytes | None = None
) -> tuple[bytes, list[int]]:
    """The plane `steps` of changes from `old` to `new`; or, of data, the new bits that it leads to."""
    coder, b = Coder(data), shape.width
    directions, lengths = [Chance() for _ in range(8)], [Chance() for _ in range(32)]
    ones = [Chance(59_000) for _ in range(32)]
    total, line, found = 0, -1, []
    for i, position in enumerate(positions):
        if shape.line_of(position) != line:
            total, line = 0, shape.line_of(position)
        o = old[i]
        step = ((new[i] - o) % (1 << b)) if data is None else 1
        if step >= 1 << (b - 1):
            step -= 1 << b
        positive = o >> (b - 1) == 0
        rises = (step > 0) == positive
        rises = bool(coder.kept(directions[abs(total)], int(rises != (total < 0)))) != (total < 0)
        total = min(max(total + (1 if rises else -1), -7), 7)
        scale = min(max(shape.top + 1 - shape.exponent(o), 0), 31)
        size = abs(step)
        if not coder.kept(ones[scale], int(size == 1)):
            n, j = (size - 1).bit_length(), 1
            while j <= b - 2 and coder.kept(lengths[min(max(j - scale + 14, 0), 31)], int(n > j)):
                j += 1
            more = 1
            for k in reversed(range(j - 1)):
                more = 2 * more + coder.bit(1 << 15, (size - 1) >> k & 1)
            size = more + 1
        found.append((o + (size if rises == positive else -size)) % (1 << b))
    return coder.end(), found
