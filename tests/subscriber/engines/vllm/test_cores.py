"""Ops use all cores of a rank, whose main thread is bound to one of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from weightcast.codec.threads import workers
from weightcast.subscriber.engines.vllm.cores import bound_cores, on_cores


@pytest.fixture
def bound() -> Iterator[set[int]]:
    """This thread and another one are bound to a core each, as by OpenMP, and a third one to all. The cores: two if there are."""
    before = os.sched_getaffinity(0)
    first, *_, second = sorted(before)[:2] * 2
    ready, stop = threading.Barrier(3), threading.Event()

    def run(cores: set[int]) -> None:
        os.sched_setaffinity(0, cores)
        ready.wait()
        stop.wait()

    threads = [threading.Thread(target=run, args=(cores,)) for cores in ({second}, before)]
    for thread in threads:
        thread.start()
    ready.wait()
    os.sched_setaffinity(0, {first})
    yield {first, second}
    os.sched_setaffinity(0, before)
    stop.set()
    for thread in threads:
        thread.join()


def test_an_op_runs_on_all_cores_that_threads_are_bound_to_and_goes_back(bound: set[int]) -> None:
    mine = os.sched_getaffinity(0)
    assert workers() == 1
    cores = bound_cores()
    assert cores == bound
    with on_cores(cores):
        assert os.sched_getaffinity(0) == bound
        assert workers() == len(bound)
    assert os.sched_getaffinity(0) == mine


def test_a_thread_that_is_not_bound_stays_where_it_is() -> None:
    mine = os.sched_getaffinity(0)
    assert bound_cores() == (frozenset() if len(mine) > 1 else mine)
    with on_cores(bound_cores()):
        assert os.sched_getaffinity(0) == mine
