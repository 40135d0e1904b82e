"""Target: a Hugging Face checkpoint folder, patched in place.

    DIR/model.safetensors.index.json, weight files, config, tokenizer      what loaders see
    DIR/.weightcast/state.json      which version it holds, in which files (the mark)
    DIR/.weightcast/layout.arrow    the tensor table of that version
    DIR/.weightcast/journal.arrow   absolute values of a patch that has begun
    DIR/.weightcast/swap.json       a change of files that has begun
    DIR/.weightcast/hidden/         the index while the weights are between two versions
    DIR/.weightcast/lock            one subscriber at a time
    DIR/.weightcast/reading.lock    loaders may hold it shared; see `reading`

A patch: journal made durable → index moved out of sight → values written and read back → mark → index back → journal
removed. A loader that comes in between finds no weights rather than torn ones. Killed anywhere, `recover` finishes
it from the journal alone. The weights themselves are not synced: after a power loss the digest, which a subscriber
takes in full when it starts, tells whether they are whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from weightcast.codec import Changes, Geometry, Memory, gather, scatter
from weightcast.manifest.chain import Position
from weightcast.manifest.tensorfile import INDEX_NAME, SINGLE_NAME, encode_index, split_into_files
from weightcast.schemas.errors import Corrupt, StorageError, UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.names import check_file_name

from .folder_files import (
    Mapped,
    check_room,
    create_file,
    entry_point,
    map_file,
    place_all,
    sync_folder,
    weight_paths,
    write_durably,
)
from .journal import Journal, read_journal, write_journal
from .target import Mark, mark_of, restrict

_FILE_BYTES: Final = 4 << 30  # of weight files that a change of layout writes anew
_OWN_FILE: Final = re.compile(
    r"^model-v\d+(-\d+)?-\d{5}-of-\d{5}\.safetensors$"
)  # as `_free_name` gives them


@dataclass(frozen=True)
class _Swap:
    """A change of files: the new weight files (already in place, under new names), their index, and the mark then."""

    mark: Mark
    index: str
    layout: str
    remove: list[str]


class CheckpointFolder:
    """Keeps `path` a Hugging Face checkpoint at a version.

    Args:
        path: the folder; made if missing. If it holds a checkpoint already, that must turn out to be some version of
            the stream, or the subscriber refuses to touch it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.replaceable = False
        self.name = str(self.path)
        self._own = self.path / ".weightcast"
        self._files: tuple[Mark | None, list[Mapped]] | None = None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """See Target: a lock on a file, which the kernel drops with its holder."""
        try:
            (self._own / "hidden").mkdir(parents=True, exist_ok=True)
            lock = (self._own / "lock").open("w")
        except OSError as error:
            raise UsageError(
                f"{self._own} cannot be written: {error.strerror}",
                hint="a subscriber needs a folder that it may write to",
            ) from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def recover(self) -> None:
        """See Target."""
        if (self._own / "swap.json").is_file():
            self._finish_swap(_read_swap(self._own / "swap.json"))
        journal = read_journal(self._own / "journal.arrow")
        if journal is not None:
            self._write(Geometry(self._layout()), journal)
        self._show()
        self._sweep()

    def mark(self) -> Mark | None:
        """See Target."""
        path = self._own / "state.json"
        if not path.is_file():
            return None
        try:
            return Mark(**json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise Corrupt(
                f"{path} is not a subscriber's mark: {error}",
                hint="remove the folder; the subscriber fetches it again",
            ) from error

    def adopt(self, position: Position, layout: Layout) -> None:
        """See Target."""
        write_durably(self._own / "layout.arrow", layout.encoded)
        self._set_mark(mark_of(position))

    def tensors(self) -> Layout | None:
        """See Target."""
        specs = [entry.spec for file in self._mapped() for entry in file.entries]
        return Layout.of(specs) if specs else None

    def memory(self, geometry: Geometry) -> Memory:
        """See Target."""
        files = self._mapped()
        known = {spec.name for spec in geometry.layout}
        unknown = [e.spec.name for f in files for e in f.entries if e.spec.name not in known]
        if unknown:
            raise UsageError(f"{len(unknown)} tensors in {self.path} are not in the stream: {unknown[:5]}")
        return place_all(geometry, files, writable=False)

    def patch(self, geometry: Geometry, changes: Mapping[str, Changes], position: Position) -> None:
        """See Target."""
        journal = Journal(mark_of(position), changes)
        write_journal(self._own / "journal.arrow", journal)
        self._write(geometry, journal)

    def relay(
        self, before: Geometry, after: Geometry, changes: Mapping[str, Changes], position: Position
    ) -> None:
        """See Target: new files, so that the old ones stay whole until the swap."""
        incoming = self._incoming()
        groups = split_into_files(after.layout.stored, _FILE_BYTES)
        files = [create_file(incoming / f"{i}.safetensors", specs) for i, specs in enumerate(groups)]
        memory = place_all(after, files, writable=True)
        old, kept = self.memory(before), set(before.layout.stored)
        for spec in after.layout.stored:
            if spec in kept:
                memory.tensor(spec.name)[...] = old.tensor(spec.name)
        for dtype, found in changes.items():
            scatter(after[dtype], memory, found)
        self.load(after.layout, [f.path for f in files], position)

    def load(self, layout: Layout, weights: Sequence[Path], position: Position) -> None:
        """See Target."""
        tied = [spec for spec in layout if spec.tied_to is not None]
        extra = [self._tied_file(tied, weights)] if tied else []
        old = [p.name for p in weight_paths(self.path) if p.is_file()]
        groups = []
        for number, path in enumerate([*weights, *extra]):
            name = self._free_name(position.version, number, len(weights) + len(extra))
            specs = [entry.spec for entry in map_file(path, writable=False).entries]
            _move(path, self.path / name)
            groups.append((name, specs))
        swap = _Swap(
            mark_of(position),
            encode_index(groups).decode(),
            layout.encoded.hex(),
            [name for name in old if name not in dict(groups)],
        )
        write_durably(self._own / "swap.json", json.dumps(asdict(swap)).encode())
        self._finish_swap(swap)

    def companions(self, files: Mapping[str, bytes]) -> None:
        """See Target."""
        for name, data in files.items():
            path = self.path / check_file_name(name)
            if name in (INDEX_NAME, SINGLE_NAME) or name.endswith(".safetensors"):
                raise UsageError(f"companion file {name!r} would replace weights")
            if not path.is_file() or path.read_bytes() != data:
                write_durably(path, data)

    def workdir(self) -> Path | None:
        """See Target."""
        return self._incoming()

    def _write(self, geometry: Geometry, journal: Journal) -> None:
        """Carry out a journal; may be repeated."""
        files = self._mapped()
        with self._readers_away():
            self._hide()
            memory = place_all(geometry, files, writable=True)
            for dtype, changes in journal.changes.items():
                space = geometry[dtype]
                scatter(space, memory, changes)
                if not np.array_equal(gather(space, memory, changes.positions), changes.values):
                    raise Corrupt(
                        f"{self.path} does not hold what was written to it", hint="the disk may be failing"
                    )
                self._write_tied(geometry, files, changes)
            self._set_mark(journal.mark)
            self._files = (journal.mark, self._files[1]) if self._files else None
            self._show()
        (self._own / "journal.arrow").unlink(missing_ok=True)

    def _write_tied(self, geometry: Geometry, files: Sequence[Mapped], changes: Changes) -> None:
        """Repeat changes in the second names of tied tensors."""
        space = geometry[changes.dtype]
        entries = {e.spec.name: (f, e) for f in files for e in f.entries}
        for spec in geometry.layout:
            if spec.tied_to is None or spec.dtype != changes.dtype or spec.name not in entries:
                continue
            file, entry = entries[spec.name]
            memory = Memory.blank(geometry, writable=True)
            memory.place(spec.tied_to, file.address(entry), file.array)
            scatter(space, memory, restrict(space, changes, [spec.tied_to]))

    def _tied_file(self, tied: Sequence[TensorSpec], weights: Sequence[Path]) -> Path:
        """One more file, with the second names that a snapshot leaves out."""
        path = self._incoming() / "tied.safetensors"
        file = create_file(path, [TensorSpec(s.name, s.dtype, s.shape) for s in tied])
        sources = {
            e.spec.name: (f, e) for f in (map_file(p, writable=False) for p in weights) for e in f.entries
        }
        names = {spec.name: spec.tied_to for spec in tied}
        for entry in file.entries:
            source, original = sources[str(names[entry.spec.name])]
            file.array[entry.begin : entry.end] = source.array[original.begin : original.end]
        return path

    def _finish_swap(self, swap: _Swap) -> None:
        """From the moment that `swap.json` exists the new files are the folder's; may be repeated."""
        with self._readers_away():
            single = self.path / SINGLE_NAME
            if single.exists():
                single.replace(self._own / "hidden" / SINGLE_NAME)
            (self._own / "hidden" / INDEX_NAME).unlink(missing_ok=True)
            write_durably(self.path / INDEX_NAME, swap.index.encode())
            write_durably(self._own / "layout.arrow", bytes.fromhex(swap.layout))
            self._set_mark(swap.mark)
            self._files = None
        for name in swap.remove:
            (self.path / name).unlink(missing_ok=True)
        (self._own / "hidden" / SINGLE_NAME).unlink(missing_ok=True)
        (self._own / "journal.arrow").unlink(missing_ok=True)  # of a state that is no more
        (self._own / "swap.json").unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove downloads and weight files that a killed subscriber left before they became the folder's."""
        shutil.rmtree(self._own / "incoming", ignore_errors=True)
        used = {p.name for p in self._weight_paths()}
        for path in self.path.iterdir():
            if _OWN_FILE.match(path.name) and path.name not in used:
                path.unlink()

    def _set_mark(self, mark: Mark) -> None:
        write_durably(self._own / "state.json", json.dumps(asdict(mark)).encode())

    def _hide(self) -> None:
        entry = entry_point(self.path)
        if entry.is_file():
            entry.replace(self._own / "hidden" / entry.name)
            sync_folder(self.path)

    def _show(self) -> None:
        for name in (INDEX_NAME, SINGLE_NAME):
            hidden = self._own / "hidden" / name
            if hidden.is_file():
                hidden.replace(self.path / name)
                sync_folder(self.path)

    def _mapped(self) -> list[Mapped]:
        """The weight files; mapped again when another process of this host has moved the folder on."""
        mark = self.mark()
        if self._files is None or self._files[0] != mark:
            paths = self._weight_paths()
            missing = [p.name for p in paths if not p.is_file()]
            if missing:
                raise Corrupt(
                    f"{self.path}: weight file {missing[0]!r} is missing",
                    hint="remove the folder; the subscriber fetches it again",
                )
            self._files = (mark, [map_file(p, writable=True) for p in paths])
        return self._files[1]

    def _weight_paths(self) -> list[Path]:
        """The weight files, also while their index is out of sight."""
        hidden = self._own / "hidden"
        if (hidden / INDEX_NAME).is_file():
            return [self.path / p.name for p in weight_paths(hidden)]
        if (hidden / SINGLE_NAME).is_file():
            return [hidden / SINGLE_NAME]
        return weight_paths(self.path)

    def _layout(self) -> Layout:
        path = self._own / "layout.arrow"
        try:
            return Layout.decode(path.read_bytes(), str(path))
        except OSError as error:
            raise Corrupt(
                f"{path} cannot be read: {error.strerror}",
                hint="remove the folder; the subscriber fetches it again",
            ) from error

    def _incoming(self) -> Path:
        folder = self._own / "incoming"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _free_name(self, version: int, number: int, count: int) -> str:
        for again in range(1000):
            name = (
                f"model-v{version}{f'-{again}' if again else ''}-{number + 1:05d}-of-{count:05d}.safetensors"
            )
            if not (self.path / name).exists():
                return name
        raise StorageError(f"{self.path} is full of abandoned weight files of version {version}")

    @contextmanager
    def _readers_away(self) -> Iterator[None]:
        with (self._own / "reading.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Load from a kept folder inside this context, and the weights stay at one version meanwhile.

    The subscriber waits for it before it changes a byte, so do not stay longer than loading takes.

    Raises:
        UsageError: the folder is not kept by a subscriber.
    """
    folder = Path(path)
    try:
        lock = (folder / ".weightcast" / "reading.lock").open("a")
    except OSError as error:
        raise UsageError(f"{folder} is not kept by a subscriber: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield folder


def _read_swap(path: Path) -> _Swap:
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        return _Swap(Mark(**raw["mark"]), raw["index"], raw["layout"], raw["remove"])
    except (ValueError, TypeError, KeyError) as error:
        raise Corrupt(
            f"{path} is not whole: {error}", hint="remove the folder; the subscriber fetches it again"
        ) from error


def _move(source: Path, target: Path) -> None:
    """Rename, or copy where the two are on different file systems."""
    with contextlib.suppress(OSError):
        source.replace(target)
        return
    check_room(target.parent, source.stat().st_size)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.copyfile(source, temporary)
    temporary.replace(target)
    source.unlink()
