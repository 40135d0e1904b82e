"""When the next poll is due: a pure function of the setting, the rhythm of versions, and the store's own pace."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.subscriber.rhythm import AT_ONCE, Rhythm, backoff_s, due_s, spread_s

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
    assert pause == poll_s or pause >= request_s / AT_ONCE, "no more requests than that are on their way"


def times(gap_s: float, poll_s: float, request_s: float, until_s: float) -> list[float]:
    """When a poller that found a version at 0 has answers, without chance; it asks on before they are there."""
    now, answers = 0.0, []
    while now < until_s:
        now += due_s(poll_s, gap_s, now + request_s, request_s)
        answers.append(now + request_s)
    return answers


def late_s(gap_s: float, at_s: float, poll_s: float = 0.5, request_s: float = 0.06) -> float:
    """How much later than `at_s`, the earliest moment at which it can be, a version is found."""
    return next(t for t in times(gap_s, poll_s, request_s, at_s + 10 * poll_s) if t >= at_s) - at_s


@pytest.mark.parametrize("request_s", [0.0, 0.002, 0.06, 0.25])
def test_a_version_on_time_is_found_at_once_however_long_a_request_takes(request_s: float) -> None:
    for gap in (0.5, 2.0, 7.0, 60.0, 600.0):
        assert late_s(gap, gap, request_s=request_s) <= max(0.01, request_s / AT_ONCE) + 1e-9


@pytest.mark.parametrize("gap", [1.0, 4.0, 30.0])
def test_one_that_is_early_or_late_is_found_within_a_part_of_what_it_is_off(gap: float) -> None:
    for off in (-0.4, -0.2, -0.05, 0.05, 0.2, 0.4, 0.9):
        late = late_s(gap, gap * (1 + off))
        assert late <= max(abs(off) * gap / 4, 0.01) + 1e-9
        assert late <= max(gap / 16, 0.01) + 1e-9


def test_polls_between_two_versions_are_bounded() -> None:
    """They cost money: about 40 a version, and no more than by the fixed pause where versions are rare."""
    assert len(times(2.0, 0.5, 0.06, 2.0)) <= 45
    assert len(times(2.0, 0.5, 0.0, 2.0)) <= 45
    assert len(times(600.0, 0.5, 0.06, 600.0)) <= 600 / 0.5 + 40


def test_a_stream_that_stops_is_asked_less_and_less_up_to_the_setting() -> None:
    asked = times(1.0, 30.0, 0.01, 1000.0)
    pauses = [b - a for a, b in itertools.pairwise(asked) if a > 2.0]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(pauses))
    assert pauses[-1] == pytest.approx(30, rel=0.01)
    assert len(asked) < 140


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
    assert found.pause_s(0.5, 37.75, 0.25) == 0.25 / AT_ONCE, "what counts is when the answer comes"


def test_nothing_is_expected_once_a_version_should_long_have_come() -> None:
    assert not rhythm().is_due(0.0)
    steady = rhythm((0, 0.0), (1, 2.0), (2, 4.0))
    assert [steady.is_due(at) for at in (4.1, 6.0, 7.9, 8.1, 1e6)] == [True, True, True, False, False]
    first = rhythm((0, 0.0))
    assert [first.is_due(at) for at in (0.1, 59.0, 61.0)] == [True, True, False]


def test_versions_found_together_are_spread_over_the_time() -> None:
    assert rhythm((0, 0.0), (4, 8.0), (6, 12.0)).gap_s == 2.0


def test_only_the_last_gaps_count() -> None:
    slow = [(n, 100.0 * n) for n in range(10)]
    fast = [(9 + n, 900.0 + n) for n in range(1, 6)]
    assert rhythm(*slow, *fast).gap_s == 1.0
