"""A small stream whose every figure is known, for the tests of queries and commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher, PublisherSettings

VERSIONS = 5
EMBED = 300 * 256
"""Elements of the one tensor that is large enough for rows of its own; `lm_head.weight` is tied to it."""

ELEMENTS_0 = EMBED + 10 * 5 + 1 + 0 + 8
ELEMENTS_3 = ELEMENTS_0 - 5 + 1 + 7
"""After `small.9` went, `small.0` grew from 5 to 6 elements, and `extra.bias` came with 7."""

CHANGES_1 = {"embed.weight": 50, "small.3.weight": 2, "small.7.weight": 1, "scale": 1}
CHANGES_3 = {"small.0.weight": 6, "extra.bias": 7}
CHANGES_4 = {"embed.weight": 50, "small.3.weight": 2, "odd": 1}
"""Those of version 4 undo those of version 1 in `embed.weight` and `small.3.weight`."""


def states() -> list[dict[str, torch.Tensor]]:
    """The tensors of versions 0 to 4."""
    generator = torch.Generator().manual_seed(1)
    embed = torch.randn(300, 256, generator=generator).bfloat16()
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1.0, 2.0, 3.0]).bfloat16()
    first = {"embed.weight": embed, "lm_head.weight": embed, "scale": torch.tensor(2.0)}
    first |= {f"small.{i}.weight": torch.randn(5, generator=generator) for i in range(10)}
    first |= {"empty": torch.zeros(0, dtype=torch.bfloat16), "odd": odd}
    second = _changed(first, CHANGES_1)
    third = dict(second)
    fourth = {k: v for k, v in third.items() if k != "small.9.weight"}
    fourth["small.0.weight"] = torch.ones(6)
    fourth["extra.bias"] = torch.ones(7).bfloat16()
    fifth = _changed(fourth, CHANGES_4)
    return [first, second, third, fourth, fifth]


def _changed(state: dict[str, torch.Tensor], counts: dict[str, int]) -> dict[str, torch.Tensor]:
    """A copy in which the lowest bit of the first `counts[name]` elements of some tensors is flipped."""
    fresh = {name: tensor.clone() for name, tensor in state.items()}
    for name, count in counts.items():
        width = {2: torch.int16, 4: torch.int32}[fresh[name].element_size()]
        fresh[name].view(width).reshape(-1)[:count] ^= 1
    fresh["lm_head.weight"] = fresh["embed.weight"]
    return fresh


def publish_sample(root: Path) -> None:
    """Publish versions 0 to 4, with steps 0, 10, … and a snapshot beside version 3."""
    settings = PublisherSettings(threads=2, writer="trainer-a")
    with Publisher(str(root), settings, fence=False) as publisher:
        for i, state in enumerate(states()):
            files = {"config.json": b'{"a": 1}', "tokenizer.json": b"{}"} if i == 0 else None
            drop = ["small.9.weight"] if i == 3 else []
            publisher.publish(state, step=10 * i, metadata={"loss": 0.5}, files=files, drop=drop).wait()
            if i == 3:
                publisher.snapshot()


def reader_of(root: Path) -> StreamReader:
    """A reader of the stream at `root`."""
    return StreamReader.open(open_store(str(root)))


def copied(root: Path, target: Path) -> Path:
    """A copy of a stream, to damage."""
    shutil.copytree(root, target)
    return target


def shard_path(root: Path, version: int) -> Path:
    """The file of the one shard of a version."""
    (found,) = (root / "data" / f"{version:012d}").iterdir()
    return found


def manifest_path(root: Path, version: int) -> Path:
    """The file of a version's manifest."""
    return root / "versions" / f"{version:012d}.json"


def flip(path: Path, at: int = -1) -> None:
    """Flip one bit of a file, in its middle by default."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at < 0 else at] ^= 4
    path.write_bytes(data)


def edit_json(path: Path, **changes: Any) -> None:
    """Replace keys of a JSON document."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def bits(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in C order."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
