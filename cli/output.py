"""What commands write to stdout: one JSON document, a table for a person, tab-separated lines for a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from .ending import OutputClosed
from .text import printable

MAX_LAID_OUT: Final = 2000
"""Rows that are laid out for a terminal: rich takes about 0.1 ms for a cell, and nobody reads more."""


def write(text: str) -> None:
    """Write to stdout.

    Raises:
        OutputClosed: nobody reads it any more.
    """
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        raise OutputClosed from None


def write_json(document: dict[str, Any]) -> None:
    """One JSON document in one line of ASCII."""
    write(json.dumps(document, allow_nan=False) + "\n")


def write_fields(fields: Sequence[tuple[str, object]]) -> None:
    """Names and values, one pair a line; pairs without a value are left out."""
    width = max((len(name) for name, _ in fields), default=0)
    for name, value in fields:
        if value is not None and value != "":
            write(f"{name:{width}}  {printable(str(value), sys.stdout)}\n")


def write_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table. On a terminal it is laid out; elsewhere it is one line a row, tab-separated, as it comes."""
    if sys.stdout.isatty():
        rows = list(rows)
        if len(rows) <= MAX_LAID_OUT:
            _laid_out(columns, rows)
            return
    write("\t".join(columns) + "\n")
    for row in rows:
        write("\t".join(_cell(value) for value in row) + "\n")


def _cell(value: object) -> str:
    return "" if value is None else printable(str(value), sys.stdout)


def _laid_out(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    cells = [[_cell(value) for value in row] for row in rows]
    for i, name in enumerate(columns):
        numeric = bool(cells) and all(row[i][:1].isdigit() or not row[i] for row in cells)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(value) for value in row))  # Text: no markup is looked for in names
    Console(file=sys.stdout).print(table)
