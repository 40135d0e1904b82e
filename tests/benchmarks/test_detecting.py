"""The run under one detector: what it measures and checks."""

from __future__ import annotations

import pytest

from weightcast.benchmarks.lab.detecting import WAYS, measure


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_detecting(way: str) -> None:
    found = measure(way, 1 << 17, 4)
    assert found["elements"] == (1 << 17) + 1024
    assert found["wrong"] == 0
    if not way.startswith("none"):
        assert found["changed"] > 1000
        assert found["whole_versions"] == 1
        dense = 2 * found["elements"]
        assert found["held_beyond_changes_bytes"] <= found["held_bytes"]
        assert 0 < found["held_bytes"] <= dense
        assert (found["held_bytes"] == dense) == (way == "snapshot")
        assert 0 < found["best_publish_s"] <= found["best_commit_s"]
