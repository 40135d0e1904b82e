"""What a rank holds, from its trainer's tensors: slices, and the table of them that the other ranks are told."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightcast.publisher.placement import Slice, slices
from weightcast.publisher.sources import Casts, dtype_name
from weightcast.schemas.errors import UsageError

from .plan import Corner, Entry

Sharded = Mapping[str, Any] | Iterable[tuple[str, Any] | Slice]
"""Tensors by name, DTensors among them, or slices. All must be alive at once."""


@dataclass(frozen=True)
class Held:
    """A rank's slices and what the table says of each, side by side."""

    slices: tuple[Slice, ...]
    table: tuple[Entry, ...]


def held(tensors: Sharded, casts: Casts) -> Held:
    """The slices of what a trainer hands over, sorted by dtype and name as in a layout. Nothing is copied.

    Raises:
        UsageError: as `placement.slices`, or a dtype that a stream cannot carry.
    """
    found = list(slices(tensors))
    named = [(dtype_name(_cast(casts, s), s.name), s) for s in found]
    ties = _ties(named)
    pairs = [
        (Entry(s.name, dtype, s.shape, Corner(s.start, s.extent), ties.get(s.name, "")), s)
        for dtype, s in named
    ]
    pairs.sort(key=lambda pair: (pair[0].dtype, pair[0].name, pair[0].corner))
    return Held(tuple(s for _, s in pairs), tuple(e for e, _ in pairs))


def _cast(casts: Casts, part: Slice) -> Any:
    """Something of the dtype that a slice is published under."""
    if not casts:
        return part.tensor
    return casts(part.name, torch.empty(0, dtype=part.tensor.dtype))


def _ties(named: Sequence[tuple[str, Slice]]) -> dict[str, str]:
    """For names whose slices are the same memory as another name's: the first such name in the trainer's order."""
    memory: dict[str, list[Hashable]] = {}
    for dtype, part in named:
        tensor = part.tensor
        if tensor.numel():
            strides = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
            where = (str(tensor.device), tensor.data_ptr(), strides, tensor.is_conj(), tensor.is_neg())
            memory.setdefault(part.name, []).append((dtype, part.shape, part.start, part.extent, where))
    first: dict[Hashable, str] = {}
    ties = {}
    for name, places in memory.items():
        owner = first.setdefault(tuple(places), name)
        if owner != name:
            ties[name] = owner
    return ties


def encode_table(table: Sequence[Entry]) -> str:
    """A table as JSON."""
    rows = [[e.name, e.dtype, e.shape, e.corner.start, e.corner.extent, e.tie] for e in table]
    return json.dumps(rows, separators=(",", ":"))


def decode_table(text: str, rank: int) -> list[Entry]:
    """Inverse of `encode_table`; `rank` is whose it is.

    Raises:
        UsageError: it is none: the ranks run different releases.
    """
    try:
        return [
            Entry(
                str(name), str(dtype), tuple(map(int, shape)), Corner(_index(start), _index(extent)), str(tie)
            )
            for name, dtype, shape, start, extent, tie in json.loads(text)
        ]
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"rank {rank} sent a table of slices that cannot be read: {error}",
            hint="run the same release of weightcast on all ranks",
        ) from error


def _index(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))
