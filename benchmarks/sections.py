"""The generated parts of docs/benchmarks.md: what is between two marks is replaced, all else is left as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from weightcast.schemas.errors import NotFound, UsageError

from .plot import draw
from .report import PLOTS
from .result import Plot


def marks(name: str) -> tuple[str, str]:
    """The lines that stand before and after a section."""
    return f"<!-- begin {name}: written by make bench -->", f"<!-- end {name} -->"


def replaced(text: str, sections: Mapping[str, str]) -> str:
    """`text` with new contents between the marks of each section.

    Raises:
        UsageError: it has no such marks.
    """
    for name, content in sections.items():
        begin, end = marks(name)
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        block = f"{begin}\n\n{content.strip()}\n\n{end}"
        text, count = pattern.subn(lambda _, block=block: block, text)  # type: ignore[misc]
        if count != 1:
            raise UsageError(
                f"section {name}: expected one pair of marks, found {count}", hint=f"add {begin} … {end}"
            )
    return text


def update(document: Path, sections: Mapping[str, str], plots: list[Plot]) -> None:
    """Replace the sections of a document, and write the plots beside it.

    Raises:
        NotFound: there is no such document.
        UsageError: it lacks a section's marks; nothing was written.
    """
    try:
        text = document.read_text("utf-8")
    except FileNotFoundError as error:
        raise NotFound(
            f"document {document} does not exist", hint="run it in the repository's root"
        ) from error
    text = replaced(text, sections)
    folder = document.parent / PLOTS
    if plots:
        folder.mkdir(exist_ok=True)
    for plot in plots:
        (folder / f"{plot.name}.svg").write_text(draw(plot), "utf-8")
    document.write_text(text, "utf-8")
