"""A small training run with everything that a detector has to be right about, and a reader that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightcast.manifest.fetch import DeltaFetcher
from weightcast.manifest.rebuild import State, advance, rebuild
from weightcast.manifest.store import Store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.publisher.detectors.detection import is_bare
from weightcast.schemas.manifest import VersionManifest

Bits = npt.NDArray[np.uint16]

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Training:
    """fp32 parameters in three groups, published in bf16; gradients of all sizes, clipped; a scheduler.

    `head` is tied to `embed`, `frozen` and `idle` get no gradients (`frozen` is in no group), `zeros` starts as zeros.

    Args:
        make: makes the optimizer from groups.
        scale: makes the large tensors larger; at 1 they have 175,000 elements together.
        seed: of weights and gradients.
        half: keep bf16 copies of the parameters, and publish those.
    """

    def __init__(
        self, make: Callable[..., torch.optim.Optimizer], *, scale: int = 1, seed: int = 1, half: bool = False
    ) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self.embed = self._parameter(400, 250 * scale, size=0.02)
        self.up = self._parameter(250, 300 * scale, size=0.01)
        self.idle = self._parameter(300, size=1.0)
        self.norm = self._parameter(250, size=1.0)
        self.zeros = self._parameter(10, 400, size=0.0)
        self.frozen = self._parameter(70, 1000, size=0.05)
        self.router = torch.zeros(16)
        groups = [
            {"params": [self.embed, self.up], "weight_decay": 0.1},
            {"params": [self.norm, self.idle], "weight_decay": 0.0, "lr": 3e-5},
            {"params": [self.zeros], "weight_decay": 0.01},
        ]
        self.optimizer = make(groups)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda k: min(1.0, (k + 1) / 10) * 0.5 ** (k / 50)
        )
        self.half = {n: p.detach().bfloat16() for n, p in self.parameters().items()} if half else {}

    def _parameter(self, *shape: int, size: float) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(shape, generator=self._random) * size)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By the names that they are published under; `head` is the same as `embed`."""
        names = ("embed", "up", "idle", "norm", "zeros", "frozen")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> dict[str, torch.Tensor]:
        """What to publish."""
        found: dict[str, torch.Tensor] = dict(self.half or self.parameters())
        return found | {"head": found["embed"], "router": self.router}

    def step(self) -> None:
        """Set gradients, clip them, step, and move the router's biases now and then."""
        self.gradients()
        self.optimizer.step()
        self.scheduler.step()

    def gradients(self) -> None:
        """New gradients, as large as 1e-6 to 10, and rows of zeros."""
        for parameter in (self.embed, self.up, self.norm, self.zeros):
            size = 10 ** (torch.rand((), generator=self._random) * 7 - 6)
            grad = torch.randn(parameter.shape, generator=self._random) * size
            grad[: parameter.shape[0] // 10] = 0
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_([self.embed, self.up, self.norm, self.zeros], 1.0)

    def bits(self) -> dict[str, Bits]:
        """The bf16 bits of all that is published."""
        return {n: t.detach().bfloat16().view(torch.uint16).numpy().copy() for n, t in self.tensors().items()}


class Reader:
    """Follows a stream version by version, and checks each against the bits that were published.

    Attributes:
        wrong: elements that differed.
        resets: versions that were whole ones.
    """

    def __init__(self, store: Store) -> None:
        self.wrong = 0
        self.resets: list[int] = []
        self._store = store
        self._pool = ThreadPoolExecutor(2)
        self._fetcher = DeltaFetcher(store, self._pool, 1 << 26)
        self._state: State | None = None

    def check(self, manifest: VersionManifest, bits: Mapping[str, Bits]) -> None:
        """Apply a version, and count the elements that differ from `bits`."""
        reader = StreamReader.open(self._store)
        if manifest.reset or self._state is None:
            self.resets.append(manifest.version)
            self._state = rebuild(reader, manifest.version, self._pool)
        else:
            position = reader.position(manifest.version)
            self._state = advance(reader, self._state, position, self._fetcher, self._pool)
        memory = self._state.memory
        for spec in self._state.layout:
            self.wrong += int((memory.tensor(spec.tied_to or spec.name) != bits[spec.name]).sum())

    def close(self) -> None:
        """Stop."""
        self._pool.shutdown()


def published(publisher: Publisher, reader: Reader, training: Training) -> VersionManifest:
    """Publish what `training` has now, and have `reader` check it."""
    bits = training.bits()
    manifest = publisher.publish(training.tensors()).wait(60)
    reader.check(manifest, bits)
    return manifest


def has_no_copy(publisher: Publisher) -> bool:
    """Whether the bits of the last version are nowhere in the publisher."""
    baseline = publisher._pipeline.baseline if publisher._pipeline else None
    return baseline is not None and is_bare(baseline)
