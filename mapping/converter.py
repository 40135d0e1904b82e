"""A trainer's own converter to checkpoint names, run once on stand-ins, becomes a layout map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightcast.schemas.errors import UsageError

from .layout_map import Convert, LayoutMap, Look, Output, pairs
from .tracer import Tracer

Place = tuple[tuple[int, ...], tuple[int, ...]]


class Position(NamedTuple):
    """Where a converter's local output lies.

    Attributes:
        shape: of the whole checkpoint tensor.
        start: first index of the output in each dimension.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]


def record_map(
    convert: Convert,
    trainer: Mapping[str, torch.Tensor],
    parts: Mapping[str, Place] | None = None,
) -> LayoutMap:
    """Learn from `convert` where each element of its outputs lies in the trainer's tensors.

    Runs it once, over stand-ins that take no memory. Outputs that are only moved (views, copies, cat, stack, rows by
    number, …) are mapped; the others are found, and the map says why (`LayoutMap.computed`).

    Args:
        convert: takes the trainer's tensors by name, read-only, and gives (checkpoint name, tensor) pairs or a mapping;
            best a generator, so that what it computes is never all in memory. Called again whenever something is
            computed, and to prove the map.
        trainer: what it will be called with: names, shapes, dtypes, strides; no values are read. Plain tensors; of
            tensor-parallel parameters this process's own parts.
        parts: for each output that is a part of its checkpoint tensor, where it lies there: a `Position`, or such a
            tuple.

    Raises:
        UsageError: the converter fails on the stand-ins, changes the trainer's tensors, or gives something else than
            tensors under different names; or `parts` does not fit them.
    """
    looks = {name: _look(name, tensor) for name, tensor in trainer.items()}
    tracer = Tracer()
    places = dict(parts or {})
    outputs: dict[str, Output] = {}
    try:
        with torch.no_grad(), tracer:
            for name, tensor in pairs(convert(_Probes(tracer, trainer))):
                if name in outputs:
                    raise UsageError(f"the converter gives two tensors under the name {name!r}")
                outputs[name] = _output(tracer, name, tensor, places.pop(name, None))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the converter fails on stand-ins without values: {type(error).__name__}: {error}",
            hint="publish its outputs, as for a trainer without a map",
        ) from error
    if places:
        raise UsageError(f"parts has {next(iter(places))!r}, which the converter does not give")
    return LayoutMap(convert, looks, tuple(outputs.values()))


class _Probes(Mapping[str, torch.Tensor]):
    """Stand-ins, made when they are asked for."""

    def __init__(self, tracer: Tracer, trainer: Mapping[str, torch.Tensor]) -> None:
        self._tracer, self._trainer = tracer, trainer
        self._made: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made:
            self._made[name] = self._tracer.probe(name, self._trainer[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._trainer)

    def __len__(self) -> int:
        return len(self._trainer)


def _output(tracer: Tracer, name: str, tensor: torch.Tensor, place: Place | None) -> Output:
    extent = tuple(tensor.shape)
    shape, start = place if place is not None else (extent, (0,) * len(extent))
    inside = len(shape) == len(start) == len(extent) and all(
        at >= 0 and at + n <= size for size, at, n in zip(shape, start, extent, strict=True)
    )
    if not inside:
        raise UsageError(
            f"output {name!r} of shape {list(extent)} does not lie at {list(start)} in a tensor of shape {list(shape)}",
            hint="cut padding off in the converter, and give parts of the checkpoint's shapes",
        )
    read = next((f"{reason} of {source!r}" for source, reason in tracer.refused.items()), "")
    tiles = None if read else tracer.tiles(tensor)
    reason = "" if tiles is not None else read or tracer.why_not(tensor)
    return Output(name, tensor.dtype, tuple(shape), tuple(start), extent, tiles, reason)


def _look(name: str, tensor: torch.Tensor) -> Look:
    if bool(is_traceable_wrapper_subclass(tensor)) or tensor.layout is not torch.strided:
        raise UsageError(
            f"trainer tensor {name!r} is a {type(tensor).__name__} ({tensor.layout}); a map needs plain dense ones",
            hint="pass to_local() of DTensors, and parts for what the converter makes of them",
        )
    return Look.of(tensor)
