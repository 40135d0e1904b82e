"""What a part of the benchmark found: tables, plots, and the ratios that have a bar to reach. Values, as JSON."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Table(_Value):
    """A table for people.

    Attributes:
        title: its heading.
        head: one text a column.
        rows: texts, as many as columns.
        note: what stands under it.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


class Line(_Value):
    """A series of a plot: `y` over `x`."""

    label: str
    x: list[float]
    y: list[float]


class Plot(_Value):
    """A picture of lines.

    Attributes:
        name: stem of its file's name.
        title: above it, and instead of it where it cannot be seen.
        x, y: what the axes are, with units.
        log_x, log_y: whether an axis is logarithmic; then all its values are positive.
    """

    name: str
    title: str
    x: str
    y: str
    lines: list[Line]
    log_x: bool = False
    log_y: bool = False


class Ratio(_Value):
    """A figure that does not depend on the machine's mood, and what it should be.

    Attributes:
        name: what is compared with what.
        value: as measured.
        bar: what is aimed for; None: nothing is.
        at_most: whether `bar` is an upper bound, not a lower one.
        unit: behind the value, such as "×" or "%".
    """

    name: str
    value: float
    bar: float | None = None
    at_most: bool = False
    unit: str = "×"

    def reached(self, value: float) -> bool | None:
        """Whether `value` is as good as the bar; None without a bar."""
        if self.bar is None:
            return None
        return value <= self.bar if self.at_most else value >= self.bar


class Result(_Value):
    """All that a part found.

    Attributes:
        part: its name.
        tables, plots, ratios: for people.
        figures: everything measured, for programs.
        skipped: why it did not run here, or "".
        time: when it began, in UTC, as ISO 8601.
        seconds: how long it took.
    """

    part: str
    tables: list[Table] = []
    plots: list[Plot] = []
    ratios: list[Ratio] = []
    figures: dict[str, Any] = {}
    skipped: str = ""
    time: str = ""
    seconds: float = 0.0
