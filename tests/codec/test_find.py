"""Finding changes: the same whatever the machine's vectors can do, and held apart from where they were found."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from itertools import combinations
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import Interval, Room, code, encode, find, kernels, kernels_find, reference
from weightcast.codec.digest import digest
from weightcast.codec.jit import GROUP, LANES, OWN, SHARED, TAGS
from weightcast.codec.jit_find import COMPRESSES
from weightcast.codec.memory import UNSIGNED
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import TensorSpec

from .states import DTYPES, change, examples, memory_of, random_bits, space_of

SEEDS = st.integers(0, 2**32 - 1)
WIDTHS = st.sampled_from([1, 2, 4, 8])
NOTES: Final[dict[str, Callable[..., Any]]] = {"turns": kernels_find.note_by_turns} | (
    {"vectors": kernels_find.note_by_vectors} if COMPRESSES else {}
)


def keep_by_vectors(
    old: Any, new: Any, relative: int, index: int, seed: Any, positions: Any, olds: Any, news: Any,
    kept: int, found: int, tag: Any,
) -> Any:  # fmt: skip
    """As `keep_marked`."""
    at = [np.uint64(array.ctypes.data) for array in (positions, olds, news)]
    return kernels_find.keep_by_vectors(old, new, relative, index, seed, *at, kept, found, 0, tag)


KEEPS: Final[dict[str, Callable[..., Any]]] = {"turns": kernels_find.keep_marked} | (
    {"vectors": keep_by_vectors} if COMPRESSES else {}
)


@examples
@given(
    WIDTHS, st.sampled_from([1, 2]), st.lists(st.integers(0, 300), min_size=1, max_size=6), st.floats(0, 1),
    st.integers(0, 9), SEEDS,
)  # fmt: skip
def test_changes_and_digests_are_those_of_the_reference(
    width: int, mix: int, sizes: list[int], density: float, lead: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    space = space_of(width, [(n,) for n in [*sizes, 70]], mix)
    old = random_bits(width, space.elements, rng)
    new = change(old, density, rng)
    begin, end = sorted(rng.choice(space.elements + 1, 2, replace=False).tolist())
    interval = Interval(space.dtype, begin, end - begin)
    found = find(space, memory_of(space, new, lead=lead), memory_of(space, old, lead=9 - lead), interval)
    at = np.flatnonzero(old[begin:end] != new[begin:end])
    assert np.array_equal(found.positions, at)
    assert np.array_equal(found.olds, old[begin:end][at])
    assert np.array_equal(found.news, new[begin:end][at])
    before, after = Digest(), Digest()
    for spec, start in zip(space.specs, space.starts.tolist(), strict=False):
        first, last = max(start, begin), min(start + spec.elements, end)
        if first < last:
            before += reference.digest(spec, old[first:last].tolist(), first - start, mix)
            after += reference.digest(spec, new[first:last].tolist(), first - start, mix)
    assert found.digest == after
    assert found.change == after - before


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("mix", [1, 2])
@pytest.mark.parametrize("changes", [0, 1, 2, 3, 4, 15, 16, 17, 33, 63, 64])
def test_groups_are_noted_alike_by_all_means(
    name: str, width: int, mix: int, changes: int, rng: np.random.Generator
) -> None:
    """One group with so many changes, between others; and the digest of all of them."""
    groups = 5
    old = random_bits(width, groups * GROUP, rng)
    new = change(old, 0.1, rng)
    new[GROUP : 2 * GROUP] = old[GROUP : 2 * GROUP]
    new[GROUP + rng.choice(GROUP, changes, replace=False)] ^= np.array(1, new.dtype)
    at = np.flatnonzero(old != new)
    filled = 5  # entries that are there already
    positions = np.zeros(filled + len(at) + 2 * GROUP, np.uint32)
    seed0, seed1 = np.uint64(rng.integers(1 << 63)), np.uint64(rng.integers(1 << 63))
    at_old, at_new = np.uint64(old.ctypes.data), np.uint64(new.ctypes.data)
    end, *lanes = NOTES[name](
        at_old,
        at_new,
        groups,
        seed0,
        seed1,
        {1: OWN, 2: SHARED}[mix],
        np.uint32(1000),
        positions,
        filled,
        TAGS[width],
    )
    assert end == filled + len(at)
    assert np.array_equal(positions[filled:end], 1000 + at)
    assert not positions[:filled].any()
    assert not positions[end + GROUP :].any()
    expected = kernels.digest_run(at_new, 0, groups * GROUP, (seed0, seed1, np.uint64(mix)), TAGS[width])
    assert tuple(map(int, lanes)) == tuple(map(int, expected))


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.9, 1.0])
def test_changes_close_together_are_all_found_and_nothing_is_written_behind_them(
    width: int, density: float, rng: np.random.Generator
) -> None:
    length = (kernels_find.BLOCK_GROUPS + 7) * GROUP
    old = random_bits(width, length, rng)
    new = change(old, density, rng)
    at = np.flatnonzero(old != new)
    entries = length + GROUP
    positions = np.full(entries + GROUP, 77, np.uint32)
    olds, news = (np.full(entries + GROUP, 77, old.dtype) for _ in range(2))
    sides = [np.array([side.ctypes.data], np.uint64) for side in (old, new)]
    starts, seeds = np.array([0, length]), np.array([[*rng.integers(1 << 63, size=2), 2]], np.uint64)
    found, *_ = kernels_find.find_interval(
        *sides, starts, seeds, 0, 0, length, positions, olds, news, TAGS[width]
    )
    assert found == len(at)
    for written, expected in ((positions, at), (olds, old[at]), (news, new[at])):
        assert np.array_equal(written[:found], expected)
        assert np.all(written[entries:] == 77)


def guarded(width: int, count: int, lead: int) -> npt.NDArray[Any]:
    """Zeros [count] that end `lead` bytes before memory that nobody may read."""
    nbytes, page = count * width + lead, mmap.PAGESIZE
    pages = -(-nbytes // page)
    mapped = np.frombuffer(mmap.mmap(-1, (pages + 1) * page), np.uint8)
    guard = ctypes.c_void_p(mapped.ctypes.data + pages * page)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(page), 0) == 0
    return mapped[pages * page - nbytes : pages * page - lead].view(UNSIGNED[width])


@pytest.mark.parametrize(
    ("way", "width", "lead"),
    [
        (way, width, lead)
        for way in KEEPS
        for width in (1, 2, 4, 8)
        for lead in range(4)
        if way != "vectors" or lead % width == 0  # which wants both sides aligned
    ],
)
@pytest.mark.parametrize("mix", [1, 2])
@pytest.mark.parametrize("equal", [0.0, 0.2, 1.0])
def test_of_what_was_marked_only_what_still_differs_is_kept(
    way: str, width: int, lead: int, mix: int, equal: float, rng: np.random.Generator
) -> None:
    """Sides may be written between a first look and a second; may end anywhere, at memory's end, too."""
    relative, index, filled, spec = 1000, 12345, 3, TensorSpec("t", DTYPES[width], (20_000,))
    seeds = [*map(np.uint64, reference.seeds(spec)), np.uint64(mix)]
    for marked in (0, 1, 7, 8, 9, 41, 64):
        old, new = guarded(width, 300, lead), guarded(width, 300, lead)
        old[:] = random_bits(width, 300, rng)
        new[:] = old
        at = np.sort(rng.choice(299, max(marked - 1, 0), replace=False))
        at = np.append(at, 299)[-marked:] if marked else at  # the last element of all is among them
        kept = at[rng.random(len(at)) >= equal]
        new[kept] ^= np.array(1 << (8 * width - 1) | 1, new.dtype)
        positions = np.full(filled + marked + 2 * LANES, 7, np.uint32)
        olds, news = (np.full(len(positions), 7, old.dtype) for _ in range(2))
        positions[filled : filled + marked] = relative + at
        sides = [np.uint64(side.ctypes.data) for side in (old, new)]
        end, *moved = KEEPS[way](
            *sides, relative, index, tuple(seeds), positions, olds, news, filled, filled + marked, TAGS[width]
        )
        assert end == filled + len(kept)
        for found, expected in ((positions, relative + kept), (olds, old[kept]), (news, new[kept])):
            assert np.array_equal(found[filled:end], expected)
            assert np.all(found[:filled] == 7)
            assert np.all(found[filled + marked + LANES :] == 7)
        after, before = (reference.digest(spec, side.tolist(), index, mix) for side in (new, old))
        assert Digest(*map(int, moved)) == after - before


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0])
def test_long_runs_are_compared_in_blocks(density: float, rng: np.random.Generator) -> None:
    space = space_of(2, [(3 * kernels_find.BLOCK_GROUPS * GROUP + 77,)])
    old = random_bits(2, space.elements, rng)
    new = change(old, density, rng)
    olds, news = memory_of(space, old), memory_of(space, new)
    interval = Interval(space.dtype, 3, space.elements - 3)
    found = find(space, news, olds, interval)
    assert np.array_equal(found.positions, np.flatnonzero(old[3:] != new[3:]))
    assert np.array_equal(found.olds, old[3:][found.positions])
    assert np.array_equal(found.news, new[3:][found.positions])
    assert found.digest == digest(space, news, interval)
    assert found.change == found.digest - digest(space, olds, interval)


