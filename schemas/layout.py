"""The tensor table of a version: names, dtypes, shapes, ties. Content-addressed, stored as an Arrow IPC
file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import pyarrow as pa

from .dtypes import WIDTHS, width_of
from .errors import Untrusted, UsageError
from .ipc import read_table
from .names import check_tensor_name

MAX_TENSORS: Final = 4_000_000
MAX_DIMENSIONS: Final = 32
MAX_ELEMENTS: Final = 1 << 48
"""Of all tensors of a layout together, so that no sum over them leaves int64."""
MAX_LAYOUT_BYTES: Final = 1 << 30

MIX: Final = 2
"""How new streams make the weights of the digest: as `mix_2` of docs/format.md. `mix_1` is that of older ones."""

MIX_FEATURE: Final = "mix2"
"""The version's digest is made by `mix_2`."""

_MIX_KEY: Final = b"mix"

LAYOUT_SCHEMA: Final = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("dtype", pa.string(), nullable=False),
        pa.field("shape", pa.list_(pa.field("item", pa.int64(), nullable=False)), nullable=False),
        pa.field("tied_to", pa.string(), nullable=True),
    ]
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its checkpoint name, dtype, shape, and, if it only repeats another one, that one's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tied_to: str | None = None

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes of one element."""
        return WIDTHS[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in C order."""
        return self.elements * self.width


@dataclass(frozen=True)
class Layout:
    """All tensors of a version, in layout order: by dtype, then by name. Build with `Layout.of`.

    The *flat space* of a dtype is the concatenation of its untied tensors in this order; rows of a delta
    shard are
    intervals of a flat space.

    Attributes:
        mix: 1 or 2, how the weights of the digest are made (docs/format.md, state digest). The same in all layouts
            between two resets of a stream.
    """

    tensors: tuple[TensorSpec, ...]
    mix: int = MIX
    _index: dict[str, TensorSpec] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], mix: int = MIX) -> Layout:
        """Validate and order `specs`. What goes on with a stream has the `mix` of its last layout.

        Raises:
            UsageError: a bad name, dtype or shape, two tensors of one name, or a tie that does not hold.
        """
        specs = tuple(sorted(specs, key=lambda s: (s.dtype, s.name)))
        if len(specs) > MAX_TENSORS:
            raise UsageError(f"{len(specs)} tensors; a stream carries at most {MAX_TENSORS}")
        index: dict[str, TensorSpec] = {}
        for spec in specs:
            check_tensor_name(spec.name)
            width_of(spec.dtype, spec.name)
            if (
                len(spec.shape) > MAX_DIMENSIONS
                or any(d < 0 for d in spec.shape)
                or spec.elements > MAX_ELEMENTS
            ):
                raise UsageError(f"tensor {spec.name!r} has an impossible shape {list(spec.shape)[:8]}")
            if spec.name in index:
                raise UsageError(
                    f"two tensors are called {spec.name!r}", hint="every tensor needs a name of its own"
                )
            index[spec.name] = spec
        if sum(s.elements for s in specs) > MAX_ELEMENTS:
            raise UsageError(
                f"{sum(s.elements for s in specs)} elements in all; a stream carries at most {MAX_ELEMENTS}"
            )
        for spec in specs:
            if spec.tied_to is not None:
                other = index.get(spec.tied_to)
                if (
                    other is None
                    or other.tied_to is not None
                    or (other.dtype, other.shape) != (spec.dtype, spec.shape)
                ):
                    raise UsageError(
                        f"tensor {spec.name!r} is tied to {spec.tied_to!r}, which is not an untied tensor "
                        f"of its dtype and shape"
                    )
        return cls(specs, mix, index)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def __getitem__(self, name: str) -> TensorSpec:
        return self._index[name]

    @property
    def features(self) -> list[str]:
        """Those that a manifest of this layout must list."""
        return [MIX_FEATURE] if self.mix == 2 else []

    @cached_property
    def stored(self) -> tuple[TensorSpec, ...]:
        """The tensors that carry bytes of their own, in layout order."""
        return tuple(s for s in self.tensors if s.tied_to is None)

    @cached_property
    def stored_by_name(self) -> dict[str, TensorSpec]:
        """The same, by name."""
        return {spec.name: spec for spec in self.stored}

    @cached_property
    def dtypes(self) -> dict[str, tuple[int, int]]:
        """For each dtype the half-open range of its tensors in `stored`."""
        ranges: dict[str, tuple[int, int]] = {}
        for i, spec in enumerate(self.stored):
            ranges[spec.dtype] = (ranges.get(spec.dtype, (i, i))[0], i + 1)
        return ranges

    @cached_property
    def elements(self) -> int:
        """Elements of all stored tensors."""
        return sum(s.elements for s in self.stored)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(s.nbytes for s in self.stored)

    @cached_property
    def encoded(self) -> bytes:
        """The Arrow IPC file that the store holds."""
        schema = LAYOUT_SCHEMA if self.mix == 1 else LAYOUT_SCHEMA.with_metadata({_MIX_KEY: str(self.mix)})
        table = pa.table(
            {
                "name": [s.name for s in self.tensors],
                "dtype": [s.dtype for s in self.tensors],
                "shape": [list(s.shape) for s in self.tensors],
                "tied_to": [s.tied_to for s in self.tensors],
            },
            schema=schema,
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of `encoded`, in hex: the name of the layout."""
        return hashlib.sha256(self.encoded).hexdigest()

    @classmethod
    def decode(cls, data: bytes, where: str = "layout") -> Layout:
        """Parse an Arrow IPC file whose hash has been checked.

        Raises:
            Untrusted: not such a table, or one that breaks a rule of `Layout.of`.
        """
        try:
            table = read_table(data, LAYOUT_SCHEMA)
            columns = [table.column(i).to_pylist() for i in range(4)]
            specs = tuple(TensorSpec(n, d, tuple(s), t) for n, d, s, t in zip(*columns, strict=True))
            layout = cls.of(specs, _mix_of(table.schema.metadata or {}))
        except ValueError as error:
            raise Untrusted(f"{where} is not a tensor table: {error}") from error
        if layout.tensors != specs:
            raise Untrusted(f"{where} does not list its tensors by dtype and name")
        layout.__dict__["encoded"] = data  # another Arrow release may write the same table in other bytes
        return layout


def _mix_of(metadata: Mapping[bytes, bytes]) -> int:
    found = metadata.get(_MIX_KEY, b"1")
    if found not in (b"1", b"2"):
        raise ValueError(
            f"its digest is made by mix {found[:16]!r}, this release knows 1 and 2: a newer one is needed"
        )
    return int(found)
