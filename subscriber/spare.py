"""Memory that the changes of a version were put in, for those of the next one."""

from __future__ import annotations

import sys
from typing import Final

import numpy as np

from weightcast.codec import Changes, FlatSpace

MOST_BYTES: Final = 64 << 20
"""What is kept between versions of each dtype, at most: 6.7 million changes of bf16."""

_SLACK: Final = 8  # an eighth more than a version has: the next one may have somewhat more
_REFERENCES: Final = 2  # to an array that nobody else has: from its `Changes`, and from the call that counts


class Spare:
    """Pages that were used before cost nothing; new ones have to be zeroed, which took half as long as decoding.

    Used by one thread. What it gave is used again as soon as nobody refers to it any more: the changes of one version
    can be given away, or kept, as if they were in memory of their own.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Changes] = {}

    def take(self, space: FlatSpace, count: int) -> Changes:
        """Room for so many changes, with anything in it; large ones are not kept."""
        kept = self._kept.get(space.dtype)
        if kept is None or len(kept) < count or _is_held(kept):
            most = MOST_BYTES // (np.dtype(np.int64).itemsize + space.width)
            kept = Changes.room(space, max(count, min(count + count // _SLACK, most)))
            if count <= most and _shows_holders(kept):
                self._kept[space.dtype] = kept
        return kept.part(0, count)


def _is_held(changes: Changes) -> bool:
    """Whether somebody refers to one of the arrays, or looks at a part of it."""
    return max(sys.getrefcount(changes.positions), sys.getrefcount(changes.values)) > _REFERENCES


def _shows_holders(changes: Changes) -> bool:
    """Whether `_is_held` can tell, in this Python and of such arrays, for wrong bits would be the price."""
    shown = not _is_held(changes)
    holder = changes.positions[:0]
    shown &= _is_held(changes)
    holder = changes.values[:0]  # and lets go of the positions
    shown &= _is_held(changes)
    del holder
    return shown