@pytest.mark.parametrize("codec", ["gap", "class"])
@pytest.mark.parametrize("density", [0.001, 0.03, 0.6, 1.0])
def test_a_row_is_the_same_when_it_is_coded_later(
    codec: Any, density: float, rng: np.random.Generator
) -> None:
    space = space_of(2, [(40, 100), (7,)])
    old = random_bits(2, space.elements, rng)
    new = change(old, density, rng, reach=3)
    olds, news = memory_of(space, old), memory_of(space, new)
    interval = Interval(space.dtype, 0, 4000)
    at_once = encode(space, news, olds, interval, codec=codec)
    kept = find(space, news, olds, interval).copied()
    news.flat(space.dtype)[:] = 0  # the trainer goes on
    find(space, news, olds, interval)  # and this thread finds something else
    assert code(space, interval, kept, olds, codec=codec) == at_once.row
    assert (kept.digest, kept.change) == (at_once.digest, at_once.change)
    assert kept.nbytes == 8 * len(kept)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_what_lies_in_a_room_stays_until_that_is_used_again(width: int, rng: np.random.Generator) -> None:
    space = space_of(width, [(5000,)])
    old = random_bits(width, 5000, rng)
    news, olds = memory_of(space, change(old, 0.9, rng)), memory_of(space, old)
    room, other = Room(5000, width), Room(4999, width)
    every = Interval(space.dtype, 0, 5000)
    expected = find(space, news, olds, every).copied()
    found = find(space, news, olds, every, room)
    find(space, news, olds, Interval(space.dtype, 1, 4999), other)
    find(space, olds, news, every)
    for name in ("positions", "olds", "news"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
        assert np.shares_memory(getattr(found, name), getattr(room, name)), name
    assert not any(np.shares_memory(a, b) for a, b in combinations((room.positions, room.olds, room.news), 2))
    with pytest.raises(UsageError, match="room is not for"):
        find(space, news, olds, every, other)
    with pytest.raises(UsageError, match="room is not for"):
        find(space, news, olds, every, Room(5000, {1: 2, 2: 4, 4: 8, 8: 1}[width]))


def test_what_is_not_an_interval_of_the_space_is_refused() -> None:
    space = space_of(2, [(10,)])
    memory = memory_of(space, np.zeros(10, np.uint16))
    with pytest.raises(UsageError, match="not inside"):
        find(space, memory, memory, Interval(space.dtype, 5, 6))
