"""How fast the codec compares, digests, codes and applies, beside how fast the same cores read both inputs.

    python -m weightcast.benchmarks.codec_race --mib 512 --rounds 5

Data: bf16 copies of fp32 masters, N(0, 0.02) scaled by layer, before and after one AdamW step whose moments
have settled; the learning rate is set so that the wanted share of the bf16 elements changes. Every figure is
the best of several rounds, and the rounds of all contestants are interleaved, so that ratios hold on a busy
machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt
import zstandard

from weightcast.codec import Changes, Encoded, Geometry, Interval, Memory, decode, digest, encode, scatter
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import Row

LAYER_ELEMENTS: Final = 1 << 22
DISTINCT_LAYERS: Final = 4  # generated; repeated further apart than any row or zstd window reaches
BETA1: Final = 0.9
BETA2: Final = 0.999
EPSILON: Final = 1e-8
SETTLED_STEPS: Final = 20  # AdamW steps after moments that were drawn at their stationary size

U16 = npt.NDArray[np.uint16]
F32 = npt.NDArray[np.float32]


def to_bf16(values: F32) -> U16:
    """Round to nearest even, as bits."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def settled_step(layer: int) -> tuple[F32, F32]:
    """fp32 masters [LAYER_ELEMENTS] of a layer, and their next AdamW step at learning rate 1."""
    rng = np.random.default_rng(layer)
    scale = np.float32(0.02 * (0.5 + layer % 4 / 2))
    master = rng.standard_normal(LAYER_ELEMENTS, np.float32) * scale
    moment = rng.standard_normal(LAYER_ELEMENTS, np.float32) * np.float32(((1 - BETA1) / (1 + BETA1)) ** 0.5)
    square = np.ones(LAYER_ELEMENTS, np.float32)
    for _ in range(SETTLED_STEPS):
        gradient = rng.standard_normal(LAYER_ELEMENTS, np.float32)
        moment = np.float32(BETA1) * moment + np.float32(1 - BETA1) * gradient
        square = np.float32(BETA2) * square + np.float32(1 - BETA2) * gradient * gradient
    return master, (moment / (np.sqrt(square) + np.float32(EPSILON))).astype(np.float32)


def states(density: float, mib: int) -> tuple[U16, U16, float]:
    """bf16 bits before and after a step that changes `density` of them, and the share that really changed."""
    layers = [settled_step(i) for i in range(DISTINCT_LAYERS)]
    master, direction = (
        np.concatenate([part[: 1 << 18] for part in parts]) for parts in zip(*layers, strict=True)
    )
    low, high = 1e-9, 1e-2
    for _ in range(30):  # bisection in the exponent
        rate = (low * high) ** 0.5
        share = np.mean(to_bf16(master) != to_bf16(master - np.float32(rate) * direction))
        low, high = (rate, high) if share < density else (low, rate)
    old = np.concatenate([to_bf16(m) for m, _ in layers])
    new = np.concatenate([to_bf16(m - np.float32(rate) * d) for m, d in layers])
    repeats = -(-mib * (1 << 19) // len(old))
    return np.tile(old, repeats), np.tile(new, repeats), float(np.mean(old != new))


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def scan(left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64]) -> Any:
    """Read both arrays once: the yardstick."""
    total = np.uint64(0)
    for i in range(left.size):
        total |= left[i] ^ right[i]
    return total


def xor_zstd(old: U16, new: U16) -> bytes:
    """The usual alternative: dense XOR through zstd level 1."""
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).data)


class Race:
    """Both states under one geometry, and the contestants: functions of an interval."""

    def __init__(self, old: U16, new: U16) -> None:
        self.old_bits, self.new_bits = old, new
        specs = [
            TensorSpec(f"layer.{i:04d}", "BF16", (LAYER_ELEMENTS,)) for i in range(len(old) // LAYER_ELEMENTS)
        ]
        self.geometry = Geometry(Layout.of(specs))
        self.space = self.geometry["BF16"]
        self.old, self.new = (self._memory(bits) for bits in (old, new))
        self.intervals = self.geometry.intervals()
        self.rows = {i: row for i in self.intervals if (row := self.encode(i).row) is not None}
        self.changes = {i: self.decode(i) for i in self.rows}

    def _memory(self, bits: U16) -> Memory:
        parts = {
            n: bits[int(s) :][:LAYER_ELEMENTS]
            for n, s in zip(self.space.names, self.space.starts, strict=False)
        }
        return Memory.over(self.geometry, parts)

    def scan(self, interval: Interval) -> Any:
        part = slice(interval.start, interval.stop)
        return scan(self.old_bits[part].view(np.uint64), self.new_bits[part].view(np.uint64))

    def digest(self, interval: Interval) -> Any:
        return digest(self.space, self.new, interval)

    def compare(self, interval: Interval) -> Any:
        """Encode two states that are equal: compare and digest alone."""
        return encode(self.space, self.new, self.new, interval)

    def encode(self, interval: Interval) -> Encoded:
        return encode(self.space, self.new, self.old, interval)

    def decode(self, interval: Interval) -> Changes:
        return decode(self.space, self.rows[interval], self.old)[0]

    def scatter(self, interval: Interval) -> None:
        scatter(self.space, self.new, self.changes[interval])

    def xor_zstd(self, interval: Interval) -> bytes:
        part = slice(interval.start, interval.stop)
        return xor_zstd(self.old_bits[part], self.new_bits[part])


def race(
    contestants: dict[str, Callable[[Interval], Any]],
    intervals: Sequence[Interval],
    rounds: int,
    threads: int,
) -> dict[str, float]:
    """Best seconds of each contestant over all intervals, interleaved."""
    best = dict.fromkeys(contestants, float("inf"))
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            for name, run in contestants.items():
                begin = time.perf_counter()
                list(pool.map(run, intervals))
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="bf16 bytes of the model, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.002])
    options = parser.parse_args()
    for density in options.density:
        old, new, share = states(density, options.mib)
        contest = Race(old, new)
        names = ["scan", "digest", "compare", "encode", "decode", "scatter", "xor_zstd"]
        best = race(
            {name: getattr(contest, name) for name in names},
            contest.intervals,
            options.rounds,
            options.threads,
        )
        report(contest, best, share)


def report(contest: Race, best: dict[str, float], share: float) -> None:
    rows: list[Row] = list(contest.rows.values())
    changes = sum(row.count for row in rows)
    frames = sum(len(contest.xor_zstd(i)) for i in contest.intervals)
    print(f"{contest.space.elements / 2**20:.0f} Mi elements, {100 * share:.2f} % changed")
    for name, seconds in best.items():
        rate = 4 * contest.space.elements / seconds / 1e9
        print(
            f"  {name:9} {1e3 * seconds:8.1f} ms  {rate:6.1f} GB/s of both inputs  "
            f"{100 * best['scan'] / seconds:6.1f} % of scan"
        )
    planes = {
        p: 8 * sum(len(getattr(r, p)) for r in rows) / changes for p in ("gaps", "lows", "steps", "escapes")
    }
    print(
        f"  bits a change: {sum(planes.values()):.2f}  "
        + "  ".join(f"{n} {b:.2f}" for n, b in planes.items())
    )
    print(
        f"  gap_shift {sorted({r.gap_shift for r in rows})}; "
        f"dense XOR + zstd-1: {8 * frames / changes:.2f} bits a change"
    )


if __name__ == "__main__":
    main()
