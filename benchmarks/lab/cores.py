"""What a process takes of the machine's cores, and how long it waits for one, as the kernel counts it (Linux)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Cores:
    """Of all threads of a process together.

    Attributes:
        used_s: seconds that they ran.
        waited_s: seconds that they could have run, but others had the core.
    """

    used_s: float
    waited_s: float

    @classmethod
    def of(cls, pid: int) -> Self:
        """From its start on, without threads that have ended (proc(5): schedstat)."""
        used = waited = 0
        for path in Path(f"/proc/{pid}/task").iterdir():
            try:
                ran, stood, _ = (path / "schedstat").read_text().split()
            except OSError:  # it ended meanwhile
                continue
            used, waited = used + int(ran), waited + int(stood)
        return cls(used / 1e9, waited / 1e9)

    def __sub__(self, before: Cores) -> Cores:
        return Cores(self.used_s - before.used_s, self.waited_s - before.waited_s)
