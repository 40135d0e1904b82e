"""A subscriber in a process of its own. Commands: `dense BYTES`, `plain VERSION`, `follow`, `ahead`, `stop`."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from pydantic import BaseModel

from weightcast.manifest.store import Store, open_store
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.names import DATA_PREFIX, SNAPSHOTS_PREFIX
from weightcast.subscriber import Subscriber, SubscriberSettings, Tensors

from .memory import MIB
from .models import ModelSpec
from .side import say

_PART: Final = 8 * MIB  # bytes of a request for a part of a checkpoint
_STREAMS: Final = 8
_PLAIN_ROUNDS, _PLAIN_PAUSE_S = 5, 0.4


class ReceiverJob(BaseModel):
    """What a receiver is to do.

    Attributes:
        root: of the stream.
        model: that version 0 is of.
        settings: of the subscriber.
    """

    root: str
    model: ModelSpec
    settings: dict[str, Any] = {}


class Receiver:
    """Keeps a model's tensors at the head while it is told to follow."""

    def __init__(self, job: ReceiverJob) -> None:
        self._job = job
        self._target = Tensors(job.model.make().tensors())
        self._subscriber: Subscriber | None = None
        self._thread: threading.Thread | None = None

    def dense(self, most: int) -> None:
        """Fetch a checkpoint as a plain client would: its files in parts, many at a time; `most` bytes of it."""
        store = open_store(self._job.root)
        begin = time.monotonic()
        with ThreadPoolExecutor(_STREAMS) as pool:
            found = sum(pool.map(lambda part: _fetch(store, *part), _parts(store, most)))
        say("dense", bytes=found, seconds=time.monotonic() - begin)

    def plain(self, version: int) -> None:
        """Fetch the shards of a version as a plain client would, again and again over the same connections."""
        store = open_store(self._job.root)
        shards = [(e.key, 0, e.size) for e in store.list(f"{DATA_PREFIX}{version:012d}/")]
        seconds = []
        with ThreadPoolExecutor(len(shards)) as pool:
            for _ in range(_PLAIN_ROUNDS):
                begin = time.monotonic()
                found = sum(pool.map(lambda part: _fetch(store, *part), shards))
                seconds.append(time.monotonic() - begin)
                time.sleep(_PLAIN_PAUSE_S)
        say("plain", bytes=found, seconds=seconds)

    def follow(self, *, cut_through: bool = False) -> None:
        """With a subscriber of its own, whose connections are new."""
        self.stop()
        settings = SubscriberSettings(**self._job.settings, cut_through=cut_through)
        self._subscriber = Subscriber(self._job.root, self._target, settings)
        self._thread = threading.Thread(target=self._follow, args=(self._subscriber,))
        self._thread.start()

    def stop(self) -> None:
        """Close it."""
        if self._subscriber is not None and self._thread is not None:
            self._subscriber.close()
            self._thread.join()
        self._subscriber = self._thread = None

    def _follow(self, subscriber: Subscriber) -> None:
        try:
            for position in subscriber.follow():
                say("applied", version=position.version, at=time.monotonic())
        except WeightcastError as error:
            print(error, file=sys.stderr)
            os._exit(error.exit_code)
        except Exception:  # noqa: BLE001 - whatever it is: a thread that just ends would be waited for
            traceback.print_exc()
            os._exit(1)


def _fetch(store: Store, key: str, start: int, stop: int) -> int:
    return len(store.fetch_part(key, start=start, stop=stop))


def _parts(store: Store, most: int) -> Iterator[tuple[str, int, int]]:
    """Key, first byte and end of parts of a checkpoint's weight files."""
    for entry in sorted(store.list(SNAPSHOTS_PREFIX), key=lambda e: e.key):
        if entry.key.endswith(".safetensors"):
            for start in range(0, entry.size, _PART):
                if most <= 0:
                    return
                stop = min(start + _PART, entry.size)
                most -= stop - start
                yield entry.key, start, stop


def main() -> None:
    """Do as told until the input ends."""
    receiver = Receiver(ReceiverJob.model_validate_json(sys.argv[1]))
    say("ready")
    for line in sys.stdin:
        command, *values = line.split()
        if command == "dense":
            receiver.dense(int(values[0]))
        elif command == "plain":
            receiver.plain(int(values[0]))
        elif command in ("follow", "ahead"):
            receiver.follow(cut_through=command == "ahead")
        else:
            receiver.stop()
    receiver.stop()


if __name__ == "__main__":
    main()
