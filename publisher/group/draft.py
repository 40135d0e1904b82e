"""One rank's share of a version in the making: compared, encoded, on its way to the store."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

from weightcast.codec.boxes import encode_box
from weightcast.manifest.ahead import map_ahead
from weightcast.manifest.commit import put_shard
from weightcast.manifest.store import Store
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, StorageError
from weightcast.schemas.manifest import ShardRef
from weightcast.schemas.part import Part
from weightcast.schemas.part import Tile as TileRef
from weightcast.schemas.settings import PublisherSettings
from weightcast.schemas.shard import Codec, Row, features_of

from .holding import Holding, Staged, Tile

WHOLE_SHARD_BYTES: Final = 4 << 20
"""After which a shard of a whole part is closed. The one who assembles a snapshot reads tiles of all ranks in the order
of the tensors: small shards keep what it must hold at once small."""

_WHOLE_AHEAD: Final = 4
"""Shards of a whole part on their way at once; they hold a copy of what they carry."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a part belongs: version, what it is told from (None: nothing), writer."""

    version: int
    base: str | None
    rank: int
    size: int


class PartShards:
    """Puts rows into shards and sends them. Used by one thread; any may cancel."""

    def __init__(
        self,
        store: Store,
        stage: Stage,
        name: str,
        pool: Executor,
        shard_bytes: int,
        ahead: int | None = None,
    ) -> None:
        self._store = store
        self._stage = stage
        self._name = name
        self._pool = pool
        self._shard_bytes = shard_bytes
        self._ahead = ahead
        self._batch: list[Row] = []
        self._tiles: list[TileRef] = []
        self._nbytes = 0
        self._flying: deque[Future[ShardRef]] = deque()
        self._sent: list[Future[ShardRef]] = []
        self._given_up = False
        self.features: set[str] = set()
        self.tiles: list[list[TileRef]] = []

    def add(self, rows: list[Row], tile: TileRef | None = None) -> None:
        """Take rows, of a whole part a tile's; waits if too many shards are on their way.

        Raises:
            StorageError: one could not be stored, or nobody wants them any more.
        """
        self._batch += rows
        self._nbytes += sum(row.nbytes for row in rows)
        if tile is not None:
            self._tiles.append(tile)
        if self._nbytes >= self._shard_bytes:
            self._close()

    def _close(self) -> None:
        if self._given_up:
            raise StorageError("this part was given up", hint="publish again")
        self.features |= features_of(self._batch)
        future = self._pool.submit(
            put_shard,
            self._store,
            self._stage.version,
            f"{self._name}.{self._stage.rank}",
            len(self._sent),
            self._batch,
        )
        self._sent.append(future)
        self._flying.append(future)
        if self._tiles:
            self.tiles.append(self._tiles)
        self._batch, self._tiles, self._nbytes = [], [], 0
        if self._ahead is not None and len(self._flying) >= self._ahead:
            self._flying.popleft().result()

    def finish(self) -> None:
        """Send what is left."""
        if self._batch:
            self._close()

    def stored(self) -> list[ShardRef]:
        """Wait until all are there.

        Raises:
            StorageError: one could not be stored.
        """
        return [future.result() for future in self._sent]

    def cancel(self) -> None:
        """Send no more of what has not begun."""
        self._given_up = True
        for future in self._sent:
            future.cancel()


class Draft:
    """Finds and encodes what changed in a holding, tile by tile; its shards leave meanwhile.

    Attributes:
        rows: that were found, each with the address of its old bits; what the holding moves by once it is committed.
        after: digest of what the rank owns, in this version.
    """

    def __init__(
        self,
        holding: Holding,
        stage: Stage,
        store: Store,
        settings: PublisherSettings,
        compute: Executor,
        transfer: Executor,
    ) -> None:
        self._holding = holding
        self._stage = stage
        self._compute = compute
        self._level = settings.level
        self._codec: Codec = "class" if settings.codec == "class" else "gap"
        whole = stage.base is None
        self._shards = PartShards(
            store, stage, settings.writer, transfer,
            WHOLE_SHARD_BYTES if whole else settings.shard_bytes, _WHOLE_AHEAD if whole else None,
        )  # fmt: skip
        self.rows: list[tuple[Row, int]] = []
        self._before = self._moved = self.after = Digest()

    def compare(self, staged: Iterable[Staged], before: Digest) -> None:
        """Read the present bits. When this returns, nothing refers to them any more.

        Args:
            staged: of the holding's tiles, in order.
            before: digest of the holding.

        Raises:
            Corrupt: the bits changed while they were compared.
        """
        self._before = before
        for found, after, moved in map_ahead(self._compute, self._compared, staged):
            self.after += after
            self._moved += moved
            if found:
                self.rows += found
                self._shards.add([row for row, _ in found])
        if before + self._moved != self.after:
            raise Corrupt(
                f"the changes found lead to state {before + self._moved}, the tensors have {self.after}",
                hint="the tensors were written to while they were published, or memory is faulty; publish again",
            )
        self._shards.finish()

    def _compared(self, new: Staged) -> tuple[list[tuple[Row, int]], Digest, Digest]:
        tile, rows, after, moved = new.tile, [], Digest(), Digest()
        space = self._holding.geometry[tile.spec.dtype]
        for box, at in tile.boxes:
            old = self._holding.address(tile) + at
            encoded = encode_box(space, box, new.address + at, old, self._level, codec=self._codec)
            after += encoded.digest
            moved += encoded.change
            if encoded.row is not None:
                rows.append((encoded.row, old))
        return rows, after, moved

    def send_whole(self) -> None:
        """Encode the holding itself, whole; waits for the store, so that little of it is in memory twice.

        Raises:
            StorageError: a shard could not be stored.
        """
        for tile, rows, digest in map_ahead(self._compute, self._whole, self._holding.tiles):
            self.after += digest
            ref = TileRef(
                tensor=tile.spec.name, dtype=tile.spec.dtype, shape=list(tile.spec.shape),
                start=list(tile.corner.start), extent=list(tile.corner.extent),
            )  # fmt: skip
            self._shards.add(rows, ref)
        self._moved = self.after
        self._shards.finish()

    def _whole(self, tile: Tile) -> tuple[Tile, list[Row], Digest]:
        space, address = self._holding.geometry[tile.spec.dtype], self._holding.address(tile)
        found = [encode_box(space, box, address + at, None, self._level) for box, at in tile.boxes]
        rows = [e.row for e in found if e.row is not None]
        return tile, rows, sum((e.digest for e in found), Digest())

    def finished(self) -> Part:
        """The part, once all its shards are stored; a whole one is encoded only now.

        Raises:
            StorageError: a shard could not be stored.
        """
        try:
            if self._stage.base is None:
                self.send_whole()
            return self.part()
        except BaseException:
            self.cancel()
            raise

    def part(self) -> Part:
        """The part, once all its shards are stored.

        Raises:
            StorageError: one could not be stored.
        """
        shards = self._shards.stored()
        return Part(
            version=self._stage.version,
            base=self._stage.base,
            rank=self._stage.rank,
            size=self._stage.size,
            shards=shards,
            features=sorted(self._shards.features),
            tiles=self._shards.tiles,
            ties={},
            elements=self._holding.elements,
            mix=self._holding.geometry.layout.mix,
            digest_before=self._before.hex,
            digest_after=self.after.hex,
            digest_moved=self._moved.hex,
        )

    def cancel(self) -> None:
        """Give up: what was stored belongs to nothing, and is swept by its age."""
        self._shards.cancel()
