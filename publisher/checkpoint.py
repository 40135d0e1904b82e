"""A Hugging Face checkpoint folder as a source: which files it consists of, whether it is whole, its tensors.

What belongs to a checkpoint is decided by its index alone, or by `model.safetensors` where there is no
index; other weight files are not looked at. An index beside a `model.safetensors` that it does not name is a
conflict, since loaders disagree about which one counts.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weightcast.manifest.tensorfile import INDEX_NAME, SINGLE_NAME, read_header
from weightcast.schemas.errors import Corrupt, NotFound, UsageError, WeightcastError
from weightcast.schemas.names import check_file_name

from .contents import Contents, Stamp, Weights, file_errors, stamp

log = logging.getLogger(__name__)

MAX_COMPANION_BYTES: Final = 64 << 20
"""A tokenizer has tens of megabytes at most; anything larger is not a companion file."""

MAX_INDEX_BYTES: Final = 256 << 20
"""Over ten times the index of a model of 100,000 tensors."""

TRAINER_STATE_NAME: Final = "trainer_state.json"

_COMPANIONS: Final = re.compile(
    r"(?:config|generation_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|"
    r"special_tokens_map|added_tokens|vocab|chat_template|adapter_config|modules)\.json|(?:merges|vocab)\.txt|"
    r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(?:model|jinja|tiktoken)"
)
_UNREADABLE: Final = (".bin", ".pt", ".pth", ".ckpt")
_NOT_WEIGHTS: Final = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
"""What trainers save beside the weights in such formats."""
_ORDER: Final = "pass the stream first, then the folder of a checkpoint that is written"
"""What to do about a folder that holds none."""

_STEP: Final = re.compile(r"(?:checkpoint|global_step|step|iter)[-_]([0-9]{1,18})")


def step_in_name(folder: Path) -> int | None:
    """The step that a folder is named after: `checkpoint-N`, `global_step_N`, `step_N` or `iter_N`."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def check_step(folder: Path, step: int) -> None:
    """Check that the folder's `trainer_state.json`, if there is a readable one, is of the same step.

    Raises:
        UsageError: it is of another step, so weights and metadata may not belong together.
    """
    try:
        state = json.loads((folder / TRAINER_STATE_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    found = state.get("global_step") if isinstance(state, dict) else None
    if type(found) is int and found != step:
        raise UsageError(
            f"{folder} is named after step {step}, its {TRAINER_STATE_NAME} says step {found}",
            hint="weights and trainer state do not belong together; find out which step these weights are of",
        )


def is_companion(name: str) -> bool:
    """Whether a file of this name (config, tokenizer) travels with the weights."""
    return _COMPANIONS.fullmatch(name) is not None


def is_unreadable_weights(name: str) -> bool:
    """Whether a file of this name looks like weights in a format whose reading runs code: never read."""
    return name.endswith(_UNREADABLE) and not name.startswith((".", *_NOT_WEIGHTS))


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, as it was when it was looked at.

    Attributes:
        folder: the resolved folder.
        weights: its weight files, each with its tensors.
        fingerprint: the stamps of weight files and index; another one, another save.
        aside: the stamps of the companion files.
    """

    folder: Path
    weights: Weights
    fingerprint: tuple[Stamp, ...]
    aside: tuple[Stamp, ...] = ()

    def companions(self) -> dict[str, bytes]:
        """Config and tokenizer files, by name.

        Raises:
            NotFound: the folder or a file in it is gone.
            Corrupt: a file was written to since the checkpoint was looked at.
            StorageError: a file cannot be read.
        """
        with file_errors(self.folder):
            found = {check_file_name(name): (self.folder / name).read_bytes() for name, *_ in self.aside}
            if _aside(self.folder) != self.aside:
                raise Corrupt(
                    f"{self.folder}: config or tokenizer changed", hint="the trainer is saving over it"
                )
            return found

    def is_unchanged(self) -> bool:
        """Whether the files on disk are still those that were looked at."""
        try:
            weights = _fingerprint([p for p, _ in self.weights], self.folder)
            return (weights, _aside(self.folder)) == (self.fingerprint, self.aside)
        except OSError:
            return False

    @contextmanager
    def items(self) -> Iterator[Contents]:
        """The tensors, in files that are held open until the context ends.

        Raises:
            NotFound: a file is gone.
            Corrupt: a file was replaced since the checkpoint was looked at.
        """
        with ExitStack() as stack:
            files = {}
            for path, _ in self.weights:
                with file_errors(path):
                    files[path] = stack.enter_context(path.open("rb", buffering=0)).fileno()
            contents = Contents(files, self.weights, {s[0]: s for s in self.fingerprint})
            contents.check()
            yield contents


def open_checkpoint(folder: Path) -> Checkpoint:
    """Look at a checkpoint folder and check that it is whole.

    Raises:
        NotFound: no such folder, no weights in it, or a file that the index names is missing.
        Corrupt: a file is cut, still being written, or disagrees with the index.
        UsageError: weights in a format that is not read, an ambiguous set of files, or a name that a stream
            cannot carry.
        StorageError: a file cannot be read.
    """
    with file_errors(folder):
        folder = folder.resolve()
        if not folder.is_dir():
            raise NotFound(
                f"{folder} is not a folder",
                hint=_ORDER,
            )
        paths, index = _weight_files(folder)
        before, aside = _fingerprint(paths, folder), _aside(folder)
        weights = tuple((p, tuple(read_header(p))) for p in paths)
        _check_distinct(weights, index, folder)
        if before != _fingerprint(paths, folder):
            raise Corrupt(f"{folder} changed while it was looked at", hint="the trainer is still writing")
        return Checkpoint(folder, weights, before, aside)


@dataclass(frozen=True)
class _Index:
    """`weight_map` and, if it is there, `metadata.total_size` of an index file."""

    files: Mapping[str, str]
    total_size: int | None


def _weight_files(folder: Path) -> tuple[list[Path], _Index | None]:
    """The weight files that count, and the index that says so, if there is one."""
    single = folder / SINGLE_NAME
    if not (folder / INDEX_NAME).is_file():
        if not single.is_file():
            raise _no_weights(folder)
        return [single], None
    index = _read_index(folder / INDEX_NAME)
    paths = sorted({folder / name for name in index.files.values()})
    if single.is_file() and single not in paths:
        raise UsageError(
            f"{folder} has {SINGLE_NAME} and an {INDEX_NAME} that does not name it",
            hint="remove the one that is stale",
        )
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise NotFound(
            f"{folder}: {INDEX_NAME} names {missing[0]!r}, which is missing",
            hint=f"{len(missing)} of {len(paths)} files are not there (yet)",
        )
    if not paths:
        raise Corrupt(f"{folder / INDEX_NAME} names no file")
    return paths, index


def _no_weights(folder: Path) -> WeightcastError:
    other = sorted(p.name for p in folder.iterdir() if is_unreadable_weights(p.name))
    if other:
        return UsageError(
            f"{folder} has {other[0]!r} but no safetensors files",
            hint="save with safe_serialization=True; only safetensors is read",
        )
    return NotFound(f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}", hint=_ORDER)


def _read_index(path: Path) -> _Index:
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise Corrupt(f"{path} has {path.stat().st_size} bytes, an index has at most {MAX_INDEX_BYTES}")
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
        files = {str(k): str(v) for k, v in document["weight_map"].items()}
        metadata = document.get("metadata")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(
            f"{path} is not a checkpoint index: {type(error).__name__} {error}",
            hint="it may still be being written",
        ) from error
    for name in set(files.values()):
        if not name.endswith(".safetensors") or name.startswith(".") or set(name) & set("/\\\0"):
            raise UsageError(f"{path} names {name!r}, which is not a safetensors file beside it")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return _Index(files, total if type(total) is int else None)


def _check_distinct(weights: Weights, index: _Index | None, folder: Path) -> None:
    """Check that each tensor is in one file, and in the one that the index names."""
    found: dict[str, str] = {}
    for path, entries in weights:
        for entry in entries:
            name = entry.spec.name
            if name in found:
                raise Corrupt(f"{folder}: tensor {name!r} is in both {found[name]} and {path.name}")
            found[name] = path.name
    if not found:
        raise Corrupt(f"{folder} has no tensors")
    if index is None:
        return
    if found != index.files:
        name = min(set(found.items()) ^ set(index.files.items()))[0]
        where, said = found.get(name, "no file"), index.files.get(name, "nothing")
        raise Corrupt(f"{folder}: tensor {name!r} is in {where}, {INDEX_NAME} says {said}")
    total = sum(entry.spec.nbytes for _, entries in weights for entry in entries)
    if index.total_size is not None and index.total_size != total:
        # Savers disagree about tied tensors here, and nobody reads it: worth a word, no refusal.
        log.warning("%s: total_size is %d, the tensors have %d", folder / INDEX_NAME, index.total_size, total)


def _fingerprint(paths: list[Path], folder: Path) -> tuple[Stamp, ...]:
    index = folder / INDEX_NAME
    every = [*paths, *([index] if index.exists() else [])]
    return tuple(stamp(p.name, os.stat(p)) for p in every)


def _aside(folder: Path) -> tuple[Stamp, ...]:
    """The stamps of config and tokenizer files, by name."""
    found = sorted(p for p in folder.iterdir() if is_companion(p.name) and p.is_file())
    stamps = (stamp(p.name, os.stat(p)) for p in found)
    return tuple(s for s in stamps if s[2] <= MAX_COMPANION_BYTES)
