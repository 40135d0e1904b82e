"""Both halves of a framework's checkpoint engine over a stream: the trainer publishes, rollout workers fetch.

Frameworks ask one class for both. Each sync has a token, which the trainer's side makes and all others are told before
it; the version that carries the token is the one to load, whatever else is in the stream.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from weightcast.manifest.rebuild import State, rebuild
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher.sources import torch_dtype
from weightcast.schemas.errors import NotFound, StorageError, UsageError
from weightcast.schemas.settings import PublisherSettings

from .outlet import TIMEOUT_S, Outlet, drained, walk

TOKEN: Final = "sync"  # in metadata of versions, and in what workers tell each other
POLL_S: Final = 0.1  # one small request each


class Exchange:
    """One worker's part in syncs. Which half it is shows by what is called.

    Args:
        root: URL or path of the stream.
        timeout_s: for the commit, and for the version to appear.
        device: where fetched tensors are handed over; the accelerator if there is one. Each is copied there in turn.
        settings: as of `PublisherSettings`, by name.
    """

    def __init__(
        self,
        root: str,
        *,
        timeout_s: float = TIMEOUT_S,
        device: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._outlet = Outlet(root, PublisherSettings(**settings) if settings is not None else None)
        self._replica = Replica(root)
        self._timeout_s = timeout_s
        self._device = device
        self._token = ""

    def offer(self) -> dict[str, str]:
        """What this worker tells the others before a sync. A worker that will fetch looks where the stream is now."""
        self._replica.look()
        return {TOKEN: uuid.uuid4().hex}

    def join(self, metadata: list[Any]) -> None:
        """Take part in the sync of whose workers' offers `metadata` is the list; the trainer's first worker is first.

        Raises:
            UsageError: the first offer is not one.
        """
        try:
            self._token = str(metadata[0][TOKEN])
        except (IndexError, KeyError, TypeError):
            raise UsageError(
                f"expected the offer of the trainer's first worker, found {metadata[:1]}"
            ) from None

    async def send(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, publishes: bool, step: int | None = None
    ) -> dict[str, float]:
        """Publish `weights`, if this is the worker that does, and wait for the commit; else only walk them.

        Returns:
            Figures of the version: its number, changed elements, bytes sent.
        """
        if not publishes:
            walk(weights)
            return {}
        with drained(weights) as source:  # in this thread: making a tensor may be a collective
            pending = self._outlet.publish(source, step=step, metadata={TOKEN: self._token})
        manifest = await asyncio.to_thread(pending.wait, self._timeout_s)
        totals = manifest.totals
        return {
            "weightcast/version": manifest.version,
            "weightcast/changed": totals.elements if manifest.reset else totals.changed,
            "weightcast/bytes": totals.dense_bytes if manifest.reset else totals.bytes,
        }

    async def receive(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait for the sync's version, bring the replica there, and give all its tensors.

        They may be views of the replica: they are good until the next sync.

        Raises:
            StorageError: the version did not appear in time.
        """
        state = await asyncio.to_thread(self._replica.fetch, self._token, self._timeout_s)
        for name, tensor in tensors_of(state):
            yield name, tensor.to(self._device or _accelerator())

    def close(self) -> None:
        """Wait for what is on its way, and let go of everything."""
        self._outlet.close()
        self._replica.close()


def _accelerator() -> torch.device:
    """A build with CUDA names it as its accelerator on hosts without a GPU, too."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


class Replica:
    """All tensors of one version in host memory, which follow a stream sync by sync. One sync at a time."""

    def __init__(self, root: str) -> None:
        self._store = open_store(root)
        self._pool = ThreadPoolExecutor(4, "weightcast-replica")
        self._reader: StreamReader | None = None
        self._state: State | None = None
        self._next = 0

    def look(self) -> None:
        """Note where the stream is: what is there already is not looked for."""
        reader = self._open()
        head = reader.head() if reader is not None else None
        self._next = head + 1 if head is not None else 0

    def fetch(self, token: str, timeout_s: float) -> State:
        """The state of the version that carries `token`.

        Raises:
            StorageError: there is none after `timeout_s` seconds.
            WeightcastError: it cannot be had.
        """
        until = time.monotonic() + timeout_s
        while (version := self._find(token)) is None:
            if time.monotonic() >= until:
                raise StorageError(
                    f"{self._store.url} has no version of sync {token} after {timeout_s} s",
                    hint="look whether the trainer's first worker failed",
                )
            time.sleep(POLL_S)
        reader = self._open()
        if reader is None:
            raise NotFound(f"no stream at {self._store.url}")
        start, self._state = self._state, None  # what fails half way is no base
        self._state = rebuild(reader, version, self._pool, start=start)
        return self._state

    def _find(self, token: str) -> int | None:
        reader = self._open()
        while reader is not None and reader.manifest_bytes(self._next) is not None:
            version, self._next = self._next, self._next + 1
            if reader.manifest(version).metadata.get(TOKEN) == token:
                return version
        return None

    def _open(self) -> StreamReader | None:
        if self._reader is None:
            try:
                self._reader = StreamReader.open(self._store)
            except NotFound:
                return None  # the trainer makes it with its first version
        return self._reader

    def close(self) -> None:
        """Let go of memory and threads."""
        self._state = None
        self._pool.shutdown(wait=False)


def tensors_of(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a state under all their names, as views of its memory."""
    for spec in state.layout:
        bits = state.memory.tensor(spec.tied_to or spec.name)
        yield spec.name, torch.from_numpy(bits).view(torch_dtype(spec.dtype))
