"""What detectors take beside the changes: nothing that grows with the model. `make bench` measures resident memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
import torch

from weightcast.publisher import Publisher
from weightcast.publisher.detectors import stepping
from weightcast.publisher.detectors.cast import Cast

from .training import IMPLEMENTATIONS, has_no_copy

Make = Callable[..., Publisher]

LAYERS, SHAPE = 32, (256, 1024)
COPY_BYTES = 2 * LAYERS * 256 * 1024
CHANGE_BYTES = 30  # of each: set aside, noted, coded and, in this process, stored
ROOM_BYTES = 6 << 20  # of two threads, at most 256 Ki elements at once


class Run:
    """fp32 parameters under AdamW, with bf16 ones beside them or not, published step by step."""

    def __init__(self, publisher: Publisher, half: bool = False, **options: bool) -> None:
        torch.manual_seed(0)
        self.parameters = {f"w{i}": torch.nn.Parameter(torch.randn(SHAPE) * 0.02) for i in range(LAYERS)}
        self.half = {n: p.detach().bfloat16() for n, p in self.parameters.items()} if half else {}
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-7, **options)
        self.publisher = publisher
        publisher.watch(None if half else self.optimizer, self.half or self.parameters)

    def version(self) -> int:
        """Step and publish; how many elements that changed."""
        for parameter in self.parameters.values():
            parameter.grad = torch.randn(SHAPE)
        self.optimizer.step()
        detector = self.publisher.detector
        if isinstance(detector, Cast):
            with detector.casting():
                for name, bits in self.half.items():
                    bits.copy_(self.parameters[name].detach())
        return self.publisher.publish(self.half or self.parameters).wait(60).totals.changed

    def peak(self) -> tuple[int, int]:
        """Bytes at the peak of three versions, and the most changes of one. torch's own memory is not counted."""
        tracemalloc.start()
        try:
            most = max(self.version() for _ in range(3))
            return tracemalloc.get_traced_memory()[1], most
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("detector", "half", "implementation"),
    [
        *(("adamw", False, kind) for kind in IMPLEMENTATIONS),
        ("cast", True, "for-loop"),
        ("cast", False, "fused"),
    ],
)
def test_no_detector_holds_a_copy_at_any_time(
    publisher_at: Make, detector: str, half: bool, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "PART_ELEMENTS", 1 << 18)
    publisher = publisher_at(detector=detector, cast={"*": "BF16"}, row_elements=1 << 17, snapshot_every=0)
    run = Run(publisher, half, **IMPLEMENTATIONS[implementation])
    run.version(), run.version()
    assert has_no_copy(publisher)
    peak_bytes, changes = run.peak()
    assert peak_bytes - CHANGE_BYTES * changes < ROOM_BYTES < COPY_BYTES / 2
    assert has_no_copy(publisher)


def test_snapshot_holds_one(publisher_at: Make) -> None:
    """What is measured here would show it."""
    run = Run(publisher_at(cast={"*": "BF16"}, row_elements=1 << 17, snapshot_every=0))
    peak_bytes, _ = run.peak()
    assert peak_bytes > COPY_BYTES
