"""Values that the store seam takes and returns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from weightcast.schemas.errors import UsageError

PIECE_BYTES: Final = 1 << 20
"""Unit of streamed reads: large enough that a thread hop (about 0.1 ms) a piece does not show."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed object. `modified` is in the store's clock, with a time zone; None where the store does not
    say.
    """

    key: str
    size: int
    modified: datetime | None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a store was seen to do.

    Attributes:
        create_only: of two creates of one key the second failed and the first one's bytes stayed, also when
            racing.
        read_after_write: an object could be read, and an overwritten one read anew, right after the write.
        list_after_write: an object was listed right after it was written, and no longer after it was deleted.
        bodies_intact: bytes came back as they were sent (no framing stored, no transcoding).
        put_latency_s, get_latency_s: median of a few requests with small bodies.
        write_bytes_s, read_bytes_s: one stream, one object of a few MiB.
        problems: one sentence for each property that does not hold.
    """

    create_only: bool
    read_after_write: bool
    list_after_write: bool
    bodies_intact: bool
    put_latency_s: float
    get_latency_s: float
    write_bytes_s: float
    read_bytes_s: float
    problems: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether a stream may be made here without further promises by the user."""
        return self.create_only and self.read_after_write and self.list_after_write and self.bodies_intact


@dataclass(frozen=True)
class StoreSettings:
    """How to reach a store and how long to try. What is None is taken from the environment by the file
    system.

    Attributes:
        endpoint_url: S3-compatible endpoint; else `AWS_ENDPOINT_URL_S3`, `AWS_ENDPOINT_URL`, or the AWS
            profile.
        region: S3 region; else `AWS_DEFAULT_REGION` or the AWS profile.
        addressing: "path" puts the bucket into the path, "virtual" into the host name; "auto" is "path" for
            a custom endpoint or a bucket with dots in its name, else the client's own choice.
        checksum: "auto" sends and checks the client's checksums; "when_required" is for servers that refuse
            them.
        connect_timeout_s, read_timeout_s: for one connection, and for each wait for bytes.
        max_attempts: tries of one request (for a download: without a byte of progress in between).
        deadline_s: total time for one call with its retries (for a download: since the last progress).
        single_writer: the user states that there is only ever one writer. Create-only is then an existence
            check before a plain write.
        part_bytes: size of the pieces of a large upload; S3 takes 5 MiB to 5 GiB and 10,000 pieces an object.
        list_page: objects asked for in one listing request; S3 gives at most 1,000.
        storage_options: passed on to the fsspec file system; they win over everything above. May hold
            secrets: never shown.
    """

    endpoint_url: str | None = None
    region: str | None = None
    addressing: Literal["auto", "path", "virtual"] = "auto"
    checksum: Literal["auto", "when_required"] = "auto"
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    max_attempts: int = 10
    deadline_s: float = 60.0
    single_writer: bool = False
    part_bytes: int = 32 << 20
    list_page: int = 1000
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.addressing not in ("auto", "path", "virtual"):
            raise UsageError(f"addressing {self.addressing!r} is unknown", hint="use auto, path or virtual")
        if self.checksum not in ("auto", "when_required"):
            raise UsageError(f"checksum {self.checksum!r} is unknown", hint="use auto or when_required")
        for name in (
            "connect_timeout_s",
            "read_timeout_s",
            "max_attempts",
            "deadline_s",
            "part_bytes",
            "list_page",
        ):
            if getattr(self, name) <= 0:
                raise UsageError(f"store setting {name} is {getattr(self, name)}, expected more than 0")


@dataclass(frozen=True, slots=True)
class Pacing:
    """Time and chance, so that tests can hold them: seconds to sleep, a number in [0, 1), monotonic
    seconds.
    """

    sleep: Callable[[float], None] = time.sleep
    random: Callable[[], float] = random.random
    now: Callable[[], float] = time.monotonic
