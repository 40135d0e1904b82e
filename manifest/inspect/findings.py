"""What a verification found, in values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from weightcast.schemas.errors import NotFound, StorageError, WeightcastError

MAX_STORE_FAILURES: Final = 8
"""Objects the store may fail to deliver before it counts as down: each has been tried for a minute by then.
"""

Progress = Callable[[str, int], None]
"""(what is being checked, how many were): called often, from one thread."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage.

    Attributes:
        version: that it belongs to; None for the stream as a whole.
        object: the key, or the versions, concerned.
        kind: as of the errors: "untrusted", "unsupported", "corrupt", "gap" (something is missing) or
        "storage". message: what was expected and what was found.
    """

    version: int | None
    object: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Outcome of `verify`.

    Attributes:
        url: of the stream.
        version: the newest version that was checked; None if nothing was ever committed.
        floor: versions below it may have lost their data, which is no problem.
        deep: whether versions were rebuilt.
        manifests, shards, snapshots: how many were looked at.
        bytes: of shards and snapshots fetched and hashed.
        rebuilt: versions whose state was rebuilt and has its digest.
        problems: every one found, by version.
        unchecked: what this mode did not look at, one sentence each.
    """

    url: str
    version: int | None
    floor: int
    deep: bool
    manifests: int
    shards: int
    snapshots: int
    bytes: int
    rebuilt: int
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


class Findings:
    """Collects problems and counts. Belongs to one thread."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress
        self._problems: dict[Problem, None] = {}
        self._store_failures = 0
        self.counts = dict.fromkeys(("manifests", "shards", "snapshots", "bytes", "rebuilt"), 0)

    def count(self, what: str, number: int = 1) -> None:
        """Note that something was looked at."""
        self.counts[what] += number
        if self._progress is not None and what != "bytes":
            self._progress(what, self.counts[what])

    def add(self, version: int | None, key: str, error: WeightcastError) -> None:
        """Note damage; the same one twice is one.

        Raises:
            StorageError: `error` is one, and not the first few: the store is down, and the rest cannot be
            judged.
        """
        if isinstance(error, StorageError):
            self._store_failures += 1
            if self._store_failures > MAX_STORE_FAILURES:
                raise error
        kind = "gap" if isinstance(error, NotFound) else error.kind
        self._problems.setdefault(Problem(version, key, kind, error.message))

    def concerns(self, version: int) -> bool:
        """Whether a problem of `version` is known."""
        return any(p.version == version for p in self._problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All of them, by version and object."""
        return tuple(
            sorted(
                self._problems, key=lambda p: (-1 if p.version is None else p.version, p.object, p.message)
            )
        )
