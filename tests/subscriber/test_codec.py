"""Deltas with the coding `class`, followed by every kind of target."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weightcast.schemas.errors import UsageError
from weightcast.subscriber import CheckpointFolder, Subscriber, Tensors

from ..codings import trained, weights
from ..faultstore import FaultStore
from .conftest import Trainer
from .engines.fake_vllm import Engine
from .engines.test_vllm_server import Open, engine, server, stage, target
from .kit import Model, bits, blank, loaded

__all__ = ["engine", "server", "stage", "target"]  # fixtures

At = Callable[..., Subscriber]


@pytest.fixture
def model() -> Model:
    """Version 0."""
    return weights()


@pytest.fixture
def trainer(store: FaultStore, trainer_at: Callable[..., Trainer]) -> Trainer:
    """One that codes by class."""
    return trainer_at(store, codec="class")


def publish(trainer: Trainer, model: Model, seed: int) -> Model:
    """The next version, which has the coding."""
    model = trained(model, seed)
    assert trainer.publish(model).features == ["class", "mix2", "packed", "pairs"]
    return model


def test_tensors_and_a_folder_version_by_version_and_folded(
    store: FaultStore, trainer: Trainer, subscriber_at: At, model: Model, tmp_path: Path
) -> None:
    trainer.publish(model)
    tensors = blank(model)
    every = subscriber_at(store, Tensors(tensors))
    folder = subscriber_at(store, CheckpointFolder(tmp_path / "folder"))
    assert every.once().version == folder.once().version == 0
    for seed in range(1, 6):
        model = publish(trainer, model, seed)
        assert every.once().version == seed
        assert bits(tensors) == bits(model)
    assert (
        folder.once().version == 5
    )  # five versions in one patch: rows told from versions that it never held
    assert loaded(tmp_path / "folder") == bits(model)


def test_a_live_engine_without_a_mirror_says_what_to_do(
    store: FaultStore, trainer: Trainer, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target())
    assert subscriber.once().version == 0
    publish(trainer, model, 1)
    with pytest.raises(UsageError, match="coded by class") as refusal:
        subscriber.once()
    assert "--mirror" in str(refusal.value.hint)
    with pytest.raises(UsageError, match="coded by class"):
        list(subscriber.follow(threading.Event()))  # it does not go on trying
    assert engine.serving() == bits(model)


def test_a_live_engine_with_a_mirror(
    store: FaultStore,
    trainer: Trainer,
    subscriber_at: At,
    engine: Engine,
    target: Open,
    model: Model,
    tmp_path: Path,
) -> None:
    trainer.publish(model)
    subscriber = subscriber_at(store, target(mirror=tmp_path / "mirror"))
    subscriber.once()
    for seed in (1, 2):
        model = publish(trainer, model, seed)
        assert subscriber.once().version == seed
        assert engine.serving() == bits(model)


def test_half_precision(store: FaultStore, trainer: Trainer, subscriber_at: At) -> None:
    generator = torch.Generator().manual_seed(0)
    old = {"w": (torch.randn(300, 400, generator=generator) * 0.04).half()}
    trainer.publish(old)
    tensors = blank(old)
    subscriber = subscriber_at(store, Tensors(tensors))
    subscriber.once()
    moved = torch.rand(300, 400, generator=generator) < 0.0002 / old["w"].float().abs()
    steps = moved * (torch.randint(0, 2, (300, 400), generator=generator) * 2 - 1)
    new = {"w": (old["w"].view(torch.int16) + steps.to(torch.int16)).view(torch.float16)}
    assert trainer.publish(new).features == ["class", "mix2", "packed"]
    subscriber.once()
    assert bits(tensors) == bits(new)
