"""How a command ends other than well: exit codes, and the line on stderr."""

from __future__ import annotations

import contextlib
import json as jsonlib
import logging
import os
import sys
import traceback
from typing import Final

from .text import printable

INTERRUPTED: Final = 130  # 128 + SIGINT
TERMINATED: Final = 143  # 128 + SIGTERM


class Terminated(SystemExit):
    """SIGTERM arrived."""

    code = TERMINATED


class OutputClosed(SystemExit):
    """Whoever read stdout has gone, as `head` does; 128 + SIGPIPE is what the shell knows this by."""

    code: int = 141


def report(kind: str, message: str, hint: str, *, json: bool, debug: bool) -> None:
    """Say on stderr what went wrong, in one line and one for the hint; with `json`, as a document on
    stdout, too.
    """
    if debug:
        traceback.print_exc(file=sys.stderr)
    with contextlib.suppress(OSError):
        sys.stderr.write(printable(f"weightcast: error: {message}", sys.stderr) + "\n")
        if hint:
            sys.stderr.write(printable(f"weightcast: hint: {hint}", sys.stderr) + "\n")
        if json:
            sys.stdout.write(
                jsonlib.dumps({"error": {"kind": kind, "message": message, "hint": hint}}) + "\n"
            )
            sys.stdout.flush()


def silence_stdout() -> None:
    """Keep the interpreter from complaining, when it flushes at exit, that nobody reads."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Warnings(logging.Handler):
    """Warnings of the package on stderr. Errors are left out: they end the command and are told by
    `report`.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        if record.levelno < logging.ERROR:
            sys.stderr.write(printable(f"weightcast: warning: {record.getMessage()}", sys.stderr) + "\n")


def configure_warnings(*, debug: bool) -> None:
    """Logging of commands that are no sidecars; with `debug`, everything that the package logs."""
    logger = logging.getLogger("weightcast")
    if debug:
        logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logger.setLevel(logging.DEBUG)
    elif not logger.handlers:
        logger.addHandler(_Warnings(logging.WARNING))
        logger.propagate = False
