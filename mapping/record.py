"""Learns once where an engine keeps every element of a checkpoint, by watching the model's own loader.

The loader runs over stand-ins of the right shapes and dtypes, whose memory is never touched. Each copy from a part of
one to a part of a parameter is recorded, and none is executed. What is not plainly a copy is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import numpy as np
import torch

from weightcast.codec.regions import Move, collisions
from weightcast.schemas.dtypes import TORCH_NAMES
from weightcast.schemas.layout import Layout, TensorSpec

from .belongings import Belongings, storage_of
from .images import Image
from .recorder import Copy, Overwrite, Recorder

Load = Callable[[Iterator[tuple[str, torch.Tensor]]], object]

MAX_REASON: Final = 300
"""Characters of a loader's message that go into a reason: errors of engines may print whole tensors."""

_DTYPES: Final = {ours: getattr(torch, theirs, None) for theirs, ours in TORCH_NAMES.items()}


@dataclass(frozen=True)
class Recording:
    """Where the parts of checkpoint tensors lie in one rank's model.

    Attributes:
        moves: of tensors that are not refused, by tensor and source; no element of a place is in two.
        refused: name of a stored tensor -> why it cannot be kept up to date here.
        absent: stored tensors that have no place here.
        places: the parameters and buffers of `moves`: the model's own, not copies.
    """

    moves: tuple[Move, ...]
    refused: dict[str, str]
    absent: tuple[str, ...]
    places: dict[str, torch.Tensor]


def record(model: torch.nn.Module, layout: Layout, load: Load | None = None) -> Recording:
    """Run `load` (default: `model.load_weights`) over stand-ins for all tensors of `layout`, tied names included.

    The model's tensors are afterwards what and where they were, whatever the loader does with torch operations in this
    thread. A loader that raises is called again, so that one tensor does not hide the rest.
    """
    belongings = Belongings(model)
    recorder = Recorder(belongings.owned)
    run: Load = model.load_weights if load is None else load  # type: ignore[assignment]
    try:
        with torch.no_grad(), recorder:
            _run(run, recorder, layout)
    finally:
        _give_back(belongings, recorder)
    return _recording(layout, belongings, recorder)


def _run(load: Load, recorder: Recorder, layout: Layout) -> None:
    """Call the loader until every tensor was given to it, and once more for each that it may have failed on."""
    pending = sorted(layout, key=lambda s: s.name)  # as checkpoints and loaders have it, whatever the dtypes
    doubtful: list[TensorSpec] = []
    while pending:
        given: list[TensorSpec] = []
        error = _attempt(load, recorder, _probes(recorder, pending, given))
        if error is None:
            break
        if not given:
            recorder.refuse((s.name for s in pending), error)
            break
        if recorder.current is None:  # it had taken all: the fault may be with any of them
            settled = {c.tensor for c in recorder.copies} | set(recorder.refused)
            doubtful += [s for s in given if s.name not in settled]
        else:
            doubtful.append(given[-1])
        pending = pending[len(given) :]
    for spec in doubtful:
        error = _attempt(load, recorder, _probes(recorder, [spec], []))
        if error is not None:
            recorder.refuse([spec.name], error)


