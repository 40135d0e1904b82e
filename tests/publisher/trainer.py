"""A trainer in a process of its own, for tests that stop, kill and fork it.

State k (0, 1, 2 ...) is a function of k alone, so that a test can check any version by its step. Prints
"committed VERSION STEP" once a version is known to be committed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import s3fs  # noqa: F401 - imported once by the nursery, not by each trainer
import torch

from weightcast.manifest.store import Store, StoreSettings, open_store
from weightcast.manifest.store import local as store_local
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.schemas.errors import StorageError, WeightcastError

from ..faultstore import FaultStore, die, stop

SETTINGS: dict[str, Any] = {"threads": 2, "row_elements": 1 << 16, "shard_bytes": 1 << 16}


torch.set_num_threads(1)  # GNU OpenMP hangs in the child of a process that has used it


def state(k: int) -> dict[str, torch.Tensor]:
    """What the trainer has after step k: three shards' worth of changes from one step to the next."""
    generator = torch.Generator().manual_seed(1000 + k)
    return {
        "w": torch.randint(-(1 << 15), 1 << 15, (3 << 16,), generator=generator)
        .to(torch.int16)
        .view(torch.bfloat16),
        "step": torch.tensor(k),
        "bias": torch.full((17,), float(k)),
    }


def opened(url: str) -> FaultStore:
    """The store, to be given faults."""
    return FaultStore(open_store(url, settings=StoreSettings(deadline_s=20)))


def publish(publisher: Publisher, k: int) -> None:
    """Publish state k and say so."""
    manifest = publisher.publish(state(k), step=k).wait()
    print("committed", manifest.version, k, flush=True)


def upto(store: Store, steps: int) -> Publisher:
    """A publisher that has published states 0 to `steps` - 1."""
    publisher = Publisher("", PublisherSettings(**SETTINGS), store=store)
    for k in range(steps):
        publish(publisher, k)
    return publisher


def kill_at(url: str, point: str) -> None:
    """Publish states 0, 1 and 2, and be killed at `point` of state 3."""
    store = opened(url)
    publisher = upto(store, 3)
    if url.startswith("file") and point in ("P2", "P4", "P5"):
        _kill_inside_the_local_store(point)
    elif point == "P1":
        store.on("put", "data/*", die)
    elif point == "P2":
        store.on("put", "data/*", die, after=True)
    elif point in ("P3", "P4"):  # a manifest has no temporary name but on a local store
        store.on("create", "versions/*", die)
    elif point in ("P5", "P6"):
        store.on("create", "versions/*", die, after=True)
    elif point == "P7":
        # Written in the background: that of the version before may come as late as this.
        def die_if_new(key: str) -> None:
            if json.loads(store.inner.get(key, max_bytes=1 << 16))["version"] == 3:
                die(key)

        store.on("put", "head.json", die_if_new, after=True)
    publish(publisher, 3)
    die("")  # P8: everything has moved on


