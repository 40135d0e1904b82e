"""What a rank owns: its boxes cut into tiles, and the bits that they had in the last committed version."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightcast.codec import Geometry
from weightcast.codec.boxes import Box, digest_box
from weightcast.codec.memory import UNSIGNED, bytes_at
from weightcast.codec.update import update_box
from weightcast.manifest.ahead import map_ahead
from weightcast.publisher.placement import Slice, boxes_of
from weightcast.publisher.sources import Casts
from weightcast.schemas.digest import Digest
from weightcast.schemas.layout import MIX, Layout, TensorSpec
from weightcast.schemas.shard import Row

from .plan import Corner, Entry, Piece


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a piece that is dealt with at once: at most a row's elements, side by side in the piece's C order.

    Attributes:
        entry: position of its slice in the rank's table.
        spec: its tensor.
        corner: where it is in the tensor.
        at: byte at which its bits begin in memory that has those of all tiles.
        boxes: the same elements as boxes of the tensor, each with the byte offset in the tile at which it begins.
    """

    entry: int
    spec: TensorSpec
    corner: Corner
    at: int
    boxes: tuple[tuple[Box, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.corner.elements * self.spec.width


@dataclass(frozen=True, slots=True)
class Staged:
    """The present bits of a tile, in host memory and C order at `address`; `owner` keeps them."""

    tile: Tile
    address: int
    owner: object


class Tiles:
    """Some of what a rank holds, cut into tiles. Has none of the bits.

    Args:
        table: of the rank's slices.
        pieces: of them.
        row_elements: of a tile at most.
        mix: of the layout that they are part of.

    Attributes:
        geometry: of the tensors that have pieces.
        tiles: in the order of the pieces.
        elements: of all tiles.
        room: bytes that all tiles take one after the other, each aligned at any width.
    """

    def __init__(
        self, table: Sequence[Entry], pieces: Iterable[Piece], row_elements: int, mix: int = MIX
    ) -> None:
        pieces = [piece for piece in pieces if piece.corner.elements]
        specs = {table[p.entry].name: _spec(table[p.entry]) for p in pieces}
        self.geometry = Geometry(Layout.of(specs.values(), mix))
        self.tiles: list[Tile] = []
        self.room = 0
        for piece in pieces:
            for corner in cut_into_tiles(piece.corner, row_elements):
                tile = self._tile(piece.entry, specs[table[piece.entry].name], corner, self.room)
                self.tiles.append(tile)
                self.room += -(-tile.nbytes // 8) * 8
        self.elements = sum(tile.corner.elements for tile in self.tiles)

    def _tile(self, entry: int, spec: TensorSpec, corner: Corner, at: int) -> Tile:
        space = self.geometry[spec.dtype]
        first, done, boxes = int(space.starts[space.index[spec.name]]), 0, []
        for offset, length, run, stride in boxes_of(spec.shape, corner.start, corner.extent):
            boxes.append((Box(spec.dtype, first + offset, length, run, stride), done * spec.width))
            done += length
        return Tile(entry, spec, corner, at, tuple(boxes))

    def staged(self, slices: Sequence[Slice], table: Sequence[Entry], casts: Casts) -> Iterator[Staged]:
        """The present bits of each tile in turn; see `present`."""
        return (self.present(tile, slices, table, casts) for tile in self.tiles)

    @staticmethod
    def present(tile: Tile, slices: Sequence[Slice], table: Sequence[Entry], casts: Casts) -> Staged:
        """The present bits of a tile: where they lie if they can be read there, else a copy in host memory.

        Args:
            tile: one of these.
            slices: the rank's, as in its table.
            table: of them.
            casts: what the user wants rounded.
        """
        view = slices[tile.entry].tensor
        corner = table[tile.entry].corner
        for dim, (at, n) in enumerate(zip(tile.corner.start, tile.corner.extent, strict=True)):
            if n != corner.extent[dim]:
                view = view.narrow(dim, at - corner.start[dim], n)
        plain = _in_host_memory(casts(tile.spec.name, view) if casts else view)
        return Staged(tile, plain.data_ptr(), plain)

    def digest_of(self, tile: Tile, address: int) -> Digest:
        """Digest of the bits that a tile has at `address`."""
        space = self.geometry[tile.spec.dtype]
        return sum((digest_box(space, box, address + at) for box, at in tile.boxes), Digest())


class Holding(Tiles):
    """The tiles that a rank owns, and a contiguous copy of their old bits in host memory. It moves only after a commit.

    Args:
        table, pieces, row_elements, mix: as for `Tiles`.
        path: file to map for the copy; None: anonymous memory.
    """

    def __init__(
        self,
        table: Sequence[Entry],
        pieces: Iterable[Piece],
        row_elements: int,
        path: Path | None = None,
        mix: int = MIX,
    ) -> None:
        super().__init__(table, pieces, row_elements, mix)
        self.nbytes = sum(tile.nbytes for tile in self.tiles)
        self._bits = _allocate(self.room, path)
        self._base = self._bits.ctypes.data

    def address(self, tile: Tile) -> int:
        """Of a tile's old bits, in C order."""
        return self._base + tile.at

    def copy(self, staged: Iterable[Staged]) -> None:
        """Take the present bits as the old ones, without any comparison."""
        for new in staged:
            np.copyto(self._bytes(new.tile), bytes_at(new.address, new.tile.nbytes))

    def fill(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take the bits of these whole tensors, in their own shape, for the tiles that lie in them."""
        for tile in self.tiles:
            source = tensors.get(tile.spec.name)
            if source is not None:
                inside = tuple(slice(s, s + n) for s, n in zip(*tile.corner, strict=True))
                np.copyto(self.old(tile), source[inside])

    def update(self, rows: Iterable[tuple[Row, int]], pool: Executor) -> Digest:
        """Move on by the rows of a version that was committed, each told with the address of its old bits.

        Returns:
            What that moved the digest by.
        """

        def one(pair: tuple[Row, int]) -> Digest:
            row, address = pair
            return update_box(self.geometry[row.dtype], row, address)

        return sum(map_ahead(pool, one, rows), Digest())

    def digest(self, pool: Executor, names: Callable[[str], bool] = lambda _: True) -> Digest:
        """Of the old bits of all tiles of these tensors."""

        def one(tile: Tile) -> Digest:
            return self.digest_of(tile, self.address(tile))

        return sum(map_ahead(pool, one, (t for t in self.tiles if names(t.spec.name))), Digest())

    def old(self, tile: Tile) -> npt.NDArray[Any]:
        """The old bits of a tile: a view in its own shape, unsigned."""
        return self._bytes(tile).view(UNSIGNED[tile.spec.width]).reshape(tile.corner.extent)

    def _bytes(self, tile: Tile) -> npt.NDArray[np.uint8]:
        return self._bits[tile.at : tile.at + tile.nbytes]


def cut_into_tiles(corner: Corner, limit: int) -> Iterator[Corner]:
    """Cut a box into boxes of at most `limit` elements that follow each other in its own C order."""
    extent = corner.extent
    dim = next((d for d in range(len(extent)) if math.prod(extent[d + 1 :]) <= limit), 0)
    if math.prod(extent[dim:]) <= limit and not dim:
        yield corner
        return
    step = max(1, limit // math.prod(extent[dim + 1 :]))
    outer = product(*(range(n) for n in extent[:dim]))
    for index in outer:
        start = tuple(s + i for s, i in zip(corner.start, index, strict=False))
        for at in range(0, extent[dim], step):
            n = min(step, extent[dim] - at)
            yield Corner(
                (*start, corner.start[dim] + at, *corner.start[dim + 1 :]),
                (*(1 for _ in index), n, *extent[dim + 1 :]),
            )


def _spec(entry: Entry) -> TensorSpec:
    return TensorSpec(entry.name, entry.dtype, entry.shape)


def _allocate(nbytes: int, path: Path | None) -> npt.NDArray[np.uint8]:
    """Memory that takes none before it is written."""
    if path is None or not nbytes:
        return np.zeros(nbytes, np.uint8)
    path.unlink(missing_ok=True)  # who still reads an older copy there must not lose it
    with path.open("w+b") as file:
        file.truncate(nbytes)
        return np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
