"""Which of the checkpoints in a watched folder is the next one. Pure: what was seen goes in, a choice comes out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from .contents import Stamp

Existing = Literal["newest", "all", "ignore"]

_TEMPORARY: Final = re.compile(r"\..*|tmp[-_.].*|.*[-_.]tmp([-_.].*)?|.*\.(incomplete|partial)")
"""Names under which trainers write what they rename later; orbax writes `N.orbax-checkpoint-tmp-M`."""


def is_temporary(name: str) -> bool:
    """Whether a folder of this name is one that its writer has not finished."""
    return _TEMPORARY.fullmatch(name) is not None


@dataclass(frozen=True)
class Sighting:
    """A checkpoint folder as it was at one look.

    Attributes:
        path: the folder, resolved: a symbolic link and what it leads to are one candidate.
        weights: the folder in it that has the weights; often `path` itself.
        step: what `path` is named after.
        files: the stamps of everything in `weights` that matters.
        marked: whether the marker is there, or none is needed.
    """

    path: Path
    weights: Path
    step: int | None
    files: tuple[Stamp, ...]
    marked: bool = True

    @property
    def modified_ns(self) -> int:
        """Modification time of the newest file; 0 if there is none."""
        return max((s[3] for s in self.files), default=0)

    @property
    def save(self) -> int:
        """Tells this save from another one in the same folder."""
        return hash((self.files, self.marked))


@dataclass(frozen=True)
class Choice:
    """The checkpoint to publish next, and finished ones that it replaces."""

    sighting: Sighting
    replaced: tuple[Sighting, ...] = ()


class Candidates:
    """Remembers what was seen and what became of it.

    A candidate is finished when nothing in it changed for `settle_s` seconds of looking, and it is marked. It is done
    when it was published, replaced or refused, and stays so until it changes.

    Args:
        settle_s: seconds.
        existing: what to do with what the first look finds: publish the `newest`, `all` one after another, or
            `ignore` them until they change.
        every: publish each finished checkpoint, instead of the newest of several.
    """

    def __init__(self, settle_s: float, existing: Existing = "newest", *, every: bool = False) -> None:
        self._settle_s = settle_s
        self._existing = existing
        self._every = every
        self._since: dict[Path, tuple[int, float]] = {}
        self._done: dict[Path, int] = {}  # not forgotten when a folder goes: `latest` may lead there again
        self._due: set[Path] | None = None
        self._seen: list[Sighting] = []

    def see(self, sightings: Iterable[Sighting], now_s: float) -> None:
        """Take note of a look at the folder at a time of any monotonic clock."""
        self._seen = list({s.path: s for s in sightings}.values())
        since = {}
        for seen in self._seen:
            save, start = self._since.get(seen.path, (None, now_s))
            since[seen.path] = (seen.save, start if save == seen.save else now_s)
        self._since = since
        if self._due is None:
            self._due = {s.path for s in self._seen} if self._existing == "all" else set()
            if self._existing == "ignore":
                self._done.update({s.path: s.save for s in self._seen})

    def choose(self, now_s: float) -> Choice | None:
        """The next checkpoint, if one is finished."""
        ready = in_order(s for s in self._seen if self._is_ready(s, now_s))
        due = self._due or set()
        for position, sighting in enumerate(ready):
            if self._every or sighting.path in due or sighting is ready[-1]:
                return Choice(sighting, tuple(ready[:position]))
        return None

    def settle(self, choice: Choice) -> None:
        """The choice is published; what it replaced never will be."""
        for sighting in (*choice.replaced, choice.sighting):
            self.refuse(sighting)

    def refuse(self, sighting: Sighting) -> None:
        """Do not choose this one again, unless it changes."""
        self._done[sighting.path] = sighting.save
        if self._due:
            self._due.discard(sighting.path)

    def _is_ready(self, seen: Sighting, now_s: float) -> bool:
        if not seen.files or not seen.marked or self._done.get(seen.path) == seen.save:
            return False
        return now_s - self._since[seen.path][1] >= self._settle_s


def in_order(sightings: Iterable[Sighting]) -> list[Sighting]:
    """Sorted by step; one without a step comes after those that were written before it."""
    every = list(sightings)
    numbered = [(s.step, s.modified_ns) for s in every if s.step is not None]

    def key(sighting: Sighting) -> tuple[int, int, str]:
        step = sighting.step
        if step is None:
            step = max((n for n, modified in numbered if modified <= sighting.modified_ns), default=-1)
        return step, sighting.modified_ns, str(sighting.path)

    return sorted(every, key=key)
