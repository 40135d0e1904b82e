"""The messenger of torch.distributed's ranks: texts in its key-value store, whatever the backend."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, Protocol, Self, TypeVar

import torch.distributed as dist

from weightcast.schemas.errors import UsageError

from .messenger import Silence

log = logging.getLogger(__name__)

T = TypeVar("T")

_CHUNK_BYTES: Final = 4 << 20
"""Of a value in the store. TCPStore takes at most 8 MiB."""

_MAX_TEXT_BYTES: Final = 1 << 30
"""Of one text: what a rank says must not fill another one's memory. 4 million tensors take half of it."""

_FIRST_WAIT_S: Final = 0.001
_MAX_WAIT_S: Final = 0.02
"""Between two looks into the store: from one round trip in a rack to what nobody notices beside an upload."""

_WAIT_S_PER_RANK: Final = 0.0002
"""Added to `_MAX_WAIT_S` by rank, so that all of them ask one store at most 5,000 times a second."""

_LEAVE_S: Final = 2.0
"""Rank 0 waits so long for the others to leave: they look for its last word every 20 ms or so."""


class Keys(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: Any, /) -> None:
        """Write a value; text or bytes."""

    def get(self, key: str, /) -> bytes:
        """Read one that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter."""

    def delete_key(self, key: str, /) -> bool:
        """Remove one."""


