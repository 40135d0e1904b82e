"""An engine's parameters and buffers as plain storages, and whether they still are what they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightcast.codec import Geometry, Move, Region, collisions
from weightcast.schemas.errors import Corrupt, UsageError

BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype by which elements of each width in bytes are moved."""


@dataclass(frozen=True, slots=True)
class Home:
    """The storage of a parameter, as it was when the plan was made. The storage itself is not kept alive.

    Attributes:
        name: of the parameter or buffer.
        tensor: the engine's.
        key: what tells this storage from another one in its stead.
        width: bytes of an element.
    """

    name: str
    tensor: torch.Tensor
    key: tuple[int, int]
    width: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Home:
        """The storage that `tensor` has now.

        Raises:
            UsageError: it has none of its own.
        """
        wraps: bool = is_traceable_wrapper_subclass(tensor)  # its bits are in other tensors
        if wraps or tensor.layout is not torch.strided or tensor.device.type == "meta":
            raise UsageError(
                f"parameter {name!r} is {type(tensor).__name__}, {tensor.layout}, on {tensor.device}; "
                "only dense tensors with data can be kept"
            )
        return cls(name, tensor, _key(tensor), tensor.element_size())

    @property
    def elements(self) -> int:
        """Elements of the storage."""
        return self.tensor.untyped_storage().nbytes() // self.width

    def check(self) -> None:
        """Refuse a storage that is not the one it was.

        Raises:
            Corrupt: it is not.
        """
        if _key(self.tensor) != self.key:
            raise Corrupt(
                f"parameter {self.name!r}: its storage was replaced since the plan was made",
                hint="attach again",
            )

    def flat(self) -> torch.Tensor:
        """The whole storage as integers [elements]. Keeps it alive: hold it no longer than a call."""
        with torch.inference_mode(False):  # or nobody could write to it outside of that mode
            empty = torch.empty(0, dtype=BITS[self.width], device=self.tensor.device)
            return empty.set_(self.tensor.untyped_storage(), 0, (self.elements,), (1,))


def homes_of(
    geometry: Geometry, moves: Sequence[Move], places: Mapping[str, torch.Tensor]
) -> dict[str, Home]:
    """The places that moves name, after checking that each move fits its tensor and its place.

    Raises:
        UsageError: one does not, or two moves lead to one element.
    """
    homes: dict[str, Home] = {}
    for move in moves:
        if move.place not in homes:
            if move.place not in places:
                raise UsageError(
                    f"tensor {move.tensor!r} goes to {move.place!r}, which the engine does not have"
                )
            homes[move.place] = Home.of(move.place, places[move.place])
        _check(geometry, move, homes[move.place])
    _check_apart(moves, homes)
    return homes


def _check(geometry: Geometry, move: Move, home: Home) -> None:
    spec = geometry.layout.stored_by_name.get(move.tensor)
    if spec is None:
        raise UsageError(f"the layout stores no tensor {move.tensor!r}")
    if spec.width != home.width:
        raise UsageError(
            f"tensor {move.tensor!r} is {spec.dtype}, parameter {move.place!r} is {home.tensor.dtype}"
        )
    if move.source.stop > spec.elements or move.target.stop > home.elements:
        raise UsageError(
            f"a move of tensor {move.tensor!r} ({spec.elements} elements) to parameter {move.place!r} "
            f"({home.elements}) leaves one of them: {move}"
        )


def _check_apart(moves: Sequence[Move], homes: Mapping[str, Home]) -> None:
    """Refuse moves of which one would overwrite what another one wrote."""
    storages: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        storages.setdefault(homes[move.place].key, []).append(move)
    for sharing in storages.values():
        for one, other in collisions([_in_bytes(m.target, homes[m.place].width) for m in sharing]):
            raise UsageError(
                f"tensors {sharing[one].tensor!r} and {sharing[other].tensor!r} have elements of parameter "
                f"{sharing[other].place!r} in common"
            )


def _in_bytes(region: Region, width: int) -> Region:
    return Region((*region.shape, width), (*(s * width for s in region.strides), 1), region.offset * width)


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.data_ptr()
