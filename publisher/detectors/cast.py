"""`cast`: old bits are seen where fp32 values become bf16 bits, and of what changes the first ones are kept."""

from __future__ import annotations

from bisect import bisect_right
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from weightcast.codec import Geometry
from weightcast.codec.rounding import round_all
from weightcast.schemas.digest import Digest

from .casting import Casting
from .detector import Attempt, Detector, values
from .kernels import Bits, Positions, first_of_both, replace_bits, round_over
from .pieces import Piece, Rooms
from .stepping import Stepping, refusal
from .steps import unseen

STRETCH: Final = 1 << 18  # elements that one thread casts at once; it keeps room for a list of all: 1.5 MiB

MAX_ELEMENTS: Final = 1 << 32  # of a tensor: places are noted in 32 bits

Place = tuple[int, torch.Tensor]  # an address, and what begins there


@dataclass(frozen=True, slots=True)
class Firsts:
    """The first old bits of the changed elements of a tensor: places uint32, ascending, and bits uint16."""

    places: Positions
    bits: Bits

    def then(self, later: Firsts) -> Firsts:
        """Both, these winning."""
        size = len(self.places) + len(later.places)
        places, bits = np.empty(size, np.uint32), np.empty(size, np.uint16)
        count = first_of_both(self.places, self.bits, later.places, later.bits, places, bits)
        return Firsts(places[:count].copy(), bits[:count].copy())

    @property
    def nbytes(self) -> int:
        """Bytes held: 6 an element that changed."""
        return self.places.nbytes + self.bits.nbytes


@dataclass
class _Generation:
    """What changed since the state with this digest, by the tensor's id."""

    digest: Digest
    firsts: dict[int, Firsts] = field(default_factory=dict)

    def add(self, tensor: int, firsts: Firsts) -> None:
        earlier = self.firsts.get(tensor)
        self.firsts[tensor] = earlier.then(firsts) if earlier is not None else firsts


