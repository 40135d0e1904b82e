"""The trainer's handle on its rollout processes: start, tell, listen, kill, and never leave one behind."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pydantic import ValidationError

from weightcast.schemas.errors import WeightcastError

from .messages import REPORTS, Applied, Failed, Message, Proof

COMMAND: Final = (sys.executable, "-P", "-m", "weightcast.demo.worker")
_LEAVE_S: Final = 2.0  # seconds for a process to end by itself once its input has ended
_TAIL_BYTES: Final = 2000  # of a process's log in an error


class WorkerProcess:
    """One rollout process. It ends with its input, so it cannot outlive this one, however this one ends.

    Attributes:
        name: of the subscriber.
        history: when it applied which version, in seconds since its start.
        proof: what it sent last.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.history: list[tuple[float, int]] = []
        self.proof: Proof | None = None
        self._failed: Failed | None = None
        self._log = log
        self._started = time.monotonic()
        self._news = threading.Condition()
        with log.open("ab") as stderr:
            # A session of its own: an interrupt from the keyboard is for the trainer, which then ends it.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        self._listener = threading.Thread(target=self._listen, name=f"weightcast-demo-{name}", daemon=True)
        self._listener.start()

    @property
    def applied(self) -> int | None:
        """The version that its weights are; None before the first."""
        return self.history[-1][1] if self.history else None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Tell it something.

        Raises:
            WeightcastError: it has ended.
        """
        stdin = self._process.stdin
        try:
            if stdin is not None:
                stdin.write(message.line())
                stdin.flush()
        except BrokenPipeError:
            self._listener.join(_LEAVE_S)
            raise self._error("has ended") from None

    def check(self) -> None:
        """Raise if it has ended.

        Raises:
            WeightcastError: says why, or shows the end of its log.
        """
        if self._failed is not None or self._process.poll() is not None:
            raise self._error("has ended")

    def wait_for(self, what: Callable[[WorkerProcess], bool], doing: str, timeout_s: float) -> None:
        """Wait until `what` holds for this process.

        Args:
            what: asked anew whenever it reports something.
            doing: what it should have done, for the error.
            timeout_s: seconds.

        Raises:
            WeightcastError: it ended before, or time ran out.
        """
        with self._news:
            done = self._news.wait_for(lambda: what(self) or self._ended(), timeout_s)
            if what(self):
                return
        raise self._error(
            f"has ended before it {doing}" if done else f"has not {doing} within {timeout_s:.0f} s"
        )

    def kill(self) -> None:
        """SIGKILL: it gets no chance to clean up."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End its input, which ends it; insist if need be."""
        self.dismiss()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def dismiss(self) -> None:
        """End its input, and do not wait for what comes of it."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def _ended(self) -> bool:
        return self._failed is not None or self._process.poll() is not None

    def _listen(self) -> None:
        """Take in what it reports, until its output ends."""
        for line in self._process.stdout or ():
            self._note(line)
        self._process.wait()  # its output is closed, so this is at once
        with self._news:
            self._news.notify_all()

    def _note(self, line: bytes) -> None:
        try:
            report = REPORTS.validate_json(line)
        except ValidationError:
            report = Failed(message=f"it says {line[:200]!r}, which is no report", hint="")
        with self._news:
            if isinstance(report, Applied):
                self.history.append((time.monotonic() - self._started, report.version))
            elif isinstance(report, Proof):
                self.proof = report
            else:
                self._failed = report
            self._news.notify_all()

    def _error(self, what: str) -> WeightcastError:
        if self._process.poll() is not None:
            self._listener.join(_LEAVE_S)  # its last words may still be in the pipe
        if self._failed is not None:
            return WeightcastError(
                f"subscriber {self.name} failed: {self._failed.message}", hint=self._failed.hint
            )
        tail = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        lines = tail.splitlines()
        return WeightcastError(
            f"subscriber {self.name} (process {self.pid}) {what}: {lines[-1] if lines else 'no word'}"
        )


class Crew:
    """The subscribers of a run, by name. A context manager: none of them survives it.

    Args:
        names: of the subscribers.
        command: that starts one.
        folder: for their logs.
    """

    def __init__(self, names: Sequence[str], command: Sequence[str], folder: Path) -> None:
        self._names, self._command, self._folder = names, command, folder
        self._running: dict[str, WorkerProcess] = {}

    def __enter__(self) -> Self:
        try:
            for name in self._names:
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def running(self) -> Mapping[str, WorkerProcess]:
        """Those that were started and not killed."""
        return self._running

    def start(self, name: str) -> WorkerProcess:
        """Start a process; it imports what it needs and then waits for its job."""
        process = WorkerProcess(name, self._command, self._folder / f"{name}.log")
        self._running[name] = process
        return process

    def kill(self, name: str) -> int:
        """Kill one without warning, and return the process id it had."""
        process = self._running.pop(name)
        process.kill()
        return process.pid

    def check(self) -> None:
        """Raise if one of them has ended."""
        for process in self._running.values():
            process.check()

    def close(self) -> None:
        """End all of them. All inputs are closed first, so that they end at the same time."""
        with ExitStack() as stack:
            for process in self._running.values():
                stack.callback(process.close)
            for process in self._running.values():
                process.dismiss()
        self._running.clear()
