"""Catching up from k versions behind: one by one, folded, from a snapshot, and as the subscriber chooses itself."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from weightcast.manifest.store import open_store
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.schemas.manifest import Totals
from weightcast.subscriber import Subscriber, SubscriberSettings, Tensors

from ..lab.memory import MIB, allowed_mib, peak
from ..lab.models import Walking, check_same
from ..lab.tally import Tally
from ..part import Options
from ..report import number, percent
from ..result import Line, Plot, Ratio, Result, Table

_ELEMENTS: Final = 1 << 23
_DENSITY: Final = 0.01
_BEHIND: Final = (1, 3, 10, 30, 100)
_BAR: Final = 1.2

_WAYS: Final = {"chain": "one by one", "fold": "folded", "own": "as it chooses"}
_COLD: Final = "cold"
"""The way of a subscriber that holds nothing: the snapshot."""


@dataclass(frozen=True)
class _Behind:
    """A subscriber that held the head once, and what it has to catch up with since."""

    versions: int
    way: str
    subscriber: Subscriber
    replica: dict[str, Tensor]
    tally: Tally


def run(options: Options) -> Result:
    """Publish many versions, leave subscribers behind on the way, then let each catch up."""
    distances = (1, 4) if options.quick else _BEHIND
    elements = options.pick(_ELEMENTS, 1 << 17)
    with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root:
        history = _publish(root, elements, distances)
        zeros = {name: torch.zeros_like(t) for name, t in history.model.items()}
        left = [*history.left, _leave(root, zeros, len(history.versions), _COLD)]
        found = [_catch_up(behind, history) for behind in left]
    found.sort(key=lambda f: (f["way"] == _COLD, f["behind"]))
    return Result(
        part="catchup",
        tables=[_table(found, elements)],
        plots=[_plot(found, "bytes", 1 << 20, "MiB fetched"), _plot(found, "seconds", 1, "seconds")],
        ratios=_ratios(found),
        figures={"catchup": found},
    )


@dataclass(frozen=True)
class _History:
    """A chain, and a snapshot of its head.

    Attributes:
        model: the head's tensors.
        left: subscribers that stopped at some distances from it.
        versions: totals of each delta, oldest first.
    """

    model: dict[str, Tensor]
    left: list[_Behind]
    versions: list[Totals]


def _publish(root: str, elements: int, distances: Sequence[int]) -> _History:
    """Make a history that is as long as the largest of `distances`."""
    source, last = Walking(elements, _DENSITY), max(distances)
    model = source.tensors()
    left: list[_Behind] = []
    versions: list[Totals] = []
    with Publisher(root, PublisherSettings(snapshot_every=0)) as publisher:
        publisher.publish(model, step=0).wait()
        for version in range(last + 1):
            if version:
                source.move(model)
                versions.append(publisher.publish(model, step=version).wait().totals)
            if last - version in distances:
                left += [_leave(root, model, last - version, way) for way in _WAYS]
        publisher.snapshot()
    return _History(model, left, versions)


def _leave(root: str, tensors: Mapping[str, Tensor], behind: int, way: str) -> _Behind:
    """A subscriber with these tensors; unless it is cold, it knows which version they are."""
    tally = Tally(open_store(root), hide_snapshots=way in ("chain", "fold"))
    replica = {name: t.clone() for name, t in tensors.items()}
    # One by one: it folds as little as it may, which is less than the changes of one version of this size.
    usual = SubscriberSettings(lease=False)
    settings = usual.model_copy(update={"fold_bytes": MIB}) if way == "chain" else usual
    subscriber = Subscriber(root, Tensors(replica), settings, store=tally.as_store)
    if way != _COLD:
        subscriber.once()
    return _Behind(behind, way, subscriber, replica, tally)


def _catch_up(behind: _Behind, history: _History) -> dict[str, Any]:
    """Bytes fetched, seconds, and the peak of memory beyond the tensors."""
    behind.tally.reset()
    with behind.subscriber, peak() as memory:
        begin = time.perf_counter()
        behind.subscriber.once()
        seconds = time.perf_counter() - begin
    check_same(history.model, behind.replica)
    missed = history.versions[-behind.versions :]
    dense = missed[-1].dense_bytes
    return {
        "behind": behind.versions,
        "way": behind.way,
        "bytes": behind.tally.fetched,
        "least_bytes": dense if behind.way == _COLD else min(dense, sum(v.bytes for v in missed)),
        "seconds": seconds,
        "extra_mib": memory.extra / MIB,
        "allowed_mib": allowed_mib(min(missed[-1].elements, sum(v.changed for v in missed))),
    }


def _table(found: Sequence[dict[str, Any]], elements: int) -> Table:
    return Table(
        title=f"Catching up, {elements >> 19} MiB of bf16, {percent(_DENSITY)} changed in each version",
        head=[
            "versions behind",
            "way",
            "fetched, MiB",
            "of the smaller of snapshot and deltas",
            "s",
            "memory, MiB",
        ],
        rows=[
            [
                str(f["behind"]) if f["way"] != _COLD else "all",
                _WAYS.get(f["way"], "nothing held: snapshot"),
                number(f["bytes"] / MIB),
                f"{f['bytes'] / f['least_bytes']:.2f} ×",
                number(f["seconds"]),
                number(f["extra_mib"]),
            ]
            for f in found
        ],
        note="Memory is the peak beyond the tensors themselves.",
    )


def _plot(found: Sequence[dict[str, Any]], figure: str, unit: int, title: str) -> Plot:
    def line(way: str) -> Line:
        points = [(f["behind"], f[figure] / unit) for f in found if f["way"] == way]
        points.sort()
        return Line(label=_WAYS[way], x=[float(x) for x, _ in points], y=[y for _, y in points])

    return Plot(
        name=f"catchup-{figure}",
        title=f"Catching up: {title}",
        x="versions behind",
        y=title,
        lines=[line(way) for way in _WAYS],
        log_x=True,
        log_y=True,
    )


def _ratios(found: Sequence[dict[str, Any]]) -> list[Ratio]:
    """The bars, for what the subscriber chooses itself."""
    own = [f for f in found if f["way"] == "own"]
    furthest = max(own, key=lambda f: int(f["behind"]))
    return [
        Ratio(
            name=f"{f['behind']} behind: bytes against the smaller of snapshot and deltas",
            value=f["bytes"] / f["least_bytes"],
            bar=_BAR,
            at_most=True,
        )
        for f in own
    ] + [
        Ratio(
            name=f"{furthest['behind']} behind: memory beyond the tensors; 256 MiB and 10 bytes a change",
            value=furthest["extra_mib"],
            bar=furthest["allowed_mib"],
            at_most=True,
            unit="MiB",
        )
    ]
