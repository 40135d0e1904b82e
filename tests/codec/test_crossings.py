"""Whether boxes have elements in common: against sets of elements, at the edges of what a layout can hold, and in time."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.codec import Box, crossing, crossings
from weightcast.codec.crossings import floor_sum
from weightcast.schemas.errors import Corrupt

FAR = 1 << 48
"""Elements of the largest layout."""


def elements_of(box: Box) -> set[int]:
    run, stride = box.spacing
    return {box.start + j // run * stride + j % run for j in range(box.length)}


@st.composite
def boxes(draw: st.DrawFn, reach: int = 60) -> Box:
    start, run = draw(st.integers(0, reach)), draw(st.integers(1, 12))
    if draw(st.integers(0, 3)) == 0:
        return Box("U8", start, run)
    return Box("U8", start, run * draw(st.integers(2, 9)), run, run + draw(st.integers(1, 12)))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.lists(boxes(), min_size=2, max_size=4))
def test_as_sets_of_elements(found: list[Box]) -> None:
    wanted = {
        (a, b) for a, b in itertools.combinations(range(len(found)), 2)
        if elements_of(found[a]) & elements_of(found[b])
    }  # fmt: skip
    pair = crossing(found)
    if pair is None:
        assert wanted == set()
    else:
        assert elements_of(pair[0]) & elements_of(pair[1])
        assert wanted


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 200), st.integers(0, 200))
def test_floor_sums(n: int, m: int, a: int, b: int) -> None:
    assert floor_sum(n, m, a, b) == sum((a * k + b) // m for k in range(n))


def test_nothing_crosses_nothing() -> None:
    assert crossing([]) is None
    assert crossing([Box("U8", 3, 4, 1, 2)]) is None


def meet(a: Box, b: Box) -> bool:
    """Whether an element of `b` is one of `a`, run by run of `b`."""
    begins = b.start + np.arange(b.length // b.run) * b.stride
    elements = begins[:, None] + np.arange(b.run)
    ahead = (elements - a.start) % a.stride < a.run
    return bool(np.any(ahead & (elements >= a.start) & (elements < a.stop)))


@pytest.mark.parametrize("shift", [-5, (1 << 22) + 1])
def test_at_the_end_of_the_largest_layout(shift: int) -> None:
    """Boxes of 2^24 runs over 2^48 elements that drift past each other: no number overflows."""
    runs, stride = 1 << 24, (1 << 24) - 2
    a = Box("U8", 2 * runs, runs, 1, stride)
    b = Box("U8", 2 * runs + 5 + shift, runs, 2, 2 * stride - 1)
    c = Box("U8", 2 * runs + 5 + shift, runs // 2, 1, stride + 1)
    assert max(a.stop, b.stop, c.stop) < FAR
    assert (crossing([a, b]) is not None) == meet(a, b)
    assert (crossing([a, c]) is not None) == meet(a, c)


def test_the_last_runs_alone_meet() -> None:
    n = 900
    a = Box("U8", 0, n, 1, 1000)
    b = Box("U8", (n - 1) * 1000 - 999 * (n - 2), n - 1, 1, 999)
    assert a.stop == b.stop
    assert crossing([a, b]) == (a, b)
    assert crossing([a, Box("U8", b.start, n - 2, 1, 999)]) is None
    assert crossing([Box("U8", 0, n - 1, 1, 1000), b]) is None


def test_slices_of_many_ranks_are_checked_quickly() -> None:
    ranks, tensors = 128, 200
    found = [
        Box("BF16", t * 100 * 128 * ranks + rank * 100, 100 * 128, 100, 100 * ranks)
        for t in range(tensors) for rank in range(ranks)
    ]  # fmt: skip
    crossing(found[:2])  # compiles
    started = time.process_time()
    assert crossing(found) is None
    assert time.process_time() - started < 20
    twice = Box("BF16", found[777].start + 99, 2, 1, found[777].stride)
    assert crossing([*found, twice]) == (found[777], twice)


def test_a_tangle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that all lie across each other and never meet cost a pair each: bounded, and refused by name."""
    found = [Box("U8", 3 * i, 200, 1, 1000) for i in range(60)]
    monkeypatch.setattr(crossings, "BUDGET", 60 * 59 // 2)
    assert crossing(found) is None
    monkeypatch.setattr(crossings, "BUDGET", 60 * 59 // 2 - 1)
    with pytest.raises(Corrupt, match="of the 60 rows of U8 lie across each other"):
        crossing(found)
    unequal = [Box("U8", 0, 200, 1, 1000), Box("U8", 1, 200, 1, 2000)]
    monkeypatch.setattr(crossings, "BUDGET", crossings.UNEQUAL_COST)
    assert crossing(unequal) is None
    monkeypatch.setattr(crossings, "BUDGET", crossings.UNEQUAL_COST - 1)
    with pytest.raises(Corrupt, match="lie across each other"):
        crossing(unequal)


def test_disjoint_intervals_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossings, "BUDGET", 0)
    assert crossing([Box("U8", int(i), 3) for i in np.arange(0, 3000, 3)]) is None
