"""What the trainer learns from: fresh batches of the subscribers, each of which has a spool of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .rollout import Rollouts
from .spool import Spool
from .staleness import is_fresh


class Intake:
    """Takes batches and counts them.

    Attributes:
        used: batches of each subscriber that were fresh.
        stale: batches of each that were too old, and dropped.
    """

    def __init__(self, folder: Path, names: Sequence[str], *, max_staleness: int) -> None:
        self._spools = {name: Spool(folder / name) for name in names}
        self._max_staleness = max_staleness
        self.used = dict.fromkeys(names, 0)
        self.stale = dict.fromkeys(names, 0)

    def folder(self, name: str) -> Path:
        """Where a subscriber puts its batches."""
        return self._spools[name].folder

    def waiting(self, name: str) -> int:
        """Batches of a subscriber that are there to be taken."""
        return self._spools[name].waiting(name)

    def take(self, name: str, current: int) -> Rollouts | None:
        """Take the subscriber's next batch that may train a learner at version `current`, if there is one."""
        while (batch := self._spools[name].take()) is not None:
            if is_fresh(batch.version, current=current, max_staleness=self._max_staleness):
                self.used[name] += 1
                return batch
            self.stale[name] += 1
        return None
