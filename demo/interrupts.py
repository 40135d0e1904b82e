"""Interrupts at safe points only: a library that is being imported may swallow one and be left half there."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Final, Self

_NUMBERS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Holds SIGINT and SIGTERM back until `check` or the end; a second one is let through at once.

    A context manager. Signals are the main thread's, so in any other it does nothing.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._held: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hold) for number in _NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
        if kind is None:
            self.check()

    def check(self) -> None:
        """Let through what is held back: whoever handled it before handles it now, and usually raises."""
        number, self._held = self._held, None
        if number is not None:
            self._restore()
            signal.raise_signal(number)

    def _hold(self, number: int, _: FrameType | None) -> None:
        again, self._held = self._held is not None, number
        if again:
            self.check()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
