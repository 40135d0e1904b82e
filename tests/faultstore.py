"""A store that fails, waits or dies on demand: a wrapper of the store seam."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path

from weightcast.manifest.store import Entry, ProbeResult, Store
from weightcast.schemas.errors import StorageError

Act = Callable[[str], None]
"""What happens at an operation; it is given the key."""


def refuse(key: str) -> None:
    """The store is down, or says no."""
    raise StorageError(f"cannot reach {key}: told to fail")


def die(_: str) -> None:
    """This process gets a SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_: str) -> None:
    """This process gets a SIGSTOP, and goes on here when somebody sends it a SIGCONT."""
    signal.pthread_kill(
        threading.get_ident(), signal.SIGSTOP
    )  # sent to the process, this thread may go on a while


class Hold:
    """Holds an operation until it is released. `reached` says that one is held."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()

    def __call__(self, _: str) -> None:
        self.reached.set()
        if not self.released.wait(60):
            raise StorageError("held for 60 s")

    def release(self) -> None:
        """Let it, and all later ones, go on."""
        self.released.set()


@dataclass
class Fault:
    """`act` at operations `operation` (a pattern, as `key`): before, or `after` they are done; from the `skip`-th on, `times` times."""

    operation: str
    key: str
    act: Act
    after: bool = False
    skip: int = 0
    times: int = 1 << 30
    met: int = 0

    def applies(self, operation: str, key: str, after: bool) -> bool:
        """Whether it is this fault's turn. Counts."""
        if (
            after != self.after
            or not fnmatchcase(operation, self.operation)
            or not fnmatchcase(key, self.key)
        ):
            return False
        self.met += 1
        return self.skip < self.met <= self.skip + self.times


@dataclass
class FaultStore:
    """`inner`, with `faults`. Notes each operation in `calls`, as (operation, key), when it begins."""

    inner: Store
    faults: list[Fault] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.url = self.inner.url

    def on(
        self, operation: str, key: str, act: Act, *, after: bool = False, skip: int = 0, times: int = 1 << 30
    ) -> Fault:
        """Add a fault; it stays until `heal`."""
        fault = Fault(operation, key, act, after, skip, times)
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        """Forget all faults."""
        self.faults.clear()

    def keys(self, operation: str) -> list[str]:
        """Keys that `operation` was asked for, in order."""
        with self._lock:
            return [key for done, key in self.calls if done == operation]

    def _meet(self, operation: str, key: str, after: bool) -> None:
        with self._lock:
            if not after:
                self.calls.append((operation, key))
            acts = [f.act for f in self.faults if f.applies(operation, key, after)]
        for act in acts:
            act(key)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See `Store`."""
        self._meet("get", key, False)
        data = self.inner.get(key, max_bytes=max_bytes)
        self._meet("get", key, True)
        return data

    def fetch(self, key: str, *, size: int, sha256: str) -> bytes:
        """See `Store`."""
        self._meet("fetch", key, False)
        data = self.inner.fetch(key, size=size, sha256=sha256)
        self._meet("fetch", key, True)
        return data

    def fetch_part(self, key: str, *, start: int, stop: int) -> bytes:
        """See `Store`."""
        self._meet("fetch_part", key, False)
        data = self.inner.fetch_part(key, start=start, stop=stop)
        self._meet("fetch_part", key, True)
        return data

    def download(self, key: str, path: Path, *, size: int, sha256: str) -> None:
        """See `Store`."""
        self._meet("download", key, False)
        self.inner.download(key, path, size=size, sha256=sha256)
        self._meet("download", key, True)

    def put(self, key: str, data: bytes) -> None:
        """See `Store`."""
        self._meet("put", key, False)
        self.inner.put(key, data)
        self._meet("put", key, True)

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> tuple[int, str]:
        """See `Store`. Faults of the operation `piece` strike in the middle, before each piece."""
        self._meet("put_stream", key, False)

        def pieces() -> Iterator[bytes]:
            for chunk in chunks:
                self._meet("piece", key, False)
                yield chunk

        done = self.inner.put_stream(key, pieces())
        self._meet("put_stream", key, True)
        return done

    def create(self, key: str, data: bytes) -> bool:
        """See `Store`."""
        self._meet("create", key, False)
        won = self.inner.create(key, data)
        self._meet("create", key, True)
        return won

    def list(self, prefix: str, *, after: str = "") -> Iterator[Entry]:
        """See `Store`."""
        self._meet("list", prefix, False)
        return self.inner.list(prefix, after=after)

    def delete(self, key: str) -> None:
        """See `Store`."""
        self._meet("delete", key, False)
        self.inner.delete(key)

    def clock(self) -> datetime:
        """See `Store`."""
        self._meet("clock", "", False)
        return self.inner.clock()

    def probe(self) -> ProbeResult:
        """See `Store`."""
        self._meet("probe", "", False)
        return self.inner.probe()
