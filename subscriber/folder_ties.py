"""Second names of tied tensors in a kept folder: a stream carries each tensor once, files may repeat it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from weightcast.codec import Changes, Geometry, Memory, scatter
from weightcast.manifest.tensorfile import Entry
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import Layout, TensorSpec

from .folder_files import Mapped, create_file, map_file
from .target import restrict


def tied_specs(layout: Layout) -> list[TensorSpec]:
    """The tensors that repeat another one."""
    return [spec for spec in layout if spec.tied_to is not None]


def check_ties(layout: Layout, files: Sequence[Mapped]) -> None:
    """Check that second names have the bytes of the first ones, where files have both.

    Raises:
        UsageError: they have not, or another dtype or shape.
    """
    entries = _by_name(files) if tied_specs(layout) else {}
    for spec in tied_specs(layout):
        if spec.name not in entries:
            continue
        file, entry = entries[spec.name]
        first, original = entries[str(spec.tied_to)]
        same = (entry.spec.dtype, entry.spec.shape) == (spec.dtype, spec.shape) and np.array_equal(
            file.array[entry.begin : entry.end], first.array[original.begin : original.end]
        )
        if not same:
            raise UsageError(
                f"tensor {spec.name!r} in {file.path} is not equal to {spec.tied_to!r}, to which the stream ties it"
            )


def write_tied(geometry: Geometry, files: Sequence[Mapped], changes: Changes) -> None:
    """Repeat changes in the second names of tied tensors."""
    space = geometry[changes.dtype]
    tied = [spec for spec in tied_specs(geometry.layout) if spec.dtype == changes.dtype]
    entries = _by_name(files) if tied else {}
    for spec in tied:
        if spec.name in entries and spec.tied_to is not None:
            file, entry = entries[spec.name]
            memory = Memory.blank(geometry, writable=True)
            memory.place(spec.tied_to, file.address(entry), file.array)
            scatter(space, memory, restrict(space, changes, [spec.tied_to]))


def write_tied_file(path: Path, tied: Sequence[TensorSpec], weights: Sequence[Path]) -> Path:
    """One more file, with the second names that a snapshot leaves out."""
    file = create_file(path, [TensorSpec(s.name, s.dtype, s.shape) for s in tied])
    sources = _by_name([map_file(p, writable=False) for p in weights])
    names = {spec.name: str(spec.tied_to) for spec in tied}
    for entry in file.entries:
        source, original = sources[names[entry.spec.name]]
        file.array[entry.begin : entry.end] = source.array[original.begin : original.end]
    return path


def _by_name(files: Sequence[Mapped]) -> dict[str, tuple[Mapped, Entry]]:
    def found() -> Iterator[tuple[str, tuple[Mapped, Entry]]]:
        for file in files:
            for entry in file.entries:
                yield entry.spec.name, (file, entry)

    return dict(found())
