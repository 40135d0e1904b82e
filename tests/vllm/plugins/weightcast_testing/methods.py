"""What workers do otherwise: methods that tests call through `/collective_rpc`, and patience."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def spin_less() -> None:
    """Let ranks and engine cores that wait for each other sleep; vLLM's spin, and keep the cores of this machine busy.

    They call `sched_yield` in a loop, for up to 1 s after each message. On two cores with Linux 6.18 two such processes leave
    little to others while the engine generates: 0.2 s of work took 2 to 15 s, and a sidecar's first version up to 43 s, once
    more than the 60 s that tests wait.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.SpinCondition.__init__.__defaults__ = (0.01,)  # busy_loop_s
    shm_broadcast.sched_yield = nap


def nap() -> None:
    """Instead of a yield; short beside the millisecond that a step of these engines takes."""
    time.sleep(50e-6)


def install() -> None:
    """Give every worker class the methods."""
    from vllm.v1.worker.worker_base import WorkerBase

    WorkerBase.testing_peek = peek
    WorkerBase.testing_native = native


def peek(worker: Any, name: str, count: int) -> list[int]:
    """The bits of a bf16 parameter's first elements, as unsigned numbers."""
    import torch

    values = worker.get_model().get_parameter(name).data.view(-1)[:count]
    return [bits & 0xFFFF for bits in values.view(torch.int16).tolist()]


def native(worker: Any, path: str, model: str) -> float:
    """Patch the weights with vLLM's `load_checkpoint_weight_patches`; return the seconds that it took.

    Args:
        path: safetensors file with `{name}#i`, int32 flat indices, and `{name}#v`, the values there.
        model: checkpoint folder whose tensors have the shapes.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    found = load_file(path)
    names = [key.removesuffix("#i") for key in found if key.endswith("#i")]
    index = json.loads((Path(model) / "model.safetensors.index.json").read_text())["weight_map"]
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        with safe_open(Path(model) / index[name], framework="pt") as tensors:
            shapes[name] = tuple(tensors.get_slice(name).get_shape())
    patches = [
        CheckpointWeightPatch(
            name, shapes[name], found[f"{name}#v"].dtype, found[f"{name}#v"], found[f"{name}#i"]
        )
        for name in names
    ]
    began = time.perf_counter()
    load_checkpoint_weight_patches(worker.get_model(), patches)
    return time.perf_counter() - began
