"""Processes of a measurement: each does what lines on its stdin say, and tells what happened in JSON lines."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self

from pydantic import BaseModel

from weightcast.schemas.errors import StorageError

PATIENCE_S: Final = 180.0
"""Seconds without a word after which a process is taken for dead."""


def say(event: str, **values: object) -> None:
    """Tell the process that measures. One write, so that lines of two threads do not mix."""
    os.write(1, (json.dumps({"event": event, **values}) + "\n").encode())


class Side:
    """A process that runs `python -m weightcast.benchmarks.lab.MODULE JOB`.

    Args:
        module: `caster` or `receiver`.
        job: what it is to do, as it reads it.
        before: a command to run it under, such as one that enters a namespace.
        environment: variables beside those of this process.
    """

    def __init__(
        self,
        module: str,
        job: BaseModel,
        *,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = module
        self._process = subprocess.Popen(
            [*before, sys.executable, "-m", f"{__package__}.{module}", job.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name=f"bench-{module}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id. A command like nsenter that it was started under has become it."""
        return self._process.pid

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, its threads stand still: as if it were on another machine. Processes that it started go on."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def tell(self, command: str) -> None:
        """Send it a command."""
        if self._process.stdin is None:
            raise OSError("the process has no input")
        self._process.stdin.write(command.encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, event: str, **values: object) -> dict[str, Any]:
        """Wait for an event with these values; others before it are passed over.

        Raises:
            StorageError: the process has ended, or says nothing.
        """
        while True:
            try:
                found = self._events.get(timeout=PATIENCE_S)
            except queue.Empty as error:
                raise StorageError(f"the {self._name} said nothing for {PATIENCE_S:.0f} s") from error
            if found["event"] == "ended":
                raise StorageError(f"the {self._name} has ended while {event} was waited for")
            if found["event"] == event and all(found[key] == value for key, value in values.items()):
                return found

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            self._events.put(json.loads(line))
        self._events.put({"event": "ended"})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The end of its input ends it; if it does not listen, it is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
