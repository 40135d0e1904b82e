"""The JSON documents of a stream: what exists, and in which order. Immutable but for the two hints.

Parsing is strict: unknown keys, wrong types and values out of bounds are refused, and so are formats and
features
that this release does not know. A document is checked against its hash, where one is known, before it is
parsed.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from .digest import Digest
from .errors import Unsupported, Untrusted
from .layout import MIX_FEATURE
from .names import (
    check_file_name,
    check_key,
    check_sha256,
    check_token,
    parse_data_key,
    parse_snapshot_manifest_key,
)

FORMAT: Final = 1
CLASS_FEATURE: Final = "class"
"""Some row of the version has the coding `class`."""

BOXES_FEATURE: Final = "boxes"
"""Some row of the version is a box."""

PACKED_FEATURE: Final = "packed"
"""Some shard of the version may be a Zstandard frame."""

PAIRS_FEATURE: Final = "pairs"
"""A row of the version has two steps in a byte."""

FEATURES: Final[frozenset[str]] = frozenset(
    {CLASS_FEATURE, BOXES_FEATURE, PACKED_FEATURE, PAIRS_FEATURE, MIX_FEATURE}
)
"""Optional parts of the format that this release can read. A writer lists what a reader must know."""

MAX_MANIFEST_BYTES: Final = 8 << 20
MAX_HINT_BYTES: Final = 4096
MAX_METADATA_BYTES: Final = 64 << 10
MAX_SHARDS: Final = 20_000
MAX_OBJECT_BYTES: Final = 1 << 45
MAX_SHARD_BYTES: Final = 1 << 30
"""A reader takes a shard into memory whole."""
MAX_VERSION: Final = 10**12 - 1


def _check_digest(value: str) -> str:
    Digest.from_hex(value)
    return value


Sha256 = Annotated[str, AfterValidator(check_sha256)]
Token = Annotated[str, AfterValidator(check_token)]
DigestHex = Annotated[str, AfterValidator(_check_digest)]
Key = Annotated[str, AfterValidator(check_key)]
FileName = Annotated[str, AfterValidator(check_file_name)]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Size = Annotated[int, Field(ge=0, le=MAX_OBJECT_BYTES)]
VersionNumber = Annotated[int, Field(ge=0, le=MAX_VERSION)]
Text = Annotated[str, Field(max_length=512)]


class Document(BaseModel):
    """Base of all documents: frozen, strict, closed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def encode(self) -> bytes:
        """Compact UTF-8 JSON; the same model always gives the same bytes."""
        return self.model_dump_json(exclude_none=True).encode("utf-8")


class ObjectRef(Document):
    """An immutable object: where it is, how long, and its SHA-256."""

    key: Key
    size: Size
    sha256: Sha256


class ShardRef(ObjectRef):
    """A delta shard. `elements` and `changed` count over its rows."""

    rows: Count
    elements: Count
    changed: Count

    @model_validator(mode="after")
    def _is_a_shard(self) -> Self:
        if parse_data_key(self.key) is None:
            raise ValueError(f"{self.key!r} is not the key of a delta shard")
        if self.size > MAX_SHARD_BYTES:
            raise ValueError(f"{self.key!r} claims {self.size} bytes, at most {MAX_SHARD_BYTES} are read")
        if self.changed > self.elements:
            raise ValueError(f"{self.key!r} claims {self.changed} changes in {self.elements} elements")
        return self


class LayoutRef(Document):
    """The tensor table: its hash and size, and how many tensors it lists."""

    sha256: Sha256
    size: Size
    tensors: Count


class ParentRef(Document):
    """The version before, bound by the SHA-256 of its manifest's bytes."""

    version: VersionNumber
    sha256: Sha256


class Totals(Document):
    """Sums over a version. `bytes`: of the shards on the wire; `dense_bytes`: of all tensors,
    uncompressed.
    """

    elements: Count
    changed: Count
    bytes: Count
    dense_bytes: Count


class Stream(Document):
    """`stream.json`: created once, says what the rest is written in. `single_writer`: made on a store that
    cannot create-only, with the user's word that only one publisher will ever run."""

    kind: Literal["stream"] = "stream"
    format: int
    features: list[Text] = []
    stream: Token
    created: Text
    single_writer: bool = False


