"""The format's arithmetic as docs/format.md words it: slow, plain, and what the tests hold the kernels to.

Nothing else uses this module. Numbers are Python integers; `bits` and planes are sequences of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from weightcast.schemas.digest import MASK64, Digest
from weightcast.schemas.layout import MIX, TensorSpec


def seeds(spec: TensorSpec) -> tuple[int, int]:
    """seed_0 and seed_1 of a tensor."""
    text = b"\0".join([spec.name.encode(), spec.dtype.encode(), ",".join(map(str, spec.shape)).encode()])
    words = hashlib.blake2b(text, digest_size=16).digest()
    return int.from_bytes(words[:8], "little"), int.from_bytes(words[8:], "little")


def mix_1(seed_0: int, seed_1: int, word: int) -> tuple[int, int]:
    """R_0 and R_1 of a word: splitmix64, for each lane by itself."""

    def split(z: int) -> int:
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
        return z ^ z >> 31 | 1

    golden = word * 0x9E3779B97F4A7C15
    return split(seed_0 + golden & MASK64), split(seed_1 + golden & MASK64)


def mix_2(seed_0: int, seed_1: int, word: int) -> tuple[int, int]:
    """The same with the feature `mix2`: half of it serves both lanes."""
    high, low = divmod(seed_0 + word * 0x9E3779B97F4A7C15 & MASK64, 1 << 32)
    both = (low << 32 | high) ^ low * (high | 1)
    z0, z1 = both * 0x94D049BB133111EB & MASK64, (both ^ seed_1) * 0xD6E8FEB86659FD93 & MASK64
    return z0 ^ z0 >> 32 | 1, z1 ^ z1 >> 32 | 1


def weights(spec: TensorSpec, index: int, mix: int = MIX) -> tuple[int, int]:
    """W_0(i) and W_1(i)."""
    each = 8 // spec.width
    word, slot = divmod(index, each)
    w0, w1 = (mix_1 if mix == 1 else mix_2)(*seeds(spec), word)
    return w0 << (8 * spec.width * slot), w1 << (8 * spec.width * (each - 1 - slot))


def digest(spec: TensorSpec, bits: Sequence[int], offset: int = 0, mix: int = MIX) -> Digest:
    """D of the elements of a tensor from element `offset` on."""
    pairs = [weights(spec, offset + i, mix) for i in range(len(bits))]
    lanes = (sum(v * pair[k] for v, pair in zip(bits, pairs, strict=True)) & MASK64 for k in (0, 1))
    return Digest(*lanes)


@dataclass(frozen=True)
class Planes:
    """Uncompressed planes of a row; `escapes` as elements."""

    count: int
    gaps: bytes = b""
    lows: bytes = b""
    steps: bytes = b""
    escapes: tuple[int, ...] = ()


def zigzag(old: int, new: int, width: int) -> int:
    """z of a changed element of `width` bytes."""
    span = 1 << 8 * width
    step = (new - old) % span
    if step >= span // 2:
        step -= span
    return 2 * step if step >= 0 else -2 * step - 1


def step_byte(old: int, new: int, width: int) -> int:
    """Step byte of a changed element of `width` bytes; 255 if it has to be escaped."""
    return min(zigzag(old, new, width), 255)


def gap_planes(old: Sequence[int], new: Sequence[int], width: int, gap_shift: int) -> Planes:
    """Planes of coding `gap`."""
    gaps, steps, escapes, lows = bytearray(), bytearray(), [], 0
    changed = [i for i, (o, n) in enumerate(zip(old, new, strict=True)) if o != n]
    for i, (previous, position) in enumerate(zip([-1, *changed], changed, strict=False)):
        distance = position - previous - 1
        high = distance >> gap_shift
        gaps += b"\xff" * (high // 255) + bytes([high % 255])
        lows |= (distance % (1 << gap_shift)) << (i * gap_shift)
        steps.append(step_byte(old[position], new[position], width))
        if steps[-1] == 255:
            escapes.append(new[position])
    low_bytes = -(-len(changed) * gap_shift // 8)
    return Planes(len(changed), bytes(gaps), lows.to_bytes(low_bytes, "little"), bytes(steps), tuple(escapes))


def pairs_planes(old: Sequence[int], new: Sequence[int], width: int, gap_shift: int) -> Planes:
    """Planes of coding `pairs`."""
    planes, halves, escapes = gap_planes(old, new, width, gap_shift), [], []
    for o, n in zip(old, new, strict=True):
        if o != n:
            halves.append(min(step_byte(o, n, width), 15))
            escapes += [zigzag(o, n, width)] if halves[-1] == 15 else []
    halves += [0] * (len(halves) % 2)
    steps = bytes(a + 16 * b for a, b in zip(halves[::2], halves[1::2], strict=True))
    return Planes(planes.count, planes.gaps, planes.lows, steps, tuple(escapes))


def dense_planes(old: Sequence[int], new: Sequence[int], width: int) -> Planes:
    """Planes of coding `dense`."""
    steps = bytes(step_byte(o, n, width) if o != n else 0 for o, n in zip(old, new, strict=True))
    escapes = tuple(n for n, s in zip(new, steps, strict=True) if s == 255)
    return Planes(len(steps) - steps.count(0), steps=steps, escapes=escapes)


def apply_gap(planes: Planes, old: Sequence[int], width: int, gap_shift: int) -> list[int]:
    """New bits from old ones and the planes of coding `gap`, which must be valid."""
    lows, gaps, position, positions = int.from_bytes(planes.lows, "little"), iter(planes.gaps), -1, []
    for i in range(planes.count):
        high = byte = next(gaps)
        while byte == 255:
            byte = next(gaps)
            high += byte
        position += 1 + (high << gap_shift) + (lows >> i * gap_shift) % (1 << gap_shift)
        positions.append(position)
    dense = bytearray(len(old))
    for position, step in zip(positions, planes.steps, strict=True):
        dense[position] = step
    return apply_dense(Planes(planes.count, steps=bytes(dense), escapes=planes.escapes), old, width)


def apply_pairs(planes: Planes, old: Sequence[int], width: int, gap_shift: int) -> list[int]:
    """New bits from old ones and the planes of coding `pairs`, which must be valid."""
    halves = [half for byte in planes.steps for half in (byte % 16, byte // 16)][: planes.count]
    escapes, ones = iter(planes.escapes), b"\2" * planes.count
    marks = apply_gap(Planes(planes.count, planes.gaps, planes.lows, ones), [0] * len(old), 1, gap_shift)
    zigzags = iter(next(escapes) if half == 15 else half for half in halves)
    new = []
    for o, mark in zip(old, marks, strict=True):
        z = next(zigzags) if mark else 0
        new.append((o + (z // 2 if z % 2 == 0 else -(z + 1) // 2)) % (1 << 8 * width))
    return new


def apply_dense(planes: Planes, old: Sequence[int], width: int) -> list[int]:
    """New bits from old ones and the planes of coding `dense`, which must be valid."""
    escapes = iter(planes.escapes)
    new = []
    for o, zigzag in zip(old, planes.steps, strict=True):
        step = zigzag // 2 if zigzag % 2 == 0 else -(zigzag + 1) // 2
        new.append(next(escapes) if zigzag == 255 else (o + step) % (1 << 8 * width))
    return new
