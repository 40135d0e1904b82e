"""After a commit: the baseline takes the committed bits, and a capture that waits is told from there."""

from __future__ import annotations

from concurrent.futures import Executor

from weightcast.codec import Memory
from weightcast.manifest.chain import Position
from weightcast.manifest.rebuild import State, proved
from weightcast.schemas.errors import UsageError
from weightcast.schemas.settings import PublisherSettings

from .baseline import Baseline
from .capture import Capture
from .rebase import materialise, rebase_rows, recapture
from .resume import Keeper


class Follower:
    """Moves a baseline to the version that was just committed. Its methods are called inside `gate.changing()`."""

    def __init__(self, settings: PublisherSettings, pool: Executor, keeper: Keeper) -> None:
        self._settings = settings
        self._pool = pool
        self._keeper = keeper

    def fresh(self, capture: Capture, position: Position) -> State:
        """The state that a fresh capture starts; takes over its memory."""
        if capture.geometry is None or capture.fresh is None:
            raise UsageError("a delta needs a baseline")
        return self._keeper.settle(State(position, capture.geometry, capture.fresh))

    def move(
        self, baseline: Baseline, capture: Capture, position: Position, waiting: Capture | None
    ) -> Capture | None:
        """Advance `baseline` by `capture`, which `position` committed; `waiting` told from there.

        Args:
            baseline: what both captures were told from.
            capture: what was committed.
            position: the version that it became.
            waiting: a finished capture of changes, which is used up.

        Raises:
            Corrupt: the rows do not lead to the committed state: neither baseline nor `waiting` are of use any more.
        """
        before, level = baseline.state, self._settings.level
        codec = waiting.rows.codec if waiting is not None else "gap"
        if capture.fresh is not None:
            baseline.replace(self.fresh(capture, position))
        elif capture.relaid:
            memory = materialise(before, capture, self._pool)
            geometry = capture.geometry or before.geometry
            baseline.replace(self._keeper.settle(proved(State(position, geometry, memory), self._pool)))
        elif waiting is None or not waiting.relaid:
            rows = (
                rebase_rows(
                    before, capture.rows.by_interval(), waiting.rows.by_interval(), self._pool, level, codec
                )
                if waiting
                else {}
            )
            baseline.advance(capture.rows, position, self._pool)
            if waiting is not None:
                waiting.rows.swap(rows)
                waiting.base = position.sha256
            return waiting
        else:
            # Rare: the layout changes while versions coalesce. Worth a whole copy, not a second mechanism.
            before = State(before.position, before.geometry, _copy(before))
            baseline.advance(capture.rows, position, self._pool)
        if waiting is None:
            return None
        return recapture(
            before,
            waiting,
            baseline.state,
            self._pool,
            row_elements=self._settings.row_elements,
            level=level,
            codec=codec,
        )


def _copy(state: State) -> Memory:
    memory = Memory.allocate(state.geometry)
    for spec in state.layout.stored:
        memory.tensor(spec.name)[...] = state.memory.tensor(spec.name)
    return memory