def _kill_inside_the_local_store(point: str) -> None:
    """With half of a shard in its file, with a manifest that has no name yet, or with one that just got it."""
    link = os.link

    def write_half(path: str, data: bytes) -> str:
        store_local.make_folders(os.path.dirname(path))
        Path(store_local.temporary_beside(path)).write_bytes(data[: len(data) // 2])
        die("")
        return path

    def link_and_die(source: str, target: str) -> None:
        if point == "P5":
            link(source, target)
        die("")

    if point == "P2":
        store_local.write_temporary = write_half
    else:
        os.link = link_and_die  # type: ignore[assignment]


def restart(url: str, k: int) -> None:
    """Take up the stream and publish state k."""
    with Publisher(url, PublisherSettings(**SETTINGS)) as publisher:
        publish(publisher, k)


def one_shot(url: str, k: int) -> None:
    """Publish state k without a fence."""
    with Publisher(url, PublisherSettings(**SETTINGS), fence=False) as publisher:
        publish(publisher, k)


def stop_before_commit(url: str, k: int) -> None:
    """Publish state 0; then stop (SIGSTOP) right before the commit of state k."""
    store = opened(url)
    publisher = upto(store, 1)
    store.on("create", "versions/*", stop)
    print("stopping", flush=True)
    try:
        publish(publisher, k)
        publish(publisher, k + 1)
    except WeightcastError as error:
        print(error.kind, error, flush=True)
        sys.exit(error.exit_code)


def race(url: str, name: str, rounds: int) -> None:
    """One-shot publishers, `rounds` versions; says who won each. The other process does the same."""
    folder = Path(os.environ["RACE_FOLDER"])
    store = opened(url)
    for round_ in range(rounds):
        settings = PublisherSettings(**SETTINGS, writer=name, snapshot_every=5)
        publisher = Publisher("", settings, store=store, fence=False)
        base = publisher.version
        store.heal()
        store.on("create", "versions/*", partial(_arrive, folder, name, round_))
        tensors = {"w": torch.full((50,), 1000 * round_ + (1 if name == "a" else 2))}
        try:
            manifest = publisher.publish(tensors).wait()
            print("won", round_, base, manifest.version, manifest.token, flush=True)
        except WeightcastError as error:
            print("lost", round_, base, error.kind, flush=True)
        try:
            publisher.close()
        except WeightcastError as error:
            if error.kind != "conflict":
                raise
        _meet(folder, f"{name}-done", round_)


def _arrive(folder: Path, name: str, round_: int, _: str) -> None:
    _meet(folder, name, round_)


def _meet(folder: Path, name: str, round_: int) -> None:
    """Return when both processes are here."""
    other = name.replace("a", "b", 1) if name.startswith("a") else name.replace("b", "a", 1)
    (folder / f"{name}.{round_}").touch()
    end = time.monotonic() + 60
    while not (folder / f"{other}.{round_}").exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{other} did not come to round {round_}")
        time.sleep(0.0005)


def leave(url: str, delay: float, row_elements: int = SETTINGS["row_elements"]) -> None:
    """Return from main right after the last publish, with a store that takes `delay` seconds for the commit."""
    store = opened(url)
    publisher = Publisher("", PublisherSettings(**SETTINGS | {"row_elements": row_elements}), store=store)
    publisher.publish(state(0), step=0).wait()
    store.on("create", "versions/*", lambda _: time.sleep(delay))
    store.on("put", "data/*", lambda _: time.sleep(delay / 4))
    publisher.publish(state(1), step=1)
    publisher.publish(state(2), step=2)


def fail_behind(url: str) -> None:
    """A background failure that nobody waits for, in a trainer that uses the publisher as a context manager."""
    store = opened(url)
    with Publisher("", PublisherSettings(**SETTINGS), store=store) as publisher:
        publisher.publish(state(0), step=0).wait()
        store.on("put", "data/*", _forbidden)
        publisher.publish(state(1), step=1)


def _forbidden(key: str) -> None:
    raise StorageError(f"cannot write {key}: 403")


def fork(url: str) -> None:
    """Use a publisher, fork, and publish from the child: with the parent's publisher, and with one of its own."""
    publisher = upto(open_store(url), 2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                publisher.publish(state(2))
            except WeightcastError as error:
                print(error.kind, flush=True)
            publisher.close()
            restart(url, 2)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status), flush=True)
    try:
        publish(publisher, 3)
    except WeightcastError as error:
        print(error.kind, flush=True)
        os._exit(0)


def main() -> None:
    """Run one of the above: URL COMMAND ARGUMENTS."""
    url, command, *arguments = sys.argv[1:]
    commands: dict[str, Callable[..., None]] = {
        "kill": lambda point: kill_at(url, point),
        "restart": lambda k: restart(url, int(k)),
        "one-shot": lambda k: one_shot(url, int(k)),
        "stop": lambda k: stop_before_commit(url, int(k)),
        "race": lambda name, rounds: race(url, name, int(rounds)),
        "leave": lambda delay, *row: leave(url, float(delay), *map(int, row)),
        "fail": lambda: fail_behind(url),
        "fork": lambda: fork(url),
    }
    commands[command](*arguments)
