"""A subscriber that kills itself just before the n-th thing it does to its folder or the store. See test_kill.

Reads jobs from stdin, a JSON object a line, and runs each in a forked child, which needs no start of its own; answers
with a line for each: how the child ended, and what it had done.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weightcast.codec import Changes, Geometry, Memory, digest_all, gather, scatter
from weightcast.manifest.store import open_store
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.subscriber import (
    CheckpointFolder,
    Subscriber,
    SubscriberSettings,
    ahead,
    folder,
    folder_files,
    folder_ties,
)


class Crash:
    """Counts what is done; dies before number `at`."""

    def __init__(self, at: int, log: Path) -> None:
        self.at = at
        self.done = 0
        self.log = log
        self._lock = threading.Lock()

    def step(self, what: str) -> None:
        """Something is about to be done."""
        with self._lock:
            if self.done == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.done += 1
            with self.log.open("a") as file:
                file.write(what + "\n")

    def wrap(self, owner: Any, name: str) -> None:
        """Make each call of `owner.name` a step."""
        inner: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            names = [Path(a).name for a in args if isinstance(a, str | Path)]
            if name != "get" or names[0].endswith(
                "1.json"
            ):  # of what is only read, the manifest of the second version
                self.step(f"{name} {' '.join(names)}")
            return inner(*args, **kwargs)

        setattr(owner, name, call)

    def wrap_scatter(self, module: Any) -> None:
        """Writing values is two steps: the first half of them, and the rest."""
        inner = module.scatter

        def call(space: Any, memory: Any, changes: Changes) -> None:
            half = len(changes) // 2
            self.step(f"scatter {changes.dtype}")
            inner(space, memory, Changes(changes.dtype, changes.positions[:half], changes.values[:half]))
            self.step(f"scatter more {changes.dtype}")
            inner(space, memory, changes)

        module.scatter = call


def instrument(crash: Crash) -> None:
    """From now on everything that changes a file is a step."""
    for name in ("replace", "unlink"):
        crash.wrap(Path, name)
    crash.wrap(os, "fsync")
    crash.wrap(os, "link")
    crash.wrap(os, "posix_fallocate")
    crash.wrap(shutil, "rmtree")
    crash.wrap(folder_files.mmap, "mmap")
    crash.wrap_scatter(folder)
    crash.wrap_scatter(folder_ties)


def run(job: dict[str, Any]) -> None:
    """Follow to the head, or die on the way."""
    store = open_store(job["root"])
    crash = Crash(job["at"], Path(job["log"]))
    for name in ("get", "fetch", "download"):
        crash.wrap(store, name)
    instrument(crash)
    target = CheckpointFolder(job["folder"])
    Subscriber("", target, SubscriberSettings(threads=1, lease=False), store=store).once()


def follow(job: dict[str, Any]) -> None:
    """Follow with cut-through to version `until`, or die on the way: steps are shards fetched and rows decoded ahead."""
    store = open_store(job["root"])
    crash = Crash(job["at"], Path(job["log"]))
    crash.wrap(store, "fetch_part")
    crash.wrap(ahead, "decode")
    settings = SubscriberSettings(threads=2, lease=False, poll_s=0.02, cut_through=True)
    for position in Subscriber("", CheckpointFolder(job["folder"]), settings, store=store).follow():
        if position.version == job["until"]:
            return


def warm_up() -> None:
    """Load the kernels once for all children."""
    geometry = Geometry(
        Layout.of(
            [TensorSpec("w", "BF16", (100,)), TensorSpec("x", "F32", (100,)), TensorSpec("y", "U8", (100,))]
        )
    )
    memory = Memory.allocate(geometry)
    digest_all(geometry, memory)
    for space in geometry:
        changes = Changes(space.dtype, np.arange(100), np.zeros(100, f"u{space.width}"))
        scatter(space, memory, changes)
        gather(space, memory, changes.positions)


def main() -> None:
    """See above."""
    warm_up()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            try:
                (follow if "until" in job else run)(job)
            except BaseException:  # noqa: BLE001  whatever it is, the parent shall see it
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        print(
            json.dumps(
                {"killed": os.WIFSIGNALED(status) and os.WTERMSIG(status), "code": os.WEXITSTATUS(status)}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
