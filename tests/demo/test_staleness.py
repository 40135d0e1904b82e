"""The staleness bound keeps exactly the batches that are young enough."""

from __future__ import annotations

import pytest
import torch

from weightcast.demo.rollout import Rollouts
from weightcast.demo.staleness import fresh, is_fresh
from weightcast.schemas.errors import UsageError


def batch(version: int) -> Rollouts:
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    return Rollouts(tokens, torch.zeros(2, 1), torch.zeros(2, 1), group_size=2, version=version)


@pytest.mark.parametrize(
    ("bound", "kept"), [(0, [7]), (1, [6, 7]), (2, [6, 5, 7]), (7, [6, 5, 0, 7]), (100, [6, 5, 0, 7])]
)
def test_the_bound_is_inclusive_and_keeps_the_order(bound: int, kept: list[int]) -> None:
    batches = [batch(version) for version in (6, 5, 0, 7)]
    assert [one.version for one in fresh(batches, current=7, max_staleness=bound)] == kept


def test_rollouts_from_the_future_are_of_another_run() -> None:
    with pytest.raises(UsageError, match="version 8, but the learner is at 7"):
        is_fresh(8, current=7, max_staleness=2)


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(UsageError, match="max_staleness is -1"):
        is_fresh(7, current=7, max_staleness=-1)
