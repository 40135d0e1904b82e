"""What a storage is made of, and what a view of it shows. Pure geometry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from weightcast.codec.regions import Region, overlaps

from .tiles import MAX_TILES, NOTHING, Tile, Tiles, joined, merge, split

Box = dict[int, tuple[int, int]]
"""Some dimensions of a frame: first index, and how many."""


@dataclass(frozen=True, slots=True)
class Mosaic:
    """What a storage holds.

    Attributes:
        width: bytes of one element.
        frame: sizes of a tensor that lies in it in C order, from its begin.
        tiles: of that tensor. Disjoint, and all of it.
    """

    width: int
    frame: tuple[int, ...]
    tiles: Tiles

    @classmethod
    def of(cls, width: int, storage: Region, tiles: Tiles) -> Mosaic | None:
        """Of a new storage, given as the tensor that fills it. None if elements of the storage are left out."""
        order = sorted(range(len(storage.shape)), key=lambda d: (-storage.strides[d], storage.shape[d] == 1))
        frame = tuple(storage.shape[d] for d in order)
        real = [d for d in order if storage.shape[d] != 1]
        if storage.offset or any(
            storage.strides[d] != math.prod(storage.shape[e] for e in real[i + 1 :])
            for i, d in enumerate(real)
        ):
            return None
        return cls(width, frame, tuple(tile.picked(order) for tile in tiles))

    @classmethod
    def blank(cls, width: int, elements: int) -> Mosaic:
        """Of a storage to which nothing was written yet."""
        return cls(width, (elements,), (Tile((0,), (elements,), NOTHING, (0,), 0),) if elements else ())

    @property
    def names(self) -> frozenset[str]:
        """The tensors in it."""
        return frozenset(tile.tensor for tile in self.tiles) - {NOTHING}

    def view(self, view: Region) -> Tiles | None:
        """What a view of the storage shows."""
        if not view.elements:
            return ()
        seen = _seen(self, view)
        return _shown(_boxed(seen.storage.tiles, seen.box), view, seen.groups) if seen else None

    def written(self, view: Region, tiles: Tiles) -> Mosaic | None:
        """The storage after a view of it was filled with `tiles`."""
        if not view.elements:
            return self
        seen = _seen(self, view) if not overlaps(view) else None
        if seen is None:
            return None
        dims: list[int] = []
        for d in range(len(view.shape)):
            group = sorted(seen.groups[d].items()) if d in seen.groups else [(-1, (0, 1))]
            for at in range(1, len(group)):
                tiles = split(tiles, len(dims) + at - 1, math.prod(n for _, (_, n) in group[at:]))
            dims += [j for j, _ in group]
        order = [dims.index(j) if j in dims else -1 for j in range(len(seen.storage.frame))]
        new = [tile.picked(order) for tile in tiles]
        for j, (begin, _) in seen.box.items():
            new = [tile.moved(j, begin) for tile in new]
        found = joined([*_around(seen.storage.tiles, seen.box), *new])
        return replace(seen.storage, tiles=found) if found is not None else None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A storage in whose frame a view is a box.

    Attributes:
        storage: with dimensions fine enough.
        groups: for each dimension of the view that has a stride: the frame's dimensions that it is.
        box: in the frame: dimension -> first index, how many.
    """

    storage: Mosaic
    groups: dict[int, Box]
    box: Box


def _seen(storage: Mosaic, view: Region) -> _Seen | None:
    dims = [d for d, n in enumerate(view.shape) if n > 1 and view.strides[d]]
    steps = sorted({view.strides[d] for d in dims})
    fine = _refined(storage, steps)
    if fine is None:  # another frame may do
        flat = _flattened(storage)
        fine = _refined(flat, steps) if flat is not None else None
    if fine is None:
        return None
    strides = _strides(fine.frame)
    digits = _digits(view.offset, strides)
    groups: dict[int, Box] = {}
    taken: set[int] = set()
    for d in dims:
        group = _group(fine.frame, digits, strides.index(view.strides[d]), view.shape[d])
        if group is None or taken & group.keys():
            return None
        groups[d] = group
        taken |= group.keys()
    box = {j: (at, 1) for j, at in enumerate(digits)}
    for group in groups.values():
        box |= group
    return _Seen(fine, groups, box)


