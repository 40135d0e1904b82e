"""A baseline of which no bits are kept: its position, its layout, and a detector that leads back to it."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor

from weightcast.codec import Memory
from weightcast.manifest.chain import Position
from weightcast.manifest.rebuild import State, rebuild
from weightcast.manifest.store import Store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher.baseline import Baseline, View
from weightcast.schemas.errors import Corrupt
from weightcast.schemas.layout import TensorSpec
from weightcast.schemas.shard import Row


class Bare(Baseline):
    """Moves by position alone, until a reset gives it a whole state again. Its memory has no tensor in place."""

    def __init__(self, state: State, store: Store, pool: Executor) -> None:
        super().__init__(State(state.position, state.geometry, Memory.blank(state.geometry)))
        self.holds_bits = False
        self._store = store
        self._pool = pool

    def advance(self, rows: Iterable[Row], position: Position, pool: Executor) -> None:
        """See `Baseline`. That the rows lead to the position's state was proved when they were captured."""
        if self.holds_bits:
            super().advance(rows, position, pool)
        elif position.manifest.layout != self.position.manifest.layout:
            raise Corrupt(f"version {position.version} has another layout than the one before it")
        else:
            self.state = State(position, self.geometry, self.state.memory)

    def replace(self, state: State) -> None:
        """See `Baseline`."""
        super().replace(state)
        self.holds_bits = True

    def view(self, max_undo_bytes: int) -> View:
        """See `Baseline`: rebuilt from the store when it is read first."""
        return super().view(max_undo_bytes) if self.holds_bits else _Rebuilt(self, self._store, self._pool)


class _Rebuilt(View):
    """A version that was committed, read from the store: for as long as it is open there is a copy of it in memory."""

    def __init__(self, baseline: Baseline, store: Store, pool: Executor) -> None:
        super().__init__(baseline, 0)
        self._store = store
        self._pool = pool
        self._whole: State | None = None

    def read(self, spec: TensorSpec, begin: int, end: int) -> bytes:
        """See `View`.

        Raises:
            WeightcastError: the store does not give the version.
        """
        if self._whole is None:
            reader = StreamReader.open(self._store)
            self._whole = rebuild(reader, self.state.position.version, self._pool)
        return self._whole.memory.tensor(spec.name).reshape(-1)[begin:end].tobytes()

    def close(self) -> None:
        """See `View`."""
        self._whole = None
        super().close()