class TorchMessenger:
    """Passes texts through torch.distributed's store, whatever the backend. All ranks of `group` make it together.

    Args:
        timeout_s: how long a rank is waited for.
        group: the ranks; None: all.
        store: another store, with `rank` and `size`, instead of torch.distributed's.

    Raises:
        UsageError: torch.distributed is not initialised, or this process is not in `group`.
        Silence: the store does not answer.
    """

    def __init__(
        self,
        timeout_s: float = 120.0,
        group: dist.ProcessGroup | None = None,
        *,
        store: Keys | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.timeout_s = timeout_s
        name = "all"
        if store is None:
            store, rank, size, name = _of_group(group)
        if not 0 <= rank < size:
            raise UsageError(f"this process is not one of the {size} ranks of the group (rank {rank})")
        self.rank, self.size = rank, size
        self._store = store
        self._idle: list[Keys] = []
        self._said: list[str] = []  # keys that rank 0 will delete
        self._before = 0  # how many of them are of topics before the present one
        self._max_wait_s = _MAX_WAIT_S + size * _WAIT_S_PER_RANK
        opened = self._ask(lambda keys: keys.add(f"weightcast/{name}/opened/{rank}", 1))
        self._prefix = f"weightcast/{name}/{opened}"

    @classmethod
    def over(cls, store: Keys, rank: int, size: int, timeout_s: float = 120.0) -> Self:
        """For ranks that have a store but no process group; such as threads with a `HashStore`."""
        return cls(timeout_s, store=store, rank=rank, size=size)

    def gather(self, topic: str, text: str) -> list[str] | None:
        """See `Messenger`."""
        if self.rank:
            self._put(f"{topic}/{self.rank}", text)
            return None
        others = [f"{topic}/{rank}" for rank in range(1, self.size)]
        missing = self._wait(others, 0.8 * self.timeout_s)
        self._before = len(self._said)
        if missing:
            self._said.extend(self._keys(key, 1)[0] for key in others)  # they may still come, unread
            ranks = ", ".join(key.rpartition("/")[2] for key in missing[:10])
            raise Silence(
                f"rank {ranks} of {self.size} did not come to {topic} within {0.8 * self.timeout_s:g} s",
                hint="it is dead, or slower than the timeout allows, or it does not publish as often as the others",
            )
        return [text, *(self._get(key) for key in others)]

    def broadcast(self, topic: str, text: str | None) -> str:
        """See `Messenger`."""
        if self.rank == 0:
            self._put(topic, text or "")
            return text or ""
        if self._wait([topic], self.timeout_s):
            raise Silence(
                f"rank 0 of {self.size} did not decide about {topic} within {self.timeout_s:g} s",
                hint="it is dead, or slower than the timeout allows",
            )
        return self._get(topic)

    def settled(self) -> None:
        """See `Messenger`. Rank 0 deletes."""
        said = self._said[: self._before]
        del self._said[: self._before]
        self._before = 0

        def forget(keys: Keys) -> None:
            for key in said:
                keys.delete_key(key)

        self._ask(forget)

    def leave(self) -> None:
        """See `Messenger`. The store may be kept by rank 0's own process, so rank 0 goes last."""
        try:
            if self.rank:
                self._ask(lambda keys: keys.set(self._keys(f"left/{self.rank}", 1)[0], ""), _LEAVE_S)
            else:
                others = [f"left/{rank}" for rank in range(1, self.size)]
                self._wait(others, min(_LEAVE_S, self.timeout_s), _LEAVE_S)
        except Exception as error:  # noqa: BLE001 - what comes after is not to be missed for want of a goodbye
            log.debug("left without a word: %s", error)

    def _put(self, topic: str, text: str) -> None:
        data = zlib.compress(text.encode(), 1)
        chunks = [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
        names = self._keys(topic, len(chunks))

        def put(keys: Keys) -> None:
            for name, chunk in zip(names[1:], chunks[1:], strict=True):
                keys.set(name, chunk)
            keys.set(names[0], f"{len(chunks)} {len(data)} ".encode() + chunks[0])

        self._ask(put)
        if not self.rank:
            self._said.extend(names)

    def _get(self, topic: str) -> str:
        """The text at a key that is there."""

        def get(keys: Keys) -> tuple[list[str], bytes]:
            count, _, rest = keys.get(self._keys(topic, 1)[0]).partition(b" ")
            _, _, data = rest.partition(b" ")
            names = self._keys(topic, int(count))
            return names, data + b"".join(keys.get(name) for name in names[1:])

        names, data = self._ask(get)
        if not self.rank:
            self._said.extend(names)
        return zlib.decompressobj().decompress(data, _MAX_TEXT_BYTES).decode()

    def _keys(self, topic: str, count: int) -> list[str]:
        return [f"{self._prefix}/{topic}", *(f"{self._prefix}/{topic}#{n}" for n in range(1, count))]

    def _wait(self, topics: list[str], timeout_s: float, ask_s: float | None = None) -> list[str]:
        """Wait until all are there; those that are not, after the timeout. `ask_s`: for one answer of the store."""
        missing, wait_s, end = list(topics), _FIRST_WAIT_S, time.monotonic() + timeout_s

        def look(keys: Keys) -> list[str]:
            while missing and keys.check(self._keys(missing[-1], 1)):
                missing.pop()
            if not missing or time.monotonic() <= end:
                return []
            return [topic for topic in missing if not keys.check(self._keys(topic, 1))]

        while True:
            late = self._ask(look, ask_s)
            if late or not missing:
                return late
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, self._max_wait_s)

    def _ask(self, call: Callable[[Keys], T], timeout_s: float | None = None) -> T:
        """What a call with a connection of its own gives, within the messenger's timeout or another.

        It is made in a thread, since torch waits for ever where a host is gone without a word.

        Raises:
            Silence: the store is gone, or does not answer.
        """
        outcome: Future[T] = Future()
        bound_s = self.timeout_s if timeout_s is None else timeout_s
        thread = threading.Thread(
            target=self._answer, args=(call, outcome), name="weightcast-keys", daemon=True
        )
        try:
            thread.start()
            return outcome.result(bound_s)
        except FutureTimeout:
            raise _gone(f"nothing for {bound_s:g} s") from None
        except RuntimeError as error:
            # torch's own about its store are such, ours are not; or no thread is to be had
            raise _gone(str(error).splitlines()[0]) from error

    def _answer(self, call: Callable[[Keys], T], outcome: Future[T]) -> None:
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                # where torch cannot make another connection, one does for all: requests are short
                connection = _clone(self._store)
            found = call(connection)
        except Exception as error:  # noqa: BLE001 - raised where the answer is waited for
            outcome.set_exception(error)
        else:
            self._idle.append(connection)
            outcome.set_result(found)


def _clone(store: Keys) -> Keys:
    clone = getattr(store, "clone", None)  # from torch 2.8 on
    return store if clone is None else clone()


def _gone(found: str) -> Silence:
    return Silence(
        f"torch.distributed's store does not answer: {found}",
        hint="the process that keeps it (rank 0, or the launcher) has ended, or hangs",
    )


def _of_group(group: dist.ProcessGroup | None) -> tuple[Keys, int, int, str]:
    """Store, rank, size and name of a process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("torch.distributed is not initialised", hint="call init_process_group() first")
    store = dist.distributed_c10d._get_default_store()
    name = "all" if group is None else str(group.group_name)
    return store, dist.get_rank(group), dist.get_world_size(group), name
