"""Elements of a flat space where an engine keeps them on a device: what `codec.places.Table` does, in torch operations.

Work is queued for all moves, and waited for once: a device that computes must not wait for a host at every move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from weightcast.codec import FlatSpace, Move, Region, change_digest
from weightcast.codec.memory import UNSIGNED
from weightcast.codec.places import Table, pieces, spans
from weightcast.schemas.digest import Digest

from .live_places import BITS, Home

SHARE: Final = 1 << 20
"""Positions translated at once: a few arrays of 8 MiB on the device."""

PIECE_BYTES: Final = 1 << 24
"""Of live bits that are brought to the host at once."""

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Selected:
    """Positions that are in a move, as far as they are known on the device.

    Attributes:
        move: its number.
        index: int64 [n], which positions.
        target: int64 [n], the elements of the storage.
    """

    move: int
    index: torch.Tensor
    target: torch.Tensor


class DeviceTable:
    """See `codec.places.Table`; targets lie in the storages of `homes`, one a move, on devices of any kind."""

    def __init__(self, space: FlatSpace, moves: Sequence[Move], homes: Sequence[Home]) -> None:
        self.space = space
        self.moves = moves
        self._homes = homes
        self._spans = spans(space, moves)

    def write(self, positions: Ints, values: Bits, use: Sequence[int]) -> tuple[list[Digest], int]:
        """See `codec.places.Table.write`."""
        fresh = _Uploads(values.view(_signed(self.space.width)))
        done: list[tuple[_Selected, torch.Tensor, torch.Tensor]] = []
        for part in self._select(positions, use):
            flat = self._homes[part.move].flat()
            new = fresh.on(flat.device)[part.index]
            old = flat[part.target]
            flat[part.target] = new
            done.append((part, old, (flat[part.target] != new).any()))
        moved, failed = dict.fromkeys(use, Digest()), -1
        for part, old, differs in done:
            index = part.index.cpu().numpy()
            bits = old.cpu().numpy().view(UNSIGNED[self.space.width])
            moved[part.move] += change_digest(self.space, positions[index], bits, values[index])
            failed = part.move if bool(differs) else failed
        return [moved[i] for i in use], failed

    def gather(self, positions: Ints, use: Sequence[int]) -> tuple[Ints, Bits]:
        """See `codec.places.Table.gather`."""
        queued = [(p.index, self._homes[p.move].flat()[p.target]) for p in self._select(positions, use)]
        index = [i.cpu().numpy() for i, _ in queued]
        values = [v.cpu().numpy().view(UNSIGNED[self.space.width]) for _, v in queued]
        none = np.empty(0, np.int64)
        return np.concatenate([none, *index]), np.concatenate(
            [none.astype(UNSIGNED[self.space.width]), *values]
        )

    def digests(self, use: Sequence[int]) -> list[Digest]:
        """See `codec.places.Table.digests`."""
        limit = PIECE_BYTES // self.space.width
        return [
            sum((self._digest(p, self._homes[i]) for p in pieces(self.moves[i], limit)), Digest())
            for i in use
        ]

    def _digest(self, piece: Move, home: Home) -> Digest:
        """Of bits that are brought to the host, as a move whose target is the copy."""
        target = piece.target
        host = home.flat().as_strided(target.shape, target.strides, target.offset).cpu().contiguous()
        copy = Region(target.shape, tuple(host.stride()), 0)
        move = Move(piece.tensor, piece.source, piece.place, copy)
        return Table(self.space, [move], [host.data_ptr()]).digests([0])[0]

    def _select(self, positions: Ints, use: Sequence[int]) -> Iterator[_Selected]:
        """The positions that are in each move, in shares."""
        uploads = _Uploads(positions)
        bounds = np.searchsorted(positions, self._spans[np.asarray(use, np.int64)])
        for i, (low, high) in zip(use, bounds.tolist(), strict=True):
            at = uploads.on(self._homes[i].tensor.device)
            for first in range(low, high, SHARE):
                ahead = at[first : min(first + SHARE, high)] - int(self._spans[i, 0])
                inside, target = _locate(self.moves[i], ahead)
                index = torch.arange(first, first + len(ahead), device=at.device)
                yield _Selected(i, index if inside is None else index[inside], target)


def fill(piece: Move, home: Home, bits: Bits) -> None:
    """Copy a piece of a tensor (unsigned [elements], of any alignment) into its place."""
    source, width = piece.source, home.width
    view = np.lib.stride_tricks.as_strided(
        bits[source.offset :], source.shape, [s * width for s in source.strides], writeable=False
    )
    dense = torch.from_numpy(np.array(view, order="C").view(_signed(width)))
    target = piece.target
    home.flat().as_strided(target.shape, target.strides, target.offset).copy_(dense)


class _Uploads:
    """A host array on every device that asks for it."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._host = torch.from_numpy(array if array.flags.writeable else array.copy())
        self._there: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self._there:
            self._there[device] = self._host.to(device)
        return self._there[device]


def _locate(move: Move, ahead: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Which elements are in a move's source, and where those are in its target's storage.

    Args:
        move: simplified, so that the first dimension reaches furthest.
        ahead: int64 [n], elements counted from the first of the source, up to its last.

    Returns:
        inside: bool [n]; None if all are.
        target: int64, of those that are.
    """
    source, target = move.source, move.target
    if source.strides in ((), (1,)):
        return None, ahead * (target.strides or (1,))[0] + target.offset
    inside = torch.ones_like(ahead, dtype=torch.bool)
    element = torch.full_like(ahead, target.offset)
    for n, stride, scale in zip(source.shape, source.strides, target.strides, strict=True):
        index = torch.div(ahead, stride, rounding_mode="floor")
        inside &= index < n
        element += index * scale
        ahead = ahead - index * stride
    inside &= ahead == 0
    return inside, element[inside]


def _signed(width: int) -> np.dtype[Any]:
    """The numpy dtype of what torch moves the elements by."""
    return np.dtype(str(BITS[width]).removeprefix("torch."))
