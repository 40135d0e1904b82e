"""Bytes through collectives are counted in every thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from weightcast.benchmarks.lab.traffic import Traffic, traffic


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def exchange() -> None:
    dist.all_reduce(torch.zeros(10))
    dist.broadcast(torch.zeros(3, dtype=torch.bfloat16), 0)


@pytest.mark.usefixtures("group")
def test_collectives_of_this_thread_and_of_others_are_counted() -> None:
    with traffic() as counted:
        exchange()
        assert counted == Traffic(calls=2, nbytes=46)
        thread = threading.Thread(target=exchange)
        thread.start()
        thread.join()
        torch.zeros(10).sum()
    assert counted == Traffic(calls=4, nbytes=92)
    exchange()
    assert counted == Traffic(calls=4, nbytes=92)


def test_what_was_brought_is_not_counted_if_more_came() -> None:
    counted = Traffic()
    counted.add(torch.zeros(4), [torch.zeros(12)])
    assert counted == Traffic(calls=1, nbytes=32)
