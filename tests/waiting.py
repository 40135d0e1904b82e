"""Waiting for what another thread or process does: long enough for the busiest machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], within_s: float = 60) -> T:
    """Wait for something true, and return it."""
    end = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
    return value
