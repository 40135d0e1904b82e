"""How old the weights are that something was made with: a stamp for rollouts, and the version of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from weightcast.schemas.errors import NotFound, UsageError
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.names import check_sha256, check_token

from .chain import Position
from .stream import StreamReader


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
