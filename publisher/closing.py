"""What a trainer has to close, and may use in one process alone."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from weightcast.schemas.errors import UsageError


class Closing(ABC):
    """A context manager that ends with `close`."""

    @abstractmethod
    def close(self) -> None:
        """End."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OneProcess(Closing):
    """Of use until it is closed, in the process that made it; to a fork it is a name for what its parent does."""

    def __init__(self) -> None:
        self._closed = False
        self._pid = os.getpid()

    @property
    def _is_copy(self) -> bool:
        """Whether this process is a fork of the one that made it: threads, and what is on its way, are the parent's."""
        return self._pid != os.getpid()

    def _check_usable(self) -> None:
        """Raise UsageError in a fork, or once closed."""
        if self._is_copy:
            raise UsageError(
                f"this publisher belongs to process {self._pid}, of which this one is a fork",
                hint="open a publisher after the fork",
            )
        if self._closed:
            raise UsageError("this publisher is closed", hint="open a new one")
