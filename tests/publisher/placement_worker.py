"""Four gloo ranks that hold tensors in every way: OUT.

For each case, OUT/RANK.json has the slices that `slices_of` gave (name, start, extent), whether their elements are those
of torch's own `full_tensor()` there, and the collectives that `slices_of` ran.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from weightcast.publisher.placement import slices

Case = tuple[str, dict[str, Any]]


class Block(torch.nn.Module):
    """Rows and columns that 2 and 4 ranks divide unevenly, and some that they do not."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(narrow, wide)
        self.down = torch.nn.Linear(wide, narrow, bias=False)
        self.norm = torch.nn.LayerNorm(narrow)
        self.scale = torch.nn.Parameter(torch.rand(1, 3))
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x))) * self.scale.mean()


def block(wide: int = 8, narrow: int = 4) -> Block:
    torch.manual_seed(0)
    return Block(wide, narrow)


def trained(model: torch.nn.Module, narrow: int = 4) -> dict[str, Any]:
    """After one step, so that what is held is what a trainer holds then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(2, narrow)).sum().backward()
    optimizer.step()
    return dict(model.state_dict())


def placed(mesh: DeviceMesh, *placements: Any) -> dict[str, Any]:
    """Even, uneven, with empty parts, three-dimensional."""
    whole = {
        "even": torch.randn(8, 4),
        "uneven": torch.randn(10, 7).bfloat16(),
        "few": torch.randn(2, 3),
        "experts": torch.randn(3, 5, 4),
        "empty": torch.randn(0, 6),
    }
    # Of itself (src_data_rank) each rank has the same: to scatter uneven strided parts fails in torch.
    return {name: distribute_tensor(t, mesh, placements, src_data_rank=None) for name, t in whole.items()}


def reordered(mesh: DeviceMesh) -> dict[str, Any]:
    """A DTensor that says itself in which order its mesh dimensions divided it: the last one first."""
    whole = torch.randn(8, 3)
    row, column = mesh.get_coordinate() or ()
    local = whole.chunk(2)[column].chunk(2)[row].contiguous()
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, (ShardOrderEntry(0, (1, 0)),))
    return {"reordered": DTensor(local, spec, requires_grad=False)}


def transposed(mesh: DeviceMesh) -> dict[str, Any]:
    """Local tensors that are not contiguous."""
    return {name: tensor.t() for name, tensor in placed(mesh, Shard(0)).items() if tensor.dim() == 2}


def cases() -> Iterator[Case]:
    """Every way to hold a tensor, with names as the wrappers leave them."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dim in (0, 1):
        yield f"Shard({dim})", placed(line, Shard(dim))
    yield "Replicate", placed(line, Replicate())
    yield "not contiguous", transposed(line)
    for placements in (
        (Replicate(), Shard(0)),
        (Shard(0), Replicate()),
        (Shard(0), Shard(0)),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(1)),
        (_StridedShard(0, split_factor=2), Shard(0)),
        (_StridedShard(1, split_factor=2), Shard(1)),
        (Replicate(), _StridedShard(0, split_factor=2)),
        (_StridedShard(0, split_factor=3), Shard(1)),
    ):
        yield str(placements), placed(square, *placements)
    yield "shard_order", reordered(square)
    yield "FSDP2", trained(fully_shard(block(), mesh=line))
    yield "FSDP2, uneven", trained(fully_shard(block(9, 3), mesh=line), 3)
    yield (
        "FSDP2, offloaded",
        trained(fully_shard(block(), mesh=line, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    )
    by_column = fully_shard(
        block(),
        mesh=line,
        shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.size(1) % 4 == 0 else None,
    )
    yield "FSDP2, Shard(1)", trained(by_column)
    yield "HSDP", trained(fully_shard(block(10, 5), mesh=square), 5)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    both = fully_shard(parallelize_module(block(), square["tp"], plan), mesh=square["dp"])
    yield "FSDP2 x TP", trained(both)
    compiled = torch.compile(fully_shard(block(), mesh=line), backend="eager")
    yield "compiled", dict(compiled.state_dict())
    checkpointed = block()
    checkpoint(checkpointed)
    yield "checkpointed", trained(fully_shard(checkpointed, mesh=line))


def holds(tensors: dict[str, Any]) -> dict[str, Any]:
    """What `slices` says of them, held against torch's own gather."""
    with CommDebugMode() as communication:
        found = list(slices(tensors))
    whole = {
        name.removeprefix("_orig_mod."): tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in tensors.items()
    }
    equal = all(
        torch.equal(
            whole[s.name][tuple(map(slice, s.start, map(sum, zip(s.start, s.extent, strict=True))))], s.tensor
        )
        and s.shape == tuple(whole[s.name].shape)
        for s in found
    )
    return {
        "collectives": communication.get_total_counts(),
        "equal": equal,
        "shapes": {name: list(tensor.shape) for name, tensor in whole.items()},
        "slices": [[s.name, s.start, s.extent] for s in found],
    }


def rank(rank: int, out: Path) -> None:
    """All cases in one group: starting one costs more than they do."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), 4), rank=rank, world_size=4)
    torch.manual_seed(1)
    said = {title: holds(tensors) for title, tensors in cases()}
    (out / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def main(out: Path) -> None:
    """Forked, so that torch is imported once. Ends with the number of ranks that failed."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank, args=(number, out), daemon=True) for number in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(sum(process.exitcode != 0 for process in ranks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
