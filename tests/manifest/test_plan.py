"""Planning a catch-up, against brute force."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.manifest.plan import Route, SnapshotChoice, plan
from weightcast.schemas.errors import Gap


def brute_force(
    current: int | None, head: int, deltas: dict[int, int], snapshots: list[SnapshotChoice]
) -> int | None:
    """The least bytes of all routes, or None."""
    costs = []
    starts = [(s.version, s.bytes) for s in snapshots] + ([(current, 0)] if current is not None else [])
    for start, cost in starts:
        if start <= head and all(v in deltas for v in range(start + 1, head + 1)):
            costs.append(cost + sum(deltas[v] for v in range(start + 1, head + 1)))
    return min(costs, default=None)


def check(current: int | None, head: int, deltas: dict[int, int], snapshots: list[SnapshotChoice]) -> None:
    best = brute_force(current, head, deltas, snapshots)
    if best is None:
        with pytest.raises(Gap):
            plan(current, head, deltas, snapshots)
        return
    route = plan(current, head, deltas, snapshots)
    start = route.snapshot.version if route.snapshot else current
    assert start is not None
    assert route.snapshot is None or route.snapshot in snapshots
    assert route.versions == tuple(range(start + 1, head + 1))
    assert (
        route.bytes
        == best
        == (route.snapshot.bytes if route.snapshot else 0) + sum(deltas[v] for v in route.versions)
    )


def test_exhaustive_small_cases() -> None:
    """All heads up to 3, all sets of deltas and snapshots, all positions, also beyond the head."""
    count = 0
    for head in range(4):
        numbers = range(head + 2)
        for bits in itertools.product([False, True], repeat=2 * len(numbers)):
            deltas = {v: 10 + v for v in numbers if bits[v] and v > 0}
            snapshots = [SnapshotChoice(v, f"s{v}", 25 - v) for v in numbers if bits[len(numbers) + v]]
            for current in (None, *numbers):
                check(current, head, deltas, snapshots)
                count += 1
    assert count > 6000


@given(
    current=st.none() | st.integers(0, 9),
    head=st.integers(0, 9),
    deltas=st.dictionaries(st.integers(1, 9), st.integers(0, 5)),
    snapshots=st.lists(
        st.builds(SnapshotChoice, st.integers(0, 10), st.just("k"), st.integers(0, 20)), max_size=5
    ),
)
def test_against_brute_force(
    current: int | None, head: int, deltas: dict[int, int], snapshots: list[SnapshotChoice]
) -> None:
    check(current, head, deltas, snapshots)


def test_nothing_to_do() -> None:
    assert plan(5, 5, {}, []) == Route(None, (), 0)


def test_a_position_beyond_the_head_is_of_no_use() -> None:
    snapshot = SnapshotChoice(4, "s", 9)
    assert plan(7, 5, {5: 1, 6: 1, 7: 1}, [snapshot]) == Route(snapshot, (5,), 10)


def test_equal_bytes_take_fewest_versions() -> None:
    assert plan(0, 2, {1: 0, 2: 5}, [SnapshotChoice(2, "s", 5)]).versions == ()


def test_b111_gap_names_the_first_version_that_is_lost() -> None:
    """B111: a reader at 3, versions 1 to 9 pruned, no snapshot. B112: version 6 is missing."""
    with pytest.raises(
        Gap, match="version 4 is not available as a delta and no snapshot leads past it to version 12"
    ):
        plan(3, 12, dict.fromkeys(range(10, 13), 1), [])
    with pytest.raises(Gap, match="version 6 "):
        plan(5, 7, dict.fromkeys(range(1, 6), 1), [SnapshotChoice(0, "s", 1)])
    with pytest.raises(Gap, match="no snapshot that leads to version 12"):
        plan(None, 12, dict.fromkeys(range(1, 13), 1), [])


def test_a_huge_gap_costs_nothing() -> None:
    started = time.process_time()
    with pytest.raises(Gap, match="version 1 "):
        plan(0, 10**12 - 1, {}, [])
    assert plan(None, 10**12 - 1, {10**12 - 1: 7}, [SnapshotChoice(10**12 - 2, "s", 1)]).bytes == 8
    assert time.process_time() - started < 5


def test_a_long_chain_with_many_snapshots_is_planned_in_one_pass() -> None:
    deltas = dict.fromkeys(range(1, 200001), 3)
    snapshots = [SnapshotChoice(v, str(v), 1000) for v in range(0, 200_000, 100)]
    started = time.process_time()
    assert plan(0, 200_000, deltas, snapshots).bytes == 1000 + 300
    assert time.process_time() - started < 20
