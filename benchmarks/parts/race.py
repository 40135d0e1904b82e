"""The codec against its yardsticks on synthetic weights: speed and bytes, over densities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..contest import CODECS, Entry, Pair, best_times, bits_per_change, entries, planes
from ..data import LAYER_ELEMENTS, states
from ..part import Options
from ..report import milliseconds, number, percent
from ..result import Line, Plot, Ratio, Result, Table
from ..yardsticks import formats
from . import one_core

_NAMED: Final = 0.01
"""Density at which ratios are named."""

_PEERS: Final = ("xor_zstd", "index_value", "gap_xor", "arc")


def run(options: Options) -> Result:
    """Race at each density."""
    elements = options.pick(LAYER_ELEMENTS, 1 << 16)
    races = [_race(options, density, elements) for density in options.density]
    named = min(races, key=lambda race: abs(race["density"] - _NAMED))
    return Result(
        part="race",
        tables=[*(_table(race) for race in races), one_core.table([race["one_core"] for race in races])],
        plots=_plots(races),
        ratios=[*_ratios(named), *one_core.ratios(named["one_core"])],
        figures={"races": races},
    )


def _race(options: Options, density: float, elements: int) -> dict[str, Any]:
    old, new, _ = states(density, options.pick(options.mib, 1), elements)
    names = [f"layer.{i:04d}" for i in range(len(old) // elements)]
    pair = Pair(*(dict(zip(names, bits.reshape(len(names), elements), strict=True)) for bits in (old, new)))
    found = measure(
        pair, entries(pair, formats(slow=False)), options.pick(options.rounds, 1), options.threads
    )
    return found | {"one_core": one_core.measure(pair, options.pick(one_core.SECONDS, 0))}


def measure(pair: Pair, found: Mapping[str, Entry], rounds: int, threads: int) -> dict[str, Any]:
    """Times in seconds and bits on the wire for each change, of every contestant."""
    return {
        "elements": len(pair.old),
        "density": pair.density,
        "changed": pair.changed,
        "threads": threads,
        "titles": {name: [entry.title, entry.against] for name, entry in found.items()},
        "seconds": best_times(pair, found, rounds, threads),
        "bits_per_change": bits_per_change(pair, found),
        "planes": {codec: planes(pair, codec) for codec in CODECS},
    }


def _table(race: dict[str, Any]) -> Table:
    return contest_table(
        race,
        f"{race['elements'] >> 19} MiB of bf16, {percent(race['density'])} changed, {race['threads']} threads",
    )


def contest_table(race: dict[str, Any], title: str) -> Table:
    """All contestants of one race."""
    seconds, bits = race["seconds"], race["bits_per_change"]
    read = 4 * race["elements"]
    rows = [
        [
            name,
            milliseconds(seconds[key]),
            number(read / seconds[key] / 1e9),
            percent(seconds["scan"] / seconds[key]),
            "" if against == "scan" else f"{number(seconds[against] / seconds[key])} ×",
            number(bits[key]) if key in bits else "",
        ]
        for key, (name, against) in race["titles"].items()
    ]
    note = "; ".join(
        f"planes of `{codec}`: " + ", ".join(f"{name} {size:.2f}" for name, size in sizes.items())
        for codec, sizes in race["planes"].items()
    )
    return Table(
        title=title,
        head=["what", "ms", "GB/s of both arrays", "of scan", "against XOR + zstd-1", "bits a change"],
        rows=rows,
        note=f"In bits a change, {note}.",
    )


def _plots(races: Sequence[dict[str, Any]]) -> list[Plot]:
    density = [100 * race["density"] for race in races]

    def lines(values: str, names: Sequence[str]) -> list[Line]:
        there = [name for name in names if name in races[0][values]]
        return [
            Line(label=races[0]["titles"][n][0].replace("`", ""), x=density, y=[r[values][n] for r in races])
            for n in there
        ]

    return [
        Plot(
            name="race-bits",
            title="Bits on the wire for each change",
            x="elements changed, %",
            y="bits a change",
            lines=lines("bits_per_change", [*CODECS, *_PEERS]),
            log_x=True,
        ),
        Plot(
            name="race-encode",
            title="From two states to bytes",
            x="elements changed, %",
            y="seconds",
            lines=lines("seconds", ["scan", *CODECS, *_PEERS]),
            log_x=True,
            log_y=True,
        ),
    ]


def _ratios(race: dict[str, Any]) -> list[Ratio]:
    """The bars of speed and size, at 1 %."""
    seconds, bits, at = race["seconds"], race["bits_per_change"], percent(_NAMED)
    return [
        Ratio(
            name=f"gap at {at}: share of the speed of reading both arrays",
            value=100 * seconds["scan"] / seconds["gap"],
            bar=35,
            unit="%",
        ),
        Ratio(
            name=f"gap at {at}: faster than XOR + zstd-1", value=seconds["xor_zstd"] / seconds["gap"], bar=4
        ),
        Ratio(
            name=f"gap at {at}: decode and apply faster than XOR + zstd-1's",
            value=seconds["xor_zstd_apply"] / seconds["gap_apply"],
            bar=5,
        ),
        Ratio(
            name=f"gap at {at}: bytes of XOR + zstd-1's",
            value=bits["gap"] / bits["xor_zstd"],
            bar=0.5,
            at_most=True,
        ),
        Ratio(name=f"class at {at}: faster than XOR + zstd-1", value=seconds["xor_zstd"] / seconds["class"]),
        Ratio(
            name=f"class at {at}: decode and apply faster than XOR + zstd-1's",
            value=seconds["xor_zstd_apply"] / seconds["class_apply"],
        ),
    ]
