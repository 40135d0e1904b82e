"""Which checkpoint of a watched folder is the next one. Pure: what was seen goes in, a choice comes out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .sightings import Sighting

Existing = Literal["newest", "all", "ignore"]


@dataclass(frozen=True)
class Choice:
    """The checkpoint to publish next, and finished ones that it replaces."""

    sighting: Sighting
    replaced: tuple[Sighting, ...] = ()


class Candidates:
    """Remembers what was seen and what became of it.

    A candidate may be finished when nothing in it changed for `settle_s` seconds of looking, and it is
    marked. Then it may be chosen, unless it was published, replaced or ignored and its weights did not change
    since, or was refused and nothing of it did.

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
        # Neither is forgotten when a folder goes: `latest` may lead there again.
        self._done: dict[Path, int] = {}
        self._refused: dict[Path, int] = {}
        self._due: set[Path] | None = None
        self._seen: list[Sighting] = []

    def see(self, sightings: Iterable[Sighting], now_s: float) -> None:
        """Take note of a look at the folder at a time of any monotonic clock."""
        self._seen = list({s.path: s for s in sightings}.values())
        since = {}
        for seen in self._seen:
            look, start = self._since.get(seen.path, (None, now_s))
            since[seen.path] = (seen.look, start if look == seen.look else now_s)
        self._since = since
        if self._due is None:
            self._due = {s.path for s in self._seen} if self._existing == "all" else set()
            if self._existing == "ignore":
                self._done.update({s.path: s.save for s in self._seen})

    def choose(self, now_s: float, without: Collection[Path] = ()) -> Choice | None:
        """The next checkpoint, if one is finished. `without`: folders that are left aside this time."""
        ready = in_order(s for s in self._seen if s.path not in without and self._is_ready(s, now_s))
        due = self._due or set()
        for position, sighting in enumerate(ready):
            if self._every or sighting.path in due or sighting is ready[-1]:
                return Choice(sighting, tuple(ready[:position]))
        return None

    def settle(self, choice: Choice) -> None:
        """The choice is published; what it replaced never will be."""
        for sighting in (*choice.replaced, choice.sighting):
            self._done[sighting.path] = sighting.save
            if self._due:
                self._due.discard(sighting.path)

    def refuse(self, sighting: Sighting) -> None:
        """Do not choose this one again, unless something in it changes."""
        self._refused[sighting.path] = sighting.look

    def _is_ready(self, seen: Sighting, now_s: float) -> bool:
        if not seen.files or not seen.marked:
            return False
        if self._done.get(seen.path) == seen.save or self._refused.get(seen.path) == seen.look:
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
