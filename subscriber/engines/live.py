"""A rank's live weights: read, proved and changed in place, through the moves by which the engine loaded them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from weightcast.codec import Changes, FlatSpace, Geometry, Move, places, simplify, threads
from weightcast.codec.memory import UNSIGNED
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError

from .live_classes import UNUSED, Classes, Sums
from .live_device import DeviceTable, fill
from .live_input import check_changes, check_positions, elements_of, touched
from .live_places import homes_of

COPY_BYTES: Final = 1 << 24
"""Of a tensor that one thread loads at once."""

Ints = npt.NDArray[np.int64]
Bits = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Group:
    """Moves of one flat space that are worked on in one way.

    Attributes:
        numbers: of the moves.
        table: of these moves, in this order.
    """

    numbers: list[int]
    table: places.Table | DeviceTable


class LiveWeights:
    """One rank's part of a version, where its engine computes with it.

    Nobody else may change the weights during a call. A method that touches them raises Corrupt if the storage of a
    parameter that it needs is not the one it was when this was made.

    Args:
        geometry: of the layout that the versions have.
        moves: where the tensors' elements are here; one each time that a region is held.
        parameters: the engine's parameters and buffers by name. They stay the engine's.
        elsewhere: tensors that have no place on this rank, so that it has nothing to do when they change.
        by_index: treat host memory as a device's; for tests.

    Raises:
        UsageError: a move does not fit its tensor or its place, or two moves lead to one element.
    """

    def __init__(
        self,
        geometry: Geometry,
        moves: Sequence[Move],
        parameters: Mapping[str, torch.Tensor],
        *,
        elsewhere: Collection[str] = (),
        by_index: bool = False,
    ) -> None:
        self.geometry = geometry
        self.moves = tuple(_plain(move) for move in moves)
        self._homes = homes_of(geometry, self.moves, parameters)
        self._elsewhere = frozenset(elsewhere)
        self.assign([(UNUSED, False)] * len(self.moves))
        self._groups = [group for space in geometry for group in self._group(space, by_index)]

    def warm(self) -> None:
        """Compile what `write`, `gather` and `digests` need, so that nothing is compiled while an engine waits."""
        for space in self.geometry:
            places.warm(space.width)

    def assign(self, classes: Sequence[tuple[int, bool]]) -> None:
        """Say for each move its class, or `UNUSED`, and whether it answers reads for the class.

        Until then all moves are `UNUSED`.

        Raises:
            UsageError: not one a move.
        """
        self._classes = Classes(self.moves, classes)
        self._sound = False  # whether copies were found equal, and every write since was confirmed

    def digests(self) -> list[Digest]:
        """For each move the digest of the live bits that it leads to, as part of its tensor. Memory is bounded."""
        self._check_homes(self._homes)
        return self._digests(lambda _: True)

    def parts(self) -> dict[int, Digest]:
        """For each class the digest of what this rank has of it now, read in full.

        Raises:
            Corrupt: two copies that this rank has of a class differ.
        """
        self.check()
        return self.by_class(self._digests(self._classes.used))

    def by_class(self, digests: Sequence[Digest]) -> dict[int, Digest]:
        """Digests of the moves, in their order, as parts: of a class that is held more than once the first copy's.

        Raises:
            Corrupt: two copies that this rank has of a class differ.
        """
        sums = self._classes.sums(range(len(self.moves)), digests)
        self._classes.check_equal(sums)
        self._sound = True
        return self._classes.firsts(sums)

    def check(self, changes: Mapping[str, Changes] | None = None) -> None:
        """Everything that `write` refuses; writes nothing.

        Raises:
            UsageError: changes that are not ascending elements of a space of the layout with values of its width, or
                of a tensor that has no used move here and is not elsewhere.
            Corrupt: the storage of a parameter is not the one it was.
        """
        self._check_homes(self._classes.places)
        for dtype, found in (changes or {}).items():
            self._check_changes(self._space(dtype), found)

    def _check_homes(self, names: Iterable[str]) -> None:
        for name in names:
            self._homes[name].check()

    def _digests(self, counts: Callable[[int], bool]) -> list[Digest]:
        """For each move that counts its digest, and zero for the others."""
        found = [Digest()] * len(self.moves)
        for space in self.geometry:
            for group, use in self._grouped(space, counts):
                for i, digest in zip(use, group.table.digests(use), strict=True):
                    found[group.numbers[i]] = digest
        return found

    def gather(self, dtype: str, positions: Ints) -> tuple[Ints, Bits]:
        """Live bits at those of some positions that this rank leads.

        Args:
            dtype: of a flat space.
            positions: int64 [n], elements of it, ascending.

        Returns:
            index: int64 [m], which of the positions, each once, in no particular order.
            values: unsigned [m], their bits.

        Raises:
            UsageError: the positions are not ascending elements of the space.
        """
        self.check()
        space = self._space(dtype)
        check_positions(space, positions)
        positions = np.ascontiguousarray(positions)
        index, values = [np.empty(0, np.int64)], [np.empty(0, UNSIGNED[space.width])]
        for group, use in self._grouped(space, self._classes.leads):
            found, bits = group.table.gather(positions, use)
            index.append(found)
            values.append(bits)
        return np.concatenate(index), np.concatenate(values)

    def write(self, changes: Mapping[str, Changes], *, checked: bool = False) -> dict[int, Digest]:
        """Write absolute values to every place that holds them, and read them back. Idempotent.

        Nothing is written unless `check` passes.

        Args:
            changes: absolute values, by dtype.
            checked: these very changes have passed `check`, so that only the storages are looked at again. Changes in
                mapped files could have moved since: what does not ascend any more is never written elsewhere, but
                left out, and the digest tells.

        Returns:
            For each class how far what this rank has of it moved, by the bits that were there before; of a class that
            is held more than once, how far its first copy moved.

        Raises:
            UsageError: see `check`.
            Corrupt: likewise, or what was written does not read back, or copies that `by_class` found equal moved by
                different ways. The weights are no version then: once written again, `parts` tells what they are.
        """
        self.check(None if checked else changes)
        sound, self._sound = self._sound, False
        moved: dict[int, Digest] = {}
        for dtype, found in changes.items():
            sums = self._write(self._space(dtype), found)
            if sound:
                self._classes.check_equal(sums)
            for number, digest in self._classes.firsts(sums).items():
                moved[number] = moved.get(number, Digest()) + digest
        self._sound = sound
        return moved

    def _write(self, space: FlatSpace, changes: Changes) -> Sums:
        numbers: list[int] = []
        digests: list[Digest] = []
        positions, values = np.ascontiguousarray(changes.positions), np.ascontiguousarray(changes.values)
        for group, use in self._grouped(space, self._classes.used):
            moved, failed = group.table.write(positions, values, use)
            if failed >= 0:
                raise self._unreadable(group.numbers[failed])
            numbers += [group.numbers[i] for i in use]
            digests += moved
        return self._classes.sums(numbers, digests)

    def load(self, source: Callable[[str], Bits | None]) -> None:
        """Copy whole tensors to every place that a used move has for them. `parts` proves it afterwards.

        Args:
            source: gives a tensor's bytes in C order, an unsigned array of any alignment; None leaves it as it is.

        Raises:
            UsageError: not as many bytes as the tensor has.
        """
        self.check()
        self._sound = False
        with ThreadPoolExecutor(threads.workers()) as pool:
            for name, numbers in self._by_tensor().items():
                bits = source(name)
                if bits is not None:
                    elements = elements_of(self.geometry.layout[name], bits)
                    list(pool.map(partial(self._fill, elements), self._cut(numbers)))

    def _fill(self, elements: Bits, piece: Move) -> None:
        fill(piece, self._homes[piece.place], elements)

    def _cut(self, numbers: Iterable[int]) -> Iterator[Move]:
        for number in numbers:
            move = self.moves[number]
            yield from places.pieces(move, COPY_BYTES // self._homes[move.place].width)

    def _by_tensor(self) -> dict[str, list[int]]:
        """Numbers of the used moves of each tensor."""
        found: dict[str, list[int]] = {}
        for number, move in enumerate(self.moves):
            if self._classes.used(number):
                found.setdefault(move.tensor, []).append(number)
        return found

    def _group(self, space: FlatSpace, by_index: bool) -> Iterator[_Group]:
        """The moves of a space: those in host memory, and the others."""
        mine = [(i, self._homes[m.place]) for i, m in enumerate(self.moves) if m.tensor in space.index]
        near = [(i, home) for i, home in mine if home.tensor.device.type == "cpu" and not by_index]
        kept = {i for i, _ in near}
        far = [(i, home) for i, home in mine if i not in kept]
        if near:
            numbers, homes = [i for i, _ in near], [home for _, home in near]
            moves = [self.moves[i] for i in numbers]
            yield _Group(numbers, places.Table(space, moves, [home.key[1] for home in homes]))
        if far:
            numbers, homes = [i for i, _ in far], [home for _, home in far]
            yield _Group(numbers, DeviceTable(space, [self.moves[i] for i in numbers], homes))

    def _grouped(self, space: FlatSpace, counts: Callable[[int], bool]) -> Iterator[tuple[_Group, list[int]]]:
        """The groups of a space, and which of their moves count."""
        for group in self._groups:
            if group.table.space is space:
                yield group, [i for i, number in enumerate(group.numbers) if counts(number)]

    def _check_changes(self, space: FlatSpace, changes: Changes) -> None:
        check_changes(space, changes)
        for name in touched(space, changes.positions):
            if name not in self._classes.tensors and name not in self._elsewhere:
                raise UsageError(
                    f"tensor {name!r} has changes, and there is no way to apply them on this rank"
                )

    def _space(self, dtype: str) -> FlatSpace:
        space = self.geometry.get(dtype)
        if space is None:
            raise UsageError(f"the layout stores no {dtype} tensor")
        return space

    def _unreadable(self, number: int) -> Corrupt:
        move = self.moves[number]
        return Corrupt(
            f"parameter {move.place!r}: values of tensor {move.tensor!r} do not read back as they were written",
            hint="install the version again, or load it whole",
        )


def _plain(move: Move) -> Move:
    source, target = simplify(move.source, move.target)
    return Move(move.tensor, source, move.place, target)
