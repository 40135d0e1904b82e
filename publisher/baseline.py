"""The last committed version's bits, which every delta is taken against. They move only after a commit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from typing import Final

import numpy as np

from weightcast.codec import Changes, Geometry, merge
from weightcast.manifest.chain import Position
from weightcast.manifest.deltas import apply_directly
from weightcast.manifest.rebuild import State
from weightcast.manifest.rowset import concatenated
from weightcast.schemas.errors import Corrupt
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import Row

_UNDO_BYTES: Final = 16
"""Of one changed element: 8 for its position, and at most 8 for its bits."""


class Gate:
    """Many may read, or one may change. Who wants to change waits for the readers and holds off new ones."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._readers = 0
        self._changing = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the baseline still."""
        self.hold()
        try:
            yield
        finally:
            self.let_go()

    def hold(self) -> None:
        """Hold the baseline still until `let_go`, which any thread may call."""
        with self._condition:
            self._condition.wait_for(lambda: not self._changing)
            self._readers += 1

    def let_go(self) -> None:
        """End what `hold` began."""
        with self._condition:
            self._readers -= 1
            self._condition.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Have the baseline alone."""
        with self._condition:
            self._condition.wait_for(lambda: not self._changing)
            self._changing = True
            self._condition.wait_for(lambda: self._readers == 0)
        try:
            yield
        finally:
            with self._condition:
                self._changing = False
                self._condition.notify_all()


class Baseline:
    """A committed state and the gate that guards it.

    `state` is replaced as a whole; its memory is changed only inside `gate.changing()`.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.gate = Gate()
        self._view: View | None = None

    @property
    def geometry(self) -> Geometry:
        """Where the tensors are."""
        return self.state.geometry

    @property
    def layout(self) -> Layout:
        """The tensor table."""
        return self.state.layout

    @property
    def position(self) -> Position:
        """The version."""
        return self.state.position

    def view(self, max_undo_bytes: int) -> View:
        """A view of the present version that stays as it is while the baseline moves on. One at a time."""
        with self.gate.reading():
            self._view = View(self, max_undo_bytes)
            return self._view

    def advance(self, rows: Iterable[Row], position: Position, pool: Executor) -> None:
        """Take the bits that `position` committed. Call inside `gate.changing()`.

        Raises:
            Corrupt: the rows do not lead to the committed state: the baseline is unusable.
        """
        view = self._view  # its owner may close and forget it at any time
        try:
            with view.noting() if view is not None else nullcontext() as keep:
                moved = apply_directly(self.geometry, rows, self.state.memory, pool, keep)
            if self.position.digest + moved != position.digest:
                raise Corrupt(
                    f"the baseline is {self.position.digest + moved} after version {position.version}, "
                    f"committed was {position.digest}"
                )
        except BaseException:
            if view is not None:
                view.spoil()
            raise
        self.state = State(position, self.geometry, self.state.memory)

    def replace(self, state: State) -> None:
        """Become another state altogether. Call inside `gate.changing()`.

        A view keeps the old one, which nobody changes now.
        """
        self.state = state
        self._view = None

    def wait_for_view(self, changed: int) -> None:
        """Return once a view, if there is one, has room for the undo of `changed` elements."""
        view = self._view
        if view is not None:
            view.wait_for_room(changed * _UNDO_BYTES)

    def _forget(self, view: View) -> None:
        if self._view is view:
            self._view = None


class View:
    """The state at the time of its making, read piece by piece while the baseline moves on.

    Keeps the old bits of what changed since: O(changes), and bounded, since the mover waits where they would be more
    than `max_undo_bytes`. Close it, or the mover waits for ever.
    """

    def __init__(self, baseline: Baseline, max_undo_bytes: int) -> None:
        self.state = baseline.state
        self._baseline = baseline
        self._undo: dict[str, Changes] = {}
        self._max_undo_bytes = max_undo_bytes
        self._room = threading.Condition()
        self._closed = False
        self._spoilt = False

    @contextmanager
    def noting(self) -> Iterator[Callable[[Changes], None]]:
        """Takes the old bits that one version overwrites; the first note of an element counts."""
        noted: dict[str, list[Changes]] = {}
        yield lambda old: noted.setdefault(old.dtype, []).append(old)
        for dtype, parts in noted.items():
            both, earlier = concatenated(parts), self._undo.get(dtype)
            self._undo[dtype] = merge(both, earlier) if earlier is not None else both

    def spoil(self) -> None:
        """Say that memory was changed without a note."""
        self._spoilt = True

    def read(self, spec: TensorSpec, begin: int, end: int) -> bytes:
        """Elements [begin, end) of a tensor, little-endian."""
        space = self.state.geometry[spec.dtype]
        first = int(space.starts[space.index[spec.name]])
        with self._baseline.gate.reading():
            if self._spoilt:
                raise Corrupt(f"version {self.state.position.version} is no longer in memory as it was")
            piece = self.state.memory.tensor(spec.name).reshape(-1)[begin:end].copy()
            undo = self._undo.get(spec.dtype)
            if undo is not None:
                lo, hi = np.searchsorted(undo.positions, [first + begin, first + end])
                piece[undo.positions[lo:hi] - (first + begin)] = undo.values[lo:hi]
        return piece.tobytes()

    def wait_for_room(self, more: int) -> None:
        """Return once the undo and `more` bytes are within their bound, or the view is closed."""
        with self._room:
            self._room.wait_for(lambda: self._closed or self._undo_bytes() + more <= self._max_undo_bytes)

    def _undo_bytes(self) -> int:
        return sum(c.positions.nbytes + c.values.nbytes for c in self._undo.values())

    def close(self) -> None:
        """Let the baseline go."""
        with self._room:
            self._closed = True
            self._undo = {}
            self._room.notify_all()
        self._baseline._forget(self)
