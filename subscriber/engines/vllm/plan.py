"""How one rank's model is brought to versions: which tensors are patched where they lie, which layers are reloaded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightcast.codec import Changes, Geometry, Move
from weightcast.mapping.record import Recording, record
from weightcast.schemas import engine
from weightcast.schemas.digest import Digest
from weightcast.schemas.engine import RankReport
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import Layout

from ..live import LiveWeights
from .copies import find_copies, refresh
from .dense import judge, reload
from .sources import Bytes, as_tensor, without


@dataclass
class Plan:
    """Where a layout's elements are on this rank, since the last attach.

    Attributes:
        sha256: of the layout.
        live: the tensors that this rank can patch in place; its moves are in the order of `report`.
        found: digest of the live bits of each move, at the attach.
        reloadable: tensors of layers that can be reloaded whole here -> why they are not patched.
        repacked: layers that pack a copy of their parameter, again after each write.
        packed: tensors that a kernel repacked within the same shape -> how it was seen.
        parts: class -> digest of this rank's part of it, of the bits that it has now; empty while they are no version.
        dense: tensors that are reloaded, on all ranks that have them.
        unread: digest of `dense`, whose live bits cannot be read, in the version committed last; None: not known.
    """

    sha256: str
    live: LiveWeights
    found: list[Digest]
    refused: dict[str, str]
    absent: tuple[str, ...]
    reloadable: dict[str, str]
    repacked: tuple[str, ...]
    packed: dict[str, str]
    parts: dict[int, Digest] = field(default_factory=dict)
    dense: tuple[str, ...] = ()
    unread: Digest | None = None

    @property
    def report(self) -> RankReport:
        """What the survey of all ranks is made from. Tensors that can be reloaded count as refused in it."""
        return RankReport(
            regions=[_region(move, digest) for move, digest in zip(self.live.moves, self.found, strict=True)],
            refused=self.refused | self.reloadable,
            absent=list(self.absent),
        )

    def check_dense(self, tensors: Mapping[str, Bytes]) -> None:
        """That there are values for all layers that are reloaded.

        Raises:
            UsageError: there are none for a tensor.
        """
        missing = next((name for name in self.dense if name not in tensors), None)
        if missing is not None:
            raise UsageError(
                f"tensor {missing!r} is in a layer that is reloaded whole, and there is no checkpoint with it",
                hint="follow the stream with --mirror",
            )

    def write(
        self,
        model: torch.nn.Module,
        config: Any,
        changes: Mapping[str, Changes],
        tensors: Mapping[str, Bytes],
    ) -> dict[int, Digest]:
        """Patch tensors, and reload layers from the checkpoint of the target version.

        Args:
            model: the engine's.
            config: vLLM's.
            changes: have passed `live.check`: it would be done again while the engine is paused.
            tensors: by name, of layers that are reloaded.

        Returns:
            As `LiveWeights.write`.

        Raises:
            Corrupt, UsageError: as `LiveWeights.write`, `reload` and `refresh`.
        """
        moved = self.live.write(changes, checked=True)
        self._follow(model, config, tensors)
        return moved

    def load(self, model: torch.nn.Module, config: Any, tensors: Mapping[str, Bytes]) -> None:
        """Take over whole tensors.

        Raises:
            Corrupt, UsageError: as `LiveWeights.load`, `reload` and `refresh`.
        """
        self.live.load(tensors.get)
        self._follow(model, config, tensors)

    def patched(self, changes: Mapping[str, Changes]) -> Mapping[str, Changes]:
        """The changes without those of tensors that are reloaded."""
        return without(self.live.geometry, changes, self.dense) if self.dense else changes

    def _follow(self, model: torch.nn.Module, config: Any, tensors: Mapping[str, Bytes]) -> None:
        layout = self.live.geometry.layout
        names = [name for name in self.dense if name in self.reloadable]
        if names:
            reload(model, config, names, lambda name: as_tensor(layout[name], tensors[name]))
        if self.repacked:
            refresh(model, self.repacked)


def make_plan(
    model: torch.nn.Module,
    config: Any,
    layout: Layout,
    sha256: str,
    *,
    reloads: Mapping[str, Bytes] | None = None,
    loaded: Mapping[str, Bytes] | None = None,
    packed: Mapping[str, str] | None = None,
) -> Plan:
    """Record where the tensors of `layout` lie in `model`, and read them. The model is afterwards what it was.

    Args:
        config: vLLM's.
        reloads: a checkpoint to try reloads with, best the one that the engine holds; None: nothing is reloaded.
        loaded: the checkpoint that the engine was loaded from and still holds, all tensors of it. Those that read back
            as something else were repacked by a kernel, within the same shape; so they are refused.
        packed: tensors of which that was seen before.

    Raises:
        Corrupt: a layer did not come back from a trial as it was.
    """
    recording = record(model, layout)
    copies = find_copies(model)
    known = dict(packed or {})
    refused = {name: why for name, why in known.items() if name in layout} | recording.refused
    for move in recording.moves:
        if move.place in copies.refused:
            refused[move.tensor] = f"{move.place}: {copies.refused[move.place]}"
    live = _live(layout, recording, refused)
    live.warm()
    found = live.digests()
    if loaded is not None and (repacked := _repacked(live, found, loaded)):
        known |= repacked
        refused |= repacked
        found = [
            digest for move, digest in zip(live.moves, found, strict=True) if move.tensor not in repacked
        ]
        live = _live(layout, recording, refused)
    reloadable: dict[str, str] = {}
    if reloads is not None and refused:
        judged = judge(model, config, refused, lambda name: as_tensor(layout[name], reloads[name]))
        reloadable, refused = judged.dense, judged.refused
    return Plan(sha256, live, found, refused, recording.absent, reloadable, copies.refresh, known)


def _live(layout: Layout, recording: Recording, refused: Collection[str]) -> LiveWeights:
    moves = [move for move in recording.moves if move.tensor not in refused]
    elsewhere = [name for name in recording.absent if name not in refused]
    return LiveWeights(Geometry(layout), moves, recording.places, elsewhere=elsewhere)


def _repacked(live: LiveWeights, found: Sequence[Digest], loaded: Mapping[str, Bytes]) -> dict[str, str]:
    """Tensors whose live bits are not those of the checkpoint they were loaded from, and why they are refused."""
    parts = dict.fromkeys((move.tensor, move.source) for move in live.moves)
    moves = [Move(name, source, name, source) for name, source in parts]
    layout = live.geometry.layout
    files = {name: as_tensor(layout[name], loaded[name]) for name, _ in parts}
    expected = dict(zip(parts, LiveWeights(live.geometry, moves, files).digests(), strict=True))
    return {
        move.tensor: f"{move.place}: reads back as other bits than it was loaded with: a kernel repacked it"
        for move, digest in zip(live.moves, found, strict=True)
        if digest != expected[move.tensor, move.source]
    }


def _region(move: Move, digest: Digest) -> engine.Region:
    source = move.source
    return engine.Region(
        tensor=move.tensor,
        shape=list(source.shape),
        strides=list(source.strides),
        offset=source.offset,
        digest=digest.hex,
    )
