"""The end of a sidecar: an event that signals set, and a limit to what may come after it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from select import select
from types import FrameType
from typing import Final

log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 4.5
"""From the signal to the end of the process, whatever it is doing: it may be asked to be gone within 5 s."""

_TAKEN: Final = (signal.SIGTERM, signal.SIGINT)


class Stop(threading.Event):
    """Set when the process shall end."""

    signum: int | None = None

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        super().__init__()
        self.leave = leave

    @property
    def exit_code(self) -> int:
        """0 where a manager asked for the end, 130 where a person pressed Ctrl-C."""
        return 130 if self.signum == signal.SIGINT else 0


def end(stop: threading.Event) -> int:
    """The exit code of a sidecar that has stopped and closed everything.

    If a signal stopped it, the process ends here: taking down an interpreter with torch in it was seen to
    take 2 s to 8 s on a loaded machine, and nothing is left to do.
    """
    if not isinstance(stop, Stop) or stop.signum is None:
        return 0
    for file in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            file.flush()
    stop.leave(stop.exit_code)
    return stop.exit_code


def stop_on_signals(grace_s: float = STOP_GRACE_S, leave: Callable[[int], object] = os._exit) -> Stop:
    """An event that SIGTERM and SIGINT set. Call from the main thread, once.

    The process ends `grace_s` seconds later, or at a second signal, whatever it is doing then: everything
    that it writes is safe to leave at any time. Signals are taken by a thread of its own, so that neither a
    long call in the main thread nor a lock that it holds delays them.
    """
    stop = Stop(leave)
    receive, send = socket.socketpair()
    receive.setblocking(True)
    send.setblocking(False)
    for number in _TAKEN:
        signal.signal(number, _taken_elsewhere)
    signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)

    def wait() -> None:
        with send:
            while stop.signum not in _TAKEN:
                stop.signum = receive.recv(1)[0]
            stop.set()
            log.info("stopping: %s", signal.Signals(stop.signum).name)
            again = bool(select([receive], [], [], grace_s)[0])
            log.warning(
                "not finished %s; what is not committed does not exist",
                "yet" if again else f"after {grace_s} s",
            )
            with suppress(OSError, ValueError):
                sys.stderr.flush()
            leave(128 + stop.signum if again else stop.exit_code)

    threading.Thread(target=wait, name="weightcast-signals", daemon=True).start()
    return stop


def _taken_elsewhere(_: int, __: FrameType | None) -> None:
    """Without a handler of Python's the signal would end the process, or not reach the wakeup descriptor."""
