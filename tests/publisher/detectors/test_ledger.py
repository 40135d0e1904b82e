"""Notes are given back as they were made, and take little room."""

from __future__ import annotations

import numpy as np
import pytest

from weightcast.publisher.detectors.ledger import Ledger


@pytest.mark.parametrize("share", [0.0005, 0.05, 0.9])
def test_what_was_noted_comes_back(share: float) -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**16, 20_000).astype(np.uint16)
    places = np.flatnonzero(random.random(20_000) < share).astype(np.uint32)
    ledger = Ledger()
    ledger.note("w", 4096, 20_000, places, bits[places])
    found = np.zeros(20_000, np.uint16)
    opens = np.arange(0, 20_000, 3, dtype=np.uint32)
    missing = ledger.settle("w", 4096, opens, found)
    known = np.intersect1d(opens, places)
    assert missing == len(opens) - len(known)
    assert (found[known] == bits[known]).all()
    assert np.count_nonzero(found) <= len(known)


def test_another_piece_or_length_has_no_notes() -> None:
    ledger, places = Ledger(), np.array([3], np.uint32)
    ledger.note("w", 0, 100, places, np.array([5], np.uint16))
    assert ledger.settle("w", 64, places, np.zeros(100, np.uint16)) == 1
    assert ledger.settle("v", 0, places, np.zeros(100, np.uint16)) == 1
    assert ledger.settle("w", 0, places, np.zeros(99, np.uint16)) == 1
    assert ledger.settle("w", 0, places, np.zeros(100, np.uint16)) == 0


def test_a_piece_of_zeros_takes_next_to_nothing() -> None:
    ledger, every = Ledger(), np.arange(1 << 20, dtype=np.uint32)
    ledger.note("w", 0, 1 << 20, every, np.zeros(1 << 20, np.uint16))
    assert ledger.nbytes < 2 * (1 << 20) / 1000
    found = np.ones(1 << 20, np.uint16)
    assert ledger.settle("w", 0, every, found) == 0
    assert not found.any()
