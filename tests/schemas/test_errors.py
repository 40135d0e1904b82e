"""The errors' contract: kinds, exit codes, whether trying again helps."""

from __future__ import annotations

from weightcast.schemas import errors
from weightcast.schemas.errors import NotFound, Unsupported, Untrusted, UsageError, WeightcastError

CONTRACT = {
    "NotFound": ("not_found", 10, True),
    "Conflict": ("conflict", 11, False),
    "Untrusted": ("untrusted", 12, False),
    "Unsupported": ("unsupported", 12, False),
    "Corrupt": ("corrupt", 13, True),
    "Gap": ("gap", 14, True),
    "StorageError": ("storage", 15, True),
    "UsageError": ("usage", 2, False),
    "WeightcastError": ("failure", 1, False),
}


def test_kinds_and_exit_codes_are_stable() -> None:
    found = {n: e for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, WeightcastError)}
    assert {n: (e.kind, e.exit_code, e.retryable) for n, e in found.items()} == CONTRACT
    assert len({e.kind for e in found.values()}) == len(found)


def test_hints_are_shown_and_kept_apart() -> None:
    error = NotFound("version 3 does not exist", hint="look at the log")
    assert (error.message, error.hint, str(error)) == (
        "version 3 does not exist",
        "look at the log",
        "version 3 does not exist (look at the log)",
    )
    assert str(NotFound("gone")) == "gone"


def test_who_is_caught_by_what() -> None:
    assert issubclass(Unsupported, Untrusted)
    assert issubclass(UsageError, ValueError)
