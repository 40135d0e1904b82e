"""A whole publish and apply through a local store, phase by phase: the publishing thread's stall, times, memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from weightcast.publisher import Publisher, PublisherSettings
from weightcast.schemas.shard import Codec
from weightcast.subscriber import Subscriber, SubscriberSettings, Tensors

from ..data import LAYER_ELEMENTS
from ..lab.memory import MIB, allowed_mib, peak, resident_bytes
from ..lab.models import Flipping, check_same
from ..part import Options
from ..report import milliseconds, number, percent
from ..result import Ratio, Result, Table

_RUNS: Final[tuple[tuple[float, Codec], ...]] = ((0.01, "gap"), (0.01, "class"), (0.002, "gap"))
_STALL_BAR: Final = 1.25
_PUBLISHER_BAR_MIB: Final = 512


def run(options: Options) -> Result:
    """Measure at 1 % and 0.2 %."""
    found = [_measure(options, density, codec) for density, codec in _RUNS]
    return Result(part="phases", tables=[_table(found)], ratios=_ratios(found[0]), figures={"phases": found})


def plain_copy(tensors: Mapping[str, Tensor]) -> float:
    """Seconds of a copy into memory that was touched before: what handing over weights costs at least."""
    target = {name: torch.empty_like(t).fill_(0) for name, t in tensors.items()}
    begin = time.perf_counter()
    for name, tensor in tensors.items():
        target[name].copy_(tensor)
    return time.perf_counter() - begin


def _measure(options: Options, density: float, codec: Codec) -> dict[str, float | str]:
    """Best seconds of each phase over the rounds, memory in MiB, and what went over the wire."""
    source = Flipping(options.pick(options.mib, 1), density, options.pick(LAYER_ELEMENTS, 1 << 16))
    model, replica = source.tensors(), source.tensors()
    best: dict[str, float] = {}
    memory = {"publish_extra_mib": 0.0, "apply_extra_mib": 0.0}

    def note(**seconds: float) -> None:
        best.update({f"{name}_s": min(best.get(f"{name}_s", s), s) for name, s in seconds.items()})

    with (
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root,
        Publisher(root, PublisherSettings(snapshot_every=0, codec=codec)) as publisher,
        Subscriber(root, Tensors(replica), SubscriberSettings(lease=False)) as subscriber,
    ):
        before = resident_bytes()
        begin = time.perf_counter()
        publisher.publish(model, step=0).wait()
        note(first_version=time.perf_counter() - begin)
        memory["baseline_mib"] = (resident_bytes() - before) / MIB
        subscriber.once()
        for turn in range(options.pick(options.rounds, 1) + 1):
            source.move(model)
            copied = plain_copy(model)
            with peak() as publishing:
                begin = time.perf_counter()
                pending = publisher.publish(model, step=turn + 1)
                stalled = time.perf_counter() - begin
                manifest = pending.wait()
                committed = time.perf_counter() - begin
            with peak() as applying:
                begin = time.perf_counter()
                subscriber.once()
                applied = time.perf_counter() - begin
            if turn:  # the first compiles the kernels
                note(copy=copied, stall=stalled, commit=committed, apply=applied)
                memory["publish_extra_mib"] = max(memory["publish_extra_mib"], publishing.extra / MIB)
                memory["apply_extra_mib"] = max(memory["apply_extra_mib"], applying.extra / MIB)
        publisher.wait_idle()
        check_same(model, replica)
    totals = manifest.totals
    return {
        "codec": codec,
        "mib": totals.dense_bytes / MIB,
        "density": totals.changed / totals.elements,
        "wire_bytes": totals.bytes + len(manifest.encode()),
        "bits_per_change": 8 * totals.bytes / totals.changed,
        "dense_over_wire": totals.dense_bytes / totals.bytes,
        "stall_over_copy": best["stall_s"] / best["copy_s"],
        "allowed_mib": allowed_mib(totals.changed),
        **best,
        **memory,
    }


def _table(found: list[dict[str, float | str]]) -> Table:
    rows = []
    for phases in found:
        p = {name: value for name, value in phases.items() if not isinstance(value, str)}
        rows.append(
            [
                percent(p["density"]),
                f"`{phases['codec']}`",
                milliseconds(p["copy_s"]),
                milliseconds(p["stall_s"]),
                milliseconds(p["commit_s"]),
                milliseconds(p["apply_s"]),
                number(p["bits_per_change"]),
                f"{p['dense_over_wire']:.0f} ×",
                number(p["publish_extra_mib"]),
                number(p["apply_extra_mib"]),
            ]
        )
    head = [
        "changed",
        "codec",
        "plain copy, ms",
        "stall of the publishing thread, ms",
        "publish to commit, ms",
        "apply, ms",
        "bits a change on the wire",
        "less than dense",
        "publisher's memory beyond the baseline, MiB",
        "subscriber's beyond the tensors, MiB",
    ]
    return Table(
        title=f"Publish and apply through a local store, {number(float(found[0]['mib']))} MiB of bf16",
        head=head,
        rows=rows,
    )


def _ratios(p: dict[str, float | str]) -> list[Ratio]:
    bounds = {
        "publish_extra_mib": _PUBLISHER_BAR_MIB,
        "apply_extra_mib": float(p["allowed_mib"]),
    }
    names = {
        "publish_extra_mib": "publisher's memory beyond the baseline",
        "apply_extra_mib": "subscriber's beyond its tensors: 256 MiB and 10 bytes a change",
    }
    return [
        Ratio(
            name="stall of the publishing thread against a plain copy",
            value=float(p["stall_over_copy"]),
            bar=_STALL_BAR,
            at_most=True,
        ),
        *(
            Ratio(name=names[key], value=float(p[key]), bar=bar, at_most=True, unit="MiB")
            for key, bar in bounds.items()
        ),
    ]
