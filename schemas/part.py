"""What one writer of a version hands to the one that commits it: a small JSON document that any messenger can carry."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from .digest import Digest
from .layout import MAX_DIMENSIONS, MIX
from .manifest import (
    FORMAT,
    MAX_SHARDS,
    Count,
    DigestHex,
    Document,
    Sha256,
    ShardRef,
    Text,
    VersionNumber,
    decode,
)
from .names import check_tensor_name, parse_data_key

MAX_WRITERS = 1 << 20
"""Of one version."""

Rank = Annotated[int, Field(ge=0, lt=MAX_WRITERS)]
Index = Annotated[list[Count], Field(max_length=MAX_DIMENSIONS)]


class Tile(Document):
    """A box of a tensor whose bits a shard of a whole part carries: first index and size in each dimension."""

    tensor: Annotated[str, AfterValidator(check_tensor_name)]
    dtype: Text
    shape: Index
    start: Index
    extent: Index

    @model_validator(mode="after")
    def _is_inside(self) -> Self:
        if not len(self.shape) == len(self.start) == len(self.extent) or any(
            s + n > size or not n for s, n, size in zip(self.start, self.extent, self.shape, strict=True)
        ):
            raise ValueError(f"a tile of {self.tensor!r} is empty or not inside the tensor")
        return self


class Part(Document):
    """What one writer made of its slices. Describes, commits nothing.

    Attributes:
        version: that is in the making.
        base: SHA-256 of the manifest that the rows are told from; None: of none, for the part is whole.
        rank, size: which writer of how many.
        shards: that it stored, in order.
        features: that a reader of them must know.
        tiles: of a whole part what each shard carries; else none.
        ties: of a whole part, second names of tensors that it carries: each with the one that has the bits.
        elements: that it owns.
        mix: of the layout that it is part of.
        digest_before, digest_after: of what it owns. Of a whole part the first is zero.
        digest_moved: sum over the changes found; both digests and this must agree.
    """

    kind: Literal["part"] = "part"
    format: int = FORMAT
    version: VersionNumber
    base: Sha256 | None = None
    rank: Rank
    size: Annotated[int, Field(ge=1, le=MAX_WRITERS)]
    shards: Annotated[list[ShardRef], Field(max_length=MAX_SHARDS)]
    features: list[Text]
    tiles: list[list[Tile]]
    ties: dict[str, str]
    elements: Count
    mix: Annotated[int, Field(ge=1, le=MIX)] = 1
    digest_before: DigestHex
    digest_after: DigestHex
    digest_moved: DigestHex

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        if self.rank >= self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")
        if self.before + self.moved != self.after:
            raise ValueError(
                f"the changes of rank {self.rank} do not lead from its digest before to that after"
            )
        for shard in self.shards:
            if parse_data_key(shard.key) != self.version:
                raise ValueError(f"shard {shard.key!r} does not belong to version {self.version}")
        if len(self.tiles) != (0 if self.base is not None else len(self.shards)):
            raise ValueError("exactly the shards of a whole part say which tiles they carry")
        return self

    @property
    def before(self) -> Digest:
        """Digest of what the writer owns, in the version that the part is told from."""
        return Digest.from_hex(self.digest_before)

    @property
    def after(self) -> Digest:
        """Likewise, in this version."""
        return Digest.from_hex(self.digest_after)

    @property
    def moved(self) -> Digest:
        """What the changes found move it by."""
        return Digest.from_hex(self.digest_moved)

    @property
    def changed(self) -> int:
        """Elements that changed; of a whole part, all."""
        return sum(shard.changed for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes stored."""
        return sum(shard.size for shard in self.shards)

    @classmethod
    def decode(cls, text: str | bytes, where: str = "part") -> Part:
        """Parse a part; `where` names it in errors.

        Raises:
            Untrusted: it is none, or breaks a rule.
        """
        return decode(cls, text if isinstance(text, bytes) else text.encode(), where)
