"""Work spread over cores is done even where no thread can be had any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from weightcast.codec import threads


@pytest.mark.parametrize("refuses", [False, True])
def test_every_number_is_in_one_stretch(monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    """A pool refuses while the interpreter shuts down, when a publisher may still have a version to commit."""

    def submit(self: ThreadPoolExecutor, *_: Any, **__: Any) -> Any:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(threads, "workers", lambda: 3)
    if refuses:
        monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    for stretches in (
        threads.spread(lambda a, b: (a, b), np.array([5, 1, 1, 1, 4, 4])),
        threads.spread_evenly(lambda a, b: (a, b), 6, 2),
    ):
        assert len(stretches) == 3
        assert [n for a, b in stretches for n in range(a, b)] == list(range(6))
