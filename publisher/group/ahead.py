"""`pool.map` in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Final, TypeVar

A = TypeVar("A")
B = TypeVar("B")

TILES_AHEAD: Final = 8
"""Tiles, or rows, in hand at once; at most 8 x 4 MiB of bf16 where a tile is copied from a device."""


def map_ahead(pool: Executor, call: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """Results in order; takes items, in the calling thread, only a few ahead of them."""
    window: deque[Future[B]] = deque()
    try:
        for item in items:
            window.append(pool.submit(call, item))
            if len(window) >= TILES_AHEAD:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    finally:
        for future in window:  # an error, or a caller who has enough: nothing may read the items any more
            if not future.cancel():
                future.exception()
