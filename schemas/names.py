"""What a tensor may be called, and where objects lie under a stream's root.

Keys are POSIX relative paths with `/` on every platform. Anything that comes from the store is validated here
before it becomes part of a path.
"""

from __future__ import annotations

import re
from typing import Final

from .errors import Untrusted, UsageError

MAX_TENSOR_NAME_BYTES: Final = 1024
MAX_KEY_BYTES: Final = 512
RESERVED_TENSOR_NAMES: Final = frozenset({"__metadata__"})
"""safetensors keeps these header keys for itself: a file with such a tensor could never be read."""

_KEY_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"[0-9a-f]{32}")

STREAM_KEY: Final = "stream.json"
HEAD_KEY: Final = "head.json"
FLOOR_KEY: Final = "floor.json"
VERSIONS_PREFIX: Final = "versions/"
SNAPSHOTS_PREFIX: Final = "snapshots/"
DATA_PREFIX: Final = "data/"
PROBE_PREFIX: Final = "probe/"
READERS_PREFIX: Final = "readers/"


def check_tensor_name(name: str) -> str:
    """Return `name` if a stream can carry a tensor of that name.

    Raises:
        UsageError: empty, reserved, too long, not encodable, or with a NUL or surrogate.
    """
    problem = ""
    if not name:
        problem = "is empty"
    elif name in RESERVED_TENSOR_NAMES:
        problem = "is reserved by the safetensors format"
    elif "\x00" in name:
        problem = "contains a NUL character"
    else:
        try:
            size = len(name.encode("utf-8"))
        except UnicodeEncodeError:
            problem = "is not valid Unicode"
        else:
            if size > MAX_TENSOR_NAME_BYTES:
                problem = f"has {size} bytes, at most {MAX_TENSOR_NAME_BYTES} are allowed"
    if problem:
        shown = name if len(name) <= 80 else name[:77] + "..."
        raise UsageError(f"tensor name {shown!r} {problem}", hint="rename the tensor before it is published")
    return name


def check_key(key: str) -> str:
    """Return `key` if it is a safe relative object key.

    Raises:
        Untrusted: traversal, absolute path, URL, backslash, control character, pattern character, or too
        long.
    """
    if len(key.encode("utf-8", "replace")) > MAX_KEY_BYTES or not all(
        _KEY_PART.fullmatch(p) for p in key.split("/")
    ):
        raise Untrusted(
            f"object key {key[:120]!r} is not a plain relative path",
            hint="the document was not written by weightcast",
        )
    return key


def check_file_name(name: str) -> str:
    """Return `name` if it is a plain file name without a folder part.

    Raises:
        Untrusted: anything else.
    """
    if not _FILE_NAME.fullmatch(name):
        raise Untrusted(
            f"file name {name[:120]!r} is not a plain name", hint="the document was not written by weightcast"
        )
    return name


def check_sha256(value: str) -> str:
    """Return `value` if it is a lower-case hex SHA-256."""
    if not _HEX64.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is not a SHA-256 in lower-case hex")
    return value


def check_token(value: str) -> str:
    """Return `value` if it is 32 lower-case hex digits (a UUID without dashes)."""
    if not _TOKEN.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is not a token of 32 hex digits")
    return value


def version_key(version: int) -> str:
    """Key of a version manifest, whose creation is the commit."""
    return f"{VERSIONS_PREFIX}{version:012d}.json"


def layout_key(sha256: str) -> str:
    """Key of a tensor table."""
    return f"layouts/{sha256}.arrow"


def file_key(sha256: str) -> str:
    """Key of a small companion file (config, tokenizer) or of the list of them."""
    return f"files/{sha256}"


def shard_key(version: int, writer: str, part: int, token: str) -> str:
    """Key of a delta shard. `token` is new for every attempt, so a key is never written with two contents."""
    return f"{DATA_PREFIX}{version:012d}/{writer}-{part:05d}-{token}.arrow"


def snapshot_folder(version: int, token: str | None = None) -> str:
    """Folder of a snapshot. One that starts a chain carries its attempt's token: its version is not
    settled yet.
    """
    return f"{SNAPSHOTS_PREFIX}{version:012d}" + (f"-{token}" if token else "")


def snapshot_manifest_key(folder: str) -> str:
    """Key of a snapshot's manifest, written last."""
    return f"{folder}/manifest.json"


def parse_version_key(key: str) -> int | None:
    """The version whose manifest lies at `key`, or None if `key` is something else."""
    match = re.fullmatch(r"versions/([0-9]{12})\.json", key)
    return int(match[1]) if match else None


def parse_snapshot_manifest_key(key: str) -> tuple[int, str | None] | None:
    """(version, token or None) of the snapshot whose manifest lies at `key`, or None if `key` is
    something else.
    """
    match = re.fullmatch(r"snapshots/([0-9]{12})(?:-([0-9a-f]{32}))?/manifest\.json", key)
    return (int(match[1]), match[2]) if match else None


def parse_data_key(key: str) -> int | None:
    """The version that a shard at `key` was written for, or None if `key` is something else."""
    match = re.fullmatch(r"data/([0-9]{12})/[A-Za-z0-9._-]+\.arrow", key)
    return int(match[1]) if match else None


def is_shard_key(key: str) -> bool:
    """Whether `key` is one that `shard_key` makes."""
    return (
        re.fullmatch(r"data/[0-9]{12}/[A-Za-z0-9_][A-Za-z0-9._-]*-[0-9]{5,}-[0-9a-f]{32}\.arrow", key)
        is not None
    )


def parse_snapshot_file_key(key: str) -> tuple[int, str | None, str] | None:
    """(version, token or None, file name) of a file in a snapshot's folder, or None if `key` is something
    else.
    """
    match = re.fullmatch(r"snapshots/([0-9]{12})(?:-([0-9a-f]{32}))?/([^/]+)", key)
    return (int(match[1]), match[2], match[3]) if match and _FILE_NAME.fullmatch(match[3]) else None


def is_probe_key(key: str) -> bool:
    """Whether `key` is a left-over of `Store.probe` or `Store.clock`."""
    return re.fullmatch(r"probe/[0-9a-f]{32}(/[A-Za-z0-9_][A-Za-z0-9._-]*)*", key) is not None


def is_reader_key(key: str) -> bool:
    """Whether `key` is a subscriber's lease."""
    return re.fullmatch(r"readers/[0-9a-f]{32}\.json", key) is not None
