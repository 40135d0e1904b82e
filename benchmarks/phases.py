"""A whole publish and apply of one model, phase by phase, through a local-folder store; in a process of its own.

    python -m weightcast.benchmarks.phases --mib 512 --density 0.01

The publishing thread's stall is compared with a plain copy of the same tensors, taken in turns with it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping

import torch

from weightcast.publisher import Publisher, PublisherSettings
from weightcast.subscriber import Subscriber, SubscriberSettings, Tensors

from .data import LAYER_ELEMENTS, states
from .memory import peak, resident_bytes

MIB = 1 << 20


def tensors(bits: torch.Tensor) -> dict[str, torch.Tensor]:
    """`bits` as layers of a model, each memory of its own."""
    return {f"model.layers.{i:03d}.weight": layer.clone() for i, layer in enumerate(layers_of(bits))}


def layers_of(bits: torch.Tensor) -> list[torch.Tensor]:
    """Views of `bits`, a layer each, as bf16."""
    return list(torch.chunk(bits.view(torch.bfloat16), bits.numel() // LAYER_ELEMENTS))


def switch(model: Mapping[str, torch.Tensor], bits: torch.Tensor) -> None:
    """Write `bits` into the model's tensors, in place."""
    for tensor, layer in zip(model.values(), layers_of(bits), strict=True):
        tensor.copy_(layer)


def measure(mib: int, density: float, rounds: int) -> dict[str, float]:
    """Best seconds of each phase over `rounds` versions, memory in MiB, and what went over the wire."""
    old, new, share = states(density, mib)
    sides = [torch.from_numpy(old.view("i2")), torch.from_numpy(new.view("i2"))]
    model, replica = tensors(sides[0]), tensors(sides[0])
    best: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, seconds), seconds)

    memory: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root,
        Publisher(root, PublisherSettings(snapshot_every=0)) as publisher,
        Subscriber(root, Tensors(replica), SubscriberSettings(lease=False)) as subscriber,
    ):
        before_baseline = resident_bytes()
        begin = time.perf_counter()
        publisher.publish(model, step=0).wait()
        note("first_version", time.perf_counter() - begin)
        memory["baseline_mib"] = (resident_bytes() - before_baseline) / MIB
        subscriber.once()
        for turn in range(rounds + 1):
            switch(model, sides[(turn + 1) % 2])
            target = {name: torch.empty_like(t) for name, t in model.items()}
            for t in target.values():
                t.fill_(
                    0
                )  # a copy that only ever touches pages for the first time would be no fair yardstick
            begin = time.perf_counter()
            for name, t in model.items():
                target[name].copy_(t)
            copied = time.perf_counter() - begin
            del target
            with peak() as publishing:
                begin = time.perf_counter()
                pending = publisher.publish(model, step=turn + 1)
                stalled = time.perf_counter() - begin
                manifest = pending.wait()
                committed = time.perf_counter() - begin
            with peak() as applying:
                begin = time.perf_counter()
                subscriber.once()
                applied = time.perf_counter() - begin
            if turn == 0:
                continue  # compiles the kernels
            note("copy", copied)
            note("stall", stalled)
            note("commit", committed)
            note("apply", applied)
            memory["publish_extra_mib"] = max(memory.get("publish_extra_mib", 0.0), publishing.extra / MIB)
            memory["apply_extra_mib"] = max(memory.get("apply_extra_mib", 0.0), applying.extra / MIB)
        publisher.wait_idle()
        if not all(torch.equal(model[n].view(torch.int16), replica[n].view(torch.int16)) for n in model):
            raise SystemExit("the replica's bits are not the model's")
    totals = manifest.totals
    return {
        "mib": mib,
        "density": share,
        "changed": totals.changed,
        "wire_bytes": totals.bytes + len(manifest.encode()),
        "bits_per_change": 8 * totals.bytes / totals.changed,
        "dense_over_wire": totals.dense_bytes / totals.bytes,
        "stall_over_copy": best["stall"] / best["copy"],
        **{f"{name}_s": seconds for name, seconds in best.items()},
        **memory,
    }


def main() -> None:
    """Measure once and print one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    json.dump(measure(options.mib, options.density, options.rounds), sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
