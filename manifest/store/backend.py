"""What each kind of file system does in its own way; `objects` builds the store's promises on top."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

from .errors import Failure
from .types import Entry


@dataclass(frozen=True, slots=True)
class Page:
    """Some listed objects, by full path below the root's bucket; `token` leads to the next page, None: there
    is none.
    """

    entries: list[Entry]
    token: str | None = None


class Upload(Protocol):
    """A large object on its way, invisible until `finish` returns."""

    repeatable: bool
    """Whether `write` and `finish` may be called again with the same arguments after a failure."""

    def write(self, number: int, data: bytes) -> None:
        """Send piece `number` (from 0), of the settings' size."""

    def finish(self, number: int, data: bytes) -> None:
        """Send the last piece, perhaps empty, and make the object visible."""

    def abort(self) -> None:
        """Forget what was sent. Nothing becomes visible."""


class Backend(Protocol):
    """Single tries, no retry: whatever fails raises one of `errors`, which `classify` judges.

    Paths are the root's path, a slash, and a key. All methods may be called by several threads at once.
    """

    errors: tuple[type[Exception], ...]

    def classify(self, error: Exception) -> Failure:
        """Judge one of `errors`."""

    def read(self, path: str, start: int, stop: int | None = None, *, bulk: bool = False) -> Generator[bytes]:
        """The object's bytes from `start` on, up to `stop` if it is given, in pieces of at most a few MiB.
        Closing the iterator ends the request. A store that ignores `stop` gives more. `bulk`: many are expected.
        """

    def write(self, path: str, data: bytes) -> None:
        """Replace the object; a reader sees the old bytes or the new ones."""

    def create(self, path: str, data: bytes) -> None:
        """Write the object in one conditional request.

        Raises:
            An error judged EXISTS: there is an object of that name.
        """

    def upload(self, path: str) -> Upload:
        """Start a large object."""

    def size(self, path: str) -> int:
        """Bytes of an object."""

    def page(self, root: str, prefix: str, after: str, token: str | None) -> Page:
        """Objects whose keys below `root` start with the literal `prefix`; `entries` hold keys. No cached
        answers.

        Keys up to `after` may be left out.
        """

    def delete(self, path: str) -> None:
        """Remove the object. A missing one may raise an error judged MISSING."""
