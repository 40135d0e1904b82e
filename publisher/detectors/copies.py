"""Old bits of tensors that are not watched: buffers, router biases, what is published in fp32. They are kept whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightcast.publisher.sources import Item
from weightcast.schemas.digest import Digest
from weightcast.schemas.layout import TensorSpec

from .pieces import Piece

if TYPE_CHECKING:
    from .detector import Detector

Bytes = npt.NDArray[np.uint8]


class Copies:
    """By state: of the last committed version, and of one captured since, while it is not known which is which."""

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._states: dict[Digest, dict[str, Bytes]] = {}
        self._kept: dict[str, Bytes] = {}
        self._fresh: dict[str, Bytes] = {}

    def following(self, found: Iterable[Item]) -> Iterator[Item]:
        """Pass items on, and copy those that the detector does not cover; of a tensor with two names the first."""
        self._fresh = {}
        seen: set[object] = set()
        for item in found:
            again = item.tie is not None and item.tie in seen
            seen.add(item.tie)
            if not again and not self._detector.covers(item.spec):
                self._fresh[item.spec.name] = item.array().copy()
            yield item

    def take(self, digest: Digest, specs: Iterable[TensorSpec]) -> bool:
        """Take the copies of the state with this digest; whether they and the detector have all of these tensors."""
        self.keep_only(digest)
        kept = self._states.get(digest, {})
        return all(self._detector.covers(s) or len(kept.get(s.name, ())) == s.nbytes for s in specs)

    def keep_only(self, digest: Digest) -> None:
        """Forget all states but the one with this digest, which is committed."""
        self._kept = self._states.get(digest, {})
        self._states = {digest: self._kept}

    def read(self, spec: TensorSpec, piece: Piece, out: Bytes) -> None:
        """Write the bytes of a piece in the state that was taken."""
        width = len(out) // (piece.end - piece.begin)
        out[:] = self._kept[spec.name][piece.begin * width : piece.end * width]

    def settle(self, digest: Digest) -> None:
        """Keep what the last capture has seen, of a state with this digest."""
        self._states[digest], self._fresh = self._fresh, {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(len(kept) for state in self._states.values() for kept in state.values())
