"""How the ranks of a group pass short texts: a seam of a few calls.

No collective is wanted behind it: one that a rank does not join cannot be taken back, and leaves its process group of
no use to the others. Where texts are kept, a late rank finds what was decided without it.
"""

from __future__ import annotations

from typing import Protocol

from weightcast.schemas.errors import StorageError


class Silence(StorageError):
    """Nothing more was heard: what the others do is unknown."""


class Messenger(Protocol):
    """Passes texts between the ranks of a group. Used by two threads at a time, under different topics.

    All ranks go through the topics of one thread in the same order. A topic is used once.

    Attributes:
        rank: this process, from 0.
        size: how many there are.
        timeout_s: how long `broadcast` waits; `gather` waits a fifth less, so that rank 0 can still say who is missing.
    """

    rank: int
    size: int
    timeout_s: float

    def gather(self, topic: str, text: str) -> list[str] | None:
        """All ranks' texts by rank, on rank 0; None elsewhere, at once.

        Raises:
            Silence: a rank did not come in time; names it. Or texts cannot be passed any more.
        """
        ...

    def broadcast(self, topic: str, text: str | None) -> str:
        """What rank 0 says; the others give None and wait.

        Raises:
            Silence: rank 0 did not say anything in time, or texts cannot be passed any more.
        """
        ...

    def settled(self) -> None:
        """Every rank has read everything that was said before the present topic: it may be forgotten."""
        ...

    def leave(self) -> None:
        """This rank will not ask any more. Does not raise.

        Rank 0, if its end would take the texts away, waits a little for those that have not left.
        """
        ...


class Alone:
    """The messenger of a group of one."""

    rank: int = 0
    size: int = 1
    timeout_s: float = 120.0

    def gather(self, topic: str, text: str) -> list[str] | None:
        """See `Messenger`."""
        return [text]

    def broadcast(self, topic: str, text: str | None) -> str:
        """See `Messenger`."""
        return text or ""

    def settled(self) -> None:
        """See `Messenger`."""

    def leave(self) -> None:
        """See `Messenger`."""
