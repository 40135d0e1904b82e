"""safetensors files by byte offsets: what the header says, checked against the file, without reading a
tensor.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from weightcast.schemas.dtypes import width_of
from weightcast.schemas.errors import Corrupt, NotFound, StorageError, WeightcastError
from weightcast.schemas.layout import MAX_DIMENSIONS, TensorSpec
from weightcast.schemas.names import check_tensor_name

MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors reader itself
_HEADER_ROOM_BYTES: Final = 50_000_000  # half of it: readers take several times as much memory to parse it
INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file; `begin` and `end` are byte offsets from the start of the file."""

    spec: TensorSpec
    begin: int
    end: int


def read_header(path: Path) -> list[Entry]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        NotFound: no such file.
        Corrupt: not a whole safetensors file; says what it looks like, with sizes.
        UsageError: a name or dtype that a stream cannot carry.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise Corrupt(_what_is_it(path, size, start + file.read(192), length))
            raw = file.read(length)
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist") from error
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    return _parse_header(path, size, 8 + length, raw)


def _parse_header(path: Path, size: int, body: int, raw: bytes) -> list[Entry]:
    try:
        header = json.loads(raw, object_pairs_hook=_no_duplicates)
        _check_metadata(header.pop("__metadata__", {}))
        entries = []
        for name, item in header.items():
            begin, end = item["data_offsets"]
            dtype, shape = item["dtype"], tuple(item["shape"])
            sound = len(shape) <= MAX_DIMENSIONS and all(
                type(n) is int and 0 <= n < 1 << 63 for n in (begin, end, *shape)
            )
            if not sound:
                raise ValueError(
                    f"tensor {name!r} has an impossible shape or data_offsets: {str(item)[:120]}"
                )
            width = width_of(dtype, name)
            spec = TensorSpec(check_tensor_name(name), dtype, shape)
            if spec.elements * width != end - begin:
                raise ValueError(
                    f"tensor {name!r} has {end - begin} bytes, {dtype}{list(shape)} needs "
                    f"{spec.elements * width}"
                )
            entries.append(Entry(spec, body + begin, body + end))
    except WeightcastError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path} has a broken safetensors header: {error}") from error
    entries.sort(key=lambda e: (e.begin, e.end))
    position = body
    for entry in entries:
        if entry.begin != position:
            raise Corrupt(
                f"{path}: tensor {entry.spec.name!r} begins at byte {entry.begin}, expected {position}"
            )
        position = entry.end
    if position != size:
        raise Corrupt(
            f"{path} has {size} bytes, its header promises {position}",
            hint="the file is cut or still being written",
        )
    return entries


def _check_metadata(metadata: object) -> None:
    """What safetensors itself demands of `__metadata__`; a tensor of that name makes a file that nobody
    can open.
    """
    if isinstance(metadata, dict) and isinstance(metadata.get("data_offsets"), list):
        check_tensor_name("__metadata__")
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("__metadata__ must map strings to strings")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is listed twice")
    return found


def _what_is_it(path: Path, size: int, start: bytes, length: int) -> str:
    text = start.lstrip().lower()
    if size == 0:
        return f"{path} is empty (0 bytes), expected a safetensors file"
    if text.startswith(b"version https://git-lfs"):
        return f"{path} is a Git LFS pointer ({size} bytes), not the file itself"
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return f"{path} is a web page or XML answer ({size} bytes), not a safetensors file"
    if MAX_HEADER_BYTES < length <= size - 8:
        return f"{path} ({size} bytes) has a header of {length} bytes, at most {MAX_HEADER_BYTES} are read"
    return (
        f"{path} has {size} bytes, too few for the {length + 8} bytes that its safetensors header would take"
    )


@contextmanager
def mapped(path: Path) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of a file, mapped read-only. The mapping lives as long as an array over it does, whatever
    happens to the file's name.
    """
    with path.open("rb") as file:
        yield np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def encode_header(specs: Sequence[TensorSpec]) -> bytes:
    """Length and header of a file that holds `specs` one after the other; padded to 8 bytes as the format
    asks.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + spec.nbytes],
        }
        position += spec.nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def split_into_files(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    """Distribute tensors over files of about `max_bytes`; wide elements first, so that all are aligned.

    However small the tensors are, no file gets more of them than its header has room for.
    """
    files: list[list[TensorSpec]] = []
    room = header_room = 0
    for spec in sorted(specs, key=lambda s: (-s.width, s.dtype, s.name)):
        header_bytes = _header_bytes(spec)
        if not files or spec.nbytes > room or header_bytes > header_room:
            files.append([])
            room, header_room = max_bytes, _HEADER_ROOM_BYTES
        files[-1].append(spec)
        room -= spec.nbytes
        header_room -= header_bytes
    return files or [[]]


def _header_bytes(spec: TensorSpec) -> int:
    """What a tensor takes in a header, at most: its name as JSON, a number of 20 digits a dimension, and
    the rest.
    """
    return len(json.dumps(spec.name, ensure_ascii=False).encode("utf-8")) + 21 * len(spec.shape) + 100


def file_names(count: int, prefix: str = "model") -> list[str]:
    """The names Hugging Face gives to `count` weight files."""
    return [f"{prefix}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def encode_index(files: Sequence[tuple[str, Sequence[TensorSpec]]]) -> bytes:
    """`model.safetensors.index.json` for the tensors of each file."""
    index = {
        "metadata": {"total_size": sum(s.nbytes for _, specs in files for s in specs)},
        "weight_map": {s.name: name for name, specs in files for s in specs},
    }
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
