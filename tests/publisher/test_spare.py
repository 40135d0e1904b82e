from __future__ import annotations

import numpy as np

from weightcast.publisher.spare import Buffer, Spare


def same(a: Buffer, b: Buffer) -> bool:
    return a.ctypes.data == b.ctypes.data


def test_what_was_given_back_is_taken_again_and_only_then() -> None:
    spare = Spare(1000)
    first = spare.take(80)
    second = spare.take(80)
    assert len(first) >= 80
    assert not np.shares_memory(first, second)
    spare.give(first)
    assert same(spare.take(len(first)), first)
    assert not np.shares_memory(spare.take(10), first)


def test_the_smallest_that_fits_is_taken() -> None:
    spare = Spare(1000)
    buffers = [np.empty(n, np.uint8) for n in (300, 100, 200)]
    for buffer in buffers:
        spare.give(buffer)
    assert same(spare.take(101), buffers[2])
    assert same(spare.take(101), buffers[0])
    assert same(spare.take(0), buffers[1])


def test_beyond_the_bound_the_smallest_go() -> None:
    spare = Spare(450)
    small, large, middle = (np.empty(n, np.uint8) for n in (100, 300, 150))
    for buffer in (small, large, middle):
        spare.give(buffer)
    assert same(spare.take(1), middle)
    assert same(spare.take(1), large)
    spare.give(np.empty(451, np.uint8))
    assert len(spare.take(1)) < 451, "larger than all that may be kept"
