"""Where the elements of checkpoint tensors lie in a trainer's own tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from weightcast.codec.regions import Move, Region
from weightcast.schemas.errors import UsageError

from .slices import Slice
from .tiles import Tile, Tiles

Convert = Callable[
    [Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
]


_KEPT: Final = 4
"""Tensors of random bits that are kept whatever their size: converters go to and fro between those of a layer."""

_KEPT_BYTES: Final = 1 << 31
"""And more of them up to this."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a tensor lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Look:
        """Of a plain tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the converter gives.

    Attributes:
        name: of the checkpoint tensor.
        dtype: of both.
        shape: of the whole checkpoint tensor.
        start: first index of the output in it.
        extent: the output's shape.
        tiles: of the output, disjoint and all of it; None: computed.
        reason: why it is computed; "" if it is not.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    tiles: Tiles | None
    reason: str


class LayoutMap:
    """The trainer's half of the copy plan, by `record_map`. Proved on its first use.

    It holds no tensors: give it the trainer's each time. It is not safe for use by several threads at once.

    Attributes:
        outputs: in the converter's order.
    """

    def __init__(self, convert: Convert, looks: Mapping[str, Look], outputs: tuple[Output, ...]) -> None:
        self.outputs = outputs
        self._convert = convert
        self._looks = dict(looks)
        self._proved = False

    @property
    def computed(self) -> dict[str, str]:
        """Outputs that are not only moved, and why: the converter is run for these each time."""
        return {o.name: o.reason for o in self.outputs if o.tiles is None}

    @property
    def moves(self) -> tuple[Move, ...]:
        """Everything else, as pairs of strided regions: of the checkpoint tensor's elements in C order, and of the
        trainer tensor's memory from its first element on.
        """
        return tuple(_move(o, tile) for o in self.outputs for tile in o.tiles or ())

    def slices(self, trainer: Mapping[str, torch.Tensor]) -> Iterator[Slice]:
        """The outputs as boxes of checkpoint tensors, in order: views of the trainer's tensors where they can be.

        What is computed is the converter's own tensor: if it uses memory twice, valid until the next slice is asked
        for, and nothing for a `GroupPublisher`, which takes all slices before it reads one.

        Raises:
            UsageError: the trainer's tensors are not those of the recording; or as `check`, at the first call.
        """
        self._begin(trainer)
        for output, made in self._all(trainer):
            if made is not None:
                yield Slice(output.name, output.shape, output.start, made.detach())
            for tile in output.tiles or ():
                start = tuple(a + b for a, b in zip(output.start, tile.start, strict=True))
                yield Slice(output.name, output.shape, start, _view(trainer, tile, output.dtype))
            if output.tiles == ():
                empty = torch.empty(output.extent, dtype=output.dtype)
                yield Slice(output.name, output.shape, output.start, empty)

    def tensors(self, trainer: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """The outputs as whole tensors, in order: what a `Publisher` takes. One that is in several pieces is a copy.

        Raises:
            UsageError: as `slices`; or an output is only a part of its checkpoint tensor.
        """
        for output in self.outputs:
            if output.extent != output.shape:
                raise UsageError(
                    f"{output.name!r} of shape {list(output.shape)} is here in part only: {list(output.extent)}",
                    hint="give slices() to a GroupPublisher",
                )
        self._begin(trainer)
        for output, made in self._all(trainer):
            yield output.name, made.detach() if made is not None else _assembled(output, trainer)

    def check(self, trainer: Mapping[str, torch.Tensor]) -> None:
        """Prove the map: on random bits, then on the trainer's own, it must give what the converter gives, bit for bit.

        Random bits are made for a few tensors at a time: host memory for four, or 2 GiB of them. Both also tell a
        converter whose moves depend on values, as far as these two differ. `slices` and `tensors` call this once.

        Raises:
            UsageError: they differ; names the first output that does.
        """
        self._fits(trainer)
        if len(self.computed) < len(self.outputs):
            self._prove(_Random(self._looks), "on random bits")
            self._prove(trainer, "on the trainer's tensors")
        self._proved = True

    def _begin(self, trainer: Mapping[str, torch.Tensor]) -> None:
        if self._proved:
            self._fits(trainer)
        else:
            self.check(trainer)

    def _fits(self, trainer: Mapping[str, torch.Tensor]) -> None:
        for name, look in self._looks.items():
            found = Look.of(trainer[name]) if name in trainer else None
            if found != look:
                raise UsageError(
                    f"trainer tensor {name!r} is not what the map was recorded with: expected {look}, found {found}",
                    hint="record the map again",
                )

    def _all(self, trainer: Mapping[str, torch.Tensor]) -> Iterator[tuple[Output, torch.Tensor | None]]:
        """Outputs, and their tensors if they are computed."""
        if not self.computed:
            yield from ((output, None) for output in self.outputs)
            return
        for output, tensor in self._run(trainer, ""):
            yield output, tensor if output.tiles is None else None

    def _run(self, source: Mapping[str, torch.Tensor], how: str) -> Iterator[tuple[Output, torch.Tensor]]:
        """The converter, held to what it gave when it was recorded."""
        found = _stepped(self._convert, source)
        for output in self.outputs:
            name, tensor = next(found, (None, None))
            look = None if tensor is None else (name, tensor.dtype, tuple(tensor.shape))
            if tensor is None or look != (output.name, output.dtype, output.extent):
                raise _differs(f"{output.name!r} {output.dtype} {list(output.extent)}", f"{look}", how)
            yield output, tensor
        for name, _ in found:
            raise _differs("nothing more", repr(name), how)

    def _prove(self, source: Mapping[str, torch.Tensor], how: str) -> None:
        for output, tensor in self._run(source, how):
            if output.tiles and not torch.equal(
                _bits(_assembled(output, source).to(tensor.device)), _bits(tensor)
            ):
                raise _differs(f"the bits of {output.name!r} as mapped", "other bits", how)


class _Random(Mapping[str, torch.Tensor]):
    """Tensors of random bits, the same whenever they are asked for; a few are kept."""

    def __init__(self, looks: Mapping[str, Look]) -> None:
        self._looks = looks
        self._numbers = {name: number for number, name in enumerate(looks)}
        self._made: dict[str, torch.Tensor] = {}  # in the order of use

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._made.pop(name, None)
        self._made[name] = self._make(name) if tensor is None else tensor
        while len(self._made) > _KEPT and sum(t.nbytes for t in self._made.values()) > _KEPT_BYTES:
            del self._made[next(iter(self._made))]
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._looks)

    def __len__(self) -> int:
        return len(self._looks)

    def _make(self, name: str) -> torch.Tensor:
        look = self._looks[name]
        span = Region(look.shape, look.strides, 0).stop
        random = torch.Generator().manual_seed(self._numbers[name])
        words = torch.empty(-(-span * look.dtype.itemsize // 8), dtype=torch.int64).random_(
            -(1 << 63), None, generator=random
        )
        if look.dtype is torch.bool:
            words &= 0x0101010101010101
        flat = words.view(torch.uint8)[: span * look.dtype.itemsize].view(look.dtype)
        return flat.as_strided(look.shape, look.strides)


def pairs(given: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a converter gave, as (name, tensor) pairs.

    Raises:
        UsageError: it is nothing of the kind.
    """
    for pair in given.items() if isinstance(given, Mapping) else given:
        name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, pair)
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UsageError(f"the converter must give (name, tensor) pairs, found {type(pair).__name__}")
        yield name, tensor


