"""A Hugging Face checkpoint folder as a source: which files it consists of, whether it is whole, its tensors' bits.

What belongs to a checkpoint is decided by its index alone, or by `model.safetensors` where there is no index; other files
are not looked at. An index beside a `model.safetensors` that it does not name is a conflict, since loaders disagree
about which one counts.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from weightcast.manifest.tensorfile import INDEX_NAME, SINGLE_NAME, Entry, read_header
from weightcast.schemas.errors import Corrupt, NotFound, StorageError, UsageError
from weightcast.schemas.names import check_file_name

from .sources import Item

MAX_COMPANION_BYTES: Final = 64 << 20
"""A tokenizer has tens of megabytes at most; anything larger is not a companion file."""

_COMPANIONS: Final = re.compile(
    r"^(config|generation_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|special_tokens_map|"
    r"added_tokens|vocab|chat_template|adapter_config|modules)\.json$|^(merges|vocab)\.txt$|.*\.(model|jinja|tiktoken)$"
)
_UNREADABLE: Final = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, as it was when it was looked at.

    Attributes:
        folder: the resolved folder.
        weights: its weight files, each with its tensors.
        fingerprint: inode, size and modification time of each weight file and of the index; another one, another save.
    """

    folder: Path
    weights: tuple[tuple[Path, tuple[Entry, ...]], ...]
    fingerprint: tuple[tuple[str, int, int, int], ...]

    def companions(self) -> dict[str, bytes]:
        """Config and tokenizer files, by name."""
        found = {}
        for path in sorted(self.folder.iterdir()):
            if _COMPANIONS.match(path.name) and path.is_file() and path.stat().st_size <= MAX_COMPANION_BYTES:
                found[check_file_name(path.name)] = path.read_bytes()
        return found

    def is_unchanged(self) -> bool:
        """Whether the files on disk are still those that were looked at."""
        try:
            return self.fingerprint == _fingerprint([p for p, _ in self.weights], self.folder)
        except OSError:
            return False

    @contextmanager
    def items(self) -> Iterator[dict[str, Item]]:
        """The tensors, mapped; the mapping outlives a deletion of the files, and ends with the context.

        Raises:
            NotFound: a file is gone.
        """
        with ExitStack() as stack:
            found: dict[str, Item] = {}
            for path, entries in self.weights:
                array = stack.enter_context(_mapped(path))
                base = array.ctypes.data if array.size else 0
                for entry in entries:
                    if entry.end > array.size:
                        raise Corrupt(f"{path} shrank to {array.size} bytes while it was read")
                    found[entry.spec.name] = Item(entry.spec, base + entry.begin if entry.spec.nbytes else 0, array, True, None)
            yield found


@contextmanager
def _mapped(path: Path) -> Iterator[np.ndarray]:
    """The bytes of a file, mapped read-only. Not closed explicitly: whoever holds the array keeps the mapping."""
    try:
        with path.open("rb") as file:
            yield np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError as error:
        raise NotFound(f"{path} is gone", hint="the trainer rotated the checkpoint away") from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """Look at a checkpoint folder and check that it is whole.

    Raises:
        NotFound: no such folder, no weights in it, or a file that the index names is missing.
        Corrupt: a file is cut, still being written, or disagrees with the index.
        UsageError: weights in a format that is not read, or an ambiguous set of files.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a folder")
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not index.is_file():
        if not single.is_file():
            raise _no_weights(folder)
        paths = [single]
        expected = None
    else:
        expected = _read_index(index)
        paths = sorted({folder / name for name in expected.values()})
        if single.is_file() and single not in paths:
            raise UsageError(f"{folder} has {SINGLE_NAME} and an {INDEX_NAME} that does not name it", hint="remove the one that is stale")
        missing = [p.name for p in paths if not p.is_file()]
        if missing:
            raise NotFound(f"{folder}: {INDEX_NAME} names {missing[0]!r}, which is missing ({len(missing)} of {len(paths)} files are)")
    try:
        before = _fingerprint(paths, folder)
        weights = tuple((p, tuple(read_header(p))) for p in paths)
        _check_distinct(weights, expected, folder)
        if before != _fingerprint(paths, folder):
            raise Corrupt(f"{folder} changed while it was looked at", hint="the trainer is still writing")
    except FileNotFoundError as error:
        raise NotFound(f"{folder} is gone", hint="the trainer rotated the checkpoint away") from error
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error}") from error
    return Checkpoint(folder, weights, before)


def _no_weights(folder: Path) -> NotFound | UsageError:
    other = sorted(p.name for p in folder.iterdir() if p.suffix in _UNREADABLE)
    if other:
        return UsageError(f"{folder} has {other[0]!r} but no safetensors files", hint="save with safe_serialization=True; only safetensors is read")
    return NotFound(f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}")


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_bytes())
        mapping = {str(k): str(v) for k, v in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path} is not a checkpoint index: {type(error).__name__} {error}", hint="it may still be being written") from error
    for name in set(mapping.values()):
        if "/" in name or "\\" in name or name.startswith(".") or not name.endswith(".safetensors"):
            raise UsageError(f"{path} names {name!r}, which is not a safetensors file beside it")
    return mapping


def _check_distinct(weights: tuple[tuple[Path, tuple[Entry, ...]], ...], expected: dict[str, str] | None, folder: Path) -> None:
    found: dict[str, str] = {}
    for path, entries in weights:
        for entry in entries:
            name = entry.spec.name
            if name in found:
                raise Corrupt(f"{folder}: tensor {name!r} is in both {found[name]} and {path.name}")
            found[name] = path.name
    if expected is not None and found != expected:
        name = sorted(set(found.items()) ^ set(expected.items()))[0][0]
        raise Corrupt(f"{folder}: tensor {name!r} is in {found.get(name, 'no file')}, {INDEX_NAME} says {expected.get(name, 'nothing')}")


def _fingerprint(paths: list[Path], folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    stats = [(p.name, os.stat(p)) for p in [*paths, *([folder / INDEX_NAME] if (folder / INDEX_NAME).exists() else [])]]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)
