"""How old the weights are that something was made with: stamps for rollouts, versions of steps, waiting for readers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

from weightcast.schemas.errors import NotFound, StorageError, UsageError
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.names import check_sha256, check_token

from .chain import Position
from .inspect import lags
from .inspect.values import ReaderStatus
from .stream import StreamReader

ALIVE_S: Final = 180.0
"""A lease that is older counts for nobody: three times the default between two leases."""

POLL_S: Final = 0.2
"""Between two looks at the leases: a listing, and a small request for each."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which weights made a rollout. Small, and plain JSON as a dict.

    Attributes:
        stream: id of the stream.
        version: the version's number.
        step: the trainer's step that it holds, if it says so.
        sha256: of the version's manifest; with it nobody can mistake one history for another.
    """

    stream: str
    version: int
    step: int | None
    sha256: str

    @classmethod
    def of(cls, position: Position) -> Self:
        """The stamp of a version, such as `subscriber.position`."""
        return cls(position.manifest.stream, position.version, position.manifest.step, position.sha256)

    @classmethod
    def of_manifest(cls, manifest: VersionManifest) -> Self:
        """The stamp of a version that this process committed; of such a manifest the encoding is what is stored."""
        return cls.of(Position(manifest, hashlib.sha256(manifest.encode()).hexdigest()))

    def to_dict(self) -> dict[str, Any]:
        """JSON values, to go along with a rollout."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The stamp that `to_dict` gave.

        Raises:
            UsageError: it is not one.
        """
        try:
            stamp = cls(**values)
            check_token(stamp.stream)
            check_sha256(stamp.sha256)
        except (TypeError, ValueError) as error:
            raise UsageError(f"{dict(values)!r} is not a stamp: {error}") from error
        if type(stamp.version) is not int or type(stamp.step) not in (int, type(None)):
            raise UsageError(f"{dict(values)!r} is not a stamp: version and step are integers")
        return stamp

    def behind(self, newer: Stamp) -> int:
        """Versions from this one to `newer`.

        Raises:
            UsageError: they are of different streams, between which nothing can be counted.
        """
        if self.stream != newer.stream:
            raise UsageError(f"stamps of streams {self.stream} and {newer.stream} cannot be compared")
        return newer.version - self.version


def version_of(reader: StreamReader, step: int) -> Position | None:
    """The newest version that holds the trainer's step `step`; None if none does yet.

    Where versions coalesced, a step is held by the next one. What a trainer published before it went back to an earlier
    step does not count: the weights of today are not made from it. Reads manifests from the head back to that version.
    """
    head = reader.head()
    found: Position | None = None
    for version in range(head if head is not None else -1, -1, -1):
        try:
            position = reader.position(version)
        except NotFound:
            break
        at = position.manifest.step
        if at is None:  # such as the one with which a publisher takes over: it changes nothing
            continue
        if at < step or (found is not None and at > _step(found)):
            break
        if found is None or at < _step(found):
            found = position
    return found


def _step(position: Position) -> int:
    return position.manifest.step or 0


def wait_held(
    reader: StreamReader,
    version: int,
    *,
    subscribers: int,
    max_lag: int = 0,
    timeout: float | None = None,
    alive_s: float = ALIVE_S,
) -> tuple[ReaderStatus, ...]:
    """Wait until subscribers hold `version`, or are no further behind it than allowed, as their leases say.

    A subscriber renews its lease with each version: when it has applied it and, in `Subscriber.follow`, the body of the
    loop is through with it. One that died counts with what it held last until its lease is `alive_s` old, by this
    host's clock.

    Args:
        reader: of the stream.
        version: need not be committed yet.
        subscribers: how many must hold it.
        max_lag: versions that they may be behind it.
        timeout: in seconds; None waits for ever.
        alive_s: seconds after which a lease that was not renewed does not count.

    Returns:
        Those that do; the one furthest behind first.

    Raises:
        UsageError: `subscribers` is not at least 1, or `max_lag` not at least 0.
        StorageError: time ran out; says who holds what.
    """
    if subscribers < 1 or max_lag < 0:
        raise UsageError(
            f"subscribers is {subscribers}, expected at least 1; max_lag is {max_lag}, at least 0"
        )
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        known = lags(reader, datetime.now(UTC))
        alive = [one for one in known if one.age_s is not None and one.age_s < alive_s]
        found = tuple(one for one in alive if one.version >= version - max_lag)
        if len(found) >= subscribers:
            return found
        if until is not None and time.monotonic() >= until:
            raise StorageError(
                f"{len(found)} of {subscribers} subscribers came to version {version - max_lag} within {timeout} s; "
                f"living ones are at {[one.version for one in alive]}",
                hint="look at the subscribers that are missing or behind; weightcast status lists all",
            )
        time.sleep(POLL_S)
