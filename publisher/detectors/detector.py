"""What every detector does: it holds what leads back from a state to the one that is committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch

from weightcast.codec import Geometry, Interval, Memory
from weightcast.codec.space import SMALL_ELEMENTS
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError
from weightcast.schemas.layout import TensorSpec
from weightcast.schemas.wrappers import NameMap

from .copies import Copies
from .kernels import Bits
from .pieces import Piece, Rooms, memory_of, pieces
from .steps import unseen

BF16: Final = "BF16"

Named = torch.nn.Module | Mapping[str, torch.Tensor]


class Detector(ABC):
    """Tells the old bits of tensors that it watches; of all others `copies` keeps them.

    Everything happens in the thread that trains and publishes, except that several threads ask for pieces at once.

    Attributes:
        kind: its name in settings.
        refused: why it can tell nothing from now on; empty if it can.
        copies: old bits of tensors that are not watched.
    """

    kind: ClassVar[str]

    def __init__(self) -> None:
        self.refused = ""
        self.copies = Copies(self)
        self._watched: dict[str, torch.Tensor] = {}

    def watch(self, optimizer: torch.optim.Optimizer | None, tensors: Named) -> None:
        """Watch `tensors`, which `optimizer` steps: a model, or tensors by the names that they are published under.

        Tensors that it does not step are taken to stay as they are where they are large, and copied where they are not.

        Raises:
            UsageError: there is nothing to watch.
        """
        names = NameMap()
        pairs = (
            tensors.named_parameters(remove_duplicate=False)
            if isinstance(tensors, torch.nn.Module)
            else tensors.items()
        )
        found = {names(name): tensor for name, tensor in pairs}
        if not found:
            raise UsageError("there is no tensor to watch", hint="pass the model, or its tensors by name")
        stepped = {id(p) for group in (optimizer.param_groups if optimizer else []) for p in group["params"]}
        self._watched |= {
            name: tensor
            for name, tensor in found.items()
            if self._suits(tensor) and (id(tensor) in stepped or tensor.numel() >= SMALL_ELEMENTS)
        }
        if optimizer is not None:
            self._follow(optimizer)
        self.forget()

    def _suits(self, tensor: torch.Tensor) -> bool:
        """Whether the bits to be published of `tensor` can be told from itself."""
        return not unseen(tensor)

    @abstractmethod
    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch what `optimizer` does."""

    def covers(self, spec: TensorSpec) -> bool:
        """Whether the old bits of this tensor come from watching, and not from a copy."""
        tensor = self._watched.get(spec.name)
        return tensor is not None and spec.dtype == BF16 and tensor.numel() == spec.elements

    @abstractmethod
    def tells(self, digest: Digest) -> str:
        """Why it cannot lead from the tensors as they are back to the state with this digest; empty if it can."""

    @abstractmethod
    def begin(self, geometry: Geometry) -> Attempt:
        """The old bits of all tensors, for one capture."""

    @abstractmethod
    def look(self, geometry: Geometry, row_elements: int, pool: Executor) -> None:
        """Look at all watched tensors, where a capture had old bits from elsewhere."""

    @abstractmethod
    def forget(self) -> None:
        """Lead back to no state any more."""

    @abstractmethod
    def settle(self, digest: Digest) -> None:
        """Take the tensors as they are, with this digest, for what the next changes are told from."""

    def committed(self, digest: Digest) -> None:
        """Let go of what leads back beyond the state with this digest. Called by the thread that committed it."""
        self.copies.keep_only(digest)

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held from publish to publish."""

    @abstractmethod
    def close(self) -> None:
        """Watch no more."""


class Attempt(ABC):
    """The `Olds` of one capture. Each piece is asked for once.

    Attributes:
        lasting: see `Olds`.
    """

    lasting = False

    def __init__(self, detector: Detector, geometry: Geometry) -> None:
        self._detector = detector
        self._geometry = geometry
        self._rooms = Rooms()

    @contextmanager
    def memory(self, interval: Interval) -> Iterator[Memory]:
        """Memory with the old bits of `interval`.

        Raises:
            Corrupt: some of them cannot be told.
        """
        space = self._geometry[interval.dtype]
        with self._rooms.room(interval.length * space.width) as room:
            for piece in pieces(space, interval):
                spec = space.specs[space.index[piece.name]]
                out = room[piece.at * space.width : (piece.at + piece.end - piece.begin) * space.width]
                if self._detector.covers(spec):
                    unsettled = self._old(piece, out.view(np.uint16))
                    if unsettled:
                        raise Corrupt(
                            f"the old bits of {unsettled} elements of tensor {spec.name!r} are open"
                        )
                else:
                    self._detector.copies.read(spec, piece, out)
            yield memory_of(self._geometry, interval, room)

    @abstractmethod
    def _old(self, piece: Piece, out: Bits) -> int:
        """Write the old bits of a piece of a watched tensor; how many of them cannot be told."""


def values(tensor: torch.Tensor, piece: Piece) -> npt.NDArray[Any]:
    """A view of a piece of a contiguous tensor; bf16 as its bits."""
    flat = tensor.detach().view(-1)[piece.begin : piece.end]
    return (flat.view(torch.uint16) if flat.dtype is torch.bfloat16 else flat).numpy()


def every_piece(geometry: Geometry, row_elements: int, detector: Detector) -> list[Piece]:
    """All pieces of tensors that `detector` covers, cut as a capture cuts them."""
    space = geometry.get(BF16)
    if space is None:
        return []
    covered = {spec.name for spec in space.specs if detector.covers(spec)}
    return [p for i in space.split(row_elements) for p in pieces(space, i) if p.name in covered]
