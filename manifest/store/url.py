"""From what a user types as a store to a scheme and a normalised root."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from weightcast.schemas.errors import UsageError

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://(.*)$", re.DOTALL)
_SCHEMES: Final = {
    "file": "file",
    "local": "file",
    "memory": "memory",
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
}
_FORMS = (
    "use a folder, file:///folder, s3://bucket/path, gs://bucket/path, az://container/path or memory://name"
)


@dataclass(frozen=True, slots=True)
class Location:
    """A root: `path` is what the file system takes, without a slash at the end; `url` names it for people."""

    scheme: str
    path: str
    url: str
    account: str = ""
    """Azure's storage account, if the URL names it."""

    @property
    def bucket(self) -> str:
        """First part of the path: a bucket or container for object stores."""
        return self.path.lstrip("/").split("/", 1)[0]


def parse_location(url: str, option: str = "--store") -> Location:
    """Normalise a store URL: doubled and trailing slashes vanish, a relative folder becomes absolute.

    Args:
        url: a folder, or a URL of a known scheme. Credentials, queries and chains of URLs are refused, not
            shown.
        option: the setting that `url` came from, for messages.

    Raises:
        UsageError: in one line that names the option.
    """
    if not url.strip():
        raise UsageError(f"{option} is empty, expected where the stream lies", hint=_FORMS)
    if "::" in url:
        raise UsageError(f"{option} is a chain of URLs ('::'), expected a single one", hint=_FORMS)
    if any(ord(c) < 32 or ord(c) == 127 for c in url):
        raise UsageError(f"{option} contains control characters", hint=_FORMS)
    match = _SCHEME.match(url)
    scheme = _SCHEMES.get(match[1].lower()) if match else "file"
    rest = match[2] if match else url
    if scheme is None:
        known = ", ".join(sorted(_SCHEMES))
        raise UsageError(
            f"{option} has the unknown scheme {match[1] if match else ''!r}, expected one of {known}",
            hint=_FORMS,
        )
    if scheme == "file":
        return _folder(rest, is_url=match is not None, option=option)
    return _object_root(scheme, rest, option)


def _folder(rest: str, *, is_url: bool, option: str) -> Location:
    """A local folder. Drives and backslashes are refused: the local store relies on POSIX links and
    renames.
    """
    if "\\" in rest or re.match(r"^/?[A-Za-z]:(/|$)", rest):
        raise UsageError(
            f"{option} is a Windows path, which is not supported",
            hint="use a POSIX folder (WSL) or an object store",
        )
    if not is_url and re.match(rf"^({'|'.join(_SCHEMES)}):", rest):
        raise UsageError(f"{option} {rest[:120]!r} lacks the two slashes of a URL", hint=_FORMS)
    if is_url:
        rest = rest.removeprefix("localhost")
        if not rest.startswith("/"):
            raise UsageError(
                f"{option} file://{rest[:120]} is not absolute",
                hint="a file URL has three slashes: file:///folder",
            )
    path = os.path.abspath(os.path.expanduser(rest) if not is_url else rest)
    path = "/" + path.strip("/")
    if path == "/":
        raise UsageError(
            f"{option} is the root folder of this machine, expected a folder of its own", hint=_FORMS
        )
    return Location("file", path, f"file://{path}")


def _object_root(scheme: str, rest: str, option: str) -> Location:
    """A bucket and a path in it."""
    host = rest.split("/", 1)[0]
    if scheme == "memory":
        rest = rest.lstrip("/")
    elif not host:
        raise UsageError(f"{option} names no bucket, found {scheme}://{rest[:120]}", hint=_FORMS)
    if "@" in host and scheme != "az":
        raise UsageError(
            f"{option} has credentials in the URL", hint="put them into the environment or a profile"
        )
    if "\\" in rest or "?versionId=" in rest:
        raise UsageError(f"{option} has a backslash or an object version in it", hint=_FORMS)
    container, _, account = host.partition("@")
    parts = [p for p in rest.split("/") if p]
    if not parts:
        raise UsageError(f"{option} names no place, found {scheme}://", hint=_FORMS)
    if any(p in (".", "..") for p in parts):
        raise UsageError(f"{option} has '.' or '..' as a part of its path", hint=_FORMS)
    if scheme == "az":
        parts[0] = container
    path = "/".join(parts)
    return Location(
        scheme, ("/" if scheme == "memory" else "") + path, f"{scheme}://{path}", account.split(".", 1)[0]
    )
