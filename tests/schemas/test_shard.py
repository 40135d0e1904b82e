"""Delta shards: round trips, impossible figures, and files that would expand without bound."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weightcast.codec import Box, FlatSpace, Geometry, Interval, Memory, decode, encode, encode_box
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import BOX_SCHEMA, SHARD_SCHEMA, Row, decode_shard, encode_shard

LAYOUT = Layout.of([TensorSpec("w", "U16", (1000,))])
ROW = Row(
    tensor="w",
    tensors=1,
    dtype="U16",
    shape=(1000,),
    offset=0,
    length=1000,
    count=1,
    escaped=0,
    coding="gap",
    gap_shift=0,
    gap_bytes=1,
    gaps=b"\5",
    lows=b"",
    steps=b"\2",
    escapes=b"",
    digest=Digest(1, 2),
)
BOX = replace(ROW, offset=7, length=300, run=30, stride=100)


def table_of(rows: list[Row]) -> pa.Table:
    with pa.ipc.open_file(pa.BufferReader(encode_shard(rows))) as reader:
        return reader.read_all()


def written(
    table: pa.Table, schema: pa.Schema = SHARD_SCHEMA, batch_rows: int | None = None, **options: Any
) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return sink.getvalue().to_pybytes()


rows = st.builds(
    lambda gaps, digest, offset, box: replace(
        BOX if box else ROW,
        gaps=gaps,
        count=len(gaps),
        gap_bytes=len(gaps),
        steps=b"\1" * len(gaps),
        offset=offset,
        digest=Digest(*digest),
    ),
    st.binary(min_size=1, max_size=9),
    st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1)),
    st.integers(0, 1 << 40),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(rows, max_size=5), st.integers(1, 6))
def test_round_trip_in_any_number_of_batches(found: list[Row], batch_rows: int) -> None:
    data = encode_shard(found)
    assert encode_shard(found) == data
    assert decode_shard(data, "x") == found
    schema = BOX_SCHEMA if any(row.is_box for row in found) else SHARD_SCHEMA
    assert decode_shard(written(table_of(found), schema, batch_rows=batch_rows), "x") == found


def test_columns_of_boxes_are_written_where_there_is_one() -> None:
    assert table_of([ROW, ROW]).schema.equals(SHARD_SCHEMA)
    table = table_of([ROW, BOX])
    assert table.schema.equals(BOX_SCHEMA)
    assert BOX_SCHEMA.names == [*SHARD_SCHEMA.names, "run", "stride"]
    assert (table["run"].to_pylist(), table["stride"].to_pylist()) == ([0, 30], [0, 100])
    assert decode_shard(written(table.slice(0, 1), BOX_SCHEMA), "x") == [ROW], "they may be there without one"


@pytest.mark.parametrize(
    "fields",
    [
        {"run": 0},
        {"stride": 0},
        {"run": -30},
        {"stride": -100},
        {"run": 31},
        {"run": 100},
        {"run": 150, "stride": 150},
        {"run": 300, "stride": 301},  # one run: an interval
        {"run": 600, "stride": 601},
        {"length": 301},
        {"length": 0},
        {"length": (1 << 24) + 20},
        {"tensors": 2},
        {"offset": -7},
        {"run": -(1 << 63), "stride": -(1 << 63)},
        {"run": (1 << 63) - 1, "stride": (1 << 63) - 1},
    ],
)
def test_b167_impossible_boxes(fields: dict[str, Any]) -> None:
    """B167: each is refused by the name of the shard and the tensor, before anything is allocated for it."""
    assert decode_shard(encode_shard([BOX]), "x") == [BOX]
    with pytest.raises(Corrupt, match=r"data/x\.arrow: the row of tensor 'w' has impossible figures"):
        decode_shard(encode_shard([BOX, replace(BOX, **fields)]), "data/x.arrow")


def test_boxes_of_any_size_are_left_to_the_layout() -> None:
    far = replace(BOX, offset=(1 << 63) - 1, stride=(1 << 63) - 1)
    assert decode_shard(encode_shard([far]), "x") == [far]
    with pytest.raises(Corrupt, match="'w'"):
        next(iter(Geometry(LAYOUT))).locate(far)


@pytest.mark.parametrize(
    "fields",
    [
        {"tensors": 0},
        {"tensors": -1},
        {"offset": -1},
        {"length": 0},
        {"length": (1 << 24) + 1},
        {"length": 1 << 62},
        {"count": 0},
        {"count": 1001},
        {"count": 10**15},
        {"escaped": -1},
        {"escaped": 2},
        {"coding": "class"},
        {"coding": ""},
        {"gap_shift": -1},
        {"gap_shift": 25},
        {"gap_bytes": 0},
        {"gap_bytes": 5},
        {"gap_bytes": 1 << 40},
        {"lows": b"x"},
        {"gap_shift": 3},
        {"coding": "dense"},
        {"coding": "whole"},
        {"coding": "whole", "gap_bytes": 0},
        {"coding": "dense", "gap_bytes": 0, "gap_shift": 1},
    ],
)
def test_b167_impossible_figures(fields: dict[str, Any]) -> None:
    """B167: each is refused by the name of the shard and the tensor, before anything is allocated for it."""
    with pytest.raises(Corrupt, match=r"data/x\.arrow: the row of tensor 'w' has impossible figures"):
        decode_shard(encode_shard([ROW, replace(ROW, **fields)]), "data/x.arrow")


def rss_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_b165_a_plane_that_expands_without_bound() -> None:
    """B165: a frame of some 8,000 bytes that expands to 256 MiB: refused, memory flat; stated or not."""
    zeros = bytes(1 << 20)
    for stated in (True, False):
        compressor = zstandard.ZstdCompressor().compressobj(size=256 << 20 if stated else -1)
        frame = b"".join([compressor.compress(zeros) for _ in range(256)] + [compressor.flush()])
        assert len(frame) < 20_000
        space = next(iter(Geometry(LAYOUT)))
        memory = Memory.allocate(Geometry(LAYOUT))
        for row in (
            replace(ROW, count=1000, gap_bytes=1000, gaps=bytes(1000), steps=frame),
            replace(ROW, coding="dense", gap_bytes=0, gaps=b"", steps=frame),
            replace(
                ROW, coding="whole", gap_bytes=0, gaps=b"", steps=b"", count=1000, escaped=1000, escapes=frame
            ),
        ):
            before = rss_kib()
            (read,) = decode_shard(encode_shard([row]), "x")
            with pytest.raises(Corrupt, match="plane"):
                decode(space, read, memory)
            assert rss_kib() - before < 64 << 10


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_b165_arrow_compression_is_refused(codec: str) -> None:
    """B165: 128 MiB of zeros in an Arrow-compressed column."""
    big = replace(ROW, steps=bytes(128 << 20))
    data = written(table_of([big]), compression=codec)
    assert len(data) < 4 << 20
    before = rss_kib()
    with pytest.raises(Corrupt, match="buffer compression"):
        decode_shard(data, "x")
    assert rss_kib() - before < 64 << 10


def test_b165_a_compressed_batch_behind_the_end_is_not_read() -> None:
    """A footer that points to a batch which does not follow the others: the compressed one is never
    touched.
    """
    plain, packed = (
        encode_shard([ROW]),
        written(table_of([replace(ROW, steps=bytes(1 << 20))]), compression="zstd"),
    )
    end = plain.index(b"\xff\xff\xff\xff\0\0\0\0")
    for data in (plain[:end] + packed[8:], plain[: end + 8] + packed[8:]):
        try:
            found = decode_shard(data, "x")
        except Corrupt:
            continue
        assert found == [ROW]


def narrow_runs() -> pa.Schema:
    return BOX_SCHEMA.set(len(SHARD_SCHEMA), pa.field("run", pa.int32(), nullable=False))


def retyped(name: str, kind: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(f.name, kind, nullable=False) if f.name == name else f for f in SHARD_SCHEMA])


TABLES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "no Arrow": lambda: b"x" * 500,
    "only a magic": lambda: b"ARROW1\0\0ARROW1",
    "cut": lambda: encode_shard([ROW])[:-1],
    "cut in half": lambda: encode_shard([ROW])[:1500],
    "a column less": lambda: written(
        table_of([ROW]).drop_columns(["digest"]), pa.schema(list(SHARD_SCHEMA)[:-1])
    ),
    "a column more": lambda: written(
        table_of([ROW]).append_column("x", [[1]]), pa.schema([*SHARD_SCHEMA, pa.field("x", pa.int64())])
    ),
    "a column of boxes alone": lambda: written(
        table_of([BOX]).drop_columns(["stride"]), pa.schema(list(BOX_SCHEMA)[:-1])
    ),
    "columns of boxes the other way round": lambda: written(
        table_of([BOX]).select([*SHARD_SCHEMA.names, "stride", "run"]),
        pa.schema([*SHARD_SCHEMA, BOX_SCHEMA.field("stride"), BOX_SCHEMA.field("run")]),
    ),
    "a narrow run": lambda: written(table_of([BOX]).cast(narrow_runs()), narrow_runs()),
    "another type": lambda: written(
        table_of([ROW]).cast(retyped("count", pa.int32())), retyped("count", pa.int32())
    ),
    "a large type": lambda: written(
        table_of([ROW]).cast(retyped("steps", pa.large_binary())), retyped("steps", pa.large_binary())
    ),
    "a stream": lambda: stream_of([ROW]),
}


def stream_of(found: list[Row]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SHARD_SCHEMA) as writer:
        writer.write_table(table_of(found))
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_are_none(name: str) -> None:
    with pytest.raises(Corrupt, match=r"shard data/x\.arrow is not a delta table"):
        decode_shard(TABLES[name](), "data/x.arrow")


@pytest.mark.parametrize("column", BOX_SCHEMA.names)
def test_nulls_are_refused(column: str) -> None:
    batch = table_of([BOX]).to_batches()[0]
    arrays = [
        pa.array([None], f.type) if f.name == column else batch.column(i) for i, f in enumerate(BOX_SCHEMA)
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, BOX_SCHEMA) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=BOX_SCHEMA))
    with pytest.raises(Corrupt, match=f"column '{column}' has a null"):
        decode_shard(sink.getvalue().to_pybytes(), "x")


def test_a_null_inside_a_shape() -> None:
    kind = pa.list_(pa.field("item", pa.int64(), nullable=True))
    table = table_of([ROW])
    index = SHARD_SCHEMA.get_field_index("shape")
    schema = SHARD_SCHEMA.set(index, pa.field("shape", kind, nullable=False))
    data = written(table.set_column(index, schema.field(index), pa.array([[None]], kind)), schema)
    with pytest.raises(Corrupt):
        decode_shard(data, "x")


@pytest.mark.parametrize("box", [False, True])
def test_no_flipped_bit_does_harm(box: bool) -> None:
    """Each byte flipped (with a hash that fits): refused, or other rows, which the codec checks; never
    another error.
    """
    space: FlatSpace = next(iter(Geometry(LAYOUT)))
    old, new = Memory.allocate(Geometry(LAYOUT)), Memory.allocate(Geometry(LAYOUT))
    new.tensor("w")[::5] = 300
    if box:
        address = new.address(space, 0)
        row = encode_box(space, Box("U16", 3, 300, 30, 100), address, old.address(space, 0)).row
    else:
        row = encode(space, new, old, Interval("U16", 0, 1000)).row
    assert row is not None
    good = encode_shard([row])
    for i in range(len(good)):
        data = bytearray(good)
        data[i] ^= 1 << (i % 8)
        try:
            for found in decode_shard(bytes(data), "x"):
                if found.dtype == "U16":
                    decode(space, found, old)
        except Corrupt:
            continue


def test_b167_buffers_beyond_the_file() -> None:
    """B167: a buffer that claims 2^62 bytes in the metadata is refused, memory flat."""
    data = bytearray(encode_shard([ROW]))
    length = struct.pack("<q", len(ROW.tensor))
    before = rss_kib()
    for at in [i for i in range(0, len(data) - 8, 8) if data[i : i + 8] == length][:20]:
        broken = bytearray(data)
        broken[at : at + 8] = struct.pack("<q", 1 << 62)
        try:
            decode_shard(bytes(broken), "x")
        except Corrupt:
            continue
    assert rss_kib() - before < 64 << 10
    assert np.frombuffer(length, "<i8")[0] == 1
