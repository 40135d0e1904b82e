"""Resident memory of a process, as the kernel counts it (Linux)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MIB: Final = 1 << 20


def resident_bytes(field: str = "VmRSS", pid: int | str = "self") -> int:
    """`VmRSS`: resident now; `VmHWM`: the most since the last reset; `RssAnon`: without mapped files."""
    status = Path(f"/proc/{pid}/status")
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{status} has no {field}")


@dataclass
class Peak:
    """Memory before a stretch of code, and the most during it beyond that, in bytes."""

    before: int = 0
    extra: int = 0

    @property
    def most(self) -> int:
        """All that was resident at the peak."""
        return self.before + self.extra


def give_back() -> None:
    """Give memory that was freed back to the kernel (glibc), so that a peak after this shows all that is taken."""
    ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure the peak of resident memory inside the context, beyond what was resident before."""
    found = Peak(before=resident_bytes())
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is resident now (proc(5))
    yield found
    found.extra = max(0, resident_bytes("VmHWM") - found.before)


def allowed_mib(changes: int) -> float:
    """MiB that a subscriber may take beyond its tensors: 256, and 10 bytes a change (a position, a bf16 value)."""
    return 256 + 10 * changes / MIB
