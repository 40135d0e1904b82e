"""A stream with faults on demand, publishers and subscribers on it that are closed whatever happens."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from weightcast.manifest.store import Store, StoreSettings, open_store
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.manifest import VersionManifest
from weightcast.subscriber import Subscriber, SubscriberSettings, Target

from ..faultstore import FaultStore


@pytest.fixture
def store() -> FaultStore:
    """A fresh store in memory."""
    return FaultStore(open_store(f"memory://{uuid.uuid4().hex}", settings=StoreSettings(max_attempts=1)))


@pytest.fixture
def local_store(tmp_path: Path) -> FaultStore:
    """A fresh store in a folder, which other processes can open as well."""
    return FaultStore(open_store(tmp_path / "store"))


class Trainer:
    """Publishes versions one after the other, and waits for each."""

    def __init__(self, store: Store, **settings: Any) -> None:
        settings = {"threads": 2, "snapshot_every": 0, **settings}
        self.publisher = Publisher("", PublisherSettings(**settings), store=store, fence=False)

    def publish(self, tensors: Mapping[str, torch.Tensor], **options: Any) -> VersionManifest:
        """One version, committed."""
        manifest = self.publisher.publish(tensors, **options).wait(30)
        self.publisher.wait_idle()
        if self.publisher._pipeline is not None:
            self.publisher._pipeline.snapshots.join(
                None
            )  # one that came of itself, so that tests know what is there
        return manifest


@pytest.fixture
def trainer_at() -> Iterator[Callable[..., Trainer]]:
    """Opens a trainer on a store; publisher settings by name."""
    opened: list[Trainer] = []

    def make(store: Store, **settings: Any) -> Trainer:
        opened.append(Trainer(store, **settings))
        return opened[-1]

    yield make
    for trainer in opened:
        with suppress(WeightcastError):
            trainer.publisher.close(10)


@pytest.fixture
def trainer(store: FaultStore, trainer_at: Callable[..., Trainer]) -> Trainer:
    """One on `store`."""
    return trainer_at(store)


@pytest.fixture
def subscriber_at() -> Iterator[Callable[..., Subscriber]]:
    """Opens subscribers; settings by name."""
    opened: list[Subscriber] = []

    def make(store: Store, target: Target, **settings: Any) -> Subscriber:
        settings = {"threads": 2, "poll_s": 0.02, "lease": False, **settings}
        opened.append(Subscriber("", target, SubscriberSettings(**settings), store=store))
        return opened[-1]

    yield make
    for subscriber in opened:
        subscriber.close()
