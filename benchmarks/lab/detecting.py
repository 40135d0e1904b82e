"""One training run under one detector: `python -m weightcast.benchmarks.lab.detecting WAY ELEMENTS STEPS`.

Prints JSON: of each version whether all changes were found and nothing else, what `publish` took, and the most memory.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from weightcast.codec import Geometry, Memory
from weightcast.manifest.deltas import apply_directly
from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.store import open_store
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.publisher.detectors.cast import Cast
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.settings import DetectorKind

from .memory import resident_bytes

_KINDS: Final[dict[str, DetectorKind]] = {
    "none": "snapshot",
    "none with masters": "snapshot",
    "snapshot": "snapshot",
    "cast": "cast",
    "cast in parts": "cast",
    "adamw for-loop": "adamw",
    "adamw foreach": "adamw",
    "adamw fused": "adamw",
}
WAYS: Final = tuple(_KINDS)
"""Nothing published, from fp32 parameters alone or with bf16 ones beside them; then each detector: `cast` with bf16
parameters, and with fp32 ones alone, whose step it makes in parts; `adamw` with each of torch's implementations."""

_LAYER: Final = 1 << 20  # elements of a large tensor
_WARM: Final = 3  # versions before memory is measured: the first are whole, and compile
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "adamw foreach": {"foreach": True},
    "adamw fused": {"fused": True},
}


class Training:
    """fp32 parameters in two groups, decayed and not; gradients of many sizes, clipped; warmup and decay.

    Args:
        elements: of all large tensors together.
        options: of AdamW.
        half: keep bf16 parameters beside them, which are published.
    """

    def __init__(self, elements: int, options: dict[str, Any], half: bool) -> None:
        torch.manual_seed(0)
        layers = max(1, elements // _LAYER)
        self.parameters = {
            f"layers.{i}.weight": torch.nn.Parameter(torch.randn(1024, elements // layers // 1024) * 0.02)
            for i in range(layers)
        }
        norms = {f"layers.{i}.norm": torch.nn.Parameter(torch.ones(1024)) for i in range(layers)}
        groups = [
            {"params": list(self.parameters.values()), "weight_decay": 0.1},
            {"params": list(norms.values()), "weight_decay": 0.0, "lr": 3e-6},
        ]
        self.parameters |= norms
        self.optimizer = torch.optim.AdamW(groups, lr=1e-5, **options)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda k: min(1.0, (k + 1) / 10) * 0.5 ** (k / 50)
        )
        self.half = {n: p.detach().bfloat16() for n, p in self.parameters.items()} if half else {}
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)

    @property
    def published(self) -> dict[str, Any]:
        """What to publish."""
        return self.half or self.parameters

    def step(self) -> None:
        """New gradients, clipped, and a step."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.normal_(0, 10 ** float(torch.empty(()).uniform_(-6, 0)))
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        self._schedule.step()

    def cast(self) -> None:
        """bf16 parameters from fp32 ones."""
        for name, half in self.half.items():
            half.copy_(self.parameters[name].detach())


class Reference:
    """The bf16 bits of the last version, in a reader's hands."""

    def __init__(self, training: Training) -> None:
        self._geometry = Geometry(
            Layout.of(TensorSpec(n, "BF16", tuple(p.shape)) for n, p in training.published.items())
        )
        self._memory = Memory.allocate(self._geometry)
        self._training = training
        self.wrong = 0
        self.changed = 0

    def follow(
        self, manifest: VersionManifest | None, fetcher: DeltaFetcher, pool: ThreadPoolExecutor
    ) -> None:
        """Apply a version and count the elements that are not as published; of none, or a whole one, take them."""
        if manifest is not None and not manifest.reset:
            apply_directly(self._geometry, fetcher.rows(manifest), self._memory, pool)
            self.changed += manifest.totals.changed
        for name, tensor in self._training.published.items():
            bits = tensor.detach().bfloat16().view(torch.uint16).numpy()
            mine = self._memory.tensor(name)
            if manifest is None or manifest.reset:
                mine[...] = bits
            self.wrong += int(np.count_nonzero(mine != bits))


def measure(way: str, elements: int, steps: int) -> dict[str, Any]:
    """Train, publish each step, and check each version."""
    training = Training(
        elements, _OPTIONS.get(way, {"foreach": False}), half=way in ("cast", "none with masters")
    )
    reference = Reference(training)
    seconds: list[float] = []
    held = resets = 0
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root,
        ThreadPoolExecutor(2) as pool,
        Publisher(
            root, PublisherSettings(detector=_KINDS[way], cast={"*": "BF16"}, snapshot_every=0)
        ) as publisher,
    ):
        fetcher = DeltaFetcher(open_store(root), pool, 1 << 26)
        publisher.watch(None if training.half else training.optimizer, training.published)
        train = stepper(training, publisher)
        for version in range(steps + 1):
            if version:
                train()
            if version == _WARM:
                gc.collect()
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))
            manifest = None
            held = max(held, publisher.detector.nbytes if publisher.detector else 0)
            if not way.startswith("none"):
                begin = time.perf_counter()
                pending = publisher.publish(training.published, step=version)
                seconds.append(time.perf_counter() - begin)
                manifest = pending.wait()
                resets += manifest.reset
            reference.follow(manifest, fetcher, pool)
        return {
            "way": way,
            "elements": sum(p.numel() for p in training.parameters.values()),
            "steps": steps,
            "changed": reference.changed,
            "wrong": reference.wrong,
            "whole_versions": resets,
            "held_bytes": held,
            "peak_bytes": resident_bytes("VmHWM"),
            "publish_s": median(seconds[_WARM:]) if seconds else 0.0,
            "best_publish_s": min(seconds[_WARM:]) if seconds else 0.0,
        }


def stepper(training: Training, publisher: Publisher) -> Callable[[], None]:
    """One step, with the casts where there are bf16 parameters."""
    detector = publisher.detector

    def train() -> None:
        training.step()
        if isinstance(detector, Cast):
            with detector.casting():
                training.cast()

    return train


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
