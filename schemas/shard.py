"""The table inside a delta shard: one row for each interval of a dtype's flat space, or box, that changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import pyarrow as pa

from .digest import Digest
from .errors import Corrupt
from .frames import MAGIC, expand, frame_of, stated_bytes
from .ipc import read_table
from .manifest import BOXES_FEATURE, CLASS_FEATURE, MAX_SHARD_BYTES, PACKED_FEATURE, PAIRS_FEATURE

Coding = Literal["gap", "dense", "whole", "class", "pairs"]
CODINGS: Final[tuple[str, ...]] = get_args(Coding)

GAPPED: Final = ("gap", "pairs")
"""Codings whose positions are gaps, and whose steps are of changes alone: a byte each, or two in a byte."""

Codec = Literal["gap", "class", "auto"]
"""What a publisher may be set to. `gap`: every coding but `class`; `class`: every coding; `auto`: the publisher picks
`gap` or `class` for each version, and whoever encodes one is only ever told one of these two."""

CLASS_HEAD_BYTES: Final = 2
"""Bytes at the beginning of a `class` row's plane `gaps`, before the lists of numbers."""

MAX_ROW_ELEMENTS: Final = 1 << 24
MAX_GAP_SHIFT: Final = 24  # bits: a row has at most 2^24 elements

ROW_BYTES: Final = 128
"""About what a row takes beside its planes."""

TABLE_BYTES: Final = 4096
"""About what a shard takes beside its rows: names and places of its columns, each twice."""

PACKED_SHARE: Final = 32
"""A shard is packed if that concerns 1/32 of it. A frame takes about two thirds off what is not planes."""

MAX_EXPANSION: Final = 16
"""Bytes that a packed shard may have for each that was fetched: a small object must not fill a reader's memory."""

SHARD_SCHEMA: Final = pa.schema(
    [
        pa.field(name, kind, nullable=False)
        for name, kind in [
            ("tensor", pa.string()),
            ("tensors", pa.int32()),
            ("dtype", pa.string()),
            ("shape", pa.list_(pa.field("item", pa.int64(), nullable=False))),
            ("offset", pa.int64()),
            ("length", pa.int64()),
            ("count", pa.int64()),
            ("escaped", pa.int64()),
            ("coding", pa.string()),
            ("gap_shift", pa.int8()),
            ("gap_bytes", pa.int64()),
            ("gaps", pa.binary()),
            ("lows", pa.binary()),
            ("steps", pa.binary()),
            ("escapes", pa.binary()),
            ("digest", pa.binary(16)),
        ]
    ]
)

BOX_SCHEMA: Final = pa.schema(
    [*SHARD_SCHEMA, *(pa.field(name, pa.int64(), nullable=False) for name in ("run", "stride"))]
)
"""Of a shard that has a box row."""


@dataclass(frozen=True, slots=True)
class Row:
    """Changes in one interval of a dtype's flat space, or in one box in a tensor.

    A box is runs of `run` elements that begin `stride` elements apart: its element j is element
    offset + (j // run) * stride + j % run of the tensor. Positions, `length` and the planes count in it.

    Attributes:
        tensor: the tensor in which the interval begins.
        tensors: how many tensors, in layout order, the interval reaches into; 1 inside a large tensor.
        dtype: of all of them.
        shape: of `tensor` if the interval lies in one tensor, else empty.
        offset: first element, counted in `tensor`'s C order.
        length: elements in the interval or box.
        count: elements that changed (`whole`: that were sent, which is `length`).
        escaped: changed elements whose new bits, in coding `pairs` whose steps, lie in `escapes`.
        coding: how the planes are to be read.
        gap_shift: how many low bits of each gap lie in `lows` instead of `gaps`.
        gap_bytes: length of the gap plane before compression; a `class` row's is not compressed.
        lows: the low bits of the gaps, packed, never compressed.
        gaps, steps, escapes: the planes, each raw or one zstd frame, whichever is shorter; of a `class` row as coded.
        digest: of the interval or box after the change.
        run, stride: of a box; both 0: an interval.
    """

    tensor: str
    tensors: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int
    count: int
    escaped: int
    coding: Coding
    gap_shift: int
    gap_bytes: int
    gaps: bytes
    lows: bytes
    steps: bytes
    escapes: bytes
    digest: Digest
    run: int = 0
    stride: int = 0

    @property
    def is_box(self) -> bool:
        """Whether the elements are those of a box."""
        return self.run != 0 or self.stride != 0

    @property
    def spacing(self) -> tuple[int, int]:
        """(run, stride) as kernels take them: of an interval both are its length."""
        return (self.run, self.stride) if self.is_box else (self.length, self.length)

    @property
    def stop(self) -> int:
        """One past the last element, counted as `offset` is. The figures must be possible."""
        runs = self.length // self.run if self.run else 1
        return self.offset + (runs - 1) * self.stride + (self.run or self.length)

    @property
    def nbytes(self) -> int:
        """Bytes of the planes, and a round figure for the rest of the row."""
        return len(self.gaps) + len(self.lows) + len(self.steps) + len(self.escapes) + ROW_BYTES


_FEATURES: Final[dict[Coding, str]] = {"class": CLASS_FEATURE, "pairs": PAIRS_FEATURE}
"""Codings that not every reader of format 1 knows."""


def is_packed(rows: Sequence[Row]) -> bool:
    """Whether a shard of these rows is to be packed; it is left as it is where that does not pay or fit.

    Only with a row whose coding is a feature, too: whoever knows `gap`, `dense` and `whole` alone can read all others.
    """
    table_bytes = TABLE_BYTES + ROW_BYTES * len(rows)
    total_bytes = TABLE_BYTES + sum(row.nbytes for row in rows)
    return table_bytes * PACKED_SHARE >= total_bytes and any(row.coding in _FEATURES for row in rows)


