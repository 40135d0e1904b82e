"""A thousand versions: a publisher and three subscribers as processes; their memory, and the time of each version."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

from ..lab.caster import CasterJob
from ..lab.memory import MIB, resident_bytes
from ..lab.models import ModelSpec
from ..lab.receiver import ReceiverJob
from ..lab.side import Side
from ..part import Options
from ..report import milliseconds, number
from ..result import Line, Plot, Ratio, Result, Table

_VERSIONS: Final = 1000
_SUBSCRIBERS: Final = 3
_ELEMENTS: Final = 1 << 20
_DENSITY: Final = 0.01
_SAMPLE: Final = 10  # versions between two looks at memory
_WARM: Final = 0.1  # share of the versions after which memory is to stay where it is
_MEMORY_BAR_MIB: Final = 8.0
"""What an allocator may keep: two hundredths of what such a process takes."""

_TIME_BAR: Final = 1.2


def run(options: Options) -> Result:
    """Publish, wait until all have it, and so on."""
    versions = options.pick(_VERSIONS, 10)
    model = ModelSpec(density=_DENSITY, elements=options.pick(_ELEMENTS, 1 << 17))
    with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root, ExitStack() as stack:
        caster = stack.enter_context(Side("caster", CasterJob(model=model, root=root)))
        caster.hear("ready")
        job = ReceiverJob(root=root, model=model)
        subscribers = options.pick(_SUBSCRIBERS, 1)
        receivers = [stack.enter_context(Side("receiver", job)) for _ in range(subscribers)]
        for receiver in receivers:
            receiver.hear("ready")
            receiver.tell("follow")
            receiver.hear("applied", version=0)
        found = _soak(caster, receivers, versions, options.pick(_SAMPLE, 2))
    return Result(
        part="soak",
        tables=[_table(found, versions)],
        plots=_plots(found),
        ratios=_ratios(found),
        figures=found,
    )


def _soak(caster: Side, receivers: list[Side], versions: int, sample: int) -> dict[str, Any]:
    """Memory in bytes by process, and seconds of each version: publish to commit, and to the last subscriber."""
    sides = {"publisher": caster, **{f"subscriber {i + 1}": side for i, side in enumerate(receivers)}}
    memory: dict[str, list[int]] = {name: [] for name in sides}
    sampled, publish_s, apply_s = [], [], []
    for version in range(1, versions + 1):
        caster.tell("publish")
        committed = caster.hear("committed", version=version)
        applied = [receiver.hear("applied", version=version)["at"] for receiver in receivers]
        publish_s.append(committed["at"] - committed["began"])
        apply_s.append(max(applied) - committed["began"])
        if version % sample == 0:
            sampled.append(version)
            for name, side in sides.items():
                memory[name].append(resident_bytes(pid=side.pid))
    return {"versions": sampled, "memory": memory, "publish_s": publish_s, "apply_s": apply_s}


def growth(samples: list[int]) -> float:
    """Bytes by which the last tenth's median is above that of the first tenth after the start."""
    tenth = max(1, len(samples) // 10)
    warm = int(_WARM * len(samples))
    return median(samples[-tenth:]) - median(samples[warm : warm + tenth])


def _table(found: dict[str, Any], versions: int) -> Table:
    rows = [
        [
            name,
            number(s[0] / MIB),
            number(median(s) / MIB),
            number(s[-1] / MIB),
            f"{growth(s) / MIB:+.1f} MiB",
        ]
        for name, s in found["memory"].items()
    ]
    named = {"publish to commit, ms": found["publish_s"], "publish to applied by all, ms": found["apply_s"]}
    times = [
        [name, *(milliseconds(t) for t in (_first(s), median(s), _last(s))), f"{_last(s) / _first(s):.2f} ×"]
        for name, s in named.items()
    ]
    return Table(
        title=f"{versions:,} versions, one publisher, {len(rows) - 1} subscribers, each a process",
        head=["resident memory, MiB", "at first", "median", "at last", "last tenth against an early one"],
        rows=[*rows, *times],
        note="Of the times, *at first* and *at last* are medians of a tenth of the versions.",
    )


def _first(seconds: list[float]) -> float:
    return median(seconds[: max(1, len(seconds) // 10)])


def _last(seconds: list[float]) -> float:
    return median(seconds[-max(1, len(seconds) // 10) :])


def _plots(found: dict[str, Any]) -> list[Plot]:
    versions = [float(v) for v in found["versions"]]
    each = [float(v) for v in range(1, len(found["publish_s"]) + 1)]
    return [
        Plot(
            name="soak-memory",
            title="Resident memory over versions",
            x="versions",
            y="MiB",
            lines=[
                Line(label=name, x=versions, y=[b / MIB for b in s]) for name, s in found["memory"].items()
            ],
        ),
        Plot(
            name="soak-times",
            title="Time of each version",
            x="versions",
            y="ms",
            lines=[
                Line(label="publish to commit", x=each, y=[1e3 * s for s in found["publish_s"]]),
                Line(label="publish to applied by all", x=each, y=[1e3 * s for s in found["apply_s"]]),
            ],
        ),
    ]


def _ratios(found: dict[str, Any]) -> list[Ratio]:
    memory = [
        Ratio(
            name=f"memory of {name}: last tenth above an early one",
            value=growth(s) / MIB,
            bar=_MEMORY_BAR_MIB,
            at_most=True,
            unit="MiB",
        )
        for name, s in found["memory"].items()
    ]
    times = [
        Ratio(
            name=f"{name}: last tenth of the versions against the first",
            value=_last(found[key]) / _first(found[key]),
            bar=_TIME_BAR,
            at_most=True,
        )
        for name, key in (("publish to commit", "publish_s"), ("publish to applied by all", "apply_s"))
    ]
    return [*memory, *times]
