"""Loads and compiles what the ops need, in a thread: an op itself keeps the engine from generating."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from weightcast.schemas.errors import UsageError

_pool: Final = ThreadPoolExecutor(1, thread_name_prefix="weightcast-warmup")
_lock: Final = threading.Lock()
_runs: Final[dict[frozenset[int], Future[None]]] = {}


def ready(widths: Iterable[int] = ()) -> bool:
    """Whether the ops are loaded in this process, and compiled for elements of these widths, in bytes.

    The first call begins with it. Returns at once.

    Raises:
        UsageError: what they need is not installed here.
    """
    wanted = frozenset(widths)
    with _lock:
        run = _runs.get(wanted)
        if run is None:
            run = _runs[wanted] = _pool.submit(_load, wanted)
    if not run.done():
        return False
    error = run.exception()
    if error is not None:
        raise UsageError(
            f"weightcast does not load in the server: {type(error).__name__}: {error}",
            hint="install it there with its dependencies: pip install weightcast",
        ) from error
    return True


def _load(widths: frozenset[int]) -> None:
    importlib.import_module(".rank", __package__)
    if widths:
        from weightcast.codec.places import warm

        for width in sorted(widths):
            warm(width)
