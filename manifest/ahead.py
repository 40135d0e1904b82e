"""`pool.map` in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Final, TypeVar

A = TypeVar("A")
B = TypeVar("B")

AHEAD: Final = 8
"""Rows, or a writer's tiles, in hand at once. A row that is decoded holds at most a few times its own length; a tile
that is copied from a device at most 4 MiB of bf16."""


def map_ahead(pool: Executor, call: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Results in order; takes items, in the calling thread, only a few ahead of them."""
    window: deque[Future[B]] = deque()
    try:
        for item in items:
            window.append(pool.submit(call, item))
            if len(window) >= AHEAD:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    finally:
        for future in window:  # an error, or a caller who has enough: nothing may read the items any more
            if not future.cancel():
                future.exception()
