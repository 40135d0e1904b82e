"""A thread pool that still works while the interpreter shuts down."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Workers(ThreadPoolExecutor):
    """Runs a call in the calling thread where a pool refuses new work.

    Python closes all pools before it waits for threads that are still at work, and a publisher whose trainer has
    returned from main still has a version to commit.
    """

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As `Executor.submit`; runs `fn` here if the pool is closed."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            future: Future[T] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - handed to whoever asks the future
                future.set_exception(error)
            return future
