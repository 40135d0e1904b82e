"""What a look at a watched folder finds: candidates, by names and stamps alone. Opens no file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weightcast.manifest.tensorfile import INDEX_NAME, SINGLE_NAME

from .checkpoint import TRAINER_STATE_NAME, is_companion, is_unreadable_weights, step_in_name
from .contents import Stamp, file_errors, stamp

LATEST: Final = "latest"
NESTED: Final = ("huggingface", "actor/huggingface")
"""Where verl puts the Hugging Face weights of a step."""

_TEMPORARY: Final = re.compile(r"\..*|tmp[-_.].*|.*[-_.]tmp([-_.].*)?|.*\.(incomplete|partial)")
"""Names under which trainers write what they rename later; orbax writes `N.orbax-checkpoint-tmp-M`."""


def is_temporary(name: str) -> bool:
    """Whether a folder of this name is one that its writer has not finished."""
    return _TEMPORARY.fullmatch(name) is not None


def is_aside(name: str) -> bool:
    """Whether a file may change and the checkpoint is still the same: all but weights and their index."""
    return name != INDEX_NAME and not name.endswith(".safetensors")


@dataclass(frozen=True)
class Sighting:
    """A checkpoint folder as it was at one look.

    Attributes:
        path: the folder, resolved: a symbolic link and what it leads to are one candidate.
        weights: the folder in it that has the weights; often `path` itself.
        step: what `path` is named after.
        files: the stamps of everything in `weights` that matters.
        marked: whether the marker is there, or none is needed.
    """

    path: Path
    weights: Path
    step: int | None
    files: tuple[Stamp, ...]
    marked: bool = True

    @property
    def modified_ns(self) -> int:
        """Modification time of the newest file; 0 if there is none."""
        return max((s[3] for s in self.files), default=0)

    @property
    def look(self) -> int:
        """Differs from another look's if anything changed."""
        return hash((self.files, self.marked))

    @property
    def save(self) -> int:
        """Differs from another look's if the weights were saved again, or the marker came or went."""
        return hash((tuple(s for s in self.files if not is_aside(s[0])), self.marked))


def look(folder: Path, marker: str | None = None) -> list[Sighting]:
    """The candidates in a folder as they are now, finished or not.

    Raises:
        NotFound: the folder does not exist.
        StorageError: the folder cannot be read.
    """
    with file_errors(folder):
        names = sorted(os.listdir(folder))
    found = [_sight(folder, marker, named=False)]
    found += [
        _sight(folder / name, marker)
        for name in names
        if name == LATEST or step_in_name(Path(name)) is not None
    ]
    return [sighting for sighting in found if sighting is not None]


def _sight(path: Path, marker: str | None, *, named: bool = True) -> Sighting | None:
    """A candidate; None if there is none, or it is still called by a temporary name."""
    try:
        root = path.resolve(strict=True)
        if named and is_temporary(root.name):
            return None
        weights = _weights_folder(root) if named else root
        files = _files(weights)
        if not named and not any(_is_weights(f[0]) for f in files):
            return None
        marked = marker is None or (root / marker).exists()
    except PermissionError:
        return Sighting(path, path, step_in_name(path), ((".", 0, 0, 0),))  # opening it will say so
    except (OSError, RuntimeError):  # gone, no folder, or a loop of links
        return None
    return Sighting(root, weights, step_in_name(root), files, marked)


def _weights_folder(root: Path) -> Path:
    """`root`, or the folder in it that has the weights."""
    folders = [root, *(root / nested for nested in NESTED)]
    return next((f for f in folders if any((f / name).exists() for name in (INDEX_NAME, SINGLE_NAME))), root)


def _files(folder: Path) -> tuple[Stamp, ...]:
    """The stamps of all files that matter, by name."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_weights(entry.name) or entry.name == TRAINER_STATE_NAME or is_companion(entry.name):
                try:
                    found.append(stamp(entry.name, entry.stat()))
                except FileNotFoundError:
                    continue
    return tuple(sorted(found))


def _is_weights(name: str) -> bool:
    readable = name.endswith(".safetensors") and not name.startswith(".")
    return readable or name == INDEX_NAME or is_unreadable_weights(name)
