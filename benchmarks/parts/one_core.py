"""The codec's own steps on one core, one row at a time: a supplement of `race`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from weightcast.codec import code, decode, encode, find

from ..contest import CODECS, Pair
from ..report import number, percent
from ..result import Ratio, Table

_ROUNDS: Final = 25
_BARS: Final = {"class": (2.0, 1.0)}
"""10^9 elements a second at 1 %, coding and decoding."""


def measure(pair: Pair, rounds: int = _ROUNDS) -> dict[str, Any]:
    """10^9 elements a second of each step on a row of the usual density: CPU time of this thread, best of `rounds`."""
    space, old, new = pair.space, pair.old_memory, pair.new_memory
    rows = [(interval, find(space, new, old, interval).copied()) for interval in pair.intervals]
    interval, changes = min(rows, key=lambda row: abs(len(row[1]) / row[0].length - pair.density))

    def speed(call: Callable[[], Any]) -> float:
        return interval.length / best_time(call, rounds) / 1e9

    found: dict[str, Any] = {
        "density": len(changes) / interval.length,
        "find": speed(lambda: find(space, new, old, interval)),
    }
    for codec in CODECS:
        row = encode(space, new, old, interval, codec=codec).row
        if row is None:
            raise SystemExit("nothing changed")
        found[f"{codec} code"] = speed(lambda codec=codec: code(space, interval, changes, old, codec=codec))  # type: ignore[misc]
        found[f"{codec} decode"] = speed(lambda row=row: decode(space, row, old))  # type: ignore[misc]
    return found


def best_time(call: Callable[[], Any], rounds: int) -> float:
    """CPU seconds of this thread."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.thread_time()
        call()
        best = min(best, time.thread_time() - begin)
    return best


def table(found: list[dict[str, Any]]) -> Table:
    """All densities."""
    steps = [key for key in found[0] if key != "density"]
    return Table(
        title="One row, one core, 10⁹ elements a second of CPU time",
        head=["changed", "compare, digest, find", *(f"`{s.split()[0]}`: {s.split()[1]}" for s in steps[1:])],
        rows=[[percent(f["density"]), *(number(f[step]) for step in steps)] for f in found],
        note="*code* is what coding adds to finding the changes; *decode* is from bytes to proved changes.",
    )


def ratios(found: dict[str, Any]) -> list[Ratio]:
    """The bars of `class`."""
    return [
        Ratio(
            name=f"{codec} at 1 %, one core: {step}",
            value=found[f"{codec} {step}"],
            bar=bar,
            unit="G elements/s",
        )
        for codec, bars in _BARS.items()
        for step, bar in zip(("code", "decode"), bars, strict=True)
    ]
