"""Results as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from .result import Ratio, Result, Table

PLOTS = "plots"
"""Folder of the plots, beside the document."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def part_section(results: Sequence[Result], *, plots: bool = False) -> str:
    """One part that ran once or more: ratios of all runs, and tables of the last.

    `plots`: with links to pictures, as files of `PLOTS`.
    """
    last = results[-1]
    if last.skipped:
        return f"*{last.part}* was skipped: {last.skipped}\n"
    blocks = [_table(found) for found in last.tables]
    if plots:
        blocks += [f"![{plot.title}]({PLOTS}/{plot.name}.svg)\n" for plot in last.plots]
    if last.ratios:
        blocks.append(ratio_table(results))
    blocks.append(f"({_took(results)})\n")
    return "\n".join(blocks)


def ratio_table(results: Sequence[Result]) -> str:
    """Each ratio with its bar; the median and the spread if there were several runs."""
    head = ["ratio", "here", *(["spread"] if len(results) > 1 else []), "bar", "reached"]
    rows = []
    for ratio in results[-1].ratios:
        values = [same.value for result in results for same in result.ratios if same.name == ratio.name]
        middle = median(values)
        spread = f"{number(min(values))}–{number(max(values))}"
        rows.append(
            [
                ratio.name,
                f"{number(middle)} {ratio.unit}",
                *([spread] if len(results) > 1 else []),
                _bar(ratio),
                {True: "yes", False: "no", None: ""}[ratio.reached(middle)],
            ]
        )
    return table(head, rows)


def number(value: float) -> str:
    """Three digits or so."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"


def milliseconds(seconds: float) -> str:
    """For tables."""
    return number(1e3 * seconds)


def percent(share: float) -> str:
    """For tables."""
    return f"{number(100 * share)} %"


def _bar(ratio: Ratio) -> str:
    if ratio.bar is None:
        return ""
    return f"{'≤' if ratio.at_most else '≥'} {number(ratio.bar)} {ratio.unit}"


def _table(found: Table) -> str:
    note = f"\n{found.note}\n" if found.note else ""
    return f"**{found.title}**\n\n{table(found.head, found.rows)}{note}"


def _took(results: Sequence[Result]) -> str:
    seconds = sum(result.seconds for result in results)
    runs = "one run" if len(results) == 1 else f"{len(results)} runs"
    return f"{results[-1].time[:16].replace('T', ' ')} UTC, {runs}, {seconds:.0f} s"
