"""One training run under one detector: `python -m weightcast.benchmarks.lab.detecting WAY ELEMENTS STEPS`.

Prints JSON: whether all changes of all versions were found and nothing else, what `publish` and the steps took, memory.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
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
from weightcast.publisher.detectors.detector import Detector
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.settings import DetectorKind

from .memory import give_back, peak

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
_WARM: Final = 3  # versions before anything is measured: the first are whole, and compile
_PLAIN: Final = 7
"""Steps before there is a publisher, and after it; the very first makes the optimizer's state."""

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

    def gradients(self) -> None:
        """New ones, clipped."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.normal_(0, 10 ** float(torch.empty(()).uniform_(-6, 0)))
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)

    def step(self) -> None:
        """A step, and the next learning rate."""
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


class Found:
    """Times and memory of a run, version by version; of `held`, `beyond` and what is extra the most."""

    def __init__(self) -> None:
        self.step_extra_bytes = self.publish_extra_bytes = 0
        self.steps_s: list[float] = []
        self.returned_s: list[float] = []
        self.committed_s: list[float] = []
        self.held = self.beyond = 0
        self.resets = 0

    def holds(self, detector: Detector | None) -> None:
        """Note what a detector keeps now, and that without the changes that it noted."""
        if detector is not None:
            self.held = max(self.held, detector.nbytes)
            beyond = detector.copies.nbytes if isinstance(detector, Cast) else detector.nbytes
            self.beyond = max(self.beyond, beyond)

    def step(self, train: Callable[[], float], weigh: bool) -> None:
        """Make a step, and note the time that it took, or the memory beyond what was resident."""
        if weigh:
            give_back()
        with peak() as memory:
            seconds = train()
        if weigh:
            self.step_extra_bytes = max(self.step_extra_bytes, memory.extra)
        else:
            self.steps_s.append(seconds)

    def publish(
        self, publisher: Publisher, tensors: dict[str, Any], version: int, weigh: bool
    ) -> VersionManifest:
        """Publish, and note the same."""
        gc.collect()
        if weigh:
            give_back()
        with peak() as memory:
            begin = time.perf_counter()
            pending = publisher.publish(tensors, step=version)
            returned = time.perf_counter() - begin
            manifest = pending.wait()
            committed = time.perf_counter() - begin
        if weigh:
            self.publish_extra_bytes = max(self.publish_extra_bytes, memory.extra)
        else:
            self.returned_s.append(returned)
            self.committed_s.append(committed)
        self.resets += manifest.reset
        if publisher.detector is None:  # its copy of the tensors
            self.held = self.beyond = manifest.totals.dense_bytes
        return manifest

    def figures(self) -> dict[str, Any]:
        """Medians, bests and maxima of what came after the start."""
        publishes = {"publish": self.returned_s[_WARM:], "commit": self.committed_s[_WARM:]}
        if not self.returned_s:
            publishes = {}
        times = {**publishes, "step": self.steps_s[_WARM - 1 :]}  # no step before version 0
        return {
            **{f"{name}_s": median(s) for name, s in times.items()},
            **{f"best_{name}_s": min(s) for name, s in times.items()},
            "whole_versions": self.resets,
            "held_bytes": self.held,
            "held_beyond_changes_bytes": self.beyond,
            "step_extra_bytes": self.step_extra_bytes,
            "publish_extra_bytes": self.publish_extra_bytes,
        }


def measure(way: str, elements: int, steps: int) -> dict[str, Any]:
    """Train without a publisher for a while, then publish each of `steps` steps (4 or more), and check each version.

    The last of them are weighed and not timed, since memory that was just given back takes time to have again.
    """
    training = Training(
        elements, _OPTIONS.get(way, {"foreach": False}), half=way in ("cast", "none with masters")
    )
    plain = plain_steps(training)
    reference, found = Reference(training), Found()
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root,
        ThreadPoolExecutor(2) as pool,
        Publisher(
            root, PublisherSettings(detector=_KINDS[way], cast={"*": "BF16"}, snapshot_every=0)
        ) as publisher,
    ):
        fetcher = DeltaFetcher(open_store(root), pool, 1 << 26)
        publisher.watch(None if training.half else training.optimizer, training.published)
        train = stepper(training, publisher.detector)
        for version in range(steps + 1):
            weigh = version > steps - max(1, steps // 6)
            if version:
                found.step(train, weigh)
            found.holds(publisher.detector)
            manifest = None
            if not way.startswith("none"):
                manifest = found.publish(publisher, training.published, version, weigh)
            reference.follow(manifest, fetcher, pool)
    # Again, since the first steps of a process have to ask the kernel for memory.
    plain += plain_steps(training)
    return {
        "way": way,
        "elements": sum(p.numel() for p in training.parameters.values()),
        "steps": steps,
        "changed": reference.changed,
        "wrong": reference.wrong,
        "plain_step_s": median(plain),
        "best_plain_step_s": min(plain),
        **found.figures(),
    }


def plain_steps(training: Training) -> list[float]:
    """Seconds of steps that nobody watches, but of the first."""
    return [stepper(training, None)() for _ in range(_PLAIN)][1:]


def stepper(training: Training, detector: Detector | None) -> Callable[[], float]:
    """Makes one step, with the casts where there are bf16 parameters; tells its seconds, gradients not counted."""

    def train() -> float:
        training.gradients()
        begin = time.perf_counter()
        training.step()
        with detector.casting() if isinstance(detector, Cast) else nullcontext():
            training.cast()
        return time.perf_counter() - begin

    return train


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
