"""How old the weights behind a batch may be for the learner to use it."""

from __future__ import annotations

from collections.abc import Iterable

from weightcast.schemas.errors import UsageError

from .rollout import Rollouts


def is_fresh(version: int, *, current: int, max_staleness: int) -> bool:
    """Say whether rollouts of `version` may train a learner that is at version `current`.

    Raises:
        UsageError: the bound is negative, or the version is ahead of the learner's (it is of another run).
    """
    if max_staleness < 0:
        raise UsageError(f"max_staleness is {max_staleness}, it must be at least 0")
    if version > current:
        raise UsageError(
            f"rollouts are of version {version}, but the learner is at {current}",
            hint="empty the spool folder: it holds the rollouts of another run",
        )
    return version >= current - max_staleness


def fresh(batches: Iterable[Rollouts], *, current: int, max_staleness: int) -> list[Rollouts]:
    """Return, in their order, the batches at most `max_staleness` versions behind `current`."""
    return [
        batch for batch in batches if is_fresh(batch.version, current=current, max_staleness=max_staleness)
    ]