def _flattened(storage: Mosaic) -> Mosaic | None:
    """With one dimension."""
    tiles: Iterable[Tile] = storage.tiles
    for inner in storage.frame[1:]:
        tiles = list(merge(tiles, 0, inner))
        if len(tiles) > MAX_TILES * 16:
            return None
    found = joined(tiles)
    return replace(storage, frame=(math.prod(storage.frame),), tiles=found) if found is not None else None


def _refined(mosaic: Mosaic, strides: Sequence[int]) -> Mosaic | None:
    """The same with dimensions split until each of `strides` is one of the frame's."""
    frame, tiles = list(mosaic.frame), mosaic.tiles
    for stride in strides:
        have = _strides(frame)
        if stride in have:
            continue
        dim = next((d for d, s in enumerate(have) if 0 < s < stride), None)
        if dim is None or stride % have[dim] or frame[dim] % (stride // have[dim]):
            return None
        inner = stride // have[dim]
        frame[dim : dim + 1] = [frame[dim] // inner, inner]
        tiles = split(tiles, dim, inner)
    return Mosaic(mosaic.width, tuple(frame), tiles)


def _strides(frame: Sequence[int]) -> list[int]:
    """Of C order; -1 for dimensions of size 1, which have none."""
    strides = [math.prod(frame[d + 1 :]) for d in range(len(frame))]
    return [-1 if n == 1 else s for n, s in zip(frame, strides, strict=True)]


def _digits(offset: int, strides: Sequence[int]) -> list[int]:
    digits = []
    for stride in strides:
        digit, offset = divmod(offset, stride) if stride > 0 else (0, offset)
        digits.append(digit)
    return digits


def _group(frame: Sequence[int], digits: Sequence[int], dim: int, n: int) -> Box | None:
    """The dimensions that `n` steps along `dim` go through: dimension -> first index, how many. Outermost last."""
    group: Box = {}
    while digits[dim] + n > frame[dim]:  # a carry: whole rows, and on in the dimension outside
        if digits[dim] or n % frame[dim] or not dim:
            return None
        group[dim] = (0, frame[dim])
        n //= frame[dim]
        dim -= 1
    group[dim] = (digits[dim], n)
    return group


def _boxed(tiles: Iterable[Tile], box: Box) -> list[Tile]:
    """Parts inside a box, in indices of the box."""
    found = []
    for tile in tiles:
        part: Tile | None = tile
        for dim, (begin, n) in box.items():
            part = part.cut(dim, begin, begin + n) if part is not None else None
        if part is not None:
            starts = tuple(at - box[d][0] for d, at in enumerate(part.start))
            found.append(replace(part, start=starts))
    return found


def _around(tiles: Iterable[Tile], box: Box) -> Iterator[Tile]:
    """Parts outside a box."""
    for tile in tiles:
        rest: Tile | None = tile
        for dim, (begin, n) in box.items():
            if rest is None:
                break
            stop = rest.start[dim] + rest.extent[dim]
            outside = rest.cut(dim, 0, begin), rest.cut(dim, begin + n, stop)
            yield from (part for part in outside if part is not None)
            rest = rest.cut(dim, begin, begin + n)


def _shown(tiles: Iterable[Tile], view: Region, groups: dict[int, Box]) -> Tiles | None:
    """Tiles of a frame's box as those of the view, whose dimension d is the frame's dimensions groups[d]."""
    dims: list[int] = []
    sizes: list[list[int]] = []
    for d in range(len(view.shape)):
        group = sorted(groups[d].items()) if d in groups else [(-1, (0, 1))]
        dims += [j for j, _ in group]
        sizes.append([n for _, (_, n) in group])
    found = [tile.picked(dims) for tile in tiles]
    for d, inside in enumerate(sizes):
        for inner in inside[1:]:
            found = list(merge(found, d, inner))
            if len(found) > MAX_TILES * 16:
                return None
    expanded = [d for d, n in enumerate(view.shape) if n > 1 and not view.strides[d]]
    for d in expanded:
        found = [tile.spread(d, view.shape[d]) for tile in found]
    return joined(found)
