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


def write_journal(path: Path, journal: Journal) -> None:
    """Make the journal durable: it exists whole or not at all.

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
        sync_file(temporary)
        temporary.replace(path)
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


def read_journal(path: Path) -> Journal | None:
    """The journal at `path`, or None if there is none.

    Raises:
        Corrupt: there is one, but it is not whole; a rename put it there, so the disk lost data.
    """
    if not path.is_file():
        return None
    try:
        with pa.OSFile(str(path), "rb") as file, pa.ipc.open_file(file) as reader:
            table = reader.read_all()
        mark = Mark(**json.loads(table.schema.metadata[b"mark"]))
        changes = {
            dtype: Changes(
                dtype, np.frombuffer(positions, np.int64), np.frombuffer(values, f"u{WIDTHS[dtype]}")
            )
            for dtype, positions, values in zip(*(table.column(i).to_pylist() for i in range(3)), strict=True)
        }
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            f"{path} is not a whole journal: {error}",
            hint="remove the folder; the subscriber fetches it again",
        ) from error
    return Journal(mark, changes)
