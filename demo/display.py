"""What a person sees: a live table on a terminal, plain lines elsewhere, a summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from .config import WORKERS
from .outcome import Outcome, Row, SubscriberOutcome

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

_ROWS: Final = 15  # of the live table: with its notes it fits a terminal of 24 lines
_NOTES: Final = 3
_COLUMNS: Final = (
    "version",
    "step",
    "reward",
    "changed",
    "wire",
    "x less",
    *(f"lag {name}" for name in WORKERS),
)


class Board(Protocol):
    """Where the run shows how it goes."""

    def add(self, row: Row) -> None:
        """A version was committed, and the one after it is ready."""

    def note(self, text: str) -> None:
        """Something else happened."""


class PlainBoard:
    """A line each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def add(self, row: Row) -> None:
        """See Board."""
        cells = zip(_COLUMNS, _cells(row), strict=True)
        self.note("  ".join(f"{name} {value}" for name, value in cells))

    def note(self, text: str) -> None:
        """See Board."""
        print(text, file=self._stream, flush=True)


class LiveBoard:
    """The newest versions in a table that is drawn anew in place."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._rows: list[Row] = []
        self._notes: list[str] = []

    def add(self, row: Row) -> None:
        """See Board."""
        self._rows.append(row)
        self._live.update(self._drawn())

    def note(self, text: str) -> None:
        """See Board."""
        self._notes.append(text)
        self._live.update(self._drawn())

    def _drawn(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in _COLUMNS:
            table.add_column(name, justify="right")
        for row in self._rows[-_ROWS:]:
            table.add_row(*_cells(row))
        return Group(table, *(Text(note, style="yellow") for note in self._notes[-_NOTES:]))


@contextmanager
def board(stream: TextIO) -> Iterator[Board]:
    """A live table if `stream` is a terminal, else plain lines."""
    if not stream.isatty():
        yield PlainBoard(stream)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=stream), refresh_per_second=8) as live:
        yield LiveBoard(live)


def write_summary(outcome: Outcome, *, kept: bool) -> None:
    """Say on stdout what the run came to, and what is proved."""
    first, last = outcome.rewards
    steps = len(outcome.rows) - 1
    versions = f"{outcome.rows[0].version} to {outcome.rows[-1].version}"
    ratio = outcome.dense_bytes / outcome.wire_bytes
    lines = [
        ("reward", f"{first:.2f} -> {last:.2f} in {steps} steps"),
        ("published", f"versions {versions}, {_mib(outcome.wire_bytes)}, {ratio:.1f}x less than dense"),
        *((f"subscriber {s.name}", _sentence(s)) for s in outcome.subscribers),
        ("store", outcome.root if kept else "temporary, removed (keep it with --keep)"),
        ("seconds", f"{outcome.seconds:.1f}"),
        *(("NOT PROVED", problem) for problem in outcome.problems),
    ]
    if not outcome.problems:
        lines.append(("proved", "every subscriber has the trainer's weights, byte for byte; the reward rose"))
    for name, text in lines:
        print(f"{name:13} {text}", file=sys.stdout)


def _sentence(subscriber: SubscriberOutcome) -> str:
    verdict, returned = subscriber.verdict, subscriber.returned
    text = (
        f"version {subscriber.version}, state {subscriber.digest}, {verdict.equal} of {verdict.tensors} "
        f"tensors have the trainer's SHA-256, {subscriber.batches} batches"
    )
    if returned is None:
        return text
    return (
        f"{text}; killed at version {returned.killed_at}, started again from nothing at version "
        f"{returned.restarted_at}, caught up in {returned.seconds:.1f} s, {returned.batches} batches since"
    )


def _cells(row: Row) -> list[str]:
    return [
        str(row.version),
        str(row.step),
        "-" if row.reward is None else f"{row.reward:.3f}",
        f"{row.changed_percent:.1f} %" if row.changed else "-",
        f"{row.wire_bytes / 1024:.0f} KiB",
        f"{row.ratio:.1f}" if row.changed else "-",
        *("-" if lag is None else str(lag) for lag in row.lags.values()),
    ]


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
