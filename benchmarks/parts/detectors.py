"""What detection costs by detector: time of a publish and of a step, memory held and at the peak.

Each detector is a process of its own: a training run that publishes every step (`lab/detecting.py`). Two more runs
publish nothing: what a step takes there is the trainer's own.
"""

from __future__ import annotations

from typing import Any, Final

from ..lab.detecting import measure
from ..lab.forks import in_forks
from ..lab.memory import MIB
from ..part import Options
from ..report import milliseconds, number
from ..result import Ratio, Result, Table

_ELEMENTS: Final = 20 << 20
_STEPS: Final = 12
_LEAST_STEPS: Final = 4  # two publishes are measured
_TITLES: Final = {
    "snapshot": "`snapshot`",
    "cast": "`cast` of masters",
    "cast in parts": "`cast`, steps in parts",
    "adamw for-loop": "`adamw`, for-loop",
    "adamw foreach": "`adamw`, foreach",
    "adamw fused": "`adamw`, fused",
}
_ALONE: Final = {False: "none", True: "none with masters"}
"""The trainers without a publisher: with fp32 parameters alone, and with bf16 ones beside them."""
_EXTRA_BAR_MIB: Final = 64.0
_LEDGER_BAR_PERCENT: Final = 0.1
"""What the ledger may take of the copy that it stands for, at learning rates up to 1e-5."""


def run(options: Options) -> Result:
    """One detector after the other."""
    elements, steps = options.pick(_ELEMENTS, 1 << 18), options.pick(_STEPS, _LEAST_STEPS)
    alone = {half: _measure(way, elements, steps)["step_extra_bytes"] for half, way in _ALONE.items()}
    found = [_measure(way, elements, steps) for way in _TITLES]
    for f in found:
        in_step = f["step_extra_bytes"] - alone[f["way"] == "cast"]
        f["beyond_trainer_bytes"] = f["held_beyond_changes_bytes"] + max(f["publish_extra_bytes"], in_step)
    return Result(
        part="detectors", tables=[_table(found)], ratios=_ratios(found), figures={"detectors": found}
    )


def _measure(way: str, elements: int, steps: int) -> dict[str, Any]:
    """Figures of a run in a process of its own. A run that missed a change stops the benchmark."""
    (found,) = in_forks(measure, [(way, elements, steps)])
    if found["wrong"]:
        raise SystemExit(f"detector {way}: {found['wrong']} elements are not as published")
    return found


def _table(found: list[dict[str, Any]]) -> Table:
    first = found[0]
    return Table(
        title=f"fp32 parameters under AdamW, {first['elements']:,} elements, {first['steps']} versions",
        head=[
            "detector",
            "publish returns, ms",
            "publish to commit, ms",
            "step without a publisher, ms",
            "step, watched, ms",
            "held beyond the changes",
            "most beyond the trainer's own, MiB",
            "changes found",
            "wrong or missed",
            "whole versions",
        ],
        rows=[_row(f) for f in found],
        note=(
            "Best (median) of the versions after the third, and of twelve steps without a publisher, half of them "
            "before there was one and half after; gradients are not counted as a step, the cast into bf16 parameters "
            "is. *Most beyond the trainer's own*: what is held, and the peak of a publish, or of a step if that is "
            "more (less the same of a step that nobody watches), in the last versions, which are not timed. The "
            "changes of a version on their way are in it. A reader applies every version, and its bits are compared "
            "with those that were published. The first version is whole."
        ),
    )


def _row(f: dict[str, Any]) -> list[str]:
    return [
        _TITLES[f["way"]],
        *(_both(f, name) for name in ("publish", "commit", "plain_step", "step")),
        _size(f["held_beyond_changes_bytes"]),
        number(f["beyond_trainer_bytes"] / MIB),
        f"{f['changed']:,}",
        f"{f['wrong']:,}",
        f"{f['whole_versions']:,}",
    ]


def _both(f: dict[str, Any], name: str) -> str:
    return f"{milliseconds(f[f'best_{name}_s'])} ({milliseconds(f[f'{name}_s'])})"


def _size(nbytes: int) -> str:
    return f"{number(nbytes / MIB)} MiB" if nbytes >= MIB else f"{number(nbytes / 1024)} KiB"


def _ratios(found: list[dict[str, Any]]) -> list[Ratio]:
    snapshot, *others = found
    ratios = []
    for f in others:
        name = _TITLES[f["way"]]
        ratios += [
            Ratio(
                name=f"{name}: most beyond the trainer's own",
                value=f["beyond_trainer_bytes"] / MIB,
                bar=_EXTRA_BAR_MIB,
                at_most=True,
                unit="MiB",
            ),
            Ratio(
                name=f"{name}: publish to commit against `snapshot`",
                value=f["best_commit_s"] / snapshot["best_commit_s"],
            ),
            Ratio(
                name=f"{name}: a step against one without a publisher",
                value=f["best_step_s"] / f["best_plain_step_s"],
            ),
        ]
        if f["way"].startswith("adamw"):
            share = 100 * f["held_beyond_changes_bytes"] / snapshot["held_bytes"]
            ratios.append(
                Ratio(
                    name=f"{name}: ledger of the copy of `snapshot`",
                    value=share,
                    bar=_LEDGER_BAR_PERCENT,
                    at_most=True,
                    unit="%",
                )
            )
    return ratios
