"""What can go wrong, grouped by what the one who handles it does.

    WeightcastError
    ├── NotFound        10  nothing is there: wait, or look elsewhere
    ├── Conflict        11  somebody else was first: stop, look at who it was
    ├── Untrusted       12  it is there, but it is not what it must be: do not use it
    │   └── Unsupported 12  written by a newer format: upgrade the reader
    ├── Corrupt         13  bytes differ from what the manifest promises: fetch again, then repair
    ├── Gap             14  a version in between cannot be had: start again from a snapshot
    ├── StorageError    15  the store does not answer as it should: try again later
    └── UsageError       2  the call, a setting or an input is wrong: change it

Every error names the object, what was expected, what was found; `hint` says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, Final


class WeightcastError(Exception):
    """Base of all errors this package raises on purpose.

    Attributes:
        kind: stable machine-readable name of the class.
        exit_code: what the command line exits with.
        retryable: whether the same call may succeed later without anybody changing anything.
        hint: one sentence that says what to do, or "".
    """

    kind: ClassVar[str] = "failure"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        """What happened, without the hint."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


def some(names: Sequence[str]) -> str:
    """Names for a message: the first ten, and how many more there are."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(map(repr, names[:10])) + more


class NotFound(WeightcastError):
    """The object, version or stream does not exist."""

    kind = "not_found"
    exit_code = 10
    retryable = True


class Conflict(WeightcastError):
    """Another writer owns what this call wanted to create."""

    kind = "conflict"
    exit_code = 11


class Untrusted(WeightcastError):
    """A document breaks the chain, the schema, or a bound; it must not be used."""

    kind = "untrusted"
    exit_code = 12


class Unsupported(Untrusted):
    """A document needs a format or a feature that this release does not know."""

    kind = "unsupported"


class Corrupt(WeightcastError):
    """Bytes do not have the size, hash, digest or structure that a manifest promises."""

    kind = "corrupt"
    exit_code = 13
    retryable = True


class Gap(WeightcastError):
    """A version on the way is missing or pruned, and no snapshot leads over it."""

    kind = "gap"
    exit_code = 14
    retryable = True


class StorageError(WeightcastError):
    """The store failed, timed out, or refused for a reason of its own."""

    kind = "storage"
    exit_code = 15
    retryable = True


class UsageError(WeightcastError, ValueError):
    """The caller's input cannot be used as it is."""

    kind = "usage"
    exit_code = 2


KINDS: Final[Mapping[str, type[WeightcastError]]] = MappingProxyType(
    {
        kind.kind: kind
        for kind in (
            WeightcastError,
            NotFound,
            Conflict,
            Untrusted,
            Unsupported,
            Corrupt,
            Gap,
            StorageError,
            UsageError,
        )
    }
)
"""The class that a kind names, for errors that come from another process."""
