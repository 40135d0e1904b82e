"""Threads for read-only queries: ordered results, taken only so far ahead that memory stays bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

A = TypeVar("A")
B = TypeVar("B")

THREADS: Final = 8
"""Requests at once: enough to hide a round trip of some 50 ms behind the others."""


@contextmanager
def workers(threads: int = THREADS) -> Iterator[Executor]:
    """A pool that is done when the block ends, and that drops what it has not begun if the block is
    interrupted.
    """
    pool = ThreadPoolExecutor(threads, "weightcast-inspect")
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def ahead(
    pool: Executor,
    call: Callable[[A], B],
    items: Iterable[A],
    limit: int,
    weight: Callable[[A], int] = lambda _: 1,
) -> Iterator[tuple[A, Future[B]]]:
    """Run `call` on `items` in `pool`; yields each item with its future, in order.

    Items on their way weigh at most `limit` together, but at least one is.
    """
    window: deque[tuple[A, int, Future[B]]] = deque()
    pending = 0
    for item in items:
        heavy = weight(item)
        while window and pending + heavy > limit:
            first, light, future = window.popleft()
            yield first, future
            pending -= light
        window.append((item, heavy, pool.submit(call, item)))
        pending += heavy
    for first, _, future in window:
        yield first, future
