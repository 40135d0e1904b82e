"""A change of files in a kept folder: new weight files under new names, then everything else in one go."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from weightcast.schemas.errors import Corrupt, StorageError

from .folder_files import check_room, write_durably
from .target import Mark

_OWN_FILE: Final = re.compile(
    r"\.?model-v\d+(-\d+)?-\d{5}-of-\d{5}\.safetensors(\.tmp)?"
)  # as `free_name` gives them


@dataclass(frozen=True)
class Swap:
    """What the folder is to become.

    Attributes:
        mark: the version it holds then.
        index: text of the index, which names the new weight files; they are in place already.
        layout: the version's tensor table, as hex.
        remove: names of the weight files that are no longer needed.
    """

    mark: Mark
    index: str
    layout: str
    remove: list[str]


def write_swap(path: Path, swap: Swap) -> None:
    """Make it durable: from now on the new files are the folder's."""
    write_durably(path, json.dumps(asdict(swap)).encode())


def read_swap(path: Path) -> Swap:
    """What `write_swap` wrote.

    Raises:
        Corrupt: it is not whole; a rename put it there, so the disk lost data.
    """
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        return Swap(Mark(**raw["mark"]), raw["index"], raw["layout"], raw["remove"])
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt(
            f"{path} is not whole: {error}", hint="remove the folder; the subscriber fetches it again"
        ) from error


def free_name(folder: Path, version: int, number: int, count: int) -> str:
    """A name that no weight file has: file `number` (from 0) of `count` of `version`."""
    for again in range(1000):
        name = f"model-v{version}{f'-{again}' if again else ''}-{number + 1:05d}-of-{count:05d}.safetensors"
        if not (folder / name).exists():
            return name
    raise StorageError(f"{folder} is full of abandoned weight files of version {version}")


def abandoned(folder: Path, used: set[str]) -> list[Path]:
    """Files that a subscriber put into `folder` and that are not `used`."""
    return [p for p in folder.iterdir() if _OWN_FILE.fullmatch(p.name) and p.name not in used]


def move(source: Path, target: Path) -> None:
    """Rename, or copy where the two are on different file systems."""
    with contextlib.suppress(OSError):
        source.replace(target)
        return
    check_room(target.parent, source.stat().st_size)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{target} cannot be written: {error.strerror}") from error
    source.unlink()
