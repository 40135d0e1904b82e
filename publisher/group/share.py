"""One rank's share of a stream: what it owns, which version its copy is of, and the version in the making."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

import torch

from weightcast.manifest.ahead import map_ahead
from weightcast.manifest.chain import Position
from weightcast.manifest.store import Store
from weightcast.publisher.sources import Casts
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt
from weightcast.schemas.settings import PublisherSettings

from .draft import Draft, Stage
from .holding import Holding, Tile, Tiles
from .plan import Entry, Piece
from .tables import Held
from .words import Shared, pieces_of

BATCH_BYTES: Final = 1 << 18
"""Of replicated tiles digested in one call of a pool: some thirty norms. A call costs more than one of them."""


@dataclass(frozen=True)
class Pools:
    """Threads: that compare and encode; that send."""

    compute: Executor
    transfer: Executor


class Share:
    """Compares a rank's slices with its copy, and moves the copy after a commit.

    Attributes:
        table: of the slices that the plan was made for.
        holding: what the rank owns, and its bits in the version `base`.
        base: SHA-256 of that version's manifest; "" if they are of none.
    """

    def __init__(
        self,
        table: Sequence[Entry],
        shared: Sequence[Shared],
        settings: PublisherSettings,
        pools: Pools,
        rank: int,
        mix: int,
    ) -> None:
        """mix: of the layout of the version that changes will be told from, or that starts afresh."""
        self._settings = settings
        self._pools = pools
        path = settings.baseline
        self.table = tuple(table)
        self.holding = Holding(
            table,
            pieces_of(shared, table),
            settings.row_elements,
            _own(path, rank) if path is not None else None,
            mix,
        )
        self._groups = {at: group for at, group, _ in shared if group >= 0}
        replicated = [Piece(at, table[at].corner) for at in self._groups]
        self._shared = Tiles(table, replicated, settings.row_elements, mix)
        self._batches = list(_batches(self._shared.tiles))
        self.base = ""
        self._digest = Digest()

    def is_at(self, base: str) -> None:
        """Say of which version the holding's bits are."""
        self._digest = self.holding.digest(self._pools.compute)
        self.base = base

    @property
    def mix(self) -> int:
        """Of the layout of its digests."""
        return self.holding.geometry.layout.mix

    @property
    def digest(self) -> Digest:
        """Of the holding, in version `base`."""
        return self._digest

    def draft(self, held: Held, casts: Casts, store: Store, stage: Stage) -> Draft:
        """Compare the present bits with the copy, or, for a whole part, copy them; after that nothing refers to them.

        Raises:
            Corrupt: they changed meanwhile.
        """
        draft = Draft(self.holding, stage, store, self._settings, self._pools.compute, self._pools.transfer)
        staged = self.holding.staged(held.slices, held.table, casts)
        if stage.base is None:
            self.base = ""  # from here on the copy is of no version
            self.holding.copy(staged)
        else:
            try:
                draft.compare(staged, self._digest)
            except BaseException:
                draft.cancel()
                raise
        return draft

    def replicas(self, held: Held, casts: Casts) -> dict[int, dict[int, Digest]]:
        """For each group of ranks that hold the same: digests of the present bits of that, by position in the table."""

        def some(tiles: Sequence[Tile]) -> list[tuple[int, Digest]]:
            staged = (Tiles.present(tile, held.slices, held.table, casts) for tile in tiles)
            return [(s.tile.entry, self._shared.digest_of(s.tile, s.address)) for s in staged]

        tensors = (held.slices[at].tensor for at in self._groups)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)  # other threads read on other streams
        found: dict[int, dict[int, Digest]] = {}
        for at, digest in chain.from_iterable(map_ahead(self._pools.compute, some, self._batches)):
            group = found.setdefault(self._groups[at], {})
            group[at] = group.get(at, Digest()) + digest
        return found

    def follow(self, draft: Draft, position: Position) -> None:
        """Take what a committed version carried.

        Raises:
            Corrupt: that does not lead to its bits; the copy is of no use any more.
        """
        base, self.base = self.base, ""
        if base:
            moved = self.holding.update(draft.rows, self._pools.compute)
            if self._digest + moved != draft.after:
                raise Corrupt(
                    f"the copy is {self._digest + moved} after version {position.version}, published was {draft.after}"
                )
        self._digest, self.base = draft.after, position.sha256


def _batches(tiles: Iterable[Tile]) -> Iterator[list[Tile]]:
    """Tiles in their order, in lists of some `BATCH_BYTES`."""
    batch: list[Tile] = []
    nbytes = 0
    for tile in tiles:
        batch.append(tile)
        nbytes += tile.nbytes
        if nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _own(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.{rank}")
