"""The codec against its yardsticks on versions of a really trained model: bytes and speed, fresh and settled."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np

from ..contest import Pair, bits_per_change, entries, planes
from ..part import Options
from ..report import number, percent
from ..result import Line, Plot, Ratio, Result, Table
from ..trace import PACKAGE, Bits, versions
from ..yardsticks import Format, formats
from .race import contest_table, measure

_RATES: Final = (1e-6, 5e-6, 1e-5)
_LAST: Final = 40
_FRESH: Final = range(1, 4)
"""Steps whose AdamW moments are new, so that nearly all elements move by the whole learning rate."""

_SETTLED: Final = range(31, _LAST + 1, 3)
_TIMED: Final = {1e-6: _LAST, 5e-6: _LAST}
_BARS: Final = {"gap": 0.78, "class": 0.56}
"""Bytes against the best peer's, shards whole."""

_BITS: Final = {1e-6: {"gap": 12.0, "class": 8.8}, 5e-6: {"gap": 9.8, "class": 7.4}}
"""Bits a change, shards whole. On another machine the trace may differ a little."""


def run(options: Options) -> Result:
    """Measure each learning rate."""
    if importlib.util.find_spec(PACKAGE) is None:
        return Result(
            part="trace", skipped=f"package {PACKAGE}, which has the trained model, is not installed"
        )
    rates = _RATES[1:2] if options.quick else _RATES
    found = [_rate(options, rate) for rate in rates]
    return Result(
        part="trace",
        tables=[_sizes_table(found), *(t for rate in found for t in _speed_tables(rate))],
        plots=[_plot(found)],
        ratios=[ratio for rate in found for ratio in _ratios(rate)],
        figures={"rates": found},
    )


def _pairs(options: Options, rate: float) -> Iterator[tuple[int, Pair]]:
    """The steps of interest, each with its two states."""
    last = options.pick(_LAST, 2)
    wanted = {*_FRESH, *_SETTLED}
    for step, (before, after) in enumerate(pairwise(versions(rate, last, 0, options.trace)), 1):
        if step in wanted:
            yield step, pair_of(before, after)


def pair_of(before: Bits, after: Bits) -> Pair:
    """Two versions of a trace for a contest."""
    return Pair(before, after)


def _rate(options: Options, rate: float) -> dict[str, Any]:
    others = formats(slow=True)
    steps, race = [], None
    for step, pair in _pairs(options, rate):
        steps.append({"step": step} | sizes(pair, others))
        if step == _TIMED.get(rate) or (options.quick and step == 1):
            race = measure(pair, entries(pair, others), options.pick(options.rounds, 1), options.threads)
    return {"lr": rate, "steps": steps, "race": race, "peers": {f.name: f.title for f in others}}


def sizes(pair: Pair, others: list[Format]) -> dict[str, Any]:
    """Density, and bits a change: of whole shards and frames, and of our planes alone."""
    found = bits_per_change(pair, entries(pair, others))
    alone = {f"{codec} planes": sum(planes(pair, codec).values()) for codec in ("gap", "class")}
    return {"density": pair.density, "bits": {k: v for k, v in found.items() if k != "copy"} | alone}


def means(rate: Mapping[str, Any], steps: range) -> dict[str, float]:
    """Mean density and bits a change over some steps of those that were measured."""
    chosen = [s for s in rate["steps"] if s["step"] in steps]
    if not chosen:
        return {}
    bits = {name: float(np.mean([s["bits"][name] for s in chosen])) for name in chosen[0]["bits"]}
    return {"density": float(np.mean([s["density"] for s in chosen]))} | bits


def best_peer(rate: Mapping[str, Any], found: Mapping[str, float]) -> tuple[str, float]:
    """The smallest of the others: title, bits a change."""
    name = min(rate["peers"], key=lambda n: found[n])
    return rate["peers"][name], found[name]


def _sizes_table(found: list[dict[str, Any]]) -> Table:
    kinds = ["gap", "gap planes", "class", "class planes"]
    peers = found[0]["peers"]
    rows = []
    for rate in found:
        for masters, steps in (("fresh", _FRESH), ("settled", _SETTLED)):
            mean = means(rate, steps)
            if mean:
                best = best_peer(rate, mean)[1]
                rows.append(
                    [f"{rate['lr']:g}", masters, percent(mean["density"])]
                    + [number(mean[name]) for name in (*kinds, *peers)]
                    + [f"{mean[codec] / best:.2f} ×" for codec in ("gap", "class")]
                )
    head = [
        "learning rate",
        "masters",
        "changed",
        "`gap`",
        "its planes",
        "`class`",
        "its planes",
        *peers.values(),
    ]
    return Table(
        title="Bits a change on the real trace",
        head=[*head, "`gap` of best peer", "`class` of best peer"],
        rows=rows,
        note=f"Fresh: steps {_FRESH[0]}–{_FRESH[-1]}; settled: steps {_SETTLED[0]}–{_SETTLED[-1]}, every third. "
        "Ours are whole shards; their planes alone are beside them, as peers' frames have no table around them either.",
    )


def _speed_tables(rate: dict[str, Any]) -> list[Table]:
    race = rate["race"]
    if race is None:
        return []
    title = f"Real trace, learning rate {rate['lr']:g}, {percent(race['density'])} changed, {race['threads']} threads"
    return [contest_table(race, title)]


def _plot(found: list[dict[str, Any]]) -> Plot:
    names = {"gap": "gap", "class": "class", **found[0]["peers"]}
    points = sorted((s["density"], s["bits"]) for rate in found for s in rate["steps"])
    return Plot(
        name="trace-bits",
        title="Bits for each change on the real trace",
        x="elements changed, %",
        y="bits a change",
        lines=[
            Line(label=title, x=[100 * d for d, _ in points], y=[bits[name] for _, bits in points])
            for name, title in names.items()
        ],
        log_x=True,
    )


def _ratios(rate: dict[str, Any]) -> list[Ratio]:
    """The bars of size, for settled masters."""
    mean = means(rate, _SETTLED) or means(rate, _FRESH)
    best = best_peer(rate, mean)[1]
    found = []
    for codec, bar in _BARS.items():
        name = f"lr {rate['lr']:g}: bytes of {codec} against the best peer's"
        found.append(Ratio(name=name, value=mean[codec] / best, bar=bar, at_most=True))
        found.append(
            Ratio(name=f"{name}, planes alone", value=mean[f"{codec} planes"] / best, bar=bar, at_most=True)
        )
    for codec, bits in _BITS.get(rate["lr"], {}).items():
        name = f"lr {rate['lr']:g}: {codec}, bits a change"
        found.append(Ratio(name=name, value=mean[codec], bar=bits, at_most=True, unit="bits"))
    return found
