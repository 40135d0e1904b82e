"""How often a subscriber asks for the next version: seldom while nothing comes, often when one is due. Pure."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

_GAPS: Final = 5  # the last gaps between versions, of which the median is the rhythm

_POLLS_A_GAP: Final = 16
"""Polls between two versions, at least: what is found is then late by a 32nd of a gap on average."""

_NEARER: Final = 8
"""The pause is at most this part of the time by which a version is due sooner or later than now."""

_OVERDUE_GAPS: Final = 2
"""From here on the stream may have stopped, and pauses grow with the time that passed."""

_OVERDUE_PART: Final = 8  # of the time that passed: what pauses grow to

_LEAST_S: Final = 0.01  # whatever the store: 100 polls a second are enough

AT_ONCE: Final = 8
"""Polls on their way at once, at most: over 80 ms one can leave every 10 ms, and a store that answers slowly is not
asked faster for it."""

_ON_ITS_WAY_S: Final = 2.0
"""So long after a shard its version may come any moment: then its publisher has died."""

_UNKNOWN_S: Final = 60.0  # so long after a version the next one may come, as long as there is no rhythm

_MAX_BACKOFF_S: Final = 30.0
_MAX_DOUBLINGS: Final = 16  # of the pause; more would only overflow


class Rhythm:
    """When versions were found. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._shard_at = -math.inf

    def shard(self, now: float) -> None:
        """A shard of the next version has appeared."""
        self._shard_at = now

    def found(self, version: int, now: float) -> None:
        """`version` is the newest, as of `now`. Several at once count as evenly spread since the last time."""
        if self._last is not None and version > self._last[0]:
            self._gaps.append((now - self._last[1]) / (version - self._last[0]))
        if self._last is None or version > self._last[0]:
            self._last = version, now

    @property
    def gap_s(self) -> float | None:
        """Seconds between versions; None before there were three."""
        return median(self._gaps) if len(self._gaps) >= 2 else None

    def pause_s(self, poll_s: float, now: float, request_s: float) -> float:
        """Seconds to wait before the next poll, whose answer takes `request_s`; see `due_s`."""
        if now - self._shard_at < _ON_ITS_WAY_S:
            return due_s(poll_s, 0.0, 0.0, request_s)
        gap = self.gap_s
        if gap is None or self._last is None:
            return poll_s
        return due_s(poll_s, gap, now + request_s - self._last[1], request_s)

    def is_due(self, now: float) -> bool:
        """Whether the next version may be in the making: not once it should long have come."""
        if now - self._shard_at < _ON_ITS_WAY_S:
            return True
        if self._last is None:
            return False
        gap = self.gap_s
        return now - self._last[1] < (_UNKNOWN_S if gap is None else _OVERDUE_GAPS * gap)


def due_s(poll_s: float, gap_s: float, since_s: float, request_s: float) -> float:
    """Seconds from one poll to the next while versions come at a rhythm, whether the first is answered by then or not.

    Args:
        poll_s: the setting, which is never exceeded.
        gap_s: seconds between two versions, as observed.
        since_s: seconds from the last one to the next answer.
        request_s: seconds that a poll takes.
    """
    share = gap_s / _POLLS_A_GAP if since_s < _OVERDUE_GAPS * gap_s else since_s / _OVERDUE_PART
    wanted = min(share, abs(since_s - gap_s) / _NEARER)
    return min(poll_s, max(wanted, _LEAST_S, request_s / AT_ONCE))


def spread_s(pause_s: float, chance: float) -> float:
    """A pause spread by a third, so that many subscribers do not poll at the same instant; `chance`: in [0, 1)."""
    return pause_s * (2 + 2 * chance) / 3


def backoff_s(poll_s: float, failures: int) -> float:
    """Seconds to the next poll after `failures` in a row: `poll_s`, doubled with each up to a limit."""
    return min(poll_s * (1 << min(failures, _MAX_DOUBLINGS)), max(_MAX_BACKOFF_S, poll_s))
