"""What a tensor is made of when others were put together: boxes of it, each a strided part of one. Pure geometry.

A function here gives None when the outcome cannot be told in boxes, or only in more than `MAX_TILES` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

MAX_TILES: Final = 1 << 12
"""Of one tensor. A permutation of single rows is not worth a map: it is rather computed each time."""

NOTHING: Final = ""
"""Source of a tile of elements that are nobody's: left as they were, or set to something else."""

Tiles = tuple["Tile", ...]


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of a tensor, and the part of a trainer's tensor that it shows.

    Index i of the tensor, start <= i < start + extent, is element offset + sum((i - start) * strides) of the source.

    Attributes:
        start: first index in each dimension.
        extent: size in each dimension; none is 0.
        tensor: name of the source, or `NOTHING`.
        strides: in the source's elements; 0 where an element is shown several times.
        offset: of the source's first element in memory.
    """

    start: tuple[int, ...]
    extent: tuple[int, ...]
    tensor: str
    strides: tuple[int, ...]
    offset: int

    def cut(self, dim: int, begin: int, end: int) -> Tile | None:
        """The part whose indices along `dim` are in [begin, end)."""
        first = max(begin, self.start[dim])
        n = min(end, self.start[dim] + self.extent[dim]) - first
        if n <= 0:
            return None
        offset = self.offset + (first - self.start[dim]) * self.strides[dim]
        return replace(
            self, start=_put(self.start, dim, first), extent=_put(self.extent, dim, n), offset=offset
        )

    def moved(self, dim: int, distance: int) -> Tile:
        """The same part elsewhere."""
        return replace(self, start=_put(self.start, dim, self.start[dim] + distance))

    def picked(self, dims: Sequence[int]) -> Tile:
        """With these of its dimensions, in this order; -1: a new one of size 1."""
        return replace(
            self,
            start=tuple(0 if d < 0 else self.start[d] for d in dims),
            extent=tuple(1 if d < 0 else self.extent[d] for d in dims),
            strides=tuple(0 if d < 0 else self.strides[d] for d in dims),
        )

    def spread(self, dim: int, n: int) -> Tile:
        """A dimension of size 1 expanded."""
        return replace(self, extent=_put(self.extent, dim, n), strides=_put(self.strides, dim, 0))


def cat(parts: Sequence[tuple[Tiles, int]], dim: int) -> Tiles | None:
    """Tensors one after another along `dim`, each with its size there."""
    found: list[Tile] = []
    at = 0
    for tiles, size in parts:
        found += [tile.moved(dim, at) for tile in tiles]
        at += size
    return joined(found)


def stack(parts: Sequence[Tiles], dim: int) -> Tiles | None:
    """Tensors along a new dimension."""
    found = []
    for at, tiles in enumerate(parts):
        for tile in tiles:
            dims = [*range(len(tile.start))]
            dims.insert(dim, -1)
            found.append(tile.picked(dims).moved(dim, at))
    return joined(found)


def index(tiles: Tiles, dim: int, rows: Sequence[int]) -> Tiles | None:
    """Indices `rows` along `dim`, in this order."""
    runs = list(_runs(rows))
    if len(runs) * len(tiles) > MAX_TILES * 16:
        return None
    found = []
    for at, first, n, step in runs:
        for tile in tiles:
            part = _stepped(tile, dim, first, n, step)
            if part is not None:
                found.append(part.moved(dim, at))
    return joined(found)


def split(tiles: Iterable[Tile], dim: int, inner: int) -> Tiles:
    """Dimension `dim` as two, the second of size `inner`."""
    found: list[Tile] = []
    for tile in tiles:
        begin, end = tile.start[dim], tile.start[dim] + tile.extent[dim]
        first, last = -(-begin // inner) * inner, end // inner * inner  # whole rows between
        bounds = [begin, first, last, end] if first < last else [begin, first, end]
        for low, high in pairwise(bounds):
            part = tile.cut(dim, low, high)
            if part is not None:
                found.append(_folded(part, dim, inner))
    return tuple(found)


def merge(tiles: Iterable[Tile], dim: int, inner: int) -> Iterator[Tile]:
    """Dimensions `dim` and the next one, of size `inner`, as one."""
    for tile in tiles:
        rows, stride = tile.extent[dim], tile.strides[dim + 1]
        full = tile.extent[dim + 1] == inner
        if rows == 1 or (full and (inner == 1 or tile.strides[dim] == inner * stride)):
            yield _flat(tile, dim, inner)
        else:
            for row in range(tile.start[dim], tile.start[dim] + rows):
                part = tile.cut(dim, row, row + 1)
                if part is not None:
                    yield _flat(part, dim, inner)


def joined(tiles: Iterable[Tile]) -> Tiles | None:
    """The same with neighbours as one, as far as they are one part of their source; ascending."""
    found = sorted(tiles, key=lambda t: t.start)
    before = -1
    while before != len(found):
        before = len(found)
        for dim in reversed(range(len(found[0].start) if found else 0)):
            found = _joined_along(found, dim)
    return tuple(sorted(found, key=lambda t: t.start)) if len(found) <= MAX_TILES else None


def _joined_along(tiles: list[Tile], dim: int) -> list[Tile]:
    lines: dict[tuple[object, ...], list[Tile]] = {}
    for tile in sorted(tiles, key=lambda t: t.start[dim]):
        key = tile.tensor, _put(tile.start, dim, 0), _put(tile.extent, dim, 0)
        line = lines.setdefault(key, [])
        one = _union(line[-1], tile, dim) if line else None
        if one is None:
            line.append(tile)
        else:
            line[-1] = one
    return [tile for line in lines.values() for tile in line]


def _union(a: Tile, b: Tile, dim: int) -> Tile | None:
    """`a` and, after it along `dim`, `b`, if they are one strided part."""
    alike = all(
        s == t
        for d, (s, t, n) in enumerate(zip(a.strides, b.strides, a.extent, strict=True))
        if d != dim and n > 1
    )
    if not alike or a.start[dim] + a.extent[dim] != b.start[dim]:
        return None
    distance, rows = b.offset - a.offset, a.extent[dim]
    stride = a.strides[dim] if rows > 1 else distance
    if stride < 0 or distance != rows * stride or (b.extent[dim] > 1 and b.strides[dim] != stride):
        return None
    return replace(a, extent=_put(a.extent, dim, rows + b.extent[dim]), strides=_put(a.strides, dim, stride))


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Rows as runs with one step each: position, first row, how many, step."""
    at = 0
    while at < len(rows):
        step = rows[at + 1] - rows[at] if at + 1 < len(rows) else 0
        n = 1
        while step >= 0 and at + n < len(rows) and rows[at + n] - rows[at + n - 1] == step:
            n += 1
        yield at, rows[at], n, step if n > 1 else 0
        at += n


