"""Kernels through moves against the lists of their elements."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import FlatSpace, Move, Region, change_digest, places, simplify, threads
from weightcast.codec.kernels_places import BLOCK
from weightcast.codec.places import SHARE, Table, pieces
from weightcast.schemas.digest import Digest

from .states import Bits, Ints, elements_of, examples, nested, random_bits, space_of

WIDTHS = st.sampled_from([1, 2, 4, 8])
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)


class Engine:
    """A storage for each move, so that nothing overlaps, and a table of them."""

    def __init__(self, space: FlatSpace, moves: list[Move], rng: np.random.Generator) -> None:
        self.space, self.moves = space, moves
        self.storages = [random_bits(space.width, m.target.stop + 3, rng) for m in moves]
        self.table = Table(space, moves, [s.ctypes.data for s in self.storages])

    def flat(self, move: int) -> Ints:
        """Flat elements that a move has."""
        m = self.moves[move]
        return elements_of(m.source) + self.space.starts[self.space.index[m.tensor]]

    def digest(self, move: int) -> Digest:
        at = self.flat(move)
        order = np.argsort(at)
        bits = self.storages[move][elements_of(self.moves[move].target)]
        return change_digest(self.space, at[order], np.zeros_like(bits), bits[order])


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    width, moves, specs = draw(WIDTHS), [], []
    for i in range(draw(st.integers(1, 4))):
        shape = draw(SHAPES)
        copy = draw(nested(shape)), draw(nested(shape))
        specs.append((copy[0].stop + draw(st.integers(0, 9)),))
        moves += [
            Move(f"t{i:05d}", s, "p", t) for s, t in [simplify(*copy)] * draw(st.sampled_from([1, 1, 2]))
        ]
    return Engine(space_of(width, specs), moves, np.random.default_rng(draw(st.integers(0, 2**32))))


def some(space: FlatSpace, share: float, rng: np.random.Generator) -> tuple[Ints, Bits]:
    at = np.flatnonzero(rng.random(space.elements) < share)
    return at, random_bits(space.width, len(at), rng)


@examples
@given(engines(), st.sampled_from([0.0, 0.1, 0.7, 1.0]), st.integers(0, 2**32))
def test_write_changes_exactly_the_elements_that_a_move_has(engine: Engine, share: float, seed: int) -> None:
    at, values = some(engine.space, share, np.random.default_rng(seed))
    new = dict(zip(at.tolist(), values.tolist(), strict=True))
    use = [i for i in range(len(engine.moves)) if i != 1]
    expected, before = [s.copy() for s in engine.storages], [engine.digest(i) for i in use]
    for i in use:
        for flat, place in zip(engine.flat(i).tolist(), elements_of(engine.moves[i].target), strict=True):
            expected[i][place] = new.get(flat, expected[i][place])
    moved, failed = engine.table.write(at, values, use)
    assert failed == -1
    assert [s.tolist() for s in engine.storages] == [s.tolist() for s in expected]
    assert [a + b for a, b in zip(before, moved, strict=True)] == [engine.digest(i) for i in use]
    again, _ = engine.table.write(at, values, use)
    assert again == [Digest()] * len(use)


@examples
@given(engines(), st.sampled_from([0.0, 0.1, 0.7, 1.0]), st.integers(0, 2**32))
def test_gather_finds_each_move_s_bits(engine: Engine, share: float, seed: int) -> None:
    at, _ = some(engine.space, share, np.random.default_rng(seed))
    use = list(range(0, len(engine.moves), 2))
    index, values = engine.table.gather(at, use)
    expected = []
    for i in use:
        bits = engine.storages[i][elements_of(engine.moves[i].target)]
        held = dict(zip(engine.flat(i).tolist(), bits.tolist(), strict=True))
        expected += [(k, held[flat]) for k, flat in enumerate(at.tolist()) if flat in held]
    assert list(zip(index.tolist(), values.tolist(), strict=True)) == expected


@examples
@given(engines())
def test_digests_are_those_of_the_elements_in_their_tensor(engine: Engine) -> None:
    use = list(range(len(engine.moves)))
    assert engine.table.digests(use) == [engine.digest(i) for i in use]
    assert engine.table.digests(use[::-2]) == [engine.digest(i) for i in use[::-2]]


def matrix(rows: int, columns: int, *, pick: slice, transposed: bool) -> Move:
    """Some columns of a matrix into a place of their own."""
    width = len(range(columns)[pick])
    source = Region((rows, width), (columns, pick.step or 1), pick.start or 0)
    target = Region((rows, width), (1, rows) if transposed else (width, 1), 2)
    return Move("t00000", *simplify_into(source, target))


def simplify_into(source: Region, target: Region) -> tuple[Region, str, Region]:
    source, target = simplify(source, target)
    return source, "p", target


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("pick", [slice(None), slice(300, 800), slice(1, 1000, 7)])
def test_moves_longer_than_any_block_and_share(
    pick: slice, transposed: bool, count: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(threads, "workers", lambda: count)
    monkeypatch.setattr(places, "PIECE_ELEMENTS", 70_001)
    move = matrix(600, 1000, pick=pick, transposed=transposed)
    engine = Engine(space_of(2, [(600, 1000), (50,)]), [move], rng)
    at, values = some(engine.space, 0.5, rng)
    assert len(at) > 2 * SHARE > BLOCK
    before, expected = engine.digest(0), engine.storages[0].copy()
    whole = np.zeros(engine.space.elements, np.uint16)
    whole[engine.flat(0)] = expected[elements_of(move.target)]
    whole[at] = values
    expected[elements_of(move.target)] = whole[engine.flat(0)]
    moved, failed = engine.table.write(at, values, [0])
    assert failed == -1
    assert np.array_equal(engine.storages[0], expected)
    assert engine.table.digests([0]) == [engine.digest(0)] == [before + moved[0]]
    index, bits = engine.table.gather(at, [0])
    assert np.array_equal(index, np.flatnonzero(np.isin(at, engine.flat(0))))
    assert np.array_equal(bits, values[index])


@examples
@given(engines(), st.integers(0, 2**32))
def test_positions_that_do_not_ascend_write_nothing_outside_of_the_targets(engine: Engine, seed: int) -> None:
    rng, n = np.random.default_rng(seed), engine.space.elements
    at = np.sort(rng.integers(0, n + 1, 200))
    at[rng.random(200) < 0.1] = rng.integers(-(2**40), 2**40)
    at[rng.random(200) < 0.1] = rng.integers(-n - 1, 2 * n + 1)
    outside = []
    for move, storage in zip(engine.moves, engine.storages, strict=True):
        mask = np.ones(len(storage), bool)
        mask[elements_of(move.target)] = False
        outside.append((storage, mask, storage[mask]))
    engine.table.write(at, random_bits(engine.space.width, len(at), rng), range(len(engine.moves)))
    for storage, mask, before in outside:
        assert np.array_equal(storage[mask], before)


def test_a_write_that_does_not_read_back_names_its_move(rng: np.random.Generator) -> None:
    """Both elements of the second move's target are one."""
    moves = [
        Move("t00000", Region((2,), (1,), 0), "p", Region((2,), (1,), 0)),
        Move("t00001", Region((2,), (1,), 0), "p", Region((2,), (0,), 0)),
    ]
    engine = Engine(space_of(2, [(2,), (2,)]), moves, rng)
    assert engine.table.write(np.arange(4), np.arange(4, dtype=np.uint16), [0, 1])[1] == 1


