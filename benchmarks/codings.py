"""The codings `gap` and `class` on the real trace, and the best peer of the race: bits a change and CPU time.

    python -m weightcast.benchmarks.codings --lr 1e-6 --trace out/trace

Times are of one thread, in CPU time, best of several rounds: encode is what the coding adds to compare and digest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.codec import Geometry, Interval, Memory, classes, decode, encode
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import Codec, Row, encode_shard

from .trace import Bits, versions
from .yardsticks import gap_xor_zstd


def geometry_of(bits: Bits) -> Geometry:
    """The layout of bf16 tensors."""
    return Geometry(Layout.of(TensorSpec(n, "BF16", v.shape) for n, v in bits.items()))


def rows_of(geometry: Geometry, old: Memory, new: Memory, codec: Codec) -> Iterator[tuple[Interval, Row]]:
    """The rows of a delta."""
    for interval in geometry.intervals():
        row = encode(geometry[interval.dtype], new, old, interval, codec=codec).row
        if row is not None:
            yield interval, row


def peer_bytes(old: Bits, new: Bits) -> int:
    """u16 gap + XOR + zstd-1 over all tensors end to end, one frame: what suits the peer best."""
    flat = (np.concatenate([bits[n].ravel() for n in old]) for bits in (old, new))
    return len(gap_xor_zstd(*flat))


def sizes(before: Bits, after: Bits) -> dict[str, float]:
    """Bits a change of the peer, and of each codec: its planes, and the whole shard."""
    geometry = geometry_of(before)
    old, new = Memory.over(geometry, before), Memory.over(geometry, after)
    changes = sum(int(np.count_nonzero(before[n] != after[n])) for n in before)
    found = {"changes": float(changes), "peer": 8 * peer_bytes(before, after) / changes}
    codecs: tuple[Codec, ...] = ("gap", "class")
    for codec in codecs:
        rows = [row for _, row in rows_of(geometry, old, new, codec)]
        planes = sum(len(r.gaps) + len(r.lows) + len(r.steps) + len(r.escapes) for r in rows)
        found[codec] = 8 * planes / changes
        found[f"{codec} shard"] = 8 * len(encode_shard(rows)) / changes
    return found


def best_time(call: Callable[[], Any], rounds: int) -> float:
    """CPU seconds of this thread."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.thread_time()
        call()
        best = min(best, time.thread_time() - begin)
    return best


def speeds(density: float, rounds: int, elements: int = 1 << 22) -> dict[str, float]:
    """Elements a second, in 10^9, of one row of bf16 weights of which small ones change most."""
    random = np.random.default_rng(0)
    old = (random.normal(0, 0.04, elements).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    ratio = 2.0 ** (100.0 - (old >> 7 & 0xFF))  # of the chance to cross a rounding boundary
    low, high = 0.0, 2.0**30
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if np.minimum(0.57, ratio * middle).mean() > density else (middle, high)
    new = old.copy()
    at = np.flatnonzero(random.random(elements) < np.minimum(0.57, ratio * low))
    new[at] += (random.geometric(0.9, len(at)) * random.choice([1, -1], len(at))).astype(np.uint16)
    geometry = geometry_of({"w": old.reshape(-1, 4096)})
    space, memory = geometry["BF16"], Memory.over(geometry, {"w": old})
    interval = Interval("BF16", 0, elements)
    row = encode(space, Memory.over(geometry, {"w": new}), memory, interval, coding="class").row
    if row is None:
        raise SystemExit("nothing changed")
    positions = at.astype(np.uint32)
    address, olds, news = memory.address(space, 0), old[at], new[at]
    encoding = best_time(lambda: classes.encode(space, address, interval, positions, olds, news), rounds)
    return {
        "density": len(at) / elements,
        "encode": elements / encoding / 1e9,
        "decode": elements / best_time(lambda: classes.decode(space, row, address), rounds) / 1e9,
        "decode and digest": elements / best_time(lambda: decode(space, row, memory), rounds) / 1e9,
    }


def main() -> None:
    """One JSON document on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 5e-6])
    parser.add_argument("--first", type=int, default=10, help="first step of the mean")
    parser.add_argument("--last", type=int, default=40, help="last step of the mean")
    parser.add_argument("--trace", type=Path, default=Path("out/trace"), help="where traces are kept")
    parser.add_argument("--rounds", type=int, default=25)
    given = parser.parse_args()
    found: dict[str, Any] = {"sizes": {}, "speeds": [speeds(d, given.rounds) for d in (0.003, 0.01, 0.04)]}
    for lr in given.lr:
        steps = [
            sizes(before, after)
            for step, (before, after) in enumerate(pairwise(versions(lr, given.last, 0, given.trace)), 1)
            if step >= given.first
        ]
        found["sizes"][f"{lr:g}"] = {key: float(np.mean([s[key] for s in steps])) for key in steps[0]}
    json.dump(found, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
