"""What a folder target writes down before it changes anything, so that an interrupted change can be finished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from weightcast.codec import Changes
from weightcast.schemas.dtypes import WIDTHS
from weightcast.schemas.errors import Corrupt

from .folder_files import check_room, write_durably
from .target import Mark

_SCHEMA: Final = pa.schema(
    [("dtype", pa.string()), ("positions", pa.large_binary()), ("values", pa.large_binary())]
)


@dataclass(frozen=True)
class Journal:
    """Absolute values to write: by dtype, at flat positions of the layout that the folder has then; and what it is then."""

    mark: Mark
    changes: Mapping[str, Changes]


def write_journal(path: Path, journal: Journal) -> None:
    """Make the journal durable: it exists whole or not at all.

    Raises:
        StorageError: no room, or the disk failed; nothing is there then.
    """
    check_room(path.parent, sum(c.positions.nbytes + c.values.nbytes for c in journal.changes.values()))
    table = pa.table(
        {
            "dtype": list(journal.changes),
            "positions": [c.positions.tobytes() for c in journal.changes.values()],
            "values": [c.values.tobytes() for c in journal.changes.values()],
        },
        schema=_SCHEMA,
    ).replace_schema_metadata({"mark": json.dumps(asdict(journal.mark))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_durably(path, sink.getvalue())


def read_journal(path: Path) -> Journal | None:
    """The journal at `path`, or None if there is none.

    Raises:
        Corrupt: there is one, but it is not whole; a rename put it there, so the disk lost data.
    """
    if not path.is_file():
        return None
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
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
