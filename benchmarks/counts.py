"""What many small tensors cost beyond the same bytes in few: publish and apply, in a process of its own.

python -m weightcast.benchmarks.counts --tensors 100 100000
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Final

import torch

from weightcast.publisher import Publisher, PublisherSettings
from weightcast.subscriber import CheckpointFolder, Subscriber, SubscriberSettings, Tensors

ELEMENTS: Final = 6_400_000
DENSITY: Final = 0.01


def measure(count: int, rounds: int) -> dict[str, float]:
    """Best seconds of publish (to the commit) and of apply, for `ELEMENTS` bf16 elements in `count` tensors."""
    torch.manual_seed(0)
    flat = (torch.randn(ELEMENTS) * 0.02).bfloat16()
    names = [f"model.layers.{i // 100}.block.{i % 100}.weight" for i in range(count)]
    model = dict(zip(names, (t.clone() for t in torch.chunk(flat, count)), strict=True))
    replica = {name: tensor.clone() for name, tensor in model.items()}
    best: dict[str, float] = {}
    manifest_bytes = wire_bytes = 0
    settings = SubscriberSettings(lease=False)
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root,
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as folder,
        Publisher(root, PublisherSettings(snapshot_every=0)) as publisher,
        Subscriber(root, Tensors(replica), settings) as tensors,
        Subscriber(root, CheckpointFolder(folder), settings) as kept,
    ):
        publisher.publish(model, step=0).wait()
        tensors.once()
        kept.once()
        for turn in range(rounds + 1):
            move(list(model.values()))
            times = [time.perf_counter()]
            manifest = publisher.publish(model, step=turn + 1).wait()
            times.append(time.perf_counter())
            tensors.once()
            times.append(time.perf_counter())
            kept.once()
            times.append(time.perf_counter())
            if turn == 0:
                continue  # compiles the kernels
            for name, begin, end in zip(("publish", "tensors", "folder"), times, times[1:], strict=False):
                best[name] = min(best.get(name, end - begin), end - begin)
            manifest_bytes, wire_bytes = len(manifest.encode()), manifest.totals.bytes
    if not all(torch.equal(t.view(torch.int16), replica[n].view(torch.int16)) for n, t in model.items()):
        raise SystemExit("the replica's bits are not the model's")
    return {
        "tensors": count,
        "manifest_bytes": manifest_bytes,
        "wire_bytes": wire_bytes,
        **{f"{name}_s": seconds for name, seconds in best.items()},
    }


def move(tensors: Sequence[torch.Tensor]) -> None:
    """Change `DENSITY` of all elements by one bf16 step, in place."""
    bits = torch.cat(tuple(tensors)).view(torch.int16)
    bits[torch.rand(len(bits)) < DENSITY] += 1
    for tensor, part in zip(tensors, torch.chunk(bits, len(tensors)), strict=True):
        tensor.view(torch.int16).copy_(part)


def main() -> None:
    """Measure each count and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, nargs="+", default=[100, 100_000])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    json.dump([measure(count, options.rounds) for count in options.tensors], sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
