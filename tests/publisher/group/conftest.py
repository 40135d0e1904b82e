"""Groups of ranks on one store in memory, closed whatever happens."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.faultstore import FaultStore
from weightcast.manifest.store import StoreSettings, open_store

from .kit import RANKS, Crew


@pytest.fixture
def stores() -> list[FaultStore]:
    """One store in memory, as each rank sees it."""
    url = f"memory://{uuid.uuid4().hex}"
    return [FaultStore(open_store(url, settings=StoreSettings(max_attempts=1))) for _ in range(RANKS)]


@pytest.fixture
def crew_at(stores: list[FaultStore]) -> Iterator[Callable[..., Crew]]:
    """Opens groups of ranks."""
    opened: list[Crew] = []

    def make(size: int = RANKS, **options: Any) -> Crew:
        crew = Crew(list(stores[:size]), **options)
        opened.append(crew)
        return crew

    yield make
    for crew in opened:
        for store in stores:
            store.heal()
        crew.close()
