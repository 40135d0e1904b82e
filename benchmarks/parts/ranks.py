"""Publishing a sharded model from 1, 2 and 4 ranks, each its own, beside gathering it on one rank first."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Final

from ..lab.forks import in_forks
from ..lab.memory import MIB
from ..lab.models import ModelSpec
from ..lab.ranks import WAYS, RanksJob, rank
from ..part import Options, cores
from ..report import milliseconds, number
from ..result import Ratio, Result, Table

_RANKS: Final = (1, 2, 4)
_MIB: Final = 128  # 64 Mi bf16 elements
_LAYER_ELEMENTS: Final = 1 << 20
_DENSITY: Final = 0.01
_SPREAD_BAR: Final = 1.25
_TITLES: Final = {"own": "every rank its own", "gather": "gather, then publish"}


def run(options: Options) -> Result:
    """One number of ranks after the other."""
    model = ModelSpec(
        density=_DENSITY,
        mib=options.pick(_MIB, 1),
        layer_elements=options.pick(_LAYER_ELEMENTS, 1 << 16),
    )
    versions = options.pick(options.rounds + 1, 2)
    ranks = (1, 2) if options.quick else _RANKS
    found = [figures for size in ranks for figures in _measure(size, model, versions)]
    return Result(
        part="ranks",
        tables=[_table(found, model)],
        ratios=[ratio for size in ranks for ratio in _ratios(*(f for f in found if f["ranks"] == size))],
        figures={"ranks": found},
    )


def _measure(size: int, model: ModelSpec, versions: int) -> list[dict[str, Any]]:
    """Figures of so many ranks by way: of each version the slowest rank's times, the most memory, bytes by rank."""
    with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as folder:
        job = RanksJob(
            model=model,
            ranks=size,
            threads=max(1, cores() // size),
            versions=versions,
            port=_free_port(),
            folder=Path(folder),
        )
        ranks = in_forks(rank, [(job, number) for number in range(size)])
    return [_joined(way, [found[way] for found in ranks]) for way in WAYS]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _joined(way: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One way's figures over all ranks."""
    returned, committed = (
        [max(times) for times in zip(*(found[name] for found in ranks), strict=True)]
        for name in ("returned_s", "committed_s")
    )
    return {
        "ranks": len(ranks),
        "way": way,
        "publish_s": median(returned),
        "best_publish_s": min(returned),
        "commit_s": median(committed),
        "best_commit_s": min(committed),
        "extra_bytes": max(found["extra_bytes"] for found in ranks),
        "collectives": sum(found["collectives"] for found in ranks),
        "collective_bytes": sum(found["collective_bytes"] for found in ranks),
        "text_bytes": sum(found["text_bytes"] for found in ranks),
        "uploaded_bytes": [found["uploaded_bytes"][-1] for found in ranks],
    }


def _table(found: list[dict[str, Any]], model: ModelSpec) -> Table:
    return Table(
        title=f"{model.mib} MiB of bf16 sharded by rows, {100 * _DENSITY:.0f} % changed, local store",
        head=[
            "ranks",
            "way",
            "publish returns, ms",
            "publish to commit, ms",
            "memory of a publish, most of a rank, MiB",
            "received through collectives, all ranks, MiB",
            "texts between ranks, KiB",
            "uploaded by each rank, KiB",
        ],
        rows=[
            [
                str(f["ranks"]),
                _TITLES[f["way"]],
                _both(f, "publish"),
                _both(f, "commit"),
                number(f["extra_bytes"] / MIB),
                number(f["collective_bytes"] / MIB),
                number(f["text_bytes"] / 1024),
                ", ".join(number(nbytes / 1024) for nbytes in f["uploaded_bytes"]),
            ]
            for f in found
        ],
        note=(
            f"Best (median) over versions of the slowest rank's time. **All ranks are processes on the same {cores()} "
            "cores**, and share the memory's bandwidth: this compares the two ways, and does not show how either "
            "scales over machines. gloo gathers over loopback, which is faster than most networks. Memory is beyond "
            "what was resident before, and so without the copy of the last version: each rank has one of what it "
            "owns, or rank 0 one of everything. Memory and bytes are of a version that is not timed. Each stream is "
            "read at the end, and its bits are compared with the model's."
        ),
    )


def _both(f: dict[str, Any], name: str) -> str:
    return f"{milliseconds(f[f'best_{name}_s'])} ({milliseconds(f[f'{name}_s'])})"


def _ratios(own: dict[str, Any], gather: dict[str, Any]) -> list[Ratio]:
    """Between the two ways, on as many ranks."""
    size, sent = own["ranks"], own["uploaded_bytes"]
    if size == 1:
        return []
    return [
        Ratio(
            name=f"{size} ranks: publish returns earlier than after a gather",
            value=gather["best_publish_s"] / own["best_publish_s"],
        ),
        Ratio(
            name=f"{size} ranks: publish to commit faster than with a gather",
            value=gather["best_commit_s"] / own["best_commit_s"],
        ),
        Ratio(
            name=f"{size} ranks: bytes that a collective carried",
            value=own["collective_bytes"],
            bar=0,
            at_most=True,
            unit="B",
        ),
        Ratio(
            name=f"{size} ranks: most bytes uploaded by a rank, against the mean",
            value=max(sent) * size / sum(sent),
            bar=_SPREAD_BAR,
            at_most=True,
        ),
    ]