def _probes(
    recorder: Recorder, specs: Sequence[TensorSpec], given: list[TensorSpec]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stand-ins for checkpoint tensors: address space, not memory."""
    for spec in specs:
        given.append(spec)
        recorder.current = spec.name
        dtype = _DTYPES[spec.dtype]
        if dtype is None:
            recorder.refuse([spec.name], f"this release of torch has no {spec.dtype}")
            continue
        probe = torch.empty(spec.shape, dtype=dtype, device="cpu")
        recorder.track(probe, Image.whole(spec.name, spec.width, spec.elements))
        yield spec.name, probe
    recorder.current = None


def _attempt(load: Load, recorder: Recorder, probes: Iterator[tuple[str, torch.Tensor]]) -> str | None:
    """Call the loader. Returns why it failed, if it did."""
    try:
        load(probes)
    except Exception as error:  # noqa: BLE001 - a model's loader may raise anything, and means one tensor
        text = next(iter(str(error).splitlines()), "")[:MAX_REASON]
        empty = _empty_parameter(recorder, error.__traceback__)
        return f"loader failed: {type(error).__name__}{': ' if text else ''}{text}{empty}"
    return None


def _empty_parameter(recorder: Recorder, traceback: TracebackType | None) -> str:
    """What an engine leaves behind that keeps repacked weights elsewhere; loaders fail on it, most of them silently."""
    while traceback is not None:
        for value in traceback.tb_frame.f_locals.values():
            owned = recorder.owner(value) if isinstance(value, torch.Tensor) else None
            if owned is not None and not owned.tensor.numel():
                return f" ({owned.name}: the parameter has shape {tuple(owned.tensor.shape)})"
        traceback = traceback.tb_next
    return ""


def _give_back(belongings: Belongings, recorder: Recorder) -> None:
    """Undo what loaders do to a model other than by writing to its tensors, and refuse what it was done with."""
    for name, registry, key, tensor in belongings.new():
        held = recorder.names(storage_of(tensor))
        if held:
            del registry[key]
            recorder.refuse(held, f"{name}: the model keeps the loaded tensor itself")
    replaced = belongings.restore()
    writers: dict[str, set[str]] = {}
    for copy in recorder.copies if replaced else ():
        writers.setdefault(copy.place, set()).add(copy.tensor)
    for found in replaced:
        place = belongings.owned[found.before].name if found.before in belongings.owned else found.name
        touched = recorder.names(found.after) | writers.get(place, set())
        recorder.refuse(sorted(touched), f"{found.name}: the loader replaces its storage")


def _recording(layout: Layout, belongings: Belongings, recorder: Recorder) -> Recording:
    refused: dict[str, str] = {}
    for name, reason in recorder.refused.items():
        stored = layout[name].tied_to or name
        refused.setdefault(stored, reason if name == stored else f"{name!r}, which is tied to it: {reason}")
    moves = _moves(layout, recorder.copies)
    for name, reason in _conflicts(moves, recorder.overwrites):
        refused.setdefault(name, reason)
    kept = sorted((m for m in moves if m.tensor not in refused), key=_order)
    here = {move.tensor for move in kept} | set(refused)
    owned = {o.name: o.tensor for o in belongings.owned.values()}
    return Recording(
        moves=tuple(kept),
        refused=refused,
        absent=tuple(s.name for s in layout.stored if s.name not in here),
        places={move.place: owned[move.place] for move in kept},
    )


def _moves(layout: Layout, copies: Iterable[Copy]) -> dict[Move, int]:
    """Each move once, under the stored tensor's name, and when it was made last."""
    moves: dict[Move, int] = {}
    for copy in copies:
        tensor = layout[copy.tensor].tied_to or copy.tensor
        moves[Move(tensor, copy.source, copy.place, copy.target)] = copy.order
    return moves


def _order(move: Move) -> tuple[str, int, str, int]:
    return move.tensor, move.source.offset, move.place, move.target.offset


def _conflicts(moves: Mapping[Move, int], overwrites: Iterable[Overwrite]) -> Iterator[tuple[str, str]]:
    """Tensors that a place does not keep, since something else is written to the same elements: name and reason."""
    by_place: dict[str, list[Move]] = {}
    for move in moves:
        by_place.setdefault(move.place, []).append(move)
    for place, here in by_place.items():
        for i, j in collisions([move.target for move in here]) if len(here) > 1 else ():
            one, other = here[i].tensor, here[j].tensor
            yield one, _shared(place, one, other)
            yield other, _shared(place, other, one)
    later: dict[str, list[Overwrite]] = {}
    for overwrite in overwrites:
        if overwrite.place in by_place:
            later.setdefault(overwrite.place, []).append(overwrite)
    for place, writes in later.items():
        yield from _overwritten(by_place[place], moves, writes)


def _shared(place: str, tensor: str, other: str) -> str:
    if tensor == other:
        return f"{place}: two parts of the tensor are written to the same elements"
    return f"{place}: {other!r} is written to the same elements, and the stream does not tie the two"


def _overwritten(
    here: list[Move], moves: Mapping[Move, int], writes: list[Overwrite]
) -> Iterator[tuple[str, str]]:
    order = np.array([moves[move] for move in here])
    start = np.array([move.target.offset for move in here])
    stop = np.array([move.target.stop for move in here])
    for write in writes:
        near = (order < write.order) & (start < write.target.stop) & (stop > write.target.offset)
        for i in np.flatnonzero(near):
            if collisions([here[i].target, write.target]):
                yield here[i].tensor, f"{write.place}: overwritten after it was loaded"
