"""The weight files of a kept folder: which they are, in sight of loaders or not, and mapped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weightcast.manifest.tensorfile import INDEX_NAME, SINGLE_NAME
from weightcast.schemas.errors import Corrupt, UsageError

from .folder_files import Mapped, map_file, sync_folder, weight_paths
from .target import Mark


class WeightFiles:
    """What loaders find in `folder`, and what is in `hidden` while they shall find nothing.

    Attributes:
        checked: hash of the layout under which the mapped files were found consistent; "" after they changed.
    """

    def __init__(self, folder: Path, hidden: Path) -> None:
        self._folder = folder
        self._hidden = hidden
        self._files: list[Mapped] | None = None
        self._seen: list[tuple[int, ...]] = []  # what the files were when they were mapped
        self._mark: Mark | None = None  # which version they were said to be, then or since
        self.checked = ""

    def hide(self) -> None:
        """Without these files no loader finds the weights. May be repeated.

        The single file goes first: an index that names it does not do without it.
        """
        for name in (SINGLE_NAME, INDEX_NAME):
            if (self._folder / name).is_file():
                (self._folder / name).replace(self._hidden / name)
        sync_folder(self._hidden)
        sync_folder(self._folder)

    def show(self) -> None:
        """Undo `hide`, as far as there is something to undo."""
        for name in (INDEX_NAME, SINGLE_NAME):
            if (self._hidden / name).is_file():
                (self._hidden / name).replace(self._folder / name)
                sync_folder(self._folder)

    def drop_hidden(self) -> bool:
        """Remove what was hidden, so that these weights are none any more. Returns whether there was anything."""
        found = [p for p in (self._hidden / INDEX_NAME, self._hidden / SINGLE_NAME) if p.is_file()]
        for path in found:
            path.unlink()
        if found:
            sync_folder(self._hidden)
        return bool(found)

    def paths(self) -> list[Path]:
        """The weight files, also while their index is out of sight.

        Raises:
            Corrupt, UsageError: as `weight_paths`.
        """
        hidden = any((self._hidden / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))
        return [self._locate(p.name) for p in weight_paths(self._hidden if hidden else self._folder)]

    def mapped(self, mark: Mark | None) -> list[Mapped]:
        """The weight files, mapped; mapped again when another subscriber has replaced them.

        Args:
            mark: which version the folder says that it holds.

        Raises:
            Corrupt: one is missing; or they were replaced though `mark` is the same (only the first call says so).
            UsageError: one is a link, so that changing it would change what somebody else has.
        """
        files = self._files
        if files is None or not self._are_still(files):
            self.forget()
            if files is not None and mark == self._mark:
                raise Corrupt(f"the weight files in {self._folder} were replaced by somebody else")
            paths = self.paths()
            self._refuse_links(paths)
            self._seen, self._mark = self._look(paths), mark
            self._files = files = [map_file(p, writable=True) for p in paths]
        return files

    def remember(self, mark: Mark) -> None:
        """The mapped files are said to be `mark` now."""
        self._mark = mark

    def forget(self) -> None:
        """They are about to be replaced."""
        self._files, self.checked = None, ""

    def _refuse_links(self, paths: Sequence[Path]) -> None:
        for path in paths:
            if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
                raise UsageError(
                    f"{path} is a link, and would be changed for whoever else uses the file",
                    hint="use a copy of the folder",
                )

    def _are_still(self, files: Sequence[Mapped]) -> bool:
        try:
            return self._seen == self._look([self._locate(f.path.name) for f in files])
        except Corrupt:
            return False  # gone, perhaps because others took their place

    def _look(self, weights: Sequence[Path]) -> list[tuple[int, ...]]:
        """Which files these are, and which index leads to them. A patch in place changes neither."""
        seen: list[tuple[int, ...]] = []
        for path in weights:
            try:
                stats = path.stat()
            except FileNotFoundError:
                raise Corrupt(f"weight file {path} is missing") from None
            seen.append((stats.st_dev, stats.st_ino, stats.st_size))
        index = self._locate(INDEX_NAME)
        if index.is_file():
            stats = index.stat()
            seen.append((stats.st_ino, stats.st_size, stats.st_mtime_ns))
        return seen

    def _locate(self, name: str) -> Path:
        """Where a file is, also while it is out of sight."""
        return self._hidden / name if (self._hidden / name).is_file() else self._folder / name
