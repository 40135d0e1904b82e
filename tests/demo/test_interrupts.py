"""Interrupts wait for a safe point, and a second one does not."""

from __future__ import annotations

import signal

import pytest

from weightcast.demo.interrupts import Interrupts


def test_an_interrupt_waits_for_the_safe_point() -> None:
    before = signal.getsignal(signal.SIGINT)
    passed = False
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(signal.SIGINT)
        passed = True
        interrupts.check()
        passed = False
    assert passed
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_without_a_safe_point_arrives_at_the_end() -> None:
    passed = False
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        passed = True
    assert passed


def test_a_second_interrupt_is_let_through_at_once() -> None:
    passed = 0
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        passed = 1
        signal.raise_signal(signal.SIGINT)
        passed = 2
    assert passed == 1
