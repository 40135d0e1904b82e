"""Where a capture gets the bits from that readers have."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from weightcast.codec import Interval, Memory


class Olds(Protocol):
    """The old bits, an interval at a time. Called by several threads at once."""

    @property
    def lasting(self) -> bool:
        """Whether what `memory` gives stays as it is while the baseline is held still.

        Then rows are coded after the trainer was let go; otherwise inside the context.
        """

    def memory(self, interval: Interval) -> AbstractContextManager[Memory]:
        """Memory that has the old bits of `interval`, at least inside the context."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Old bits that are kept whole, as the baseline keeps them."""

    kept: Memory
    lasting: bool = True

    def memory(self, interval: Interval) -> AbstractContextManager[Memory]:
        """All of it."""
        return nullcontext(self.kept)
