"""`--codec auto`: the choice as a function of what was measured, and a publisher that follows it."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Any

import pytest
import torch

from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.publisher.choice import CodecChoice, Cost, choose, gain
from weightcast.schemas.manifest import CLASS_FEATURE

from ..faultstore import FaultStore

BILLION = 1_000_000_000
GAP = Cost(BILLION, BILLION / 100, 11e6, 0.4)
"""A thousand million elements, one in a hundred changed, 8.8 bits a change."""

CLASS = replace(GAP, nbytes=7.3e6, coding_s=0.9)
GIGABIT = 125e6


def test_a_slow_link_takes_class_and_a_fast_one_gap() -> None:
    for threads in (1, 8):
        assert choose("gap", gain(GAP, None, GAP, 1e6, threads)) == "class"
        assert choose("class", gain(GAP, CLASS, GAP, 1e6, threads)) == "class"
    assert choose("class", gain(GAP, CLASS, GAP, 1250e6, 1)) == "gap"
    assert choose("gap", gain(GAP, None, GAP, 1250e6, 1)) == "gap"


def test_gain_is_seconds_saved_for_each_second_spent() -> None:
    saved_s, spent_s = (11e6 - 7.3e6) / GIGABIT, 0.5 * 2.6 / 4
    assert gain(GAP, CLASS, GAP, GIGABIT, 4) == pytest.approx(saved_s / spent_s)
    half = Cost(BILLION, BILLION / 200, 0, 0)
    assert gain(GAP, CLASS, half, GIGABIT, 4) == pytest.approx(saved_s / spent_s), "the same for each change"


def test_what_was_never_measured_is_taken_from_the_trace() -> None:
    """A share of 0.71 of the bytes, and 0.2 ns an element and 27 ns a change."""
    extra_s = (0.2 + 0.27) * 2.6 / 4
    assert gain(GAP, None, GAP, GIGABIT, 4) == pytest.approx(11e6 * 0.29 / GIGABIT / extra_s)
    assert gain(None, CLASS, GAP, GIGABIT, 4) == pytest.approx(7.3e6 * (1 / 0.71 - 1) / GIGABIT / extra_s)


def test_figures_of_another_density_say_nothing() -> None:
    dense = Cost(BILLION, BILLION / 10, 60e6, 2.0)
    assert gain(GAP, CLASS, dense, GIGABIT, 4) == 1.0, "nothing is known: stay"
    assert gain(dense, CLASS, dense, GIGABIT, 4) == gain(dense, None, dense, GIGABIT, 4)


@pytest.mark.parametrize(("found", "expected"), [(1.3, ("class", "class")), (0.75, ("gap", "gap"))])
def test_what_is_clearly_better_is_taken(found: float, expected: tuple[str, str]) -> None:
    assert (choose("gap", found), choose("class", found)) == expected


@pytest.mark.parametrize("found", [0.81, 1.0, 1.24])
def test_what_is_about_equal_changes_nothing(found: float) -> None:
    assert (choose("gap", found), choose("class", found)) == ("gap", "class")


def test_class_that_is_not_smaller_or_costs_nothing() -> None:
    assert gain(GAP, replace(CLASS, nbytes=11.5e6), GAP, GIGABIT, 4) == 0
    assert gain(GAP, replace(CLASS, coding_s=0.3), GAP, GIGABIT, 4) == float("inf")


def noted(choice: CodecChoice, link_bytes_s: float, times: int = 1) -> str:
    """Versions coded as the choice says, over a link."""
    for _ in range(times):
        cost = CLASS if choice.codec == "class" else GAP
        choice.note(choice.codec, cost, cost.nbytes / link_bytes_s)
    return choice.codec


def test_it_follows_the_link_both_ways_and_does_not_swing() -> None:
    choice = CodecChoice("auto", 8)
    assert (choice.codec, choice.link_bytes_s) == ("gap", None)
    assert noted(choice, 2e6) == "gap", "the first version by a coding may have compiled it"
    assert noted(choice, 2e6) == "class"
    assert choice.link_bytes_s == pytest.approx(2e6)
    assert noted(choice, 1250e6, 10) == "gap"
    assert choice.link_bytes_s == pytest.approx(1250e6, rel=0.5)
    found = {noted(choice, 1250e6) for _ in range(20)}
    assert found == {"gap"}
    assert noted(choice, 2e6, 3) == "class"


def test_a_coding_that_was_slow_once_is_tried_again() -> None:
    choice = CodecChoice("auto", 8)
    noted(choice, 2e6, 2)
    for _ in range(2):
        choice.note("class", replace(CLASS, coding_s=900.0), 3.0)
    assert choice.codec == "gap"
    assert noted(choice, 2e6, 49) == "gap"
    assert noted(choice, 2e6, 3) == "class"


def test_a_setting_that_is_not_auto_stays() -> None:
    for codec, link in (("gap", 1e6), ("class", 1e10)):
        choice = CodecChoice(codec, 8)  # type: ignore[arg-type]
        assert noted(choice, link, 5) == codec


def test_small_and_empty_versions_say_nothing_about_the_link() -> None:
    choice = CodecChoice("auto", 8)
    choice.note("gap", Cost(BILLION, 1000, 2000.0, 0.1), 0.5)
    choice.note("gap", Cost(BILLION, 0, 0, 0.1), 0.5)
    assert (choice.codec, choice.link_bytes_s) == ("gap", None)


def drifting(versions: int, elements: int = 4_000_000) -> list[dict[str, torch.Tensor]]:
    """bf16 weights of which those that are small change, by one unit, 2 % of all in each version."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(elements, generator=generator).mul_(0.02).bfloat16()
    found = [{"w": weights.reshape(1000, -1)}]
    for _ in range(versions - 1):
        chance = (0.0006 / (weights.float().abs() + 1e-4)).clamp(max=1)
        weights = weights.clone()
        weights.view(torch.int16)[torch.rand(elements, generator=generator) < chance] += 1
        found.append({"w": weights.reshape(1000, -1)})
    return found


@pytest.mark.parametrize("slow", [True, False])
def test_a_publisher_with_auto_turns_to_class_over_a_slow_link_alone(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightcast.publisher.choice.LEAST_SENT_BYTES", 1 << 14)
    store = FaultStore(open_store(f"memory://{uuid.uuid4().hex}"))
    if slow:
        store.on("put", "data/*", lambda _: time.sleep(0.5))
    settings: dict[str, Any] = {"codec": "auto", "threads": 2, "snapshot_every": 0}
    with Publisher("", PublisherSettings(**settings), store=store, fence=False) as publisher:
        for state in drifting(5, elements=8_000_000):
            publisher.publish(state).wait(60)
    reader = StreamReader.open(store)
    coded = [CLASS_FEATURE in reader.manifest(v).features for v in range(1, 5)]
    assert coded == ([False, False, True, True] if slow else [False] * 4)
