"""The head's bits of what a rank owns, from the store, some tensors at a time.

No rank has memory for the whole model. The newest snapshot and the rows since then are put on disk, the rows by group
of tensors; then each group is brought to the head by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from weightcast.codec import ROW_ELEMENTS, FlatSpace, Geometry, Memory, joined
from weightcast.manifest.chain import Position
from weightcast.manifest.deltas import apply_directly
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.rebuild import FETCH_BYTES, digest_of, read_chain, rebuild, snapshot_choices
from weightcast.manifest.snapshot import fetch_weights
from weightcast.manifest.stream import StreamReader
from weightcast.manifest.tensorfile import read_header
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, NotFound
from weightcast.schemas.layout import TensorSpec
from weightcast.schemas.shard import Row, decode_shard, encode_shard

from .holding import Holding

GROUP_BYTES: Final = 1 << 30
"""Of tensors brought to the head at once, or one that is larger. Each group costs a few files."""


def load(
    reader: StreamReader,
    position: Position,
    holding: Holding,
    gone: Iterable[str],
    pool: Executor,
    row_elements: int = ROW_ELEMENTS,
) -> Digest:
    """Fill a holding with the bits of a version; tensors that it has not, or under another dtype or shape, are zero.

    Takes memory for `GROUP_BYTES` of tensors, and disk for the version and the deltas since its snapshot. Where the
    layout has changed since then, something is damaged, or rows are cut otherwise, it takes memory for the whole
    version instead.

    Args:
        reader: the stream.
        position: the version.
        holding: what to fill.
        gone: tensors of the version whose digest is wanted.
        pool: for fetching and decoding.
        row_elements: of the rows of a writer that had all tensors.

    Returns:
        The digest of the tensors in `gone`.

    Raises:
        Gap, Corrupt, Untrusted, NotFound: the store does not lead to that version.
    """
    gone = list(gone)
    geometry = Geometry(reader.layout(position.manifest.layout))
    known = geometry.layout.stored_by_name
    mine = [spec.name for spec in holding.geometry.layout if known.get(spec.name) == spec]
    try:
        lost = _by_groups(reader, position, geometry, mine, gone, holding, pool, row_elements)
    except (Corrupt, NotFound):
        lost = None  # an older snapshot may still lead there
    if lost is not None:
        return lost
    state = rebuild(reader, position.version, pool)
    holding.fill({name: state.memory.tensor(name) for name in mine})
    return digest_of(state.geometry, state.memory, gone, pool)


def _by_groups(
    reader: StreamReader,
    position: Position,
    geometry: Geometry,
    mine: Sequence[str],
    gone: Sequence[str],
    holding: Holding,
    pool: Executor,
    row_elements: int,
) -> Digest | None:
    """The digest of `gone`; None if this way does not lead to the version."""
    choices = snapshot_choices(reader, position.version, limit=1)
    chain = read_chain(reader, choices[0].version, position.version, pool) if choices else []
    if (
        not chain
        or chain[-1] != position
        or any(p.manifest.layout != position.manifest.layout for p in chain)
    ):
        return None
    groups = tensor_groups(geometry, row_elements)
    number = {spec.name: at for at, group in enumerate(groups) for spec in group}
    wanted = {number[name] for name in (*mine, *gone)}
    lost = Digest()
    with TemporaryDirectory(prefix="weightcast-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        snapshot = reader.snapshot(choices[0].key, chain[0])
        places = _places(fetch_weights(reader, snapshot, folder, pool))
        deltas = _Sorted(folder, number, wanted)
        fetcher = DeltaFetcher(reader.store, pool, FETCH_BYTES)
        for step in chain[1:]:
            if not deltas.add(geometry, step.version, fetcher.rows(step.manifest)):
                return None
        for at in sorted(wanted):
            memory = _from_files(geometry, groups[at], places)
            for rows in deltas.of(at):
                apply_directly(geometry, rows, memory, pool)
            names = {spec.name for spec in groups[at]}
            holding.fill({name: memory.tensor(name) for name in mine if name in names})
            lost += digest_of(geometry, memory, [name for name in gone if name in names], pool)
    return lost


def tensor_groups(geometry: Geometry, row_elements: int) -> list[list[TensorSpec]]:
    """All stored tensors in layout order, cut where no row is, if the writer had the same `row_elements`."""
    groups: list[list[TensorSpec]] = []
    for space in geometry:
        group: list[TensorSpec] = []
        nbytes = 0
        borders = {interval.start for interval in joined(space.split(row_elements), row_elements)}
        for spec, start in zip(space.specs, space.starts, strict=False):  # which has the end, too
            if group and int(start) in borders and nbytes + spec.nbytes > GROUP_BYTES:
                groups.append(group)
                group, nbytes = [], 0
            group.append(spec)
            nbytes += spec.nbytes
        groups.append(group)
    return groups


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    begin: int


def _places(paths: Iterable[Path]) -> dict[str, _Place]:
    """Where each tensor lies in the files of a snapshot."""
    return {e.spec.name: _Place(path, e.begin) for path in paths for e in read_header(path)}


def _from_files(geometry: Geometry, group: Sequence[TensorSpec], places: dict[str, _Place]) -> Memory:
    """Some tensors as a snapshot has them, in memory of their own.

    Raises:
        Corrupt: the snapshot has not all of them.
    """
    memory = Memory.blank(geometry, writable=True)
    for spec in group:
        if spec.name not in places:
            raise Corrupt(f"the snapshot has no tensor {spec.name!r}")
        place = places[spec.name]
        bits = np.fromfile(place.path, np.uint8, spec.nbytes, offset=place.begin)
        memory.place(spec.name, bits.ctypes.data if spec.nbytes else 0, bits)
    return memory


class _Sorted:
    """Rows of versions in a row, by group of tensors, in files."""

    def __init__(self, folder: Path, number: dict[str, int], wanted: set[int]) -> None:
        self._folder = folder
        self._number = number
        self._wanted = wanted
        self._files: dict[int, list[list[Path]]] = {group: [] for group in wanted}
        self._count = 0

    def add(self, geometry: Geometry, version: int, rows: Iterable[Row]) -> bool:
        """Sort in one version. False if a row reaches into several groups."""
        batches: dict[int, list[Row]] = {}
        held = 0
        for files in self._files.values():
            files.append([])
        for row in rows:
            group = self._number.get(row.tensor)
            space = geometry.space_of(row)
            if group is None or self._number[_last(space, row)] != group:
                return False
            if group in self._wanted:
                batches.setdefault(group, []).append(row)
                held += row.nbytes
            if held > FETCH_BYTES:
                self._write(batches)
                batches, held = {}, 0
        self._write(batches)
        return True

    def _write(self, batches: dict[int, list[Row]]) -> None:
        for group, rows in batches.items():
            path = self._folder / f"rows-{self._count}.arrow"
            path.write_bytes(encode_shard(rows))
            self._files[group][-1].append(path)
            self._count += 1

    def of(self, group: int) -> Iterator[Iterator[Row]]:
        """A group's rows, version by version."""
        for paths in self._files[group]:
            yield (row for path in paths for row in decode_shard(path.read_bytes(), path.name))


def _last(space: FlatSpace, row: Row) -> str:
    """The last tensor that a row reaches into."""
    return space.names[space.tensor_at(space.locate(row) + row.stop - row.offset - 1)]
