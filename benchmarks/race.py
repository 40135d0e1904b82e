"""The codec against its yardsticks, on the same arrays, in one process, in turns.

python -m weightcast.benchmarks.race --mib 512 --density 0.01 0.002

Every figure is the best of several rounds, and the rounds of all contestants are interleaved, so that ratios hold on a
busy machine. Contestants work on one row (or as many elements) at a time, spread over a thread pool.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from weightcast.codec import Changes, Encoded, Geometry, Interval, Memory, decode, encode, scatter
from weightcast.codec.digest import digest
from weightcast.schemas.layout import Layout, TensorSpec

from . import yardsticks
from .data import LAYER_ELEMENTS, U16, states

CONTESTANTS: Final = {
    "scan": "read both arrays",
    "copy": "dense copy",
    "digest": "digest alone",
    "compare": "compare and digest",
    "encode": "compare, digest, encode",
    "decode_apply": "decode, digest, apply",
    "xor_zstd": "XOR + zstd-1",
    "xor_zstd_apply": "XOR + zstd-1, back and apply",
    "index_value": "int32 index + value + zstd-1",
    "index_value_apply": "int32 index + value + zstd-1, back and apply",
    "gap_xor": "u16 gap + XOR + zstd-1",
}


class Race:
    """Two states of one model, and the contestants: functions of an interval."""

    def __init__(self, old: U16, new: U16) -> None:
        self.old_bits, self.new_bits = old, new
        self.scratch = old.copy()
        count = len(old) // LAYER_ELEMENTS
        self.geometry = Geometry(
            Layout.of(TensorSpec(f"layer.{i:04d}", "BF16", (LAYER_ELEMENTS,)) for i in range(count))
        )
        self.space = self.geometry["BF16"]
        self.old, self.new, self.target = (self._memory(bits) for bits in (old, new, self.scratch))
        self.intervals = self.geometry.intervals()
        self.rows = {i: row for i in self.intervals if (row := self.encode(i).row) is not None}
        self.xor_frames = {i: self.xor_zstd(i) for i in self.intervals}
        self.index_frames = {i: self.index_value(i) for i in self.intervals}
        self.gap_frames = {i: self.gap_xor(i) for i in self.intervals}

    def _memory(self, bits: U16) -> Memory:
        starts = self.space.starts
        return Memory.over(
            self.geometry,
            {n: bits[int(s) :][:LAYER_ELEMENTS] for n, s in zip(self.space.names, starts, strict=False)},
        )

    def check(self) -> None:
        """Stop if any contestant that brings bits over does not bring exactly the right ones."""
        for interval in self.intervals:
            part = slice(interval.start, interval.stop)
            for name in ("decode_apply", "xor_zstd_apply", "index_value_apply"):
                self.scratch[part] = self.old_bits[part]
                getattr(self, name)(interval)
                if not np.array_equal(self.scratch[part], self.new_bits[part]):
                    raise SystemExit(f"{name} is not exact")

    def scan(self, interval: Interval) -> Any:
        part = slice(interval.start, interval.stop)
        return yardsticks.scan(self.old_bits[part].view(np.uint64), self.new_bits[part].view(np.uint64))

    def copy(self, interval: Interval) -> None:
        part = slice(interval.start, interval.stop)
        yardsticks.dense_copy(self.new_bits[part], self.scratch[part])

    def digest(self, interval: Interval) -> Any:
        return digest(self.space, self.new, interval)

    def compare(self, interval: Interval) -> Encoded:
        return encode(self.space, self.new, self.new, interval)

    def encode(self, interval: Interval) -> Encoded:
        return encode(self.space, self.new, self.old, interval)

    def decode_apply(self, interval: Interval) -> None:
        changes: Changes = decode(self.space, self.rows[interval], self.old)[0]
        scatter(self.space, self.target, changes)

    def xor_zstd(self, interval: Interval) -> bytes:
        part = slice(interval.start, interval.stop)
        return yardsticks.xor_zstd(self.old_bits[part], self.new_bits[part])

    def xor_zstd_apply(self, interval: Interval) -> None:
        part = slice(interval.start, interval.stop)
        self.scratch[part] = yardsticks.xor_zstd_decode(self.old_bits[part], self.xor_frames[interval])

    def index_value(self, interval: Interval) -> bytes:
        part = slice(interval.start, interval.stop)
        return yardsticks.index_value_zstd(self.old_bits[part], self.new_bits[part])

    def index_value_apply(self, interval: Interval) -> None:
        yardsticks.index_value_zstd_decode(
            self.scratch[interval.start : interval.stop], self.index_frames[interval]
        )

    def gap_xor(self, interval: Interval) -> bytes:
        part = slice(interval.start, interval.stop)
        return yardsticks.gap_xor_zstd(self.old_bits[part], self.new_bits[part])


def best_times(
    contestants: dict[str, Callable[[Interval], Any]],
    intervals: Sequence[Interval],
    rounds: int,
    threads: int,
) -> dict[str, float]:
    """Best seconds of each contestant over all intervals, in turns."""
    best = dict.fromkeys(contestants, float("inf"))
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            for name, run in contestants.items():
                begin = time.perf_counter()
                list(pool.map(run, intervals))
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def measure(mib: int, density: float, rounds: int, threads: int) -> dict[str, Any]:
    """Times in seconds, and bits on the wire for each change, of every contestant."""
    old, new, share = states(density, mib)
    contest = Race(old, new)
    contest.check()
    best = best_times(
        {name: getattr(contest, name) for name in CONTESTANTS}, contest.intervals, rounds, threads
    )
    changed = sum(row.count for row in contest.rows.values())
    planes = {
        plane: 8 * sum(len(getattr(row, plane)) for row in contest.rows.values()) / changed
        for plane in ("gaps", "lows", "steps", "escapes")
    }
    frames = {
        "xor_zstd": contest.xor_frames,
        "index_value": contest.index_frames,
        "gap_xor": contest.gap_frames,
    }
    return {
        "mib": mib,
        "density": share,
        "threads": threads,
        "changed": changed,
        "seconds": best,
        "planes": planes,
        "bits_per_change": {"encode": sum(planes.values())}
        | {name: 8 * sum(map(len, found.values())) / changed for name, found in frames.items()},
    }


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="bf16 bytes of the model, in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--density", type=float, nargs="+", default=[0.01, 0.002])
    options = parser.parse_args()
    found = [measure(options.mib, density, options.rounds, options.threads) for density in options.density]
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
