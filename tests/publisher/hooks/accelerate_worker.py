"""One rank of a run under accelerate: MODE ROOT OUT.

Writes OUT/RANK.json (versions that it published, whether its parameters are sharded, its error), and rank 0 OUT/whole.pt:
the state dict at the end, gathered by torch itself. accelerate shards on accelerators only, so FSDP2 is applied as it would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.publisher.hooks.kit import tiny_qwen3
from weightcast.publisher import Publisher
from weightcast.publisher.hooks.accelerate import AcceleratePublisher
from weightcast.publisher.hooks.outlet import Outlet
from weightcast.schemas.errors import StorageError, WeightcastError


class Broken(Publisher):
    """Takes two tensors, then fails."""

    def publish(self, tensors: Any, **label: Any) -> Any:
        source = iter(tensors)
        next(source), next(source)
        raise StorageError("the store is broken")


def sharded(model: Any) -> Any:
    """`model` under FSDP2, each layer by itself, some parameters in uneven parts."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(mode: str, root: str, out: Path) -> None:
    """Train three steps and publish after each."""
    accelerator = Accelerator(cpu=True)
    model = tiny_qwen3(vocab_size=63, tie_word_embeddings=False)
    model = sharded(model) if mode.startswith("fsdp2") else accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    publisher = AcceleratePublisher(accelerator, root)
    versions: list[int | None] = []
    error = None
    for step in range(3):
        ids = torch.arange(8)[None] + accelerator.process_index
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if mode == "fsdp2-broken" and step == 0 and accelerator.is_main_process:
            publisher._outlet = Outlet(Broken(root))
        try:
            pending = publisher.publish(model, step=step)
        except WeightcastError as failure:
            error = str(failure)
            publisher._outlet = Outlet(root)
        else:
            versions.append(pending.wait().version if pending is not None else None)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    publisher.close()
    parts = [p.to_local().numel() / p.numel() for p in model.parameters() if isinstance(p, DTensor)]
    said = {"versions": versions, "parts": parts, "error": error}
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(said))
    if accelerator.is_main_process:
        torch.save({name.removeprefix("module."): tensor for name, tensor in whole.items()}, out / "whole.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
