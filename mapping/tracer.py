"""Follows tensors through a converter: which elements of what goes in are where in what comes out."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

from weightcast.schemas.errors import UsageError

from .belongings import storage_of
from .images import Image
from .mosaic import Mosaic
from .operations import CLONES, COPIES, FILLS, Signature, cast, is_lazy_math, region_of, tensors_in
from .recorder import Content, Recorder
from .tiles import NOTHING, Tile, Tiles, cat, index, split, stack

_aten = torch.ops.aten

_LARGE: Final = 1 << 20
"""Bytes of a stand-in from which on it is a mapping of its own. A process may have 65,530 of them on Linux."""

_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0
"""Linux's MAP_NORESERVE: address space beyond the host's memory."""

_MOVES: Final = frozenset(
    {
        *CLONES,
        _aten.cat.default,
        _aten.stack.default,
        _aten.index.Tensor,
        _aten.index_select.default,
        _aten.repeat.default,
    }
)
"""Operations that fill new memory with elements that there were, and with nothing else."""


_FRESH: Final = frozenset(
    {
        *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like),
        *(_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
    }
)
"""Operations that look at nothing but a tensor's look."""


class Tracer(Recorder):  # type: ignore[no-untyped-call]
    """Active while a converter runs on probes. Nothing that would read or compute a probe's elements is executed.

    Threads that the converter starts are not seen, nor are reads through `numpy()` and `tolist()`: what is recorded has
    to be proved on real bytes.
    """

    subject = "the converter"

    def __init__(self) -> None:
        super().__init__({})
        self._how: dict[int, str] = {}  # by storage that is known by names alone: what first made it so
        self._probes: set[int] = set()

    def probe(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """A stand-in for a trainer's tensor, of the same look: address space, not memory.

        The elements that are followed are those of the memory that `like` spans, from its first one.
        """
        probe = reserved(like)
        self.track(probe, Image.whole(name, like.element_size(), region_of(probe).stop))
        self._probes.add(storage_of(probe))
        return probe

    def tiles(self, tensor: torch.Tensor) -> Tiles | None:
        """What a tensor shows, if it is made of trainer tensors' elements and nothing else."""
        tiles = self._tiles(tensor)
        return tiles if tiles is not None and all(tile.tensor != NOTHING for tile in tiles) else None

    def _tiles(self, tensor: torch.Tensor) -> Tiles | None:
        known = self._known.get(storage_of(tensor))
        if known is None or isinstance(known, frozenset) or is_lazy_math(tensor):
            return None
        if tensor.element_size() != known.width:
            return None
        view = region_of(tensor)
        if isinstance(known, Mosaic):
            return known.view(view)
        source = known.view(view)
        if source is None or not source.elements:
            return None if source is None else ()
        start = (0,) * len(source.shape)
        return (Tile(start, source.shape, known.tensor, source.strides, source.offset),)

    def why_not(self, tensor: torch.Tensor) -> str:
        """Why `tiles` gave nothing."""
        storage = storage_of(tensor)
        known = self._known.get(storage)
        if known is None:
            return "not made from the trainer's tensors by torch operations"
        if isinstance(known, frozenset):
            return self._how.get(storage, "computed")
        tiles = self._tiles(tensor)
        if tiles is None:
            return "a view that is not made of boxes of the trainer's tensors"
        return self._how.get(storage, "parts of it are not made from the trainer's tensors")

    def _compute(
        self,
        func: Any,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: frozenset[str],
    ) -> Any:
        if func.overloadpacket in _FRESH:
            return func(*args, **kwargs)
        if func is _aten.index.Tensor and not self._names_in(args[1:]):
            return self._imagine(func, (args[0], _numbers(args[1])), kwargs, names)
        return super()._compute(func, signature, args, kwargs, names)

    def _content(self, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> Content | None:
        read = list(tensors_in(args))
        tiles = None
        if func in _MOVES and all(t.dtype is result.dtype for t in self._known_of(read)):
            tiles = self._moved(func, args, result)
        if tiles is not None:
            found = Mosaic.of(result.element_size(), region_of(result), tiles)
            if found is not None:
                return found
        causes = (self._how.get(storage_of(t)) for t in read)
        self._how[storage_of(result)] = next((c for c in causes if c), self._said(func, args, result))
        return None

    def _blank(self, ghost: torch.Tensor, device: torch.device | str) -> torch.Tensor:
        return reserved(ghost) if torch.device(device).type == "cpu" else super()._blank(ghost, device)

    def _said(self, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> str:
        if func in CLONES and args[0].dtype is not result.dtype:
            return f"cast: {cast(args[0], result)}"
        if func in _MOVES:
            return f"{func} scatters elements too finely, or mixes them with others"
        return f"computed by {func}"

    def _known_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [t for t in tensors if self.names(storage_of(t))]

    def _moved(self, func: Any, args: tuple[Any, ...], result: torch.Tensor) -> Tiles | None:
        """What an operation of `_MOVES` gives."""
        if func is _aten.cat.default or func is _aten.stack.default:
            dim = int(args[1]) % result.dim() if len(args) > 1 else 0
            return self._together(func, args[0], dim)
        value = args[0]
        tiles = self._tiles(value)
        if tiles is None or func in CLONES:
            return tiles
        if func is _aten.repeat.default:
            return _repeated(tiles, value.dim(), args[1], value.shape)
        if func is _aten.index_select.default:
            dim = int(args[1]) % max(value.dim(), 1)
            return self._indexed(tiles, value, dim, args[2])
        found = [(dim, i) for dim, i in enumerate(args[1]) if i is not None]
        return self._indexed(tiles, value, *found[0]) if len(found) == 1 else None

    def _together(self, func: Any, tensors: Sequence[torch.Tensor], dim: int) -> Tiles | None:
        if func is _aten.cat.default:
            tensors = [t for t in tensors if t.shape != (0,)]  # such a one goes with everything
        parts = []
        for tensor in tensors:
            tiles = self._tiles(tensor)
            if tiles is None:
                return None
            parts.append(tiles)
        if func is _aten.stack.default:
            return stack(parts, dim)
        return cat([(tiles, t.shape[dim]) for tiles, t in zip(parts, tensors, strict=True)], dim)

    def _indexed(self, tiles: Tiles, value: torch.Tensor, dim: int, rows: torch.Tensor) -> Tiles | None:
        if self.names(storage_of(rows)) or not value.dim():
            return None
        size = value.shape[dim]
        found = index(tiles, dim, [row % size for row in rows.flatten().tolist()])
        if found is None:
            return None
        if not rows.dim():
            return tuple(t.picked([d for d in range(len(t.start)) if d != dim]) for t in found)
        for at in range(rows.dim() - 1):
            inner = rows.shape[at + 1 :].numel()
            found = split(found, dim + at, inner) if inner else ()
        return found

    def _spoil(self, func: Any, tensor: torch.Tensor, value: Any, names: frozenset[str]) -> None:
        storage = storage_of(tensor)
        if storage in self._probes:
            (name,) = self.names(storage)
            raise UsageError(
                f"the converter changes trainer tensor {name!r} in place ({func})",
                hint="let it work on a clone",
            )
        found = self._filled(func, tensor, value)
        if found is None:
            self._how.setdefault(storage, self._cause(func, tensor, value))
        self.track(tensor, found or names | self.names(storage))

    def _filled(self, func: Any, tensor: torch.Tensor, value: Any) -> Mosaic | None:
        """A storage after a part of it was copied to, or set to a number."""
        width = tensor.element_size()
        blank = Mosaic.blank(width, tensor.untyped_storage().nbytes() // width)
        known = self._known.get(storage_of(tensor), blank)
        if not isinstance(known, Mosaic) or known.width != width or is_lazy_math(tensor):
            return None
        shape = tuple(tensor.shape)
        tiles: Tiles | None = (Tile((0,) * len(shape), shape, NOTHING, (0,) * len(shape), 0),)
        if func in COPIES:
            tiles = self._tiles(value.expand(shape)) if value.dtype is tensor.dtype else None
        elif func not in FILLS:
            return None
        return known.written(region_of(tensor), tiles) if tiles is not None else None

    def _cause(self, func: Any, tensor: torch.Tensor, value: Any) -> str:
        if not isinstance(value, torch.Tensor):
            return f"written by {func}"
        if func in COPIES and value.dtype is not tensor.dtype:
            return f"cast: {cast(value, tensor)}"
        return self._how.get(storage_of(value), f"written by {func}")


def reserved(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same look in host memory, all zeros, that takes memory only where it is written to."""
    span = region_of(torch.empty_strided(like.size(), like.stride(), device="meta")).stop
    size = span * like.element_size()
    if size < _LARGE:
        flat = torch.zeros(span, dtype=like.dtype)
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        flat = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=like.dtype)
    return flat.as_strided(like.size(), like.stride())


def _numbers(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Masks as numbers of rows."""
    found: list[torch.Tensor | None] = []
    for i in indices:
        mask = i is not None and i.dtype in (torch.bool, torch.uint8)
        found += i.nonzero().unbind(1) if mask and i is not None else [i]
    return found


def _repeated(tiles: Tiles, dims: int, repeats: Sequence[int], shape: Sequence[int]) -> Tiles | None:
    new = len(repeats) - dims
    found: Tiles | None = tuple(t.picked([*[-1] * new, *range(dims)]) for t in tiles)
    for dim, n in enumerate(repeats):
        if found is None:
            return None
        found = cat([(found, shape[dim - new] if dim >= new else 1)] * n, dim)
    return found
