"""`make bench` and `weightcast bench`: every figure as a ratio to its yardstick, measured in one run.

Each part runs in a process of its own, one after the other, so that memory is its own and nothing disturbs the times.
Prints Markdown; `--json FILE` keeps everything that was measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from weightcast.schemas.errors import WeightcastError

from .part import PARTS, Options, cores
from .report import part_section
from .result import Result
from .sections import update


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


def alone(name: str, options: Options) -> Result:
    """Run a part in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; its stderr has said why.
    """
    with tempfile.TemporaryDirectory(prefix="weightcast-bench-") as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", f"{__package__}.alone", name, options.model_dump_json(), str(file)]
        subprocess.run(command, stdout=sys.stderr, check=True)
        return Result.model_validate_json(file.read_bytes())


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="weightcast bench", description=__doc__)
    found.add_argument(
        "parts", nargs="*", metavar="PART", help=f"what to measure: {', '.join(PARTS)}; default: all"
    )
    usual = Options()
    found.add_argument("--mib", type=int, default=usual.mib, help="size of the model in MiB of bf16")
    found.add_argument(
        "--density",
        type=float,
        nargs="+",
        default=usual.density,
        help="shares of elements that change in the race",
    )
    found.add_argument("--rounds", type=int, default=usual.rounds, help="the best of so many counts")
    found.add_argument("--repeat", type=int, default=1, help="run each part so often, and show the spread")
    found.add_argument("--quick", action="store_true", help="small and short: whether it works, not how fast")
    found.add_argument(
        "--trace", type=Path, default=usual.trace, metavar="DIR", help="where real traces are kept"
    )
    found.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
    found.add_argument(
        "--docs",
        type=Path,
        nargs="?",
        const=Path("docs/benchmarks.md"),
        metavar="FILE",
        help="write the tables into this document, and the plots beside it",
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and print the report."""
    given = parser().parse_args(arguments)
    unknown = [name for name in given.parts if name not in PARTS]
    if unknown:
        parser().error(f"unknown part {unknown[0]}; parts are {', '.join(PARTS)}")
    if given.repeat < 1:
        parser().error("--repeat must be at least 1")
    options = Options(
        quick=given.quick,
        mib=given.mib,
        density=tuple(given.density),
        rounds=given.rounds,
        trace=given.trace,
    )
    head = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{processor()}, {cores()} cores",
    }
    print(f"{head['time']}, {head['machine']}\n", flush=True)
    results: dict[str, list[Result]] = {}
    failed = False
    for name in [name for name in PARTS if name in given.parts] or PARTS:
        try:
            runs = results[name] = _repeat(name, options, given.repeat)
        except subprocess.CalledProcessError as error:
            print(f"{name} failed ({error.returncode}); the other parts go on", file=sys.stderr)
            failed = True
            continue
        print(f"## {name}\n\n{part_section(runs)}", flush=True)
        _keep(given.json, head | {"parts": {k: [r.model_dump() for r in v] for k, v in results.items()}})
    code = _document(given.docs, results) if given.docs else 0
    return code or int(failed)


def _repeat(name: str, options: Options, times: int) -> list[Result]:
    runs = []
    for turn in range(times):
        print(f"… {name}, run {turn + 1} of {times}", file=sys.stderr, flush=True)
        runs.append(alone(name, options))
    return runs


def _keep(file: Path | None, figures: object) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figures, indent=2) + "\n")


def _document(document: Path, results: dict[str, list[Result]]) -> int:
    ran = {name: runs for name, runs in results.items() if not runs[-1].skipped}
    try:
        update(
            document,
            {name: part_section(runs, plots=True) for name, runs in ran.items()},
            [plot for runs in ran.values() for plot in runs[-1].plots],
        )
    except WeightcastError as error:
        print(f"{error.message}; {error.hint}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
