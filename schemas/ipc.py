"""Tables as Arrow IPC files, read without trust: what is looked at is what is read, and nothing in it
expands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

MAGIC_BYTES: Final = 8  # "ARROW1", padded to 8 bytes; the messages begin after it
_RECORD_BATCH: Final = 3  # MessageHeader in Arrow's Message.fbs


def read_table(data: bytes | bytearray, schema: pa.Schema, *others: pa.Schema) -> pa.Table:
    """The table in an Arrow IPC file of exactly `schema` or one of `others`; its buffers may be views of `data`.

    The record batches are those that follow each other from the start of the file. A footer that lists others
    is not used, since they might be compressed and so expand without bound.

    Raises:
        ValueError: not such a file, a null where the schema allows none, or Arrow buffer compression.
    """
    try:
        with pa.ipc.open_file(pa.BufferReader(data)) as file:
            batches = file.num_record_batches
            found_schema = file.schema
            if not any(found_schema.equals(known) for known in (schema, *others)):
                raise ValueError(
                    f"it has columns {found_schema.names}, expected {schema.names} in the format's types"
                )
        if any(_is_compressed(message) for message in _messages(data)):
            raise ValueError("it uses Arrow buffer compression")
        with pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(data).slice(MAGIC_BYTES))) as stream:
            if not stream.schema.equals(found_schema):
                raise ValueError("its footer has another schema than its start")
            found = list(stream)
        if len(found) != batches:
            raise ValueError(f"its footer lists {batches} record batches, {len(found)} are there")
        table = pa.Table.from_batches(found, found_schema)
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error)) from error
    _check_nulls(table)
    return table


def _check_nulls(table: pa.Table) -> None:
    for field, column in zip(table.schema, table.columns, strict=True):
        values: list[Any] = [column] if not field.nullable else []
        if pa.types.is_list(field.type):
            values.append(pc.list_flatten(column))
        if any(v.null_count for v in values):
            raise ValueError(f"column {field.name!r} has a null")


def _messages(data: bytes | bytearray) -> Iterator[bytes]:
    """Flatbuffer metadata of each message in an Arrow IPC file, none of whose bodies is read."""
    source = pa.BufferReader(data)
    source.seek(MAGIC_BYTES)
    while True:
        try:
            message = pa.ipc.read_message(source)
        except EOFError:
            return
        yield message.metadata.to_pybytes()


def _is_compressed(metadata: bytes) -> bool:
    """Whether a flatbuffer `Message` is a record batch with a `compression` field (Arrow's Message.fbs)."""

    def table_field(table: int, index: int) -> int:
        vtable = table - int.from_bytes(metadata[table : table + 4], "little", signed=True)
        slot = 4 + 2 * index
        if slot >= int.from_bytes(metadata[vtable : vtable + 2], "little"):
            return 0
        offset = int.from_bytes(metadata[vtable + slot : vtable + slot + 2], "little")
        return table + offset if offset else 0

    message = int.from_bytes(metadata[:4], "little")
    header = table_field(message, 2)
    kind = table_field(message, 1)
    if not header or not kind or metadata[kind] != _RECORD_BATCH:
        return False
    batch = header + int.from_bytes(metadata[header : header + 4], "little")
    return table_field(batch, 3) != 0