class VersionManifest(Document):
    """`versions/N.json`: its creation is the commit of version N.

    A version either changes its parent by `shards`, or starts afresh (`reset`) from the snapshot it names;
    version
    0 always does. `digest_before` is the parent's state digest, absent only for version 0.
    """

    kind: Literal["version"] = "version"
    format: int
    features: list[Text] = []
    stream: Token
    version: VersionNumber
    parent: ParentRef | None = None
    reset: bool = False
    snapshot: ObjectRef | None = None
    layout: LayoutRef
    digest_before: DigestHex | None = None
    digest_after: DigestHex
    shards: Annotated[list[ShardRef], Field(max_length=MAX_SHARDS)] = []
    files: ObjectRef | None = None
    totals: Totals
    writer: Text
    run: Token
    token: Token
    step: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    time: Text
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        if (self.version == 0) != (self.parent is None) or (self.version == 0) != (
            self.digest_before is None
        ):
            raise ValueError("exactly version 0 has no parent and no digest before")
        if self.parent is not None and self.parent.version != self.version - 1:
            raise ValueError(f"the parent of version {self.version} cannot be version {self.parent.version}")
        if self.version == 0 and not self.reset:
            raise ValueError("version 0 must be a reset")
        if self.reset != (self.snapshot is not None) or (self.reset and self.shards):
            raise ValueError("a reset names a snapshot and has no shards; any other version names none")
        if self.snapshot is not None:
            parsed = parse_snapshot_manifest_key(self.snapshot.key)
            if parsed is None or parsed[0] != self.version:
                raise ValueError(f"{self.snapshot.key!r} is not a snapshot of version {self.version}")
        for shard in self.shards:
            if parse_data_key(shard.key) != self.version:
                raise ValueError(f"shard {shard.key!r} does not belong to version {self.version}")
        if len({s.key for s in self.shards}) != len(self.shards):
            raise ValueError("two shards have the same key")
        if sum(s.changed for s in self.shards) != self.totals.changed and not self.reset:
            raise ValueError("the shards' changes do not add up to the total")
        if sum(s.size for s in self.shards) != self.totals.bytes:
            raise ValueError("the shards' sizes do not add up to the total")
        _check_metadata(self.metadata)
        return self

    @property
    def before(self) -> Digest | None:
        """State digest of the parent."""
        return None if self.digest_before is None else Digest.from_hex(self.digest_before)

    @property
    def after(self) -> Digest:
        """State digest of this version."""
        return Digest.from_hex(self.digest_after)


def _check_metadata(metadata: dict[str, Any]) -> None:
    try:
        size = len(json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode("utf-8"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"metadata cannot be written as JSON: {error}") from error
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"metadata has {size} bytes, at most {MAX_METADATA_BYTES} are allowed")


class FileRef(Document):
    """A file in a folder, by name, size and hash."""

    name: FileName
    size: Size
    sha256: Sha256


def _check_distinct(files: list[FileRef]) -> None:
    if len({f.name for f in files}) != len(files):
        raise ValueError("two files have the same name")


class SnapshotManifest(Document):
    """`snapshots/N/manifest.json`, written last. The folder is a plain Hugging Face checkpoint beside it.

    `weights`: the safetensors files in the order of the tensors; `files`: index, config, tokenizer.
    """

    kind: Literal["snapshot"] = "snapshot"
    format: int
    features: list[Text] = []
    stream: Token
    version: VersionNumber
    layout: LayoutRef
    digest: DigestHex
    weights: Annotated[list[FileRef], Field(max_length=MAX_SHARDS)]
    files: Annotated[list[FileRef], Field(max_length=1000)]
    writer: Text
    run: Token
    time: Text

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        _check_distinct(self.weights + self.files)
        return self

    @property
    def bytes(self) -> int:
        """Bytes that a reader fetches for the weights."""
        return sum(f.size for f in self.weights)


class FileList(Document):
    """Companion files of a version (config, tokenizer); each lies under `files/` by its hash."""

    kind: Literal["files"] = "files"
    files: Annotated[list[FileRef], Field(max_length=1000)]

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        _check_distinct(self.files)
        return self


class Head(Document):
    """`head.json`: a hint for readers that start. May be stale or missing; never trusted."""

    kind: Literal["head"] = "head"
    version: VersionNumber


class Floor(Document):
    """`floor.json`: versions below it may have lost their data. Only ever rises."""

    kind: Literal["floor"] = "floor"
    version: VersionNumber
    time: Text


class Reader(Document):
    """`readers/ID.json`: a subscriber says which version it holds, so that pruning spares what it still
    needs.
    """

    kind: Literal["reader"] = "reader"
    reader: Token
    version: VersionNumber
    time: Text


D = TypeVar("D", bound=Document)


def decode(model: type[D], data: bytes, where: str) -> D:
    """Parse `data` as a `model`; `where` names the object in errors.

    Raises:
        Unsupported: another format version, or a feature this release does not know.
        Untrusted: anything else that is not such a document.
    """
    try:
        document = model.model_validate_json(data)
        json.loads(data, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError, Untrusted) as error:
        _refuse_newer(data, where)
        raise Untrusted(
            f"{where} is not a valid {model.__name__} document: {_first_problem(error)}",
            hint="it was damaged, or something else wrote it; `weightcast verify` shows what else is wrong",
        ) from error
    _check_format(getattr(document, "format", FORMAT), getattr(document, "features", []), where)
    return document


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Parsers differ in which of two equal keys they take, so a document must not have any."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


def _refuse_newer(data: bytes, where: str) -> None:
    """A newer format may have any keys: name that cause rather than the first odd key."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return
    if (
        isinstance(raw, dict)
        and isinstance(raw.get("format"), int)
        and isinstance(raw.get("features", []), list)
    ):
        _check_format(raw["format"], raw.get("features", []), where)


def _check_format(found: int, features: list[Any], where: str) -> None:
    unknown = [f for f in features if not (isinstance(f, str) and f in FEATURES)]
    if found != FORMAT or unknown:
        what = f"features {[str(f)[:40] for f in unknown[:8]]}" if unknown else f"format {found}"
        raise Unsupported(
            f"{where} needs {what}; this release reads format {FORMAT} with {sorted(FEATURES)}",
            hint="upgrade weightcast",
        )
