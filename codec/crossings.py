"""Whether intervals and boxes of one flat space have elements in common: exact, and bounded in cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from weightcast.schemas.errors import Corrupt

from .boxes import Box
from .jit import kernel
from .kernels import Ints

BUDGET: Final = 1 << 28
"""Pairs of rows across each other that are compared: some 2 s. Half is a thousand tensors cut across by 512 ranks."""

UNEQUAL_COST: Final = 32
"""As how many pairs one counts whose strides differ: it takes about so much longer."""

_CROSSING: Final = 1
_EXPENSIVE: Final = 2


def crossing(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of these that have an element in common; None if there are none. Releases the GIL.

    Only those are compared whose spans, from the first element to the last, cross: two ranks' slices of one tensor do.
    Intervals must be disjoint, or the first two that are not are found.

    Args:
        boxes: in one space, with possible figures.

    Raises:
        Corrupt: there are too many to compare (docs/format.md, delta shard).
    """
    order = sorted(range(len(boxes)), key=lambda i: boxes[i].start)
    table = np.empty((len(boxes), 4), np.int64)
    for row, i in enumerate(order):
        table[row] = boxes[i].start, boxes[i].stop, *boxes[i].spacing
    pair = np.zeros(2, np.int64)
    outcome = find_crossing(table, BUDGET, pair)
    if outcome == _EXPENSIVE:
        raise Corrupt(
            f"more than {BUDGET} pairs of the {len(boxes)} rows of {boxes[0].dtype} lie across each other",
            hint="publish boxes that are slices of tensors, with the same strides in each tensor",
        )
    return (boxes[order[pair[0]]], boxes[order[pair[1]]]) if outcome == _CROSSING else None


@kernel
def find_crossing(table: Ints, budget: int, pair: Ints) -> Any:
    """Look for two rows of `table` that have an element in common; 0: there are none, 1: `pair`, 2: too many pairs.

    table: int64 [n, 4] of (start, stop, run, stride), by ascending start; run = stride = length for an interval.
    """
    spent = 0
    for i in range(table.shape[0]):
        for j in range(i + 1, table.shape[0]):
            if table[j, 0] >= table[i, 1]:
                break
            equal = table[i, 3] == table[j, 3] or is_interval(table, j)
            spent += 1 if equal else UNEQUAL_COST
            if spent > budget:
                return _EXPENSIVE
            if crosses(table, i, j) if equal else crosses_unequal(table, i, j):
                pair[0], pair[1] = i, j
                return _CROSSING
    return 0


@kernel
def is_interval(table: Ints, i: int) -> Any:
    """Whether a row is one run."""
    return table[i, 0] + table[i, 2] == table[i, 1]


@kernel
def crosses(table: Ints, i: int, j: int) -> Any:
    """Whether row j, which begins inside the span of row i and has the same stride or is one run, has elements of i.

    j begins `ahead` after the begin of a run of i. If that is outside of the run, i has another one to come.
    """
    run, stride = table[i, 2], table[i, 3]
    ahead = (table[j, 0] - table[i, 0]) % stride
    return ahead < run or ahead + table[j, 2] > stride


@kernel
def crosses_unequal(table: Ints, i: int, j: int) -> Any:
    """The same for any two boxes: whether a pair of runs is less than their lengths apart."""
    distance = table[j, 0] - table[i, 0]
    return count_pairs(table, i, j, distance - table[i, 2] + 1) > count_pairs(
        table, i, j, distance + table[j, 2]
    )


@kernel
def count_pairs(table: Ints, i: int, j: int, least: int) -> Any:
    """How many pairs of a run u of i and a run v of j have u * (stride of i) - v * (stride of j) >= least."""
    s, t = table[i, 3], table[j, 3]
    n, m = runs_of(table, i), runs_of(table, j)
    some = min(max(-(-least // s), 0), n)  # from this run of i on there is a v
    every = min(max(-(-(least + (m - 1) * t) // s), some), n)  # and from this one on it is every v
    return (n - every) * m + (every - some) + floor_sum(every - some, t, s, some * s - least)


@kernel
def runs_of(table: Ints, i: int) -> Any:
    """How many runs a box has."""
    return (table[i, 1] - table[i, 0] - table[i, 2]) // table[i, 3] + 1


@kernel
def floor_sum(n: int, m: int, a: int, b: int) -> Any:
    """Sum of (a * k + b) // m over 0 <= k < n, for a, b >= 0, by the steps of Euclid's algorithm."""
    total = np.int64(0)
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a %= m
        b %= m
        top = a * n + b
        if top < m:
            break
        n, b = top // m, top % m
        m, a = a, m
    return total
