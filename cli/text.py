"""Text that is safe for any terminal: names come from the store, and are not trusted."""

from __future__ import annotations

from typing import TextIO


def printable(text: str, stream: TextIO) -> str:
    """`text` with control characters, and what `stream` cannot encode, as backslash escapes."""
    if text.isascii() and text.isprintable():
        return text
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    encoding = stream.encoding or "ascii"
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def size(count: int) -> str:
    """Bytes for people, in binary units.

    >>> size(1536)
    '1.5 KiB'
    """
    number = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{count} B" if unit == "B" else f"{number:.1f} {unit}"


def share(part: int, whole: int) -> str:
    """A percentage; never "0 %" for some, nor "100 %" for not all."""
    if not whole or not part:
        return "0 %"
    if part == whole:
        return "100 %"
    return f"{min(max(100 * part / whole, 0.001), 99.999):.3g} %"


def age(seconds: float | None) -> str:
    """A time span in its largest unit."""
    if seconds is None:
        return "unknown"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
