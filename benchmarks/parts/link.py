"""End to end over slow links: from a commit on one host to changed weights on another, against the dense checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, Final

from weightcast.schemas.errors import StorageError

from ..data import LAYER_ELEMENTS
from ..lab.caster import CasterJob
from ..lab.cores import Cores
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
_AHEAD: Final = (_NAMED, (0.2, 0.06))
"""Where cut-through is measured, too."""

_BAR, _DENSE_BAR = 1.25, 30.0
_DENSITY: Final = 0.01
_VERSIONS, _FEWER, _WARM = 12, 5, 3
"""Versions that are timed on the link with bars, and on the others; those before them are not."""

_PROCESSES: Final = ("subscriber", "S3 server", "link")

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
        casting = CasterJob(model=model, address=link.addresses[0])
        with Side("caster", casting, before=link.at(0)) as caster:
            ready = caster.hear("ready")
            job = ReceiverJob(root=ready["root"], model=model)
            with Side("receiver", job, before=link.at(1), environment=ready["environment"]) as receiver:
                receiver.hear("ready")
                pids = dict(zip(_PROCESSES, (receiver.pid, ready["pid"], link.pid), strict=True))
                bench = _Bench(link, caster, receiver, ready["dense_bytes"], pids)
                found = []
                for at in links:
                    versions = options.pick(_VERSIONS if at == _NAMED else _FEWER, 2)
                    found += bench.measure(at, versions, ahead=at in _AHEAD)
    return Result(
        part="link",
        tables=[_table(found, model), _shares(found)],
        ratios=_ratios(found),
        figures={"links": found},
    )


@dataclass
class _Bench:
    """Two hosts with a link between them."""

    link: Link
    caster: Side
    receiver: Side
    dense_bytes: int
    pids: dict[str, int]

    def measure(self, at: tuple[float, float], versions: int, *, ahead: bool) -> list[dict[str, Any]]:
        """One link: versions, with `ahead` again with cut-through; the same bytes and dense ones by plain GETs."""
        rate, trip = at
        self.link.set(rate * _GBIT, trip)
        found = [self._follow(at, versions, way) for way in ("follow", "ahead")[: 1 + ahead]]
        self.receiver.tell(f"plain {found[-1]['last']}")
        plain = self.receiver.hear("plain")
        self.receiver.tell(f"dense {min(self.dense_bytes, int(rate * _GBIT / 8 * _DENSE_S))}")
        dense = self.receiver.hear("dense")
        least = self.dense_bytes * 8 / (rate * _GBIT)
        for each in found:
            each |= {
                "plain_s": median(plain["seconds"][1:]),
                "plain_first_s": plain["seconds"][0],
                "dense_gbit_s": 8 * dense["bytes"] / dense["seconds"] / _GBIT,
                "dense_least_s": least,
                "faster_than_dense": least / each["arrived_s"],
            }
        return found

    def _follow(self, at: tuple[float, float], versions: int, way: str) -> dict[str, Any]:
        """Versions over the link, as they come."""
        rate, trip = at
        self.receiver.tell(way)
        self.receiver.hear("applied")  # where it is
        arrived, whole, created, sizes = [], [], [], []
        taken: dict[str, list[Cores]] = {name: [] for name in self.pids}
        for number_ in range(_WARM + versions):
            time.sleep(_PAUSES[number_ % len(_PAUSES)])
            self.caster.tell("publish")
            self.caster.hear("created")
            with self.caster.held():  # it has nothing to do any more that another host would wait for
                before = self._cores()
                applied = self.receiver.hear("applied")
                after = self._cores()
            committed = self.caster.hear("committed")
            if applied["version"] != committed["version"]:
                raise StorageError(f"version {applied['version']} was applied, not {committed['version']}")
            if number_ >= _WARM:
                arrived.append(applied["at"] - committed["at"])
                whole.append(applied["at"] - committed["began"])
                created.append(committed["at"] - committed["asked"])
                sizes.append(committed["bytes"])
                for name in self.pids:
                    taken[name].append(after[name] - before[name])
        self.receiver.tell("stop")
        bound = median(sizes) * 8 / (rate * _GBIT) + 2 * trip
        return {
            "gbit_s": rate,
            "round_trip_s": trip,
            "ahead": way == "ahead",
            "last": committed["version"],
            "bytes": median(sizes),
            "arrived_s": median(arrived),
            "arrived_p90_s": quantiles(arrived, n=10)[-1],
            "whole_s": median(whole),
            "bound_s": bound,
            "over_bound": median(arrived) / bound,
            "all_s": arrived,
            "create_s": created,
            "cores": {
                name: {"used_s": median(c.used_s for c in each), "waited_s": median(c.waited_s for c in each)}
                for name, each in taken.items()
            },
        }

    def _cores(self) -> dict[str, Cores]:
        return {name: Cores.of(pid) for name, pid in self.pids.items()}


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
        "plain GETs of the same bytes, ms",
        "the first, ms",
        "dense checkpoint at full bandwidth, s",
        "as fetched, Gbit/s",
        "faster than dense",
    ]
    rows = [
        [
            _name(f),
            milliseconds(f["round_trip_s"]),
            number(f["bytes"] / 1e6),
            milliseconds(f["arrived_s"]),
            milliseconds(f["arrived_p90_s"]),
            milliseconds(f["whole_s"]),
            milliseconds(f["bound_s"]),
            f"{number(f['over_bound'])} ×",
            milliseconds(f["plain_s"]),
            milliseconds(f["plain_first_s"]),
            number(f["dense_least_s"]),
            number(f["dense_gbit_s"]),
            f"{number(f['faster_than_dense'])} ×",
        ]
        for f in found
    ]
    return Table(
        title=f"{model.mib} MiB of bf16, 1 % changed, over S3 at the other end of a link",
        head=head,
        rows=rows,
        note=f"Medians of {_VERSIONS} versions where there are bars, of {_FEWER} elsewhere, after {_WARM}; the "
        "subscriber, the S3 server and the link itself share this machine's cores. A version counts as committed when "
        "the store has answered the create of its manifest; what the publisher has to do from there on waits until it "
        "is applied, as that would not take the subscriber's cores if each had a host of its own. Plain GETs are those "
        "of its shards, all at once, over connections that are warm (the first: new ones), without decoding. The dense "
        f"checkpoint is fetched in parts of 8 MiB over 8 connections, for about {_DENSE_S:.0f} s; *faster than dense* "
        "is against its bytes at full bandwidth.",
    )


def _shares(found: Sequence[dict[str, Any]]) -> Table:
    """Who had the cores while a version was on its way."""
    head = ["link", "round trip, ms", "commit to applied, ms"]
    for name in _PROCESSES:
        head += [f"{name}: ran, ms", "waited, ms"]
    rows = []
    for f in found:
        row = [_name(f), milliseconds(f["round_trip_s"]), milliseconds(f["arrived_s"])]
        for name in _PROCESSES:
            row += [milliseconds(f["cores"][name]["used_s"]), milliseconds(f["cores"][name]["waited_s"])]
        rows.append(row)
    return Table(
        title="The same, by who had the cores from commit to applied",
        head=head,
        rows=rows,
        note="Medians, of all threads of a process together, as the kernel counts them (schedstat): how long they ran, "
        "and how long they could have run, but another one had the core. On hosts of its own a subscriber waits for "
        "its own threads alone.",
    )


def _name(found: dict[str, Any]) -> str:
    return f"{found['gbit_s']:g} Gbit/s" + (", cut-through" if found["ahead"] else "")


def _ratios(found: Sequence[dict[str, Any]]) -> list[Ratio]:
    ratios = []
    for f in found:
        where = f"{f['gbit_s']:g} Gbit/s, {1e3 * f['round_trip_s']:g} ms" + (
            ", cut-through" if f["ahead"] else ""
        )
        named = (f["gbit_s"], f["round_trip_s"]) == _NAMED
        ratios += [
            Ratio(
                name=f"{where}: commit to applied against bytes / bandwidth + 2 round trips",
                value=f["over_bound"],
                bar=_BAR if named else None,
                at_most=True,
            ),
            Ratio(
                name=f"{where}: faster than the dense checkpoint at full bandwidth",
                value=f["faster_than_dense"],
                bar=_DENSE_BAR if named else None,
            ),
        ]
    return ratios
