"""What a file system's exception means, told by its type and its HTTP answer, never by its text."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from weightcast.schemas.errors import Corrupt, NotFound, StorageError, WeightcastError


class Kind(Enum):
    """What to do about a failure."""

    MISSING = "missing"  # the object is not there
    EXISTS = "exists"  # a precondition failed
    DAMAGED = "damaged"  # bytes changed on the way: fetch anew
    TRANSIENT = "transient"  # try again; whether a write took place is unknown
    EXPIRED = "expired"  # credentials: try again with a new session
    REFUSED = "refused"  # the store said no; nothing was written


@dataclass(frozen=True, slots=True)
class Failure:
    """A judged exception: what to do, what was found, what to advise, and how long the server asked to
    wait.
    """

    kind: Kind
    found: str
    hint: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The HTTP answer behind an exception."""

    status: int
    code: str
    retry_after_s: float


_EXPIRED_CODES: Final = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "RequestExpired",
        "TokenRefreshRequired",
        "InvalidToken",
        "InvalidAccessKeyId",
    }
)
_DAMAGED_UPLOAD_CODES: Final = frozenset(
    {"BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody", "RequestTimeout"}
)
"""Answers with status 400 to a body that changed or ended on the way: the same request may well succeed."""

_TRANSIENT_STATUS: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_CHECKSUM_STATUS: Final = frozenset({400, 411, 501})
"""What servers answer that do not know the checksum headers or the trailing framing."""

_TRANSIENT_ERRNO: Final = frozenset(
    {
        errno.EIO,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EREMOTEIO,
        errno.ENETDOWN,
    }
    | {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETRESET}
)
HINT_DAMAGED: Final = (
    "the object was damaged, cut, overwritten, or recoded on the way: "
    "does a proxy or store undo a Content-Encoding (transcoding)?"
)
_HINT_DENIED: Final = (
    "check the permissions of these credentials: read, write, and list, "
    "without which a missing object looks forbidden"
)
_HINT_EXPIRED: Final = (
    "the credentials have expired or were replaced; renew them, the next try reads them again"
)
_HINT_CHECKSUM: Final = "if this store does not know S3's checksum headers, set checksum to when_required"


def http_answer(error: BaseException | None) -> Answer | None:
    """The HTTP status behind `error` or its causes, as botocore, azure, gcsfs and aiohttp carry it."""
    direct = True
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, Mapping):
            meta = response.get("ResponseMetadata", {})
            status = meta.get("HTTPStatusCode")
            if isinstance(status, int):
                code = str(response.get("Error", {}).get("Code", ""))
                return Answer(status, code, _seconds(meta.get("HTTPHeaders", {}).get("retry-after")))
        # aiohttp's parser errors also carry a `code`, which is nobody's answer; they come as causes
        for name in ("status_code", "status", "code") if direct else ("status_code",):
            status = getattr(error, name, None)
            if isinstance(status, int) and 300 <= status < 600:
                headers = getattr(response, "headers", None) or getattr(error, "headers", None) or {}
                code = str(getattr(error, "error_code", None) or "")
                return Answer(
                    status, code, _seconds(headers.get("Retry-After") or headers.get("retry-after"))
                )
        error, direct = error.__cause__, False
    return None


def _seconds(value: object) -> float:
    """Seconds of a Retry-After header; 0 for a date or nonsense."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d{1,6}", value) else 0.0


def classify(error: BaseException) -> Failure:
    """Judge an exception of any file system. Unknown ones are REFUSED: they are shown, not tried again."""
    answer = http_answer(error)
    if answer is not None:
        return _classify_answer(answer)
    name = type(error).__name__
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return Failure(Kind.MISSING, "nothing there")
    if isinstance(error, FileExistsError):
        return Failure(Kind.EXISTS, "an object of that name")
    if isinstance(error, (ConnectionError, TimeoutError)):
        return Failure(Kind.TRANSIENT, name)
    if isinstance(error, PermissionError):
        return Failure(Kind.REFUSED, "permission denied", _HINT_DENIED)
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return Failure(Kind.TRANSIENT, f"{name} {errno.errorcode[error.errno or 0]}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure(Kind.REFUSED, "no space left", "make room, then try again")
    return Failure(Kind.REFUSED, f"{name}: {str(error)[:300]}")


def _classify_answer(answer: Answer) -> Failure:
    """Judge an HTTP answer."""
    found = f"HTTP {answer.status} {answer.code}".rstrip()
    if answer.code in _EXPIRED_CODES or answer.status == 401:
        return Failure(Kind.EXPIRED, f"expired or unknown credentials ({found})", _HINT_EXPIRED)
    if answer.code == "RequestTimeTooSkewed":
        return Failure(Kind.REFUSED, found, "set this machine's clock")
    if answer.code == "NoSuchBucket":
        return Failure(Kind.REFUSED, f"no such bucket ({found})", "make the bucket, or correct the store URL")
    if answer.status in _TRANSIENT_STATUS or answer.code in _DAMAGED_UPLOAD_CODES:
        return Failure(Kind.TRANSIENT, found, retry_after_s=answer.retry_after_s)
    if answer.status in (404, 410):
        return Failure(Kind.MISSING, f"nothing there ({found})")
    if answer.status == 412:
        return Failure(Kind.EXISTS, f"an object of that name ({found})")
    if answer.status == 403:
        return Failure(Kind.REFUSED, f"permission denied ({found})", _HINT_DENIED)
    return Failure(Kind.REFUSED, found, _HINT_CHECKSUM if answer.status in _CHECKSUM_STATUS else "")


class Redactor:
    """Takes secrets out of text. Knows the values of secret-looking settings and of the AWS environment."""

    _NAMES = re.compile(r"secret|token|password|key|credential|connection_string|sas", re.IGNORECASE)

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._secrets = tuple({*self._values(options), *self._environment()})

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _values(self, options: Mapping[str, Any]) -> Iterable[str]:
        for name, value in options.items():
            if isinstance(value, Mapping):
                yield from self._values(value)
            elif isinstance(value, str) and len(value) >= 4 and self._NAMES.search(str(name)):
                yield value

    @staticmethod
    def _environment() -> Iterable[str]:
        for name in (
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "FSSPEC_S3_SECRET",
            "AZURE_STORAGE_CONNECTION_STRING",
        ):
            if len(os.environ.get(name, "")) >= 4:
                yield os.environ[name]


def to_error(failure: Failure, what: str, tries: str = "") -> WeightcastError:
    """The error of this package for a failure of `what` (verb and object)."""
    message = f"cannot {what}: expected an answer, found {failure.found}{tries}"
    if failure.kind is Kind.MISSING:
        return NotFound(f"cannot {what}: {failure.found}")
    if failure.kind is Kind.DAMAGED:
        return Corrupt(
            f"cannot {what}: expected whole bytes, found {failure.found}{tries}", hint=HINT_DAMAGED
        )
    hint = failure.hint or (
        "the store may be overloaded or out of reach; try again" if failure.kind is Kind.TRANSIENT else ""
    )
    return StorageError(message, hint=hint)
