"""`make bench` and `weightcast bench`: every figure as a ratio to its yardstick, measured in one run.

Each part runs in a process of its own, one after the other, so that memory is its own and nothing disturbs the times.
Prints Markdown; `--json FILE` keeps everything that was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .report import counts_table, phases_table, race_table


def part(module: str, *arguments: str) -> Any:
    """Run one part, and return the JSON document that it prints."""
    command = [sys.executable, "-m", f"weightcast.benchmarks.{module}", *arguments]
    print(f"… {module} {' '.join(arguments)}", file=sys.stderr, flush=True)
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def processor() -> str:
    """The processor's name, as the kernel tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all parts and print the report."""
    parser = argparse.ArgumentParser(prog="weightcast bench", description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the model in MiB of bf16")
    parser.add_argument(
        "--density", type=float, nargs="+", default=[0.01, 0.002], help="share of elements that change"
    )
    parser.add_argument("--rounds", type=int, default=5, help="the best of so many counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    densities = [str(d) for d in options.density]
    common = ["--mib", str(options.mib), "--rounds", str(options.rounds)]
    figures = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{processor()}, {cores} cores",
        "race": part("race", *common, "--threads", str(cores), "--density", *densities),
        "phases": [part("phases", *common, "--density", density) for density in densities],
        "counts": part("counts"),
    }
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{figures['time']}, {figures['machine']}\n")
    for tables in (
        race_table(figures["race"]),
        phases_table(figures["phases"]),
        counts_table(figures["counts"]),
    ):
        print(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
