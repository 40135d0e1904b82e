"""Bytes through collectives are counted in every thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from weightcast.benchmarks.lab.traffic import CountedMessenger, Traffic, traffic


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


@pytest.mark.usefixtures("group")
def test_a_barrier_is_a_collective_too() -> None:
    with traffic() as counted:
        dist.barrier()
    assert counted.calls == 1


def test_texts_are_counted() -> None:
    messenger = CountedMessenger.over(dist.HashStore(), 0, 1)
    messenger.gather("a", "12345")
    assert messenger.broadcast("b", "123") == "123"
    assert (messenger.nbytes, messenger.longest) == (8, 5)


def test_what_was_brought_is_not_counted_if_more_came() -> None:
    counted = Traffic()
    counted.add(torch.zeros(4), [torch.zeros(12)])
    assert counted == Traffic(calls=1, nbytes=32)
