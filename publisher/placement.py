"""Which part of a checkpoint tensor this process holds, from a tensor alone: no collective, no other process.

A plain tensor is all of itself. A DTensor's mesh coordinate, placements and global shape say which rows of each
dimension are here; they are divided here exactly as torch divides them, and the local tensor's shape must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weightcast.mapping.slices import Slice, Span, boxes_of
from weightcast.schemas.errors import UsageError
from weightcast.schemas.wrappers import NameMap

__all__ = ["Slice", "Span", "boxes_of", "local_rows", "partitioned", "slices", "slices_of"]

_MATERIALIZE: Final = "give it memory first: to_empty(device=...) and load a checkpoint, or move the model"


def slices(tensors: Mapping[str, Any] | Iterable[tuple[str, Any] | Slice]) -> Iterator[Slice]:
    """Everything that a trainer hands over, under checkpoint names, as the boxes that lie here.

    Args:
        tensors: by name, or pairs; slices, such as a layout map's, pass as they are.

    Raises:
        UsageError: as `slices_of`; or two names that become one.
    """
    names = NameMap()
    for item in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if isinstance(item, Slice):
            yield item
        else:
            name, value = item
            yield from slices_of(names(name), value)


def slices_of(name: str, value: Any) -> list[Slice]:
    """The boxes of tensor `name` that `value` holds here, in C order; none in a process outside its mesh.

    Almost always one. Several where torch gives one process rows that are not side by side. A process without rows
    holds an empty box.

    Args:
        name: checkpoint name.
        value: a tensor, or a DTensor of any mesh whose placements are Shard, _StridedShard or Replicate.

    Raises:
        UsageError: no tensor, one without memory, one that another framework partitioned, a placement of partial
            sums, or a local tensor that is not what the placements say.
    """
    if not isinstance(value, torch.Tensor):
        raise UsageError(
            f"expected a tensor under the name {name!r}, found {type(value).__name__}",
            hint="pass model.state_dict()",
        )
    if not isinstance(value, DTensor):
        local = _plain(name, value).detach()
        return [Slice(name, tuple(local.shape), (0,) * local.dim(), local)]
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    local = _plain(name, value._local_tensor).detach()
    shape = tuple(int(n) for n in value.shape)
    rows = local_rows(name, shape, tuple(value.device_mesh.shape), coordinate, _ordered(name, value))
    expected = tuple(sum(map(len, ranges)) for ranges in rows)
    if expected != tuple(local.shape):
        raise UsageError(
            f"tensor {name!r} of shape {list(shape)} has local shape {list(local.shape)} at mesh coordinate "
            f"{list(coordinate)}; its placements {list(value.placements)} say {list(expected)}",
            hint="construct it with distribute_tensor(), or give from_local() the shape and stride of the whole",
        )
    return list(_cut(name, shape, rows, local))


def local_rows(
    name: str,
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Iterable[tuple[int, Any]],
) -> list[list[range]]:
    """For each dimension of a tensor, which of its indices are at `coordinate`: ascending, no two ranges touching.

    Pure: needs no process group.

    Args:
        name: for the errors.
        shape: of the whole tensor.
        mesh: sizes of the mesh.
        coordinate: in it.
        placements: mesh dimension and placement, in the order in which they divide the tensor.

    Raises:
        UsageError: a placement that does not say where elements are.
    """
    rows = [[range(n)] for n in shape]
    for at, placement in placements:
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or placement.is_partial() or not 0 <= dim < len(rows):
            raise UsageError(
                f"tensor {name!r} has placement {placement!r}, which does not say which of its elements are here",
                hint="redistribute() it to Shard or Replicate before publishing",
            )
        factor = int(getattr(placement, "split_factor", 1))
        rows[dim] = _joined(
            piece
            for part in range(factor)
            for piece in _chunk(_chunk(rows[dim], factor, part), mesh[at], coordinate[at])
        )
    return [ranges or [range(0)] for ranges in rows]


def partitioned(tensor: torch.Tensor) -> str:
    """How another framework partitioned a tensor, so that its shape is not the parameter's; "" if none did."""
    if hasattr(tensor, "ds_id"):  # DeepSpeed's, on whatever it partitioned
        return "partitioned by ZeRO-3"
    if getattr(tensor, "_fsdp_flattened", False) or hasattr(tensor, "_unsharded_flat_param"):
        return "flattened by FSDP1"
    return ""


def _plain(name: str, local: torch.Tensor) -> torch.Tensor:
    """`local`, if its elements are the bits in its memory."""
    how = partitioned(local)
    if how:
        raise UsageError(
            f"tensor {name!r} is {how}, so its elements have no place of their own",
            hint="shard with FSDP2 (fully_shard), or publish checkpoints (weightcast publish --watch)",
        )
    if bool(is_traceable_wrapper_subclass(local)):  # bool: nothing is known of its type then
        raise UsageError(
            f"tensor {name!r} is a {type(local).__name__}, whose bits lie in other tensors",
            hint="publish the plain tensors that it is made of, or made from",
        )
    if local.layout is not torch.strided:
        raise UsageError(f"tensor {name!r} is {local.layout}; only dense tensors can be published")
    if local.is_meta:
        raise UsageError(f"tensor {name!r} is on the meta device and has no data", hint=_MATERIALIZE)
    return local


def _ordered(name: str, value: DTensor) -> list[tuple[int, Any]]:
    """Placements in the order in which they divide: left to right, unless the DTensor carries another one."""
    placements = list(enumerate(value.placements))
    order = getattr(value._spec, "shard_order", None)
    if order is None:
        return placements
    first = [(int(at), value.placements[at]) for entry in order for at in entry.mesh_dims]
    listed = {at for at, _ in first}
    return [*first, *(p for p in placements if p[0] not in listed)]


def _chunk(ranges: Sequence[range], pieces: int, index: int) -> list[range]:
    """Piece `index` of what torch.chunk makes of the concatenated ranges; later pieces may be empty."""
    size = -(-sum(map(len, ranges)) // pieces)
    begin, end = index * size, (index + 1) * size
    found, at = [], 0
    for part in ranges:
        found.append(part[max(begin - at, 0) : max(end - at, 0)])
        at += len(part)
    return [part for part in found if part]


def _joined(ranges: Iterable[range]) -> list[range]:
    """Neighbours that touch as one."""
    joined: list[range] = []
    for part in ranges:
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _cut(
    name: str, shape: tuple[int, ...], rows: Sequence[Sequence[range]], local: torch.Tensor
) -> Iterator[Slice]:
    """The local tensor as boxes: one for each combination of ranges."""
    if all(len(ranges) == 1 for ranges in rows):
        yield Slice(name, shape, tuple(ranges[0].start for ranges in rows), local)
        return
    cuts = []
    for ranges in rows:
        ends = [sum(map(len, ranges[: i + 1])) for i in range(len(ranges))]
        cuts.append(
            [(part.start, end - len(part), len(part)) for part, end in zip(ranges, ends, strict=True)]
        )
    for box in product(*cuts):
        part = local
        for dim, (_, at, n) in enumerate(box):
            part = part.narrow(dim, at, n)
        yield Slice(name, shape, tuple(first for first, _, _ in box), part)
