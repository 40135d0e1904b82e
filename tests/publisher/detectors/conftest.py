"""A reader that checks every version; torch in one thread, since its others wait by spinning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ...faultstore import FaultStore
from .training import Reader


@pytest.fixture
def reader(store: FaultStore) -> Iterator[Reader]:
    """A reader from nothing."""
    made = Reader(store)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
