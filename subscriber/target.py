"""The seam between a subscriber and what it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weightcast.codec import Changes, FlatSpace, Geometry, Memory
from weightcast.manifest.chain import Position
from weightcast.schemas.digest import Digest
from weightcast.schemas.layout import Layout


@dataclass(frozen=True, slots=True)
class Mark:
    """Which version a target says it holds: a claim, to be proved by digest before it is built on."""

    stream: str
    version: int
    sha256: str


class Reading(Protocol):
    """Live bits that cannot be addressed from here, such as those of another process."""

    def read(self, positions: Mapping[str, npt.NDArray[np.int64]]) -> Mapping[str, Changes]:
        """The bits at flat positions, by dtype: int64 [n], ascending, in the space of the dtype.

        Raises:
            Corrupt: they are not what they were when they were last proved, or cannot be told.
            StorageError: whoever has them does not answer.
        """


Base = Memory | Reading
"""What a delta is decoded against."""


class Target(Protocol):
    """Weights that a subscriber keeps at a version.

    The subscriber calls every method under `exclusive()`, in one thread at a time. Nothing handed over needs
    checking: all of it was verified against the manifest before. Whatever a method raises, the target must then be in
    one of three states: the version before, the version after, or visibly unusable until `recover` heals it.
    """

    @property
    def name(self) -> str:
        """What it is, for logs and errors."""

    @property
    def replaceable(self) -> bool:
        """Whether bits that are no known version may be overwritten unasked."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep every other subscriber, in any process of this host, from changing the target."""

    def recover(self) -> None:
        """Finish what an interrupted subscriber, of this process or another, left half done. Cheap if nothing is.

        Needs no store. Called before everything else, each time. While it fails, or takes long, the target counts as
        not ready.

        Raises:
            StorageError, Corrupt: the target cannot be had, or is not whole, for now.
            UsageError, Conflict, Untrusted: that will not pass.
        """

    def check(self, layout: Layout) -> None:
        """Called before anything is fetched for a version of `layout`.

        Raises:
            UsageError: the target can never hold such a version; names the first tensor that does not fit.
        """

    def mark(self) -> Mark | None:
        """Which version it says it holds; None if it does not say."""

    def adopt(self, position: Position, layout: Layout) -> None:
        """Its bits were proved to be `position`: from now on it says so. Called after every proof."""

    def empty(self) -> bool:
        """Whether it has no weights at all, so that there is nothing to recognise."""

    def base(self, geometry: Geometry) -> Base:
        """Its live bits under `geometry`; only read.

        Raises:
            UsageError: it has not exactly these tensors; names the first that differ.
            Corrupt: they are not what they were when they were last proved, or cannot be read.
        """

    def digest(self, geometry: Geometry, pool: Executor) -> Digest:
        """The digest of its live bits under `geometry`, all of which are read.

        Raises:
            UsageError, Corrupt: as `base`.
        """

    def patch(self, geometry: Geometry, changes: Mapping[str, Changes], position: Position) -> None:
        """Write these absolute values; then it holds `position`. Repeating it does no harm.

        Raises:
            Corrupt: what was written does not read back.
            StorageError, UsageError: nothing was written; the version before stays.
        """

    def relay(
        self, before: Geometry, after: Geometry, changes: Mapping[str, Changes], position: Position
    ) -> None:
        """As `patch`, from one layout to another. Tensors that `before` has not, or has otherwise, start as zeros."""

    def load(self, layout: Layout, weights: Sequence[Path], position: Position) -> None:
        """Take over all tensors from these verified safetensors files, which it may move; then it holds `position`."""

    def companions(self, files: Mapping[str, bytes]) -> None:
        """Companion files (config, tokenizer) that differ in the version that it is about to hold.

        Called before `patch`, `relay`, `load` or `adopt`, with nothing if they stay. They come to hold together
        with the weights.
        """

    def workdir(self) -> Path | None:
        """Where downloads should go, so that taking them over is a rename; None: anywhere."""


def mark_of(position: Position) -> Mark:
    """The mark of a target that holds `position`."""
    return Mark(position.manifest.stream, position.version, position.sha256)


def restrict(space: FlatSpace, changes: Changes, names: Iterable[str]) -> Changes:
    """The changes that lie in the tensors `names`."""
    spans = []
    for name in names:
        position = space.index[name]
        lo, hi = np.searchsorted(changes.positions, [space.starts[position], space.starts[position + 1]])
        if lo < hi:
            spans.append(slice(lo, hi))
    spans.sort(key=lambda span: span.start)
    parts = [(changes.positions[s], changes.values[s]) for s in spans] or [
        (changes.positions[:0], changes.values[:0])
    ]
    return Changes(
        changes.dtype, np.concatenate([p for p, _ in parts]), np.concatenate([v for _, v in parts])
    )
