"""When the next poll is due: a pure function of the setting, the rhythm of versions, and the store's own pace."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.subscriber.rhythm import Rhythm, backoff_s, due_s, spread_s

SECONDS = st.floats(0.001, 1e5)


def test_b153_pauses_are_spread_and_grow() -> None:
    pauses = [spread_s(10, i / 1000) for i in range(1000)]
    assert min(pauses) == pytest.approx(20 / 3)
    assert max(pauses) == pytest.approx(40 / 3, rel=0.01)
    assert statistics.mean(pauses) == pytest.approx(10, rel=0.01)
    assert pauses == sorted(pauses)
    assert [backoff_s(0.5, n) for n in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff_s(0.5, 5000) == 30  # hours of outage
    assert backoff_s(600, 3) == 600


@given(SECONDS, SECONDS, st.floats(0, 1e6), st.floats(0, 60))
def test_b152_a_poll_is_never_later_than_the_setting_nor_faster_than_the_store(
    poll_s: float, gap_s: float, since_s: float, request_s: float
) -> None:
    pause = due_s(poll_s, gap_s, since_s, request_s)
    assert min(poll_s, 0.01) <= pause <= poll_s
    assert pause == poll_s or pause >= request_s / 2


def times(gap_s: float, poll_s: float, request_s: float, until_s: float) -> list[float]:
    """When a poller that found a version at 0 asks again, without chance."""
    now, asked = request_s, []
    while now < until_s:
        now += due_s(poll_s, gap_s, now, request_s)
        asked.append(now)
        now += request_s
    return asked


def late_s(gap_s: float, at_s: float, poll_s: float = 0.5, request_s: float = 0.06) -> float:
    """How much later than `at_s` the first poll comes that finds the version of that moment."""
    return next(t for t in times(gap_s, poll_s, request_s, at_s + 10 * poll_s) if t >= at_s) - at_s


def test_a_version_on_time_is_found_within_one_and_a_half_requests() -> None:
    for gap in (0.5, 2.0, 7.0, 60.0, 600.0):
        assert late_s(gap, gap) <= 0.06 * 1.5 + 1e-9


@pytest.mark.parametrize("gap", [1.0, 4.0, 30.0])
def test_one_that_is_early_or_late_is_found_within_a_part_of_what_it_is_off(gap: float) -> None:
    for off in (-0.4, -0.2, -0.05, 0.05, 0.2, 0.4, 0.9):
        late = late_s(gap, gap * (1 + off))
        assert late <= max(abs(off) * gap / 4, 0.03) + 0.06 + 1e-9
        assert late <= gap / 16 + 0.06 + 1e-9


def test_polls_between_two_versions_are_bounded() -> None:
    """They cost money: about 40 a version, and no more than by the fixed pause where versions are rare."""
    assert len(times(2.0, 0.5, 0.06, 2.0)) <= 20
    assert len(times(2.0, 0.5, 0.0, 2.0)) <= 45
    assert len(times(600.0, 0.5, 0.06, 600.0)) <= 600 / 0.5 + 20


def test_a_stream_that_stops_is_asked_less_and_less_up_to_the_setting() -> None:
    asked = times(1.0, 30.0, 0.01, 1000.0)
    pauses = [b - a for a, b in itertools.pairwise(asked) if a > 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(30, rel=0.01)
    assert len(asked) < 120


def rhythm(*found: tuple[int, float]) -> Rhythm:
    made = Rhythm()
    for version, at in found:
        made.found(version, at)
    return made


def test_without_a_rhythm_the_setting_holds() -> None:
    assert rhythm().pause_s(0.5, 3.0, 0.0) == 0.5
    assert rhythm((0, 0.0), (1, 5.0)).pause_s(0.5, 10.0, 0.0) == 0.5


def test_the_rhythm_is_the_median_gap() -> None:
    found = rhythm((0, 0.0), (1, 2.0), (2, 4.0), (3, 34.0), (4, 36.0))
    assert found.gap_s == 2.0, "one long step, for an evaluation say, changes nothing"
    found.found(4, 37.0)
    assert found.gap_s == 2.0, "a version that is known already is no news"
    assert found.pause_s(0.5, 38.0, 0.0) == 0.01
    assert found.pause_s(0.5, 37.0, 0.0) == 2 / 16


def test_versions_found_together_are_spread_over_the_time() -> None:
    assert rhythm((0, 0.0), (4, 8.0), (6, 12.0)).gap_s == 2.0


def test_only_the_last_gaps_count() -> None:
    slow = [(n, 100.0 * n) for n in range(10)]
    fast = [(9 + n, 900.0 + n) for n in range(1, 6)]
    assert rhythm(*slow, *fast).gap_s == 1.0
