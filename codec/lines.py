"""Lines of a row, and the pieces of it in which elements are counted (docs/format.md, class)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MIN_LINE: Final = 64
"""Elements that a line has at least, if the tensor has as many: the trailing dimensions that reach it."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of a row.

    Attributes:
        elements: in each.
        phase: elements of the first one that lie before the row.
        count: lines that the row reaches into.
    """

    elements: int
    phase: int
    count: int

    @classmethod
    def of(cls, shape: tuple[int, ...], offset: int, length: int, run: int = 0) -> Lines:
        """The lines of a row of `length` elements from element `offset` of a tensor of this shape.

        Those of a box, of which `run` are one, begin with its runs.
        """
        elements = 1
        for dimension in reversed(shape):
            elements *= dimension
            if elements >= MIN_LINE:
                break
        if run and run % elements:
            elements = run * -(-MIN_LINE // run)
        phase = 0 if run else offset % elements
        return cls(elements, phase, -(-(phase + length) // elements))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where the elements lie that are counted.

    Attributes:
        addresses: uint64 [n], in bytes.
        begins: int64 [n], first element of each, relative to the row.
        lengths: int64 [n].
    """

    addresses: npt.NDArray[np.uint64]
    begins: Ints
    lengths: Ints

    @classmethod
    def whole(cls, address: int, length: int) -> Pieces:
        """All elements of a row at this address."""
        return cls(np.array([address], np.uint64), np.zeros(1, np.int64), np.array([length]))

    @classmethod
    def of_lines(cls, address: int, length: int, lines: Lines, live: Ints, width: int) -> Pieces:
        """Of such a row, these lines alone."""
        starts_run = np.diff(live, prepend=-2) > 1
        ends_run = np.append(starts_run[1:], True)
        begins = np.maximum(live[starts_run] * lines.elements - lines.phase, 0)
        ends = np.minimum((live[ends_run] + 1) * lines.elements - lines.phase, length)
        return cls(np.uint64(address) + (begins * width).astype(np.uint64), begins, ends - begins)
