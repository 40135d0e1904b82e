"""Checkpoint folders as trainers write them, from small random tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Model = dict[str, torch.Tensor]


def model(seed: int, tensors: int = 6, elements: int = 4096) -> Model:
    """bf16 tensors with random values."""
    random = torch.Generator().manual_seed(seed)
    return {
        f"layer.{i}.weight": torch.randn(elements, generator=random).to(torch.bfloat16)
        for i in range(tensors)
    }


def changed(before: Model, count: int, seed: int = 1) -> Model:
    """A copy in which exactly `count` elements of the first tensor have other bits."""
    after = {name: tensor.clone() for name, tensor in before.items()}
    places = torch.randperm(before["layer.0.weight"].numel(), generator=torch.Generator().manual_seed(seed))[
        :count
    ]
    after["layer.0.weight"].view(torch.int16)[places] ^= 1
    return after


def save(folder: Path, tensors: Model, *, shards: int = 1) -> Path:
    """Write a whole checkpoint over whatever is there: one file, or shards and then their index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    parts = [names[i::shards] for i in range(shards)]
    files = {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": part for i, part in enumerate(parts)}
    for file, part in files.items():
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
    write_index(folder, {n: file for file, part in files.items() for n in part}, total=total_size(tensors))
    return folder


def total_size(tensors: Model) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def write_index(folder: Path, weight_map: dict[str, str], *, total: int = 0) -> None:
    """Write an index file."""
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def snapshot_of(folder: Path) -> dict[str, tuple[int, int]]:
    """All paths below a folder with size and modification time: shows that nobody wrote there."""
    return {
        str(p.relative_to(folder)): (p.lstat().st_size, p.lstat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
    }


def rotate_away(folder: Path) -> None:
    """What a trainer does with its oldest checkpoint."""
    shutil.rmtree(folder)
