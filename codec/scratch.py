"""Arrays that a thread keeps from row to row instead of asking the system for them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt


class Scratch(threading.local):
    """Arrays by name, as large as the largest row so far: up to 24 bytes a change for a coding.

    What `take` gives is valid until the thread's next call of the same name and dtype.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[str, np.dtype[Any]], npt.NDArray[Any]] = {}

    def take(self, name: str, size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """An array of this size, with anything in it."""
        key = name, np.dtype(dtype)
        found = self._arrays.get(key)
        if found is None or len(found) < size:
            found = self._arrays[key] = np.empty(size + size // 4, dtype)
        return found[:size]
