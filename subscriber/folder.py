"""Target: a Hugging Face checkpoint folder, patched in place.

    DIR/model.safetensors.index.json, weight files, config, tokenizer      what loaders see
    DIR/.weightcast/state.json      which version it holds (the mark)
    DIR/.weightcast/layout.arrow    the tensor table of that version
    DIR/.weightcast/journal.arrow   absolute values of a patch that has begun
    DIR/.weightcast/swap.json       a change of files that has begun
    DIR/.weightcast/hidden/         index, or single weight file, while the weights are between two versions
    DIR/.weightcast/files/          config and tokenizer of the version to come
    DIR/.weightcast/incoming/       weight files on their way here
    DIR/.weightcast/lock            one subscriber at a time
    DIR/.weightcast/reading.lock    loaders may hold it shared; see `reading`

A patch: journal made durable → index moved out of sight → values written and read back → companions → mark →
index back → journal removed. A loader that comes in between finds no weights rather than torn ones. Killed anywhere,
`recover` finishes it from the journal alone, without the store. The weights themselves are not synced: after a power
loss the digest, which a subscriber takes in full when it starts, tells whether they are whole. A process that has the
weight files mapped sees them change in place.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Final

import numpy as np

from weightcast.codec import Changes, Geometry, Memory, digest_all, gather, scatter
from weightcast.manifest.chain import Position
from weightcast.manifest.tensorfile import INDEX_NAME, SINGLE_NAME, encode_index, split_into_files
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, StorageError, UsageError
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.names import check_file_name

from .folder_files import check_room, create_file, map_file, place_all, sync_folder, write_durably
from .folder_locks import OWN_NAME, only_subscriber, readers_away
from .folder_swap import Swap, abandoned, free_name, move, read_swap, write_swap
from .folder_ties import check_ties, tied_specs, write_tied, write_tied_file
from .folder_weights import WeightFiles
from .journal import Journal, read_journal, write_journal
from .target import Mark, mark_of

log = logging.getLogger(__name__)

_FILE_BYTES: Final = 4 << 30  # of weight files that a change of layout writes anew


class CheckpointFolder:
    """Keeps `path` a Hugging Face checkpoint at a version.

    Args:
        path: the folder; made if missing. If it holds a checkpoint already, that must turn out to be some version
            of the stream, or the subscriber refuses to touch it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.replaceable = False
        self.name = str(self.path)
        self._own = self.path / OWN_NAME
        self._weights = WeightFiles(self.path, self._own / "hidden")
        self._swept = False

    def exclusive(self) -> AbstractContextManager[None]:
        """See Target: a lock on a file."""
        return only_subscriber(self.path)

    def recover(self) -> None:
        """See Target."""
        if (self._own / "swap.json").is_file():
            self._finish_swap(read_swap(self._own / "swap.json"))
        if (self._own / "journal.arrow").is_file():
            self._redo()
        self._weights.show()
        shutil.rmtree(
            self._own / "files", ignore_errors=True
        )  # of a version that did not get as far as a journal
        if not self._swept:
            self._sweep()

    def check(self, layout: Layout) -> None:
        """See Target. Files can hold whatever a stream carries."""

    def mark(self) -> Mark | None:
        """See Target."""
        path = self._own / "state.json"
        try:
            return Mark(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise Corrupt(
                f"{path} is not a subscriber's mark: {error}",
                hint="remove the folder; the subscriber fetches it again",
            ) from error

    def adopt(self, position: Position, layout: Layout) -> None:
        """See Target."""
        self._set_layout(layout.encoded)
        if (
            self._own / "files"
        ).is_dir():  # companions and mark come to hold together: a patch that writes nothing else
            self.patch(Geometry(layout), {}, position)
        elif self.mark() != mark_of(position):
            self._set_mark(mark_of(position))

    def empty(self) -> bool:
        """See Target."""
        return not any(file.entries for file in self._weights.mapped(self.mark()))

    def digest(self, geometry: Geometry, pool: Executor) -> Digest:
        """See Target."""
        return digest_all(geometry, self.base(geometry), pool)

    def weights(self) -> list[Path]:
        """Its weight files."""
        return self._weights.paths()

    def base(self, geometry: Geometry) -> Memory:
        """See Target."""
        files = self._weights.mapped(self.mark())
        unknown = [e.spec.name for f in files for e in f.entries if e.spec.name not in geometry.layout]
        if unknown:
            raise UsageError(f"{len(unknown)} tensors in {self.path} are not in the stream: {unknown[:5]}")
        memory = place_all(geometry, files, writable=False)
        if self._weights.checked != geometry.layout.sha256:
            check_ties(geometry.layout, files)
            self._weights.checked = geometry.layout.sha256
        return memory

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
        check_room(incoming, after.layout.nbytes)
        try:
            groups = split_into_files(after.layout.stored, _FILE_BYTES)
            files = [create_file(incoming / f"{i}.safetensors", specs) for i, specs in enumerate(groups)]
        except StorageError:
            shutil.rmtree(incoming, ignore_errors=True)  # what was reserved so far
            raise
        memory = place_all(after, files, writable=True)
        old, kept = self.base(before), set(before.layout.stored)
        for spec in after.layout.stored:
            if spec in kept:
                memory.tensor(spec.name)[...] = old.tensor(spec.name)
        for dtype, found in changes.items():
            scatter(after[dtype], memory, found)
        self.load(after.layout, [f.path for f in files], position)

    def load(self, layout: Layout, weights: Sequence[Path], position: Position) -> None:
        """See Target."""
        tied = tied_specs(layout)
        extra = [write_tied_file(self._incoming() / "tied.safetensors", tied, weights)] if tied else []
        old = [p.name for p in self._weights.paths()]
        groups: list[tuple[str, list[TensorSpec]]] = []
        for number, path in enumerate([*weights, *extra]):
            name = free_name(self.path, position.version, number, len(weights) + len(extra))
            specs = [entry.spec for entry in map_file(path, writable=False).entries]
            move(path, self.path / name)
            groups.append((name, specs))
        remove = [name for name in old if name not in dict(groups)]  # one that was missing has its name again
        swap = Swap(mark_of(position), encode_index(groups).decode(), layout.encoded.hex(), remove)
        write_swap(self._own / "swap.json", swap)
        self._finish_swap(swap)
        self._weights.mapped(swap.mark)  # these are the files that were proved, and no others

    def companions(self, files: Mapping[str, bytes]) -> None:
        """See Target: they are put aside, and take their places together with the weights."""
        staged = self._own / "files"
        shutil.rmtree(staged, ignore_errors=True)
        for name, data in files.items():
            path = self.path / check_file_name(name)
            if name in (INDEX_NAME, SINGLE_NAME) or name.endswith(".safetensors"):
                raise UsageError(f"companion file {name!r} would replace weights")
            if not path.is_file() or path.read_bytes() != data:
                staged.mkdir(exist_ok=True)
                write_durably(staged / name, data)

    def workdir(self) -> Path | None:
        """See Target."""
        return self._incoming()

    def _redo(self) -> None:
        """Finish the patch that the journal holds; where that is impossible, give the weights up."""
        path = self._own / "journal.arrow"
        try:
            journal = read_journal(path)
            if journal is not None:
                self._write(Geometry(self._layout()), journal)
        except (Corrupt, UsageError) as error:
            log.warning(
                "%s: an interrupted patch cannot be finished, so the weights are fetched anew: %s",
                self.path,
                error,
            )
            if self._weights.drop_hidden():  # else nothing was written yet
                (self._own / "state.json").unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    def _write(self, geometry: Geometry, journal: Journal) -> None:
        """Carry out a journal; may be repeated."""
        files = self._weights.mapped(self.mark())
        with self._between_versions():
            self._weights.hide()
            memory = place_all(geometry, files, writable=True)
            for dtype, changes in journal.changes.items():
                space = geometry[dtype]
                scatter(space, memory, changes)
                if not np.array_equal(gather(space, memory, changes.positions), changes.values):
                    raise Corrupt(
                        f"{self.path} does not hold what was written to it", hint="the disk may be failing"
                    )
                write_tied(geometry, files, changes)
            self._place_companions()
            self._set_mark(journal.mark)
            self._weights.show()
        (self._own / "journal.arrow").unlink(missing_ok=True)

    def _finish_swap(self, swap: Swap) -> None:
        """From the moment that `swap.json` exists the new files are the folder's; may be repeated."""
        with self._between_versions():
            self._weights.hide()
            self._place_companions()
            self._set_layout(bytes.fromhex(swap.layout))
            self._set_mark(swap.mark)
            self._weights.drop_hidden()
            write_durably(self.path / INDEX_NAME, swap.index.encode())
            self._weights.forget()
        for name in swap.remove:
            (self.path / name).unlink(missing_ok=True)
        (self._own / "journal.arrow").unlink(missing_ok=True)  # of a state that is no more
        (self._own / "swap.json").unlink(missing_ok=True)
        shutil.rmtree(self._own / "incoming", ignore_errors=True)
        self._sweep()

    def _sweep(self) -> None:
        """Remove weight files that a killed subscriber left before they became the folder's."""
        used = {p.name for p in self._weights.paths()}
        if self.mark() is not None or not used:  # else they may be somebody's own, however they are called
            for path in abandoned(self.path, used):
                path.unlink()
        self._swept = True

    def _set_mark(self, mark: Mark) -> None:
        self._weights.remember(mark)
        write_durably(self._own / "state.json", json.dumps(asdict(mark)).encode())

    def _set_layout(self, encoded: bytes) -> None:
        path = self._own / "layout.arrow"
        if not path.is_file() or path.read_bytes() != encoded:
            write_durably(path, encoded)

    def _layout(self) -> Layout:
        path = self._own / "layout.arrow"
        try:
            return Layout.decode(path.read_bytes(), str(path))
        except OSError as error:
            raise Corrupt(
                f"{path} cannot be read: {error.strerror}",
                hint="remove the folder; the subscriber fetches it again",
            ) from error

    def _place_companions(self) -> None:
        staged = self._own / "files"
        if staged.is_dir():
            for path in staged.iterdir():
                if not path.name.startswith("."):
                    path.replace(self.path / path.name)
            sync_folder(self.path)

    def _incoming(self) -> Path:
        folder = self._own / "incoming"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def _between_versions(self) -> Iterator[None]:
        """While the folder is no whole version. What goes wrong inside, `recover` has to finish."""
        with readers_away(self.path):
            try:
                yield
            except (StorageError, OSError) as error:
                raise Corrupt(
                    f"{self.path} is between two versions: {error}",
                    hint="it is finished as soon as the disk allows it",
                ) from error
