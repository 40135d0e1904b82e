"""The codec's own steps on one core, one row at a time: a supplement of `race`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from weightcast.codec import code, decode, encode, find

from ..contest import CODECS, Pair
from ..report import number, percent
from ..result import Ratio, Table

SECONDS: Final = 2
"""Time for which steps are measured in turns: a host that others share is slow for some seconds at times."""

_CALLS: Final = 5
"""In a turn: what a step works on is near after the first."""

_BARS: Final = {"class": (2.0, 1.0)}
"""10^9 elements a second at 1 %, coding and decoding."""


def measure(pair: Pair, seconds: int) -> dict[str, Any]:
    """10^9 elements a second of each step on a row of the usual density: CPU time of this thread, the best of many.

    Steps take turns of a few calls for so many seconds; each has at least one turn.
    """
    space, old, new = pair.space, pair.old_memory, pair.new_memory
    rows = [(interval, find(space, new, old, interval).copied()) for interval in pair.intervals]
    interval, changes = min(rows, key=lambda row: abs(len(row[1]) / row[0].length - pair.density))
    steps: dict[str, Callable[[], Any]] = {"find": lambda: find(space, new, old, interval)}
    for codec in CODECS:
        row = encode(space, new, old, interval, codec=codec).row
        if row is None:
            raise SystemExit("nothing changed")
        steps[f"{codec} code"] = partial(code, space, interval, changes, old, codec=codec)
        steps[f"{codec} decode"] = partial(decode, space, row, old)
    best = least_cpu_s(steps, seconds)
    speeds = {name: interval.length / best[name] / 1e9 for name in steps}
    return {"density": len(changes) / interval.length, **speeds}


def least_cpu_s(steps: Mapping[str, Callable[[], Any]], seconds: int) -> dict[str, float]:
    """CPU seconds of this thread that each step takes at the least. 0 seconds: one turn."""
    best = dict.fromkeys(steps, float("inf"))
    end = time.monotonic() + seconds
    while True:
        for name, call in steps.items():
            for _ in range(_CALLS):
                begin = time.thread_time()
                call()
                best[name] = min(best[name], time.thread_time() - begin)
        if time.monotonic() >= end:
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
