"""The parts of the benchmark: their seam, their settings, and where each is."""

from __future__ import annotations

import importlib
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol, cast

from pydantic import BaseModel, ConfigDict, Field

from .result import Result

PARTS: Final = (
    "race",
    "trace",
    "phases",
    "training",
    "detectors",
    "ranks",
    "catchup",
    "stores",
    "link",
    "scale",
    "soak",
)
"""Names, in the order in which they run; each is a module of `parts`, whose first line says what it measures."""


def cores() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Options(BaseModel):
    """What all parts share.

    Attributes:
        quick: small models and few rounds, in seconds: whether it works, not how fast.
        mib: bf16 bytes of the model of `race`, `phases` and `link`, in MiB.
        density: shares of elements that change, for `race`.
        rounds: the best of so many counts.
        threads: of contestants in a race.
        trace: folder where real traces are kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    quick: bool = False
    mib: int = Field(default=512, ge=1)
    density: tuple[float, ...] = (0.001, 0.002, 0.01, 0.03, 0.1)
    rounds: int = Field(default=5, ge=1)
    threads: int = Field(default_factory=cores, ge=1)
    trace: Path = Path("out/trace")

    def pick(self, usual: int, quick: int) -> int:
        """A size: `quick` where it has to be quick."""
        return quick if self.quick else usual


class Part(Protocol):
    """A module that measures one thing. Runs alone in its process."""

    def run(self, options: Options) -> Result:
        """Measure. A part that cannot run here returns a result that says why (`skipped`)."""


def find_part(name: str) -> Part:
    """The part of that name, one of `PARTS`."""
    return cast(Part, importlib.import_module(f"{__package__}.parts.{name}"))


def run_part(name: str, options: Options) -> Result:
    """Run a part in this process, and note how long it took."""
    now, begin = datetime.now(UTC).isoformat(timespec="minutes"), time.perf_counter()
    found = find_part(name).run(options)
    return found.model_copy(update={"time": now, "seconds": time.perf_counter() - begin})
