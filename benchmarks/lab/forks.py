"""Measurements in processes of their own that are forks of this one, so that torch is imported once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def in_forks(call: Callable[..., T], jobs: Sequence[tuple[Any, ...]], *, trains: bool = True) -> list[T]:
    """What `call` returns for each job; each has a new process, and all run at once.

    `trains`: jobs make an optimizer, for which torch imports, for seconds, what is better imported once.

    This process must not have used threads before, neither torch's nor its own: a fork does not have them.

    Raises:
        BrokenProcessPool: a process was killed.
        Exception: what `call` raised.
    """
    if trains:
        torch.optim.AdamW([torch.zeros(1)])
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(len(jobs), context) as pool:  # as many tasks as processes: each takes one
        futures = [pool.submit(call, *job) for job in jobs]
        return [future.result() for future in futures]