def _stepped(tile: Tile, dim: int, first: int, n: int, step: int) -> Tile | None:
    """The part at rows first, first + step, … (n of them), its place being the number of the row."""
    begin, end = tile.start[dim], tile.start[dim] + tile.extent[dim]
    if step:
        low, high = max(0, -(-(begin - first) // step)), min(n, -(-(end - first) // step))
    else:
        low, high = (0, n) if begin <= first < end else (0, 0)
    if low >= high:
        return None
    return replace(
        tile,
        start=_put(tile.start, dim, low),
        extent=_put(tile.extent, dim, high - low),
        strides=_put(tile.strides, dim, tile.strides[dim] * step),
        offset=tile.offset + (first + low * step - begin) * tile.strides[dim],
    )


def _folded(tile: Tile, dim: int, inner: int) -> Tile:
    """A part of one row, or of whole rows, of size `inner`."""
    row, column = divmod(tile.start[dim], inner)
    n, stride = tile.extent[dim], tile.strides[dim]
    rows, columns = (n // inner, inner) if not column and n % inner == 0 else (1, n)
    return replace(
        tile,
        start=(*tile.start[:dim], row, column, *tile.start[dim + 1 :]),
        extent=(*tile.extent[:dim], rows, columns, *tile.extent[dim + 1 :]),
        strides=(*tile.strides[:dim], inner * stride, stride, *tile.strides[dim + 1 :]),
    )


def _flat(tile: Tile, dim: int, inner: int) -> Tile:
    """Inverse of `_folded`, where it has one."""
    stride = tile.strides[dim + 1] if inner > 1 else tile.strides[dim]
    return replace(
        tile,
        start=(*tile.start[:dim], tile.start[dim] * inner + tile.start[dim + 1], *tile.start[dim + 2 :]),
        extent=(*tile.extent[:dim], tile.extent[dim] * tile.extent[dim + 1], *tile.extent[dim + 2 :]),
        strides=(*tile.strides[:dim], stride, *tile.strides[dim + 2 :]),
    )


def _put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
