"""Resident memory of this process, as the kernel counts it (Linux)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def resident_bytes(field: str = "VmRSS") -> int:
    """`VmRSS`: resident now; `VmHWM`: the most since the last reset; `RssAnon`: without mapped files."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")


@dataclass
class Peak:
    """Memory before a stretch of code, and the most during it beyond that."""

    before: int = 0
    extra: int = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure the peak of resident memory inside the context, beyond what was resident before."""
    found = Peak(before=resident_bytes())
    _CLEAR.write_text("5")  # resets VmHWM to what is resident now (proc(5))
    yield found
    found.extra = max(0, resident_bytes("VmHWM") - found.before)
