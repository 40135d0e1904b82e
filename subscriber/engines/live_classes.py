"""Which class each move of a rank counts for, and digests by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from weightcast.codec import Move, canonical
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError

UNUSED: Final = -1
"""Class of a move that is neither read nor written, since its tensor is not kept through moves."""

Sums = Mapping[tuple[int, int], Digest]
"""Digests by class and by copy of it on this rank."""


class Classes:
    """The classes of a rank's moves.

    A region that a rank holds several times is of one class, and each time of another copy of it.

    Args:
        moves: simplified.
        assigned: for each move its class, and whether it answers reads for it.

    Attributes:
        tensors, places: of moves that have a class.

    Raises:
        UsageError: not one a move.
    """

    def __init__(self, moves: Sequence[Move], assigned: Sequence[tuple[int, bool]]) -> None:
        if len(assigned) != len(moves):
            raise UsageError(f"{len(assigned)} classes for {len(moves)} moves")
        self._moves = moves
        self._assigned = [(number, leads) for number, leads in assigned]
        self._copies = _copies(moves)
        used = [move for move, (number, _) in zip(moves, self._assigned, strict=True) if number != UNUSED]
        self.tensors = {move.tensor for move in used}
        self.places = {move.place for move in used}

    def used(self, move: int) -> bool:
        """Whether a move has a class."""
        return self._assigned[move][0] != UNUSED

    def leads(self, move: int) -> bool:
        """Whether it also answers reads."""
        return self.used(move) and self._assigned[move][1]

    def sums(self, moves: Iterable[int], digests: Iterable[Digest]) -> Sums:
        """Digests of some moves, added up by class and copy; unused ones are left out."""
        sums: dict[tuple[int, int], Digest] = {}
        for move, digest in zip(moves, digests, strict=True):
            if self.used(move):
                key = self._assigned[move][0], self._copies[move]
                sums[key] = sums.get(key, Digest()) + digest
        return sums

    def firsts(self, sums: Sums) -> dict[int, Digest]:
        """The digests of each class's first copy."""
        return {number: digest for (number, copy), digest in sums.items() if copy == 0}

    def check_equal(self, sums: Sums) -> None:
        """Refuse copies that are not equal.

        Raises:
            Corrupt: two copies of a class have different digests.
        """
        for (number, copy), digest in sums.items():
            if digest != sums.get((number, 0), Digest()):
                tensor = next(
                    move.tensor
                    for move, held in zip(self._moves, self._assigned, strict=True)
                    if held[0] == number
                )
                raise Corrupt(
                    f"class {number}, of tensor {tensor!r} and others: copy {copy} of it on this rank has digest "
                    f"{digest}, the first one {sums.get((number, 0), Digest())}",
                    hint="load a whole version",
                )


def _copies(moves: Iterable[Move]) -> list[int]:
    """For each move how many moves of the same elements come before it."""
    seen: Counter[object] = Counter()
    copies = []
    for move in moves:
        key = move.tensor, canonical(move.source)
        copies.append(seen[key])
        seen[key] += 1
    return copies
