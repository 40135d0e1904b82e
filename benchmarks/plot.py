"""Plots as SVG files: a few lines over two axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from .result import Line, Plot

WIDTH, HEIGHT = 800, 360  # pixels
LEFT, RIGHT, TOP, BOTTOM = (
    64,
    240,
    34,
    44,
)  # margins of the drawing, in pixels; names of lines are on the right
COLOURS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)
"""Okabe and Ito's palette, which colour-blind people can tell apart."""

TICKS: Final = 5  # steps of a linear axis, about


class Axis:
    """Values to pixels, and where the ticks are."""

    def __init__(self, values: Sequence[float], pixels: tuple[float, float], *, log: bool) -> None:
        self.log = log
        low, high = min(values), max(values)
        if log:
            low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
            high = high if high > low else 10 * low
        else:
            low, high = min(0.0, low), high if high > min(0.0, low) else min(0.0, low) + 1
        self.low, self.high, self._pixels = float(low), float(high), pixels

    def at(self, value: float) -> float:
        """The pixel of a value."""
        scale: Callable[[float], float] = math.log10 if self.log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self._pixels[0] + share * (self._pixels[1] - self._pixels[0])

    def ticks(self) -> list[float]:
        """Round values inside the axis."""
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        raw = (self.high - self.low) / TICKS
        size = 10 ** math.floor(math.log10(raw))
        step = next(s * size for s in (1, 2, 5, 10) if s * size >= raw)
        first, last = math.ceil(self.low / step), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def draw(plot: Plot) -> str:
    """The plot as an SVG document."""
    across = Axis([v for s in plot.lines for v in s.x], (LEFT, WIDTH - RIGHT), log=plot.log_x)
    up = Axis([v for s in plot.lines for v in s.y], (HEIGHT - BOTTOM, TOP), log=plot.log_y)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text((LEFT + WIDTH - RIGHT) / 2, 18, plot.title, size=14),
        *(_grid_x(across, tick) for tick in across.ticks()),
        *(_grid_y(up, tick) for tick in up.ticks()),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, plot.x),
        f'<g transform="translate(14 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, plot.y)}</g>',
    ]
    for number, line in enumerate(plot.lines):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_line(across, up, line, colour))
        parts.append(
            _text(WIDTH - RIGHT + 12, TOP + 14 + 18 * number, line.label, anchor="start", colour=colour)
        )
    return "\n".join([*parts, "</svg>", ""])


def _line(across: Axis, up: Axis, line: Line, colour: str) -> str:
    points = [(across.at(x), up.at(y)) for x, y in zip(line.x, line.y, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = (
        "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points) if len(points) < 40 else ""
    )
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/><g fill="{colour}">{dots}</g>'


def _grid_x(axis: Axis, value: float) -> str:
    x = axis.at(value)
    line = f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#ddd"/>'
    return line + _text(x, HEIGHT - BOTTOM + 16, label(value))


def _grid_y(axis: Axis, value: float) -> str:
    y = axis.at(value)
    line = f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>'
    return line + _text(LEFT - 6, y + 4, label(value), anchor="end")


def label(value: float) -> str:
    """A tick's text: plain up to 9,999, then powers of ten."""
    if value and (abs(value) >= 1e4 or abs(value) < 1e-3):
        power = math.floor(math.log10(abs(value)) + 1e-9)
        digits = f"{value / 10**power:g}"
        return f"1e{power}" if digits == "1" else f"{digits}e{power}"
    return f"{value:.10g}"


def _text(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle", colour: str = "#333"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(text)}</text>"
    )