@examples
@given(SHAPES, st.data(), st.integers(1, 40))
def test_pieces_are_the_move_in_order(shape: tuple[int, ...], data: st.DataObject, limit: int) -> None:
    source, target = simplify(data.draw(nested(shape)), data.draw(nested(shape)))
    cut = list(pieces(Move("t", source, "p", target), limit))
    assert all(0 < m.source.elements <= limit for m in cut)
    for whole, parts in ((source, [m.source for m in cut]), (target, [m.target for m in cut])):
        listed = [e for part in parts for e in elements_of(part).tolist()]
        assert listed == elements_of(whole).tolist()
    assert math.prod(shape) == sum(m.source.elements for m in cut)


def test_threads_are_as_many_as_the_cores_that_may_be_used() -> None:
    assert threads.workers() == min(4, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_warm_compiles_all_that_later_calls_need(width: int, rng: np.random.Generator) -> None:
    places.warm(width)
    kernels = [places.kernels.write, places.kernels.count, places.kernels.gather, places.kernels.digest]
    compiled = [len(k.signatures) for k in kernels]
    engine = Engine(space_of(width, [(6, 4)]), [matrix(6, 4, pick=slice(1, 3), transposed=True)], rng)
    at, values = some(engine.space, 0.5, rng)
    at.flags.writeable = values.flags.writeable = False
    engine.table.write(at, values, [0])
    engine.table.gather(at, [0])
    engine.table.digests([0])
    assert [len(k.signatures) for k in kernels] == compiled
