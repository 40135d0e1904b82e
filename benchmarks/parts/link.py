"""End to end over slow links: from a commit on one host to changed weights on another, against the dense checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, Final

from ..data import LAYER_ELEMENTS
from ..lab.caster import CasterJob
from ..lab.link import Link, slow_link, why_not
from ..lab.models import ModelSpec
from ..lab.receiver import ReceiverJob
from ..lab.side import Side
from ..part import Options
from ..report import milliseconds, number
from ..result import Ratio, Result, Table

_GBIT: Final = 1e9
_RATES: Final = (0.2, 1.0, 10.0)  # Gbit/s
_ROUND_TRIPS: Final = (0.002, 0.06)  # seconds
_NAMED: Final = (1.0, 0.06)
_BAR, _DENSE_BAR = 1.25, 30.0
_DENSITY: Final = 0.01
_VERSIONS, _WARM = 12, 3
_DENSE_S: Final = 4.0  # seconds that fetching part of the dense checkpoint takes, about
_PAUSES: Final = (0.3, 0.37, 0.44, 0.51, 0.58)
"""Seconds between versions: no multiple of any poll, so that each meets it at another moment."""


def run(options: Options) -> Result:
    """Publish versions over each link."""
    missing = why_not()
    if missing:
        return Result(part="link", skipped=missing)
    links = [_NAMED] if options.quick else [(rate, trip) for rate in _RATES for trip in _ROUND_TRIPS]
    model = ModelSpec(
        density=_DENSITY,
        mib=options.pick(2 * options.mib, 4),
        layer_elements=options.pick(LAYER_ELEMENTS, 1 << 16),
    )
    with slow_link() as link:
        link.set(_GBIT, 0.0)
        with Side("caster", CasterJob(model=model, address=link.addresses[0]), before=link.at(0)) as caster:
            ready = caster.hear("ready")
            job = ReceiverJob(root=ready["root"], model=model)
            with Side("receiver", job, before=link.at(1), environment=ready["environment"]) as receiver:
                receiver.hear("ready")
                found = [
                    _measure(link, caster, receiver, at, ready["dense_bytes"], options.pick(_VERSIONS, 2))
                    for at in links
                ]
    return Result(part="link", tables=[_table(found, model)], ratios=_ratios(found), figures={"links": found})


def _measure(
    link: Link, caster: Side, receiver: Side, at: tuple[float, float], dense_bytes: int, versions: int
) -> dict[str, Any]:
    """One link: the dense checkpoint first, then versions."""
    rate, trip = at
    link.set(rate * _GBIT, trip)
    receiver.tell(f"dense {min(dense_bytes, int(rate * _GBIT / 8 * _DENSE_S))}")
    dense = receiver.hear("dense")
    receiver.tell("follow")
    receiver.hear("applied")  # where it is
    arrived, whole, sizes = [], [], []
    for number_ in range(_WARM + versions):
        time.sleep(_PAUSES[number_ % len(_PAUSES)])
        caster.tell("publish")
        committed = caster.hear("committed")
        applied = receiver.hear("applied", version=committed["version"])
        if number_ >= _WARM:
            arrived.append(applied["at"] - committed["at"])
            whole.append(applied["at"] - committed["began"])
            sizes.append(committed["bytes"])
    receiver.tell("stop")
    bound = median(sizes) * 8 / (rate * _GBIT) + 2 * trip
    dense_rate = dense["bytes"] / dense["seconds"]
    return {
        "gbit_s": rate,
        "round_trip_s": trip,
        "bytes": median(sizes),
        "arrived_s": median(arrived),
        "arrived_p90_s": quantiles(arrived, n=10)[-1],
        "whole_s": median(whole),
        "bound_s": bound,
        "over_bound": median(arrived) / bound,
        "dense_gbit_s": 8 * dense_rate / _GBIT,
        "dense_s": dense_bytes / dense_rate,
        "faster_than_dense": dense_bytes / dense_rate / median(arrived),
        "all_s": arrived,
    }


def _table(found: Sequence[dict[str, Any]], model: ModelSpec) -> Table:
    head = [
        "link",
        "round trip, ms",
        "wire, MB",
        "commit to applied, ms: median",
        "90 %",
        "publish to applied, ms",
        "bytes / bandwidth + 2 round trips, ms",
        "of it",
        "dense checkpoint, s",
        "at, Gbit/s",
        "faster than dense",
    ]
    rows = [
        [
            f"{f['gbit_s']:g} Gbit/s",
            milliseconds(f["round_trip_s"]),
            number(f["bytes"] / 1e6),
            milliseconds(f["arrived_s"]),
            milliseconds(f["arrived_p90_s"]),
            milliseconds(f["whole_s"]),
            milliseconds(f["bound_s"]),
            f"{number(f['over_bound'])} ×",
            number(f["dense_s"]),
            number(f["dense_gbit_s"]),
            f"{number(f['faster_than_dense'])} ×",
        ]
        for f in found
    ]
    return Table(
        title=f"{model.mib} MiB of bf16, 1 % changed, over S3 at the other end of a link",
        head=head,
        rows=rows,
        note=f"Medians of {len(found[0]['all_s'])} versions after {_WARM}; both processes, the S3 server and the link "
        f"itself share this machine's cores. The dense checkpoint is fetched in parts of 8 MiB over 8 connections, for "
        f"about {_DENSE_S:.0f} s, and its time scaled to the whole. A version counts "
        "as committed when its publisher knows it.",
    )


def _ratios(found: Sequence[dict[str, Any]]) -> list[Ratio]:
    ratios = []
    for f in found:
        where = f"{f['gbit_s']:g} Gbit/s, {1e3 * f['round_trip_s']:g} ms"
        named = (f["gbit_s"], f["round_trip_s"]) == _NAMED
        ratios += [
            Ratio(
                name=f"{where}: commit to applied against bytes / bandwidth + 2 round trips",
                value=f["over_bound"],
                bar=_BAR if named else None,
                at_most=True,
            ),
            Ratio(
                name=f"{where}: faster than the dense checkpoint",
                value=f["faster_than_dense"],
                bar=_DENSE_BAR if named else None,
            ),
        ]
    return ratios