def features_of(rows: Sequence[Row], *, packed: bool | None = None) -> set[str]:
    """The features that a version manifest must list for a shard of these rows.

    Args:
        packed: whether the shard is a frame; None: if `store_shard` makes it one.
    """
    found = {PACKED_FEATURE} if (is_packed(rows) if packed is None else packed) else set()
    for row in rows:
        if row.coding in _FEATURES:
            found.add(_FEATURES[row.coding])
        if row.is_box:
            found.add(BOXES_FEATURE)
    return found


def encode_shard(rows: Sequence[Row]) -> bytes:
    """The Arrow IPC file for `rows`; the same rows give the same bytes."""
    schema = BOX_SCHEMA if any(row.is_box for row in rows) else SHARD_SCHEMA
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    columns["digest"] = [row.digest.to_bytes() for row in rows]
    columns["shape"] = [list(row.shape) for row in rows]
    table = pa.table(columns, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def store_shard(rows: Sequence[Row]) -> bytes:
    """The shard of these rows as it is stored: that file, or one frame of it."""
    data = encode_shard(rows)
    if not is_packed(rows):
        return data
    frame = frame_of(data)
    return frame if len(frame) < len(data) <= MAX_EXPANSION * len(frame) else data


def decode_shard(data: bytes | bytearray, where: str) -> list[Row]:
    """Parse a shard whose hash has been checked; `where` names it in errors.

    A packed one is unpacked, within bounds. Planes are not decompressed here. Arrow buffer compression is refused: it
    could expand without bound.

    Raises:
        Corrupt: not such a table, or a row with impossible figures.
    """
    try:
        table = read_table(_unpacked(data), SHARD_SCHEMA, BOX_SCHEMA)
        columns = [column.to_pylist() for column in table.columns]
    except ValueError as error:
        raise Corrupt(
            f"shard {where} is not a delta table: {error}", hint="the shard was not written by weightcast"
        ) from error
    rows = []
    for values in zip(*columns, strict=True):
        named = dict(zip(table.schema.names, values, strict=True))
        row = Row(**named | {"shape": tuple(named["shape"]), "digest": Digest.from_bytes(named["digest"])})
        fault = fault_of(row)
        if fault or row.tensors < 1 or row.offset < 0 or not has_possible_box(row):
            raise Corrupt(
                f"shard {where}: the row of tensor {row.tensor!r} has impossible figures: it "
                + (
                    fault
                    or f"begins at {row.offset}, reaches into {row.tensors} tensors, with {row.length} elements in "
                    f"runs of {row.run} that begin {row.stride} apart"
                )
            )
        rows.append(row)
    return rows


def _unpacked(data: bytes | bytearray) -> bytes | bytearray:
    if data[: len(MAGIC)] != MAGIC:
        return data
    content_bytes = stated_bytes(data)
    if not 0 <= content_bytes <= min(MAX_SHARD_BYTES, MAX_EXPANSION * len(data)):
        raise ValueError(f"a frame of {len(data)} bytes states {content_bytes} bytes of content")
    return expand(data, content_bytes)


def has_possible_box(row: Row) -> bool:
    """Whether `row` is an interval, or a box of two and more runs in one tensor."""
    if not row.is_box:
        return True
    return (
        row.tensors == 1 and 1 <= row.run < row.stride and row.run < row.length and row.length % row.run == 0
    )


def fault_of(row: Row) -> str:
    """What of a row's figures cannot be, or "": they bound what a reader allocates. Its box is not looked at."""
    if row.coding not in CODINGS:
        return f"has coding {str(row.coding)[:32]!r}"
    if row.length > MAX_ROW_ELEMENTS:
        return f"has {row.length} elements, at most {MAX_ROW_ELEMENTS} are read"
    if not (1 <= row.count <= row.length and 0 <= row.escaped <= row.count):
        return f"has {row.escaped} escapes of {row.count} changes in {row.length}"
    if row.coding == "class":
        if row.tensors != 1:
            return f"is in coding class, and reaches into {row.tensors} tensors, expected 1"
        if row.gap_shift or row.escaped or row.lows or row.escapes:
            return (
                f"is in coding class, which uses no lows and no escapes, and has gap_shift {row.gap_shift}, "
                f"{row.escaped} escapes, {len(row.lows)} bytes of lows and {len(row.escapes)} of escapes"
            )
        if not row.gap_bytes == len(row.gaps) > CLASS_HEAD_BYTES:
            return f"is in coding class, and has gap_bytes {row.gap_bytes}, but {len(row.gaps)} bytes of gaps"
        return ""
    if row.coding == "whole" and not row.escaped == row.count == row.length:
        return f"is whole, but has {row.count} changes in {row.length}"
    gapped = row.coding in GAPPED
    if not 0 <= row.gap_shift <= (MAX_GAP_SHIFT if gapped else 0):
        return f"has gap_shift {row.gap_shift} in coding {row.coding}"
    least, most = (row.count, row.count + (row.length >> row.gap_shift) // 255) if gapped else (0, 0)
    if not least <= row.gap_bytes <= most:
        return f"has gap_bytes {row.gap_bytes}, expected {least} to {most}"
    if len(row.lows) != -(-row.count * row.gap_shift // 8):
        return f"has {len(row.lows)} bytes of lows for {row.count} changes"
    unused = {"dense": (row.gaps,), "whole": (row.gaps, row.steps)}.get(row.coding, ())
    return f"has planes that its coding {row.coding} does not use" if any(unused) else ""
