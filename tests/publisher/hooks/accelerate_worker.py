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

from tests.faultstore import FaultStore, refuse
from tests.publisher.hooks.kit import tiny_qwen3
from weightcast.manifest.store import open_store
from weightcast.publisher.group import GroupPublisher
from weightcast.publisher.hooks.accelerate import AcceleratePublisher
from weightcast.schemas.errors import WeightcastError


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
    store = FaultStore(open_store(root))
    broken = mode == "fsdp2-broken"
    group = GroupPublisher("", store=store) if broken else None
    publisher = AcceleratePublisher(accelerator, group if group is not None else root)
    versions: list[int] = []
    error = None
    for step in range(3):
        ids = torch.arange(8)[None] + accelerator.process_index
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        if broken and step == 1 and not accelerator.is_main_process:
            store.on("put", "data/*", refuse)
        try:
            versions.append(publisher.publish(model, step=step).wait().version)
        except WeightcastError as failure:
            error = str(failure)
            store.heal()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    publisher.close()
    if group is not None:
        group.close()
    parts = [p.to_local().numel() / p.numel() for p in model.parameters() if isinstance(p, DTensor)]
    said = {"versions": versions, "parts": parts, "error": error}
    (out / f"{accelerator.process_index}.json").write_text(json.dumps(said))
    if accelerator.is_main_process:
        torch.save({name.removeprefix("module."): tensor for name, tensor in whole.items()}, out / "whole.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
