"""How much the demo's training slows down when it publishes each step: publishing on and off in turns.

The demo's trainer computes on one thread; its two subscribers, which generate meanwhile, are not here. With a thread on
each core there is none left for what goes on behind a step.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import torch

from weightcast.demo.config import TRAINER_THREADS, WORKERS, DemoConfig
from weightcast.demo.learner import Learner
from weightcast.demo.policy import inference_copy
from weightcast.demo.rollout import Rollouts, rollout
from weightcast.publisher import Publisher, PublisherSettings

from ..part import Options, cores
from ..report import milliseconds, number
from ..result import Ratio, Result, Table

_BAR_PERCENT: Final = 5.0
_BUDGET_S: Final = 90.0
"""Seconds of a size after which no further pair of blocks begins."""

_PAIRS: Final = 2
"""Pairs of blocks at least."""


@dataclass(frozen=True)
class _Size:
    """A policy, how often publishing is turned on and off, for how many steps each time, and on how many threads."""

    title: str
    width: int
    layers: int
    pairs: int
    steps: int
    threads: int = TRAINER_THREADS


# Many short blocks: the host's other work comes in bursts of seconds, and is to be in one pair of them, not in all.
_SIZES: Final = (_Size("the demo's own", 192, 2, 40, 4), _Size("a larger", 384, 3, 16, 2))
_BUSY_PAIRS: Final = 8
_QUICK: Final = (_Size("a tiny", 32, 1, 2, 2),)


def run(options: Options) -> Result:
    """Train each size in turns."""
    sizes = _QUICK if options.quick else _SIZES
    alone = options.quick or cores() <= TRAINER_THREADS
    busy = () if alone else tuple(replace(size, threads=cores(), pairs=_BUSY_PAIRS) for size in _SIZES)
    before = torch.get_num_threads()
    try:
        found = [_train(size) for size in (*sizes, *busy)]
    finally:
        torch.set_num_threads(before)
    return Result(
        part="training",
        tables=[_table(found)],
        ratios=[
            Ratio(
                name=f"steps of {f['title']} policy ({f['parameters'] / 1e6:.1f} M parameters), "
                f"trainer on {f['threads']} of {cores()} cores: slower by",
                value=f["slower_percent"],
                bar=_BAR_PERCENT if f["threads"] == TRAINER_THREADS else None,
                at_most=True,
                unit="%",
            )
            for f in found
        ],
        figures={"sizes": found},
    )


class _Loop:
    """The demo's step in one process; rollouts, which other processes make there, are made between blocks."""

    def __init__(self, config: DemoConfig, publisher: Publisher) -> None:
        self._config, self._publisher = config, publisher
        self.learner = Learner(config.policy, config.learner, seed=config.seed)
        self._actor = inference_copy(config.policy)
        self._rng = torch.Generator().manual_seed(config.seed)

    def block(self, steps: int, *, publish: bool) -> float:
        """Mean seconds of a step. What goes on behind the last one is waited for, but not counted."""
        batches = self._rollouts()
        # One more before, or the first that counts would have no work of a publish beside it.
        self._step(batches, publish=publish)
        begin = time.perf_counter()
        for _ in range(steps):
            self._step(batches, publish=publish)
        taken = time.perf_counter() - begin
        self._publisher.wait_idle()
        return taken / steps

    def _step(self, batches: list[Rollouts], *, publish: bool) -> None:
        self.learner.step(batches)
        state = self.learner.bf16_state()
        if publish:
            self._publisher.publish(state, step=self.learner.version)

    def _rollouts(self) -> list[Rollouts]:
        """A batch of each of the demo's two workers, under the newest weights."""
        self._actor.load_state_dict(self.learner.bf16_state())
        config, version = self._config, self.learner.version
        return [
            rollout(
                self._actor,
                config.task,
                self._rng,
                version,
                prompts=config.prompts,
                group_size=config.group_size,
            )
            for _ in WORKERS
        ]


def _train(size: _Size) -> dict[str, Any]:
    """Median step with and without publishing, over blocks in turns."""
    torch.set_num_threads(size.threads)
    config = DemoConfig(width=size.width, layers=size.layers, mlp_width=2 * size.width, steps=1 << 10)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with (
        tempfile.TemporaryDirectory(prefix="weightcast-bench-") as root,
        Publisher(root, PublisherSettings(snapshot_every=0)) as publisher,
    ):
        loop = _Loop(config, publisher)
        begin = time.perf_counter()
        for pair in range(size.pairs + 1):
            for publish in (False, True) if pair % 2 else (True, False):  # no side gains from a drift
                taken = loop.block(size.steps, publish=publish)
                if pair:  # the first warms up
                    seconds[publish].append(taken)
            if pair >= _PAIRS and time.perf_counter() - begin > _BUDGET_S:
                break
        parameters = sum(p.numel() for p in loop.learner.policy.parameters())
    slower = [100 * (b / a - 1) for a, b in zip(seconds[False], seconds[True], strict=True)]
    return {
        "title": size.title,
        "parameters": parameters,
        "threads": size.threads,
        "off_s": median(seconds[False]),
        "on_s": median(seconds[True]),
        "slower_percent": median(slower),
        "slower_percent_each": slower,
    }


def _table(found: list[dict[str, Any]]) -> Table:
    return Table(
        title="A training step of the demo, rollouts not counted",
        head=[
            "policy",
            "parameters",
            "threads of the trainer",
            "without publishing, ms",
            "publishing each step, ms",
            "slower by",
            "blocks",
        ],
        rows=[
            [
                f["title"],
                f"{f['parameters']:,}",
                str(f["threads"]),
                milliseconds(f["off_s"]),
                milliseconds(f["on_s"]),
                f"{number(f['slower_percent'])} %",
                ", ".join(f"{s:.0f} %" for s in sorted(f["slower_percent_each"])),
            ]
            for f in found
        ],
        note="Medians over blocks of steps that take turns; each pair of blocks is compared with itself.",
    )
