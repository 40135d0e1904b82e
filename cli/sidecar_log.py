"""Logging of a sidecar: to stderr, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Final, TextIO

_RECORD_KEYS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, fields given as `extra`, a traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        document |= {k: v for k, v in vars(record).items() if k not in _RECORD_KEYS and k not in document}
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def configure_logging(*, json: bool = False, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Log what this package says to `stream` (default: stderr), and nowhere else."""
    handler = logging.StreamHandler(stream or sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if json else plain)
    logger = logging.getLogger("weightcast")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)