def _stepped(convert: Convert, source: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Without gradients while the converter runs, and only then."""
    with torch.no_grad():
        found = pairs(convert(source))
    while True:
        with torch.no_grad():
            pair = next(found, None)
        if pair is None:
            return
        yield pair


def _move(output: Output, tile: Tile) -> Move:
    strides = tuple(math.prod(output.shape[d + 1 :]) for d in range(len(output.shape)))
    first = sum((a + b) * s for a, b, s in zip(output.start, tile.start, strides, strict=True))
    return Move(
        output.name,
        Region(tile.extent, strides, first),
        tile.tensor,
        Region(tile.extent, tile.strides, tile.offset),
    )


def _view(trainer: Mapping[str, torch.Tensor], tile: Tile, dtype: torch.dtype) -> torch.Tensor:
    """The part of a trainer's tensor that a tile shows."""
    source = trainer[tile.tensor].detach()
    strides = tuple(s if n > 1 else 1 for s, n in zip(tile.strides, tile.extent, strict=True))
    part = source.as_strided(tile.extent, strides, int(source.storage_offset()) + tile.offset)
    return part if part.dtype is dtype else part.view(dtype)


def _assembled(output: Output, source: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A mapped output: a view if it is one tile, else a copy on the device of the first."""
    tiles = output.tiles or ()
    if len(tiles) == 1:
        return _view(source, tiles[0], output.dtype)
    device = source[tiles[0].tensor].device if tiles else None
    whole = torch.empty(output.extent, dtype=output.dtype, device=device)
    for tile in tiles:
        part = whole[tuple(slice(s, s + n) for s, n in zip(tile.start, tile.extent, strict=True))]
        part.copy_(_view(source, tile, output.dtype))
    return whole


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _differs(expected: str, found: str, how: str) -> UsageError:
    return UsageError(
        f"the converter is not what was recorded{f', {how}' if how else ''}: expected {expected}, found {found}",
        hint="if what it moves depends on values, publish its outputs without a map; else record the map again",
    )
