"""Writing one version as a Hugging Face checkpoint folder that any loader takes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

import numpy as np

from weightcast.schemas.errors import StorageError, UsageError
from weightcast.schemas.layout import TensorSpec
from weightcast.schemas.manifest import ObjectRef
from weightcast.schemas.names import check_file_name, file_key

from .rebuild import State
from .stream import StreamReader
from .tensorfile import INDEX_NAME, SINGLE_NAME, encode_header, encode_index, file_names, split_into_files

FILE_BYTES: Final = 5 << 30
"""Size of a weight file, about: what Hugging Face's `save_pretrained` uses."""

MAX_FILE_BYTES: Final = 1 << 30
"""Companion files are read into memory; a tokenizer has tens of megabytes."""

PIECE_BYTES: Final = 64 << 20
"""Bytes handed to the file system at once."""


def export(
    state: State,
    files: Mapping[str, bytes],
    folder: Path,
    *,
    replace: bool = False,
    file_bytes: int = FILE_BYTES,
) -> list[str]:
    """Write `state` and companion `files` as the checkpoint `folder`, which appears whole or not at all.

    Tied tensors are written under each of their names, so that loaders need not know of the tie. The folder
    is built beside `folder`, synced, then renamed.

    Args:
        state: the tensors.
        files: config, tokenizer and so on, by name.
        folder: does not exist, is empty, or (`replace`) holds a checkpoint, which then is removed.
        replace: whether it may.
        file_bytes: size of a weight file, about.

    Returns:
        The names of the files written.

    Raises:
        UsageError: `folder` is taken, or a companion file has the name of a weight file or the index.
        StorageError: the disk does not take it.
    """
    folder = folder.resolve()
    check_free(folder, replace=replace)
    groups = split_into_files(state.layout.tensors, file_bytes)
    named = list(zip(file_names(len(groups)), groups, strict=True))
    taken = {INDEX_NAME, *(name for name, _ in named)}.intersection(files)
    if taken:
        raise UsageError(
            f"the version has a companion file {min(taken)!r}, which is the name of a weight file"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            for name, specs in named:
                _write_weights(state, specs, fresh / name)
            for name, data in [*files.items(), (INDEX_NAME, encode_index(named))]:
                _write(fresh / check_file_name(name), data)
            fresh.chmod(0o777 & ~_umask())
            _put_in_place(fresh, folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    return [name for name, _ in named] + sorted([*files, INDEX_NAME])


def check_free(folder: Path, *, replace: bool = False) -> None:
    """Refuse a folder that holds something; with `replace`, one that holds something else than a checkpoint.

    Raises:
        UsageError: it does.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not replace:
        raise UsageError(
            f"{folder} is not empty", hint="name a new folder, or use --force to replace a checkpoint"
        )
    if not (folder / INDEX_NAME).is_file() and not (folder / SINGLE_NAME).is_file():
        raise UsageError(
            f"{folder} holds no safetensors checkpoint, so it is not replaced", hint="name a new folder"
        )


def fetch_files(reader: StreamReader, ref: ObjectRef | None) -> dict[str, bytes]:
    """The companion files of a version, by name.

    Raises:
        UsageError: one is too large for memory.
        Corrupt, NotFound: one is not what the list says.
    """
    found = {}
    for file in reader.files(ref).files:
        if file.size > MAX_FILE_BYTES:
            raise UsageError(
                f"companion file {file.name!r} has {file.size} bytes, at most {MAX_FILE_BYTES} are read"
            )
        found[file.name] = reader.store.fetch(file_key(file.sha256), size=file.size, sha256=file.sha256)
    return found


def _write_weights(state: State, specs: Sequence[TensorSpec], path: Path) -> None:
    with path.open("xb") as file:
        file.write(encode_header(specs))
        for spec in specs:
            flat = state.memory.tensor(spec.tied_to or spec.name).reshape(-1)
            step = PIECE_BYTES // spec.width
            for begin in range(0, len(flat), step):
                file.write(flat[begin : begin + step].view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _put_in_place(fresh: Path, folder: Path) -> None:
    """Rename `fresh` to `folder`; what is there moves aside first, and is removed when the new one is in
    place.
    """
    descriptor = os.open(fresh, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    old: Path | None = None
    if folder.exists() and any(folder.iterdir()):
        old = Path(mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
        folder.rename(old)
    fresh.rename(folder)
    if old is not None:
        shutil.rmtree(old)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
