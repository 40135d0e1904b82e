"""Interrupts wait for a safe point, and a second one does not."""

from __future__ import annotations

import signal

import pytest

from weightcast.demo.interrupts import Interrupts


def interrupted(seen: list[str], *, safe_point: bool = False, times: int = 1) -> None:
    """Interrupt this process, and note how far it comes."""
    with Interrupts() as interrupts:
        interrupts.check()
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
            seen.append("interrupted")
        if safe_point:
            interrupts.check()
        seen.append("end")


@pytest.mark.parametrize(
    ("safe_point", "times", "expected"),
    [
        (True, 1, ["interrupted"]),  # it waits for the safe point
        (False, 1, ["interrupted", "end"]),  # without one, for the end
        (False, 2, ["interrupted"]),  # the second is let through at once
    ],
)
def test_how_far_an_interrupt_lets_things_go(safe_point: bool, times: int, expected: list[str]) -> None:
    before, seen = signal.getsignal(signal.SIGINT), list[str]()
    with pytest.raises(KeyboardInterrupt):
        interrupted(seen, safe_point=safe_point, times=times)
    assert seen == expected
    assert signal.getsignal(signal.SIGINT) is before