class Cast(Detector):
    """Tells the old bits of bf16 parameters that are cast under its eyes, and of any that an optimizer steps.

    Keeps 6 bytes for each element that changed since the last committed version, over any number of steps.

    Args:
        pool: what casts and compares.
    """

    kind = "cast"

    def __init__(self, pool: Executor) -> None:
        super().__init__()
        self.fault = ""  # what was not seen since the last version
        self._pool = pool
        self._rooms = Rooms()
        self._steppings: list[Stepping] = []
        self._generations: list[_Generation] = []
        self._places: list[Place] | None = None  # of watched bf16 tensors, ascending; None: not looked for

    def casting(self) -> AbstractContextManager[object]:
        """Within, `copy_` and `torch._foreach_copy_` into watched bf16 tensors are seen, whoever calls them."""
        self._find_places()
        return Casting(self)

    def copy_(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.copy_(source)`, seen: rounded to nearest even, NaNs to one NaN. `target` is bf16 and contiguous.

        It may be a watched tensor, a part of one, or a buffer that several of them lie in.
        """
        start, stop = target.data_ptr(), target.data_ptr() + 2 * target.numel()
        flat, given = target.detach().view(-1), source.detach().expand_as(target).reshape(-1)
        done = 0
        for address, tensor in self._overlapping(start, stop):
            begin = max(address, start) - start >> 1
            end = min(address + 2 * tensor.numel(), stop) - start >> 1
            flat[done:begin].copy_(given[done:begin])
            inside = (start - address >> 1) + begin
            self._cast(tensor, inside, flat[begin:end], given[begin:end])
            done = end
        flat[done:].copy_(given[done:])
        torch.autograd.graph.increment_version(target)

    def sees(self, tensor: torch.Tensor) -> bool:
        """Whether a cast into `tensor` is one to be seen."""
        if tensor.dtype is not torch.bfloat16 or not tensor.is_cpu or not tensor.is_contiguous():
            return False
        start = tensor.data_ptr()
        return bool(self._overlapping(start, start + 2 * tensor.numel()))

    def _cast(self, tensor: torch.Tensor, inside: int, flat: torch.Tensor, given: torch.Tensor) -> None:
        def one(begin: int) -> Firsts:
            part = given[begin : begin + STRETCH].to("cpu", torch.float32).contiguous()
            bits = flat[begin : begin + STRETCH].view(torch.uint16).numpy()
            return self._replaced(part.numpy(), bits, inside + begin)

        self._note(tensor, list(self._pool.map(one, range(0, flat.numel(), STRETCH))))

    def bits(self, tensor: torch.Tensor) -> Bits:
        """A copy of the bits that `tensor` is published with."""
        out = np.empty(tensor.numel(), np.uint16)

        def one(begin: int) -> None:
            part = Piece("", begin, min(begin + STRETCH, len(out)), 0)
            out[part.begin : part.end] = bits_of(tensor, part)

        for _ in self._pool.map(one, range(0, len(out), STRETCH)):
            pass
        return out

    def compare(self, tensor: torch.Tensor, before: Bits) -> None:
        """Note what differs between `tensor` and its bits from before, which are used up."""

        def one(begin: int) -> Firsts:
            part = Piece("", begin, min(begin + STRETCH, tensor.numel()), 0)
            return self._replaced(values(tensor, part), before[part.begin : part.end], begin)

        self._note(tensor, list(self._pool.map(one, range(0, tensor.numel(), STRETCH))))

    def _replaced(self, found: npt.NDArray[Any], bits: Bits, begin: int) -> Firsts:
        """Overwrite `bits`, which begin at element `begin` of their tensor, by bf16 bits or by fp32 numbers rounded."""
        with self._rooms.room(6 * len(bits)) as room:
            places, olds = room[: 4 * len(bits)].view(np.uint32), room[4 * len(bits) :].view(np.uint16)
            if found.dtype == np.uint16:
                count = replace_bits(found, bits, begin, places, olds)
            else:
                count = round_over(found.view(np.uint32), bits, begin, places, olds)
            return Firsts(places[:count].copy(), olds[:count].copy())

    def _note(self, tensor: torch.Tensor, parts: list[Firsts]) -> None:
        if self._generations and any(len(part.places) for part in parts):
            firsts = Firsts(
                np.concatenate([p.places for p in parts]), np.concatenate([p.bits for p in parts])
            )
            self._generations[-1].add(id(tensor), firsts)

    def _overlapping(self, start: int, stop: int) -> list[Place]:
        """The watched bf16 tensors in these addresses, ascending."""
        places = self._places if self._places is not None else self._find_places()
        last = first = bisect_right(places, stop - 1, key=lambda place: place[0])
        while first and places[first - 1][0] + 2 * places[first - 1][1].numel() > start:
            first -= 1
        return places[first:last]

    def _find_places(self) -> list[Place]:
        bf16 = {id(t): t for t in self._watched.values() if t.dtype is torch.bfloat16}
        self._places = sorted(((t.data_ptr(), t) for t in bf16.values()), key=lambda place: place[0])
        return self._places

    def _suits(self, tensor: torch.Tensor) -> bool:
        return not unseen(tensor, torch.float32, torch.bfloat16) and 0 < tensor.numel() < MAX_ELEMENTS

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        self.refused = self.refused or refusal(optimizer)
        watched = {id(t) for t in self._watched.values()}
        self._steppings.append(Stepping(optimizer, self, watched))

    def tells(self, digest: Digest) -> str:
        """See `Detector`."""
        known = [i for i, generation in enumerate(self._generations) if generation.digest == digest]
        if not known:
            return "what changed was not watched since the last committed version"
        first, *later = self._generations[known[-1] :]
        for generation in later:  # of versions that were captured, but are not committed
            for tensor, firsts in generation.firsts.items():
                first.add(tensor, firsts)
        self._generations = [first]
        return self.fault

    def begin(self, geometry: Geometry) -> Attempt:
        """See `Detector`."""
        return _Seen(self, geometry, self._generations[-1].firsts)

    def look(self, geometry: Geometry, row_elements: int, pool: Executor) -> None:
        """See `Detector`: there is nothing to look at."""

    def forget(self) -> None:
        """See `Detector`."""
        self._generations = []
        self._places = None

    def settle(self, digest: Digest) -> None:
        """See `Detector`."""
        self._generations.append(_Generation(digest))
        self.fault = ""
        self._find_places()

    def committed(self, digest: Digest) -> None:
        """See `Detector`."""
        super().committed(digest)
        if self._generations and self._generations[-1].digest == digest:
            del self._generations[:-1]

    def tensor(self, name: str) -> torch.Tensor:
        """A watched tensor."""
        return self._watched[name]

    @property
    def nbytes(self) -> int:
        """See `Detector`."""
        noted = sum(f.nbytes for g in self._generations for f in g.firsts.values())
        return noted + self.copies.nbytes

    def close(self) -> None:
        """See `Detector`."""
        for stepping in self._steppings:
            stepping.close()


class _Seen(Attempt):
    """The present bits, with the first old ones put in."""

    def __init__(self, detector: Cast, geometry: Geometry, firsts: dict[int, Firsts]) -> None:
        super().__init__(detector, geometry)
        self._cast = detector
        self._firsts = firsts

    def _old(self, piece: Piece, out: Bits) -> int:
        tensor = self._cast.tensor(piece.name)
        out[:] = bits_of(tensor, piece)
        firsts = self._firsts.get(id(tensor))
        if firsts is not None:
            low, high = np.searchsorted(firsts.places, [piece.begin, piece.end])
            out[firsts.places[low:high] - np.uint32(piece.begin)] = firsts.bits[low:high]
        return 0


def bits_of(tensor: torch.Tensor, piece: Piece) -> Bits:
    """The bf16 bits that a piece is published with: uint16; of a bf16 tensor a view, of an fp32 one rounded."""
    found = values(tensor, piece)
    if found.dtype == np.uint16:
        return found
    bits = np.empty(len(found), np.uint16)
    round_all(found.view(np.uint32), bits)
    return bits
