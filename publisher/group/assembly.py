"""A snapshot out of whole parts: read from the store tensor by tensor, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from weightcast.codec import Geometry
from weightcast.codec.boxes import Box, digest_box
from weightcast.codec.memory import UNSIGNED
from weightcast.codec.update import update_box
from weightcast.manifest.store import Store
from weightcast.publisher.placement import Span, boxes_of
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.manifest import ShardRef
from weightcast.schemas.part import Part, Tile
from weightcast.schemas.shard import Row, decode_shard

HELD_BYTES: Final = 512 << 20
"""Of tiles kept for the next piece. If columns of a matrix are divided, one tile of each rank is needed at a time."""

_Bits = npt.NDArray[Any]


def layout_of(parts: Sequence[Part]) -> Layout:
    """The tensors that whole parts carry, and their second names.

    Raises:
        UsageError: two parts disagree about a tensor; names it.
    """
    specs: dict[str, TensorSpec] = {}
    ties: dict[str, str] = {}
    for part in parts:
        ties |= part.ties
        for tile in (tile for tiles in part.tiles for tile in tiles):
            spec = TensorSpec(tile.tensor, tile.dtype, tuple(tile.shape))
            if specs.setdefault(tile.tensor, spec) != spec:
                other = specs[tile.tensor]
                raise UsageError(
                    f"tensor {tile.tensor!r} is {other.dtype}{list(other.shape)} in one part and {spec.dtype}"
                    f"{list(spec.shape)} in that of rank {part.rank}"
                )
    ties = {name: first for name, first in ties.items() if name not in specs and first in specs}
    return Layout.of(
        [*specs.values(), *(replace(specs[f], name=n, tied_to=f) for n, f in ties.items())], parts[0].mix
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """A tile, and the shard that carries it as its `number`-th."""

    tile: Tile
    shard: int
    number: int


class Assembly:
    """Gives the pieces that `write_snapshot` asks for. Used by one thread.

    Attributes:
        digest: of all pieces given so far.
    """

    def __init__(self, store: Store, layout: Layout, parts: Iterable[Part]) -> None:
        self._store = store
        self._geometry = Geometry(layout)
        self._shards: list[ShardRef] = []
        self._carries: list[list[Tile]] = []
        self._places: dict[str, list[_Place]] = {}
        self._held: OrderedDict[int, list[_Bits]] = OrderedDict()
        self._held_bytes = 0
        self.digest = Digest()
        for part in parts:
            for ref, tiles in zip(part.shards, part.tiles, strict=True):
                for number, tile in enumerate(tiles):
                    place = _Place(tile, len(self._shards), number)
                    self._places.setdefault(tile.tensor, []).append(place)
                self._shards.append(ref)
                self._carries.append(tiles)

    def read(self, spec: TensorSpec, begin: int, end: int) -> bytes:
        """Elements [begin, end) of a tensor, little-endian. To be asked for in ascending order, each once.

        Raises:
            UsageError: the parts do not carry all of them.
            Corrupt: a shard is not what its part says.
        """
        piece = np.empty(end - begin, UNSIGNED[spec.width])
        filled = 0
        for place in self._places.get(spec.name, ()):
            spans = boxes_of(spec.shape, place.tile.start, place.tile.extent)
            if any(s.offset < end and Box(spec.dtype, *s).stop > begin for s in spans):
                filled += _copy(self._bits(place), spans, piece, begin)
        if filled != end - begin:
            raise UsageError(
                f"the parts carry {filled} of {end - begin} elements {begin} to {end} of tensor {spec.name!r}",
                hint="every element must be in exactly one part",
            )
        space = self._geometry[spec.dtype]
        first = int(space.starts[space.index[spec.name]])
        self.digest += digest_box(space, Box(spec.dtype, first + begin, end - begin), piece.ctypes.data)
        return piece.tobytes()

    def _bits(self, place: _Place) -> _Bits:
        """All bits of a tile, in its C order."""
        if place.shard not in self._held:
            tiles = self._fetch(place.shard)
            self._held[place.shard] = tiles
            self._held_bytes += sum(bits.nbytes for bits in tiles)
            while self._held_bytes > HELD_BYTES and len(self._held) > 1:
                _, dropped = self._held.popitem(last=False)
                self._held_bytes -= sum(bits.nbytes for bits in dropped)
        self._held.move_to_end(place.shard)
        return self._held[place.shard][place.number]

    def _fetch(self, shard: int) -> list[_Bits]:
        ref = self._shards[shard]
        rows = iter(decode_shard(self._store.fetch(ref.key, size=ref.size, sha256=ref.sha256), ref.key))
        tiles = [self._decoded(tile, rows, ref.key) for tile in self._carries[shard]]
        if next(rows, None) is not None:
            raise Corrupt(f"shard {ref.key} has more rows than its part says")
        return tiles

    def _decoded(self, tile: Tile, rows: Iterator[Row], where: str) -> _Bits:
        space = self._geometry[tile.dtype]
        spans = boxes_of(tile.shape, tile.start, tile.extent)
        bits = np.zeros(sum(span.length for span in spans), UNSIGNED[space.width])
        done = 0
        for span in spans:
            row = next(rows, None)
            figures = (
                None if row is None else (row.tensor, row.coding, row.offset, row.length, row.run, row.stride)
            )
            if row is None or figures != (tile.tensor, "whole", *span):
                raise Corrupt(f"shard {where} does not carry the tile of {tile.tensor!r} that its part says")
            update_box(space, row, bits.ctypes.data + done * space.width)
            done += span.length
        return bits


def _copy(bits: _Bits, spans: Iterable[Span], piece: _Bits, begin: int) -> int:
    """Copy what lies in [begin, begin + len(piece)) of a tensor; how many elements that was.

    Args:
        bits: of a tile, in its C order.
        spans: where these are in the tensor.
        piece: where they go.
        begin: element of the tensor at which it begins.
    """
    done = copied = 0
    for span in spans:
        run, stride = (span.run, span.stride) if span.run else (span.length, span.length)
        runs = span.length // run
        part = bits[done : done + span.length].reshape(runs, run)
        done += span.length
        at = span.offset - begin  # of the first run in the piece
        first = max(0, -(-(1 - run - at) // stride))  # the first run that ends inside
        last = min(runs, max(0, -(-(len(piece) - at) // stride)))  # one past the last that begins inside
        for number in _edges(first, last):
            lo = max(0, at + number * stride)
            hi = min(len(piece), at + number * stride + run)
            piece[lo:hi] = part[number, lo - at - number * stride : hi - at - number * stride]
            copied += hi - lo
        if last - first > 2:  # those between the first and the last are whole
            start = at + (first + 1) * stride
            target = np.lib.stride_tricks.as_strided(
                piece[start:], (last - first - 2, run), (stride * piece.itemsize, piece.itemsize)
            )
            target[:] = part[first + 1 : last - 1]
            copied += target.size
    return copied


def _edges(first: int, last: int) -> tuple[int, ...]:
    if last <= first:
        return ()
    return (first,) if last - first == 1 else (first, last - 1)
