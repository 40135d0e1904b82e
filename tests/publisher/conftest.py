"""A stream in memory, with faults on demand, and publishers on it that are closed whatever happens."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from weightcast.manifest.store import StoreSettings, open_store
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.schemas.errors import WeightcastError

from ..faultstore import FaultStore


@pytest.fixture
def store() -> FaultStore:
    """A fresh store in memory."""
    return FaultStore(open_store(f"memory://{uuid.uuid4().hex}", settings=StoreSettings(max_attempts=1)))


@pytest.fixture
def publisher_at(store: FaultStore) -> Iterator[Callable[..., Publisher]]:
    """Opens publishers on `store`; settings by name."""
    opened: list[Publisher] = []

    def make(*, fence: bool = True, resume: bool = True, at: Any = None, **settings: Any) -> Publisher:
        settings = {"threads": 2, **settings}
        publisher = Publisher(
            "", PublisherSettings(**settings), store=at or store, fence=fence, resume=resume
        )
        opened.append(publisher)
        return publisher

    yield make
    store.heal()
    for publisher in opened:
        with suppress(WeightcastError):
            publisher.close(10)


@pytest.fixture
def publisher(publisher_at: Callable[..., Publisher]) -> Publisher:
    """One publisher with the default settings."""
    return publisher_at()
