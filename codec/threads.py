"""Work on many numbers, spread over the cores that this process may use; also while the interpreter shuts down."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

_T = TypeVar("_T")

MAX_THREADS: Final = 4
"""More do not write faster than memory does, and whoever is served has threads of its own."""


class Workers(ThreadPoolExecutor):
    """Runs a call in the calling thread where a pool refuses new work.

    Python closes all pools before it waits for threads that are still at work, and a publisher whose trainer has
    returned from main still has a version to commit.
    """

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """As `Executor.submit`; runs `fn` here if the pool is closed."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            if "cannot schedule new futures" not in str(error):  # no thread to be had: `fn` is queued already
                raise
            future: Future[_T] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as failure:  # noqa: BLE001 - handed to whoever asks the future
                future.set_exception(failure)
            return future


def workers() -> int:
    """Threads that use the cores this process may run on."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def spread(run: Callable[[int, int], _T], weights: npt.NDArray[np.int64]) -> list[_T]:
    """`run(first, last)` over all numbers, in stretches of about equal weight, one a thread."""
    threads = min(workers(), len(weights))
    if threads <= 1:
        return [run(0, len(weights))] if len(weights) else []
    total = np.cumsum(weights)
    edges = np.searchsorted(total, total[-1] * np.arange(1, threads) // threads, side="right")
    return _run(run, [0, *edges.tolist(), len(weights)])


def spread_evenly(run: Callable[[int, int], _T], size: int, least: int) -> list[_T]:
    """The same over numbers of equal weight; one thread for each `least` of them."""
    threads = max(1, min(workers(), size // least))
    if threads == 1:
        return [run(0, size)] if size else []
    return _run(run, [size * i // threads for i in range(threads + 1)])


def _run(run: Callable[[int, int], _T], cuts: list[int]) -> list[_T]:
    with Workers(len(cuts) - 1) as pool:
        return list(pool.map(run, cuts[:-1], cuts[1:]))
