"""A capture's rows on their way from those who find changes to those who upload them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future

from weightcast.codec import Interval
from weightcast.schemas.errors import UsageError, WeightcastError
from weightcast.schemas.shard import Codec, Row


class Rows:
    """Rows in the order of their intervals, each known or being coded."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rows: list[tuple[Interval, Future[Row]]] = []
        self._finished = False
        self._failed = False
        self._open = 0  # rows that are being coded
        self.codec: Codec = "gap"
        self.coding_s = 0.0  # of one thread, for all rows that are coded
        self._when_coded: Callable[[], None] | None = None

    def add(self, interval: Interval, row: Future[Row]) -> None:
        """Hand over one row."""
        with self._changed:
            self._rows.append((interval, row))
            self._open += 1
            self._changed.notify_all()
        row.add_done_callback(lambda _: self._coded())

    def _coded(self) -> None:
        with self._changed:
            self._open -= 1
        self._tell()

    def spent(self, seconds: float) -> None:
        """So long took the coding of one row."""
        with self._changed:
            self.coding_s += seconds

    def finish(self, *, failed: bool = False) -> None:
        """No more rows will come; `failed`: and those that came are void."""
        with self._changed:
            self._finished, self._failed = True, self._failed or failed
            rows = list(self._rows)
            self._changed.notify_all()
        if failed:
            for _, row in rows:
                row.cancel()
        self._tell()

    def when_coded(self, call: Callable[[], None]) -> None:
        """Have `call` called once, in any thread: when no more rows will come and none is being coded."""
        with self._changed:
            self._when_coded = call
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            if not self._finished or self._open or self._when_coded is None:
                return
            call, self._when_coded = self._when_coded, None
        call()

    def __iter__(self) -> Iterator[Row]:
        """All rows in order, waiting for those to come; ends early if the capture failed.

        Raises:
            WeightcastError: a row could not be coded.
        """
        position = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda at=position: self._finished or len(self._rows) > at)  # type: ignore[misc]
                fresh = self._rows[position:]
                if self._failed or not fresh:
                    return
            for _, row in fresh:
                try:
                    yield row.result()
                except CancelledError:  # the capture has failed meanwhile
                    return
            position += len(fresh)

    @property
    def failed(self) -> bool:
        """Whether the capture failed."""
        return self._failed

    @property
    def error(self) -> WeightcastError | None:
        """Why a finished capture's rows are not all there, if so; waits for those that are being coded."""
        if self._failed:
            return UsageError("the capture failed")
        for _, row in self._rows:
            error = row.exception()
            if isinstance(error, WeightcastError):
                return error
            if error is not None:
                return WeightcastError(f"changes could not be coded: {type(error).__name__}: {error}")
        return None

    def by_interval(self) -> dict[Interval, Row]:
        """The rows of a finished capture; waits for those that are being coded."""
        return {interval: row.result() for interval, row in self._rows}

    def swap(self, rows: Mapping[Interval, Row]) -> None:
        """Replace the rows of a finished capture."""
        ordered = sorted(rows.items(), key=lambda pair: (pair[0].dtype, pair[0].start))
        self._rows = [(interval, ready(row)) for interval, row in ordered]


def ready(row: Row) -> Future[Row]:
    """A row that is known."""
    future: Future[Row] = Future()
    future.set_result(row)
    return future
