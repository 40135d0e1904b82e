"""Settings of both sides. Order of precedence: flags, environment (`WEIGHTCAST_…`), TOML file, defaults.

A TOML file has the tables `[publisher]` and `[subscriber]`; it is named by `WEIGHTCAST_CONFIG` or `--config`. The
environment uses the side as part of the name: `WEIGHTCAST_PUBLISHER_SNAPSHOT_EVERY=100`. Unknown keys are errors.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from .engine import PauseMode
from .errors import NotFound, UsageError
from .shard import Codec

MIB = 1 << 20

DetectorKind = Literal["snapshot", "cast", "adamw"]


class PublisherSettings(BaseSettings):
    """How a publisher works."""

    model_config = SettingsConfigDict(env_prefix="WEIGHTCAST_PUBLISHER_", extra="forbid", frozen=True)

    writer: str = Field(
        default="publisher",
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$",
        description="name in manifests and shard keys",
    )
    threads: int = Field(
        default_factory=lambda: min(8, os.cpu_count() or 1),
        ge=1,
        le=256,
        description="threads that compare and encode",
    )
    level: int = Field(default=1, ge=1, le=19, description="Zstandard level")
    codec: Codec = Field(
        default="gap",
        description="gap; class: also positions by old exponents, smaller, but engines need a mirror; "
        "auto: either, by the speed of the link",
    )
    row_elements: int = Field(
        default=1 << 22, ge=1 << 16, le=1 << 24, description="elements a row of a delta covers at most"
    )
    shard_bytes: int = Field(
        default=8 * MIB,
        ge=1 << 16,
        le=512 * MIB,
        description="encoded bytes after which a shard is closed; the first ones are smaller",
    )
    max_pending_bytes: int = Field(
        default=256 * MIB, ge=MIB, description="encoded changes held before publish() waits for the store"
    )
    snapshot_every: int = Field(
        default=100,
        ge=0,
        description="versions between snapshots; 0: only where the chain costs more than a snapshot",
    )
    snapshot_file_bytes: int = Field(
        default=1024 * MIB, ge=MIB, description="size of a snapshot's weight files"
    )
    baseline: Path | None = Field(
        default=None, description="file that keeps the baseline between runs; default: in memory"
    )
    detector: DetectorKind = Field(
        default="snapshot",
        description="snapshot: a copy of the last version; cast, adamw: none, where `Publisher.watch` can do without",
    )
    single_writer: bool = Field(default=False, description="accept a store without create-only writes")
    cast: dict[str, str] = Field(
        default={}, description="name pattern -> dtype that matching tensors are rounded to"
    )


class SubscriberSettings(BaseSettings):
    """How a subscriber works."""

    model_config = SettingsConfigDict(env_prefix="WEIGHTCAST_SUBSCRIBER_", extra="forbid", frozen=True)

    threads: int = Field(
        default_factory=lambda: min(8, os.cpu_count() or 1),
        ge=1,
        le=256,
        description="threads that decode and prove",
    )
    poll_s: float = Field(
        default=0.5,
        gt=0,
        le=3600,
        description="seconds between two polls at most; less where a version is due; spread by a third",
    )
    connections: int = Field(
        default=16, ge=1, le=64, description="requests to the store at once; large shards come in parts"
    )
    cut_through: bool = Field(
        default=False,
        description="fetch shards before their version is committed; they are listed while it is due",
    )
    fetch_bytes: int = Field(
        default=128 * MIB, ge=MIB, description="bytes of shards held while they are fetched ahead"
    )
    fold_bytes: int = Field(
        default=64 * MIB,
        ge=MIB,
        description="changes of versions after which no further one is folded with them",
    )
    max_lag: int | None = Field(
        default=None, ge=0, description="versions behind the head beyond which the subscriber is not ready"
    )
    lease: bool = Field(
        default=True, description="tell the store which version is held, so that pruning spares it"
    )
    lease_s: float = Field(default=60, gt=0, description="seconds between two leases")
    tries: int = Field(
        default=3, ge=1, le=100, description="failed attempts at a version before a snapshot is used instead"
    )
    pause: PauseMode = Field(
        default="keep", description="what happens to an engine's requests in flight while it is changed"
    )
    verify_every: int = Field(
        default=100, ge=0, description="versions between two full proofs of an engine's weights; 0: never"
    )


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    publisher: dict[str, Any] = {}
    subscriber: dict[str, Any] = {}


S = TypeVar("S", PublisherSettings, SubscriberSettings)


def load(kind: type[S], flags: dict[str, Any], config: Path | None = None) -> S:
    """Settings from `flags` (None values are unset), the environment, the TOML file and the defaults.

    Raises:
        UsageError: an unknown key or a value out of bounds; names it and where it came from.
        NotFound: the file does not exist.
    """
    config = config or (
        Path(os.environ["WEIGHTCAST_CONFIG"]) if os.environ.get("WEIGHTCAST_CONFIG") else None
    )
    section = "publisher" if kind is PublisherSettings else "subscriber"
    prefix = str(kind.model_config["env_prefix"])
    unknown = [
        k for k in os.environ if k.startswith(prefix) and k[len(prefix) :].lower() not in kind.model_fields
    ]
    if unknown:
        raise UsageError(f"environment variable {unknown[0]} is not a setting of the {section}")
    values: dict[str, Any] = {}
    if config is not None:
        values = getattr(_read_file(config), section)
    given = {k: v for k, v in flags.items() if v is not None}
    from_environment = {k for k in kind.model_fields if prefix + k.upper() in {e.upper() for e in os.environ}}
    try:
        return kind(**{k: v for k, v in values.items() if k not in from_environment} | given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(
            f"{section} setting {'.'.join(map(str, first['loc']))}: {first['msg']}, found {first.get('input')!r}"
        ) from error


def _read_file(path: Path) -> _File:
    try:
        return _File.model_validate(tomllib.loads(path.read_text("utf-8")))
    except FileNotFoundError as error:
        raise NotFound(f"configuration file {path} does not exist") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise UsageError(f"configuration file {path}: {error}") from error
