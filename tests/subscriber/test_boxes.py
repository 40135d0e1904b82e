"""Versions whose rows are boxes that lie across each other, followed by every kind of target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from weightcast.codec import Box, Geometry, split_box
from weightcast.schemas.dtypes import WIDTHS
from weightcast.subscriber import CheckpointFolder, Subscriber
from weightcast.subscriber import Tensors as TensorsTarget

from ..codings import trained, weights
from ..faultstore import FaultStore
from ..manifest.author import Author, Tensors, columns
from ..versions import bits_of
from .engines.fake_vllm import Engine
from .engines.test_vllm_server import Open, engine, server, stage, target
from .kit import Model, bits, blank, every_dtype, loaded, stir

__all__ = ["engine", "server", "stage", "target"]  # fixtures

At = Callable[..., Subscriber]


@pytest.fixture
def model() -> Model:
    """Version 0."""
    return every_dtype()


def tensors_of(model: Model) -> Tensors:
    """A model as an author takes it."""
    found = {name: bits_of(tensor) for name, tensor in model.items()}
    return Tensors(
        {n: np.frombuffer(b.data, f"u{WIDTHS[b.dtype]}").reshape(b.shape) for n, b in found.items()},
        {n: b.dtype for n, b in found.items()},
    )


def rows_of_ranks(tensors: Tensors, row_elements: int) -> Iterator[Box]:
    """Each matrix in three slices of columns, by one rank after the other; what cannot be cut is the first one's."""
    geometry = Geometry(tensors.layout)
    for rank in range(3):
        for space in geometry:
            for name, spec in zip(space.names, space.specs, strict=True):
                if len(spec.shape) == 2 and spec.shape[1] > 2 and spec.elements:
                    third = spec.shape[1] // 3
                    box = columns(space, name, third, third, spec.shape[1] - 2 * third)[rank]
                elif rank == 0 and spec.elements:
                    box = Box(space.dtype, int(space.starts[space.index[name]]), spec.elements)
                else:
                    continue
                yield from split_box(box, row_elements)


class Ranks:
    """Publishes as several ranks would."""

    def __init__(self, store: FaultStore, model: Model) -> None:
        self.author = Author(store)
        self.author.reset(tensors_of(model))

    def publish(self, model: Model, codec: str = "gap", row_elements: int = 3000) -> list[str]:
        """The next version; its features."""
        tensors = tensors_of(model)
        boxes = rows_of_ranks(tensors, row_elements)
        position = self.author.publish(tensors, boxes=boxes, rows_a_shard=20, codec=codec)  # type: ignore[arg-type]
        return position.manifest.features


def test_tensors_and_a_folder_version_by_version_and_folded(
    store: FaultStore, subscriber_at: At, model: Model, tmp_path: Path
) -> None:
    ranks, tensors = Ranks(store, model), blank(model)
    every = subscriber_at(store, TensorsTarget(tensors))
    folder = subscriber_at(store, CheckpointFolder(tmp_path / "folder"))
    assert every.once().version == folder.once().version == 0
    for version in range(1, 5):
        model = stir(model, version)
        assert "boxes" in ranks.publish(model)
        assert every.once().version == version
        assert bits(tensors) == bits(model)
    assert folder.once().version == 4  # four versions in one patch
    assert loaded(tmp_path / "folder") == bits(model)


def test_by_class_over_versions_never_held(store: FaultStore, subscriber_at: At, tmp_path: Path) -> None:
    """Old exponents of a box come from the base and from the boxes of versions in between."""
    model = weights()
    ranks = Ranks(store, model)
    folder = subscriber_at(store, CheckpointFolder(tmp_path / "folder"))
    folder.once()
    for seed in range(1, 5):
        model = trained(model, seed)
        assert ranks.publish(model, "class", 20_000) == ["boxes", "class", "mix2", "packed", "pairs"]
    assert folder.once().version == 4
    assert loaded(tmp_path / "folder") == bits(model)


def test_a_live_engine_is_read_where_boxes_change_alone(
    store: FaultStore, subscriber_at: At, engine: Engine, target: Open, model: Model
) -> None:
    ranks = Ranks(store, model)
    subscriber = subscriber_at(store, target())
    assert subscriber.once().version == 0
    for version in range(1, 4):
        model = stir(model, version)
        assert "boxes" in ranks.publish(model)
        assert subscriber.once().version == version
        assert engine.serving() == bits(model)
    for version in range(4, 6):
        model = stir(model, version)
        ranks.publish(model)
    assert subscriber.once().version == 5
    assert engine.serving() == bits(model)


def test_a_subscriber_that_starts_late(store: FaultStore, subscriber_at: At, model: Model) -> None:
    """From the snapshot on, by deltas of boxes and of intervals in turn."""
    ranks = Ranks(store, model)
    for version in range(1, 5):
        model = stir(model, version)
        if version % 2:
            ranks.publish(model)
        else:
            ranks.author.publish(tensors_of(model))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    assert subscriber_at(store, TensorsTarget(tensors)).once().version == 4
    assert bits(tensors) == bits(model)
