"""Counts what passes between ranks: bytes that collectives bring to this process, whoever calls them; texts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightcast.publisher.group import TorchMessenger

_BELOW: Final = ("c10d", "_c10d_functional")
"""Where torch keeps its collectives: called by their functions, and by DTensor."""

_VERBS: Final = (
    "gather",
    "reduce",
    "scatter",
    "broadcast",
    "alltoall",
    "all_to_all",
    "send",
    "recv",
    "barrier",
)
"""In the names of what ranks do together there; other operations wait, or wrap what came."""

_PREFIXES: Final = (
    "all_", "broadcast", "reduce", "gather", "scatter", "send", "recv", "isend", "irecv", "barrier"
)  # fmt: skip


@dataclass
class Traffic:
    """What was counted.

    Attributes:
        calls: of collectives.
        nbytes: that they gave to this rank beyond what it had brought; all of it where that is not more.
    """

    calls: int = 0
    nbytes: int = 0

    def add(self, given: object, found: object) -> None:
        """Count one collective by what it was given, and what it gave or was to fill."""
        brought, got = _nbytes(given), _nbytes(found)
        self.calls += 1
        self.nbytes += got - brought if got > brought else got


class CountedMessenger(TorchMessenger):
    """Counts the characters of the texts that this rank says and hears.

    Attributes:
        nbytes: of all of them.
        longest: of one.
    """

    nbytes = 0
    longest = 0

    def gather(self, topic: str, text: str) -> list[str] | None:
        """See `Messenger`."""
        self._count(text)
        return super().gather(topic, text)

    def broadcast(self, topic: str, text: str | None) -> str:
        """See `Messenger`."""
        said = super().broadcast(topic, text)
        self._count(said)
        return said

    def _count(self, text: str) -> None:
        self.nbytes += len(text)
        self.longest = max(self.longest, len(text))


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count inside the context: in this thread below all functions, in others the functions of torch.distributed."""
    counted, here = Traffic(), threading.get_ident()
    originals = {
        name: found
        for name in dir(dist)
        if name.startswith(_PREFIXES) and callable(found := getattr(dist, name))
    }

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = originals[name](*args, **kwargs)
            if threading.get_ident() != here:
                counted.add((), (args, kwargs))
            return found

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        with _Below(counted):
            yield counted
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class _Below(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of its thread."""

    def __init__(self, counted: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor says it again, in operations on what lies here
        found = func(*args, **(kwargs or {}))
        if func.namespace in _BELOW and any(verb in func.name() for verb in _VERBS):
            self._counted.add(args, found)
        return found


def _nbytes(found: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor))
