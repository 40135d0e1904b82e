"""What a folder target writes down before it changes anything, so that an interrupted change can be finished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from weightcast.codec import Changes
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.errors import Corrupt, StorageError

from .folder_files import check_room, sync_file, sync_folder
from .target import Mark

_SCHEMA: Final = pa.schema(
    [
        pa.field("dtype", pa.string()),
        pa.field("positions", pa.large_binary()),
        pa.field("values", pa.large_binary()),
    ]
)


@dataclass(frozen=True)
class Journal:
    """Absolute values to write: by dtype, at flat positions of the layout of the folder; and what it is then."""

    mark: Mark
    changes: Mapping[str, Changes]


def write_journal(path: Path, journal: Journal, *, durable: bool = True) -> None:
    """Write the journal: it exists whole or not at all, and on disk if it is to be durable.

    Raises:
        StorageError: no room, or the disk failed; nothing is there then.
    """
    needed = sum(c.nbytes for c in journal.changes.values())
    check_room(path.parent, needed)
    schema = _SCHEMA.with_metadata({"mark": json.dumps(asdict(journal.mark))})
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for dtype, changes in journal.changes.items():
                columns = [pa.array([dtype]), _binary(changes.positions), _binary(changes.values)]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        if durable:
            sync_file(temporary)
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:  # Arrow's own I/O errors are OSErrors too
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{path} ({needed} bytes) cannot be written: {error.strerror or error}") from error


def _binary(array: npt.NDArray[Any]) -> pa.Array[Any]:
    """One binary value over the bytes of `array`, not copied."""
    offsets = np.array([0, array.nbytes], np.int64)
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, _buffer(offsets), _buffer(array)])


def _buffer(array: npt.NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(np.ascontiguousarray(array).view(np.uint8).data)


def read_journal(path: Path, *, mapped: bool = False) -> Journal | None:
    """The journal at `path`, or None if there is none.

    Args:
        path: where it is.
        mapped: leave its arrays in the mapped file instead of copying them.

    Raises:
        Corrupt: there is one, but it is not whole; a rename put it there, so the disk lost data.
    """
    if not path.is_file():
        return None
    try:
        opened = pa.memory_map(str(path)) if mapped else pa.OSFile(str(path), "rb")
        with opened as file, pa.ipc.open_file(file) as reader:
            mark = Mark(**json.loads(reader.schema.metadata[b"mark"]))
            found = [_changes(reader.get_batch(i)) for i in range(reader.num_record_batches)]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            f"{path} is not a whole journal: {error}",
            hint="remove the folder; the subscriber fetches it again",
        ) from error
    return Journal(mark, {changes.dtype: changes for changes in found})


def _changes(batch: Any) -> Changes:
    """The changes of one dtype, over the batch's own buffers.

    Raises:
        ValueError: the batch does not hold such.
    """
    batch.validate()
    if batch.num_rows != 1 or batch.schema.remove_metadata() != _SCHEMA:
        raise ValueError(f"a batch of {batch.num_rows} rows, {batch.schema.names}")
    dtype = batch.column(0)[0].as_py()
    positions = _bytes_of(batch.column(1)).view(np.int64)
    values = _bytes_of(batch.column(2)).view(f"u{WIDTHS[dtype]}")
    if len(positions) != len(values):
        raise ValueError(f"{len(positions)} positions, but {len(values)} values of dtype {dtype}")
    return Changes(dtype, positions, values)


def _bytes_of(column: Any) -> npt.NDArray[np.uint8]:
    """The one binary value of a column, where it lies: a scalar's own buffer would be a copy."""
    _, offsets, data = column.buffers()
    first, last = np.frombuffer(offsets, np.int64, 2, 8 * column.offset).tolist()
    return np.frombuffer(data, np.uint8, last - first, first) if last > first else np.empty(0, np.uint8)
