"""Catching up from 1, 10 and 100 versions behind, where deltas cost less than a snapshot and where they do not."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.schemas.manifest import Totals
from weightcast.subscriber import Subscriber, SubscriberSettings, Tensors

from ..lab.forks import in_forks
from ..lab.memory import MIB, allowed_mib, peak
from ..lab.models import Wandering, check_same
from ..lab.tally import Tally
from ..part import Options
from ..report import number, percent
from ..result import Line, Plot, Ratio, Result, Table

_MIB: Final = 256
_LAYER_ELEMENTS: Final = 1 << 21
_DENSITIES: Final = (0.01, 0.03)
"""100 deltas of the first are smaller than a snapshot, those of the second larger."""

_BEHIND: Final = (1, 10, 100)
_BAR: Final = 1.2


@dataclass(frozen=True)
class _History:
    """A stream of one density, with a snapshot of its head beside the chain.

    Attributes:
        folder: where the stream is, and states that somebody held once, each named by its version.
        density: share of elements that each version changes.
        versions: totals of each delta, oldest first.
    """

    folder: Path
    density: float
    versions: list[Totals]

    @property
    def root(self) -> str:
        """The stream."""
        return str(self.folder / "stream")

    def state(self, behind: int) -> dict[str, Tensor]:
        """The tensors of the version that is so many before the head."""
        found: dict[str, Tensor] = torch.load(self.folder / str(len(self.versions) - behind))
        return found


def run(options: Options) -> Result:
    """Publish many versions, then let subscribers that stopped on the way catch up; each in a process of its own."""
    distances, mib = ((1, 4), 1) if options.quick else (_BEHIND, _MIB)
    found: list[dict[str, Any]] = []
    for density in _DENSITIES[: options.pick(len(_DENSITIES), 1)]:
        with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as folder:
            layer = options.pick(_LAYER_ELEMENTS, 1 << 17)
            (history,) = in_forks(_publish, [(Path(folder), mib, layer, density, distances)], trains=False)
            for behind in (*distances, None):
                found += in_forks(_catch_up, [(history, behind)], trains=False)
    return Result(
        part="catchup",
        tables=[_table(found, mib)],
        plots=[_plot(found, "bytes", 1 << 20, "MiB fetched"), _plot(found, "seconds", 1, "seconds")],
        ratios=_ratios(found),
        figures={"catchup": found},
    )


def _publish(folder: Path, mib: int, layer: int, density: float, distances: Sequence[int]) -> _History:
    """Make a history that is as long as the largest of `distances`, and keep the states at all of them."""
    source, last = Wandering(mib, density, layer), max(distances)
    model = source.tensors()
    versions: list[Totals] = []
    found = _History(folder, density, versions)
    with Publisher(found.root, PublisherSettings(snapshot_every=0)) as publisher:
        publisher.publish(model, step=0).wait()
        for version in range(last + 1):
            if version:
                source.move(model)
                versions.append(publisher.publish(model, step=version).wait().totals)
            if last - version in (0, *distances):
                torch.save(model, folder / str(version))
        publisher.snapshot()
    return found


def _catch_up(history: _History, behind: int | None) -> dict[str, Any]:
    """Bytes fetched, seconds, and the peak of memory beyond the tensors; `behind` is None: nothing is held."""
    _warm()
    head = history.state(0)
    replica = {n: torch.zeros_like(t) for n, t in head.items()} if behind is None else history.state(behind)
    changed = sum(int((t.view(torch.int16) != replica[n].view(torch.int16)).sum()) for n, t in head.items())
    tally = Tally(open_store(history.root))
    target = Tensors(replica)
    if behind is not None:
        reader = StreamReader.open(tally.as_store)
        position = reader.position(len(history.versions) - behind)
        target.adopt(position, reader.layout(position.manifest.layout))
    settings = SubscriberSettings(lease=False)
    tally.reset()
    with Subscriber(history.root, target, settings, store=tally.as_store) as subscriber, peak() as memory:
        begin = time.perf_counter()
        subscriber.once()
        seconds = time.perf_counter() - begin
    check_same(head, replica)
    dense = history.versions[-1].dense_bytes
    deltas = None if behind is None else sum(v.bytes for v in history.versions[-behind:])
    return {
        "density": history.density,
        "behind": behind,
        "bytes": tally.fetched,
        "deltas_bytes": deltas,
        "snapshot_bytes": dense,
        "least_bytes": dense if deltas is None else min(dense, deltas),
        "changed": changed,
        "seconds": seconds,
        "extra_mib": memory.extra / MIB,
        "allowed_mib": allowed_mib(changed),
    }


def _warm() -> None:
    """Load what a process loads at its first version, so that it does not count as memory of catching up."""
    source, store = Wandering(1, 0.01, 1 << 18), open_store(f"memory://{uuid.uuid4().hex}")
    model, replica = source.tensors(), source.tensors()
    settings = SubscriberSettings(lease=False)
    with (
        Publisher("", PublisherSettings(), store=store) as publisher,
        Subscriber("", Tensors(replica), settings, store=store) as subscriber,
    ):
        for step in range(3):
            publisher.publish(model, step=step).wait()
            source.move(model)
            if step != 1:  # one version alone, then two at once
                subscriber.once()


def _table(found: Sequence[dict[str, Any]], mib: int) -> Table:
    return Table(
        title=f"Catching up, {mib} MiB of bf16, behind a head that has a snapshot",
        head=[
            "changed in each version",
            "versions behind",
            "changed in all",
            "deltas, MiB",
            "snapshot, MiB",
            "fetched, MiB",
            "of the smaller of the two",
            "s",
            "memory, MiB",
            "256 MiB and 10 bytes a change",
        ],
        rows=[
            [
                percent(f["density"]),
                "all" if f["behind"] is None else str(f["behind"]),
                f"{f['changed']:,}",
                "" if f["deltas_bytes"] is None else number(f["deltas_bytes"] / MIB),
                number(f["snapshot_bytes"] / MIB),
                number(f["bytes"] / MIB),
                f"{f['bytes'] / f['least_bytes']:.3f} ×",
                number(f["seconds"]),
                number(f["extra_mib"]),
                number(f["allowed_mib"]),
            ]
            for f in found
        ],
        note="Bytes are counted at the store, manifests included. Memory is the peak of the subscriber's process "
        "beyond the tensors; changed in all are elements that differ between what it held and the head.",
    )


def _plot(found: Sequence[dict[str, Any]], figure: str, unit: int, title: str) -> Plot:
    def line(density: float) -> Line:
        points = [
            (f["behind"], f[figure] / unit)
            for f in found
            if f["density"] == density and f["behind"] is not None
        ]
        return Line(
            label=f"{percent(density)} a version", x=[float(x) for x, _ in points], y=[y for _, y in points]
        )

    return Plot(
        name=f"catchup-{figure}",
        title=f"Catching up: {title}",
        x="versions behind",
        y=title,
        lines=[line(density) for density in sorted({f["density"] for f in found})],
        log_x=True,
        log_y=True,
    )


def _ratios(found: Sequence[dict[str, Any]]) -> list[Ratio]:
    """The bars. Who held nothing needs the snapshot, whose bytes are what they are."""
    ratios = []
    for f in (f for f in found if f["behind"] is not None):
        name = f"{percent(f['density'])}, {f['behind']} behind"
        ratios += [
            Ratio(
                name=f"{name}: bytes against the smaller of snapshot and deltas",
                value=f["bytes"] / f["least_bytes"],
                bar=_BAR,
                at_most=True,
            ),
            Ratio(
                name=f"{name}: memory against 256 MiB and 10 bytes a change",
                value=f["extra_mib"] / f["allowed_mib"],
                bar=1.0,
                at_most=True,
            ),
        ]
    return ratios
