"""Which cores an op may use.

On a CPU, vLLM binds each thread of a rank's OpenMP pool to a core of its own, and with them the main thread, that ops
run on. Threads that it starts inherit the one core, unless it is told otherwise while the op runs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def bound_cores() -> frozenset[int]:
    """The cores that threads of this process are bound to, one each; empty if the calling thread is not bound so."""
    if len(os.sched_getaffinity(0)) != 1:
        return frozenset()
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # ended meanwhile
            cores = os.sched_getaffinity(int(task.name))
            found |= cores if len(cores) == 1 else set()
    return frozenset(found)


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Let this thread, and those it starts, run on these cores for a while; no cores: leave it where it is."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
