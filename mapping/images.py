"""Which elements of a checkpoint tensor a piece of memory stands for. Pure geometry."""

from __future__ import annotations

from dataclasses import dataclass

from weightcast.codec.regions import Region, simplify
from weightcast.schemas.errors import UsageError


@dataclass(frozen=True, slots=True)
class Image:
    """A whole tensor, or a part of one in another order, as it lies in a storage.

    Attributes:
        tensor: checkpoint name.
        width: bytes of one element.
        storage: the elements of the storage, outermost first.
        source: of the tensor's elements in C order, same shape as `storage`.
    """

    tensor: str
    width: int
    storage: Region
    source: Region

    @property
    def names(self) -> frozenset[str]:
        """The tensor."""
        return frozenset({self.tensor})

    @classmethod
    def whole(cls, tensor: str, width: int, elements: int) -> Image:
        """Of a storage that holds the tensor as a checkpoint does."""
        flat = Region((elements,), (1,), 0)
        return cls(tensor, width, flat, flat)

    def view(self, view: Region) -> Region | None:
        """The tensor's elements that a view of the storage shows, at the same indices.

        None if that is no strided region, such as a flattened view of a transposed copy.
        """
        if self.storage.strides == (1,) == self.source.strides and view.stop <= self.storage.shape[0]:
            return Region(view.shape, view.strides, view.offset + self.source.offset)
        first = self._digits(view.offset)
        steps = [self._digits(s) if n > 1 else [0] * len(first or ()) for n, s in self._dims(view)]
        if first is None or any(step is None for step in steps):
            return None
        last = list(first)
        for n, step in zip(view.shape, steps, strict=True):
            last = [a + (n - 1) * b for a, b in zip(last, step or (), strict=True)]
        if any(at >= n for at, n in zip(last, self.storage.shape, strict=True)):
            return None  # an index would carry over into the next dimension
        strides = tuple(self._flat(step or []) for step in steps)
        return Region(view.shape, strides, self.source.offset + self._flat(first))

    def copied(self, view: Region, storage: Region) -> Image | None:
        """What a new storage holds to which `view` of this one was copied; None if that cannot be told."""
        source = self.view(view)
        if source is None or not source.elements:
            return None
        try:
            ordered, source = simplify(storage, source)
        except UsageError:  # an expanded view: elements of the copy are no elements of their own
            return None
        return Image(self.tensor, self.width, ordered, source)

    def _dims(self, view: Region) -> zip[tuple[int, int]]:
        return zip(view.shape, view.strides, strict=True)

    def _digits(self, distance: int) -> list[int] | None:
        """A distance in the storage, in steps along each of its dimensions."""
        digits = []
        for stride in self.storage.strides:
            digit, distance = divmod(distance, stride)
            digits.append(digit)
        return None if distance else digits

    def _flat(self, digits: list[int]) -> int:
        return sum(d * s for d, s in zip(digits, self.source.strides, strict=True))
