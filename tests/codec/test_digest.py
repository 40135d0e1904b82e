"""The state digest against the reference, and what its linearity promises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.codec import Geometry, Interval, Memory, change_digest, digest, digest_all, reference
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import UsageError
from weightcast.schemas.layout import Layout, TensorSpec

from .states import DTYPES, change, examples, memory_of, random_bits, space_of

WIDTHS = st.sampled_from([1, 2, 4, 8])
SEEDS = st.integers(0, 2**32)
MIXES = st.sampled_from([1, 2])


def whole(space_elements: int, width: int) -> Interval:
    return Interval(DTYPES[width], 0, space_elements)


@examples
@given(WIDTHS, MIXES, st.integers(0, 9), st.integers(1, 700), SEEDS)
def test_digest_is_that_of_the_reference(width: int, mix: int, lead: int, count: int, seed: int) -> None:
    space = space_of(width, [(count,), (), (3, 2), (0, 4), (65,)], mix)
    bits = random_bits(width, space.elements, np.random.default_rng(seed))
    memory = memory_of(space, bits, lead=lead)
    expected = Digest()
    for spec, start in zip(space.specs, space.starts, strict=False):
        expected += reference.digest(spec, bits[start : start + spec.elements].tolist(), mix=mix)
    assert digest(space, memory, whole(space.elements, width)) == expected


@pytest.mark.parametrize(
    ("mix", "expected"), [(1, "9fd9cd33d7bd0f87b3ea694d4da10480"), (2, "f7e17bd4269fd5ef96a6f40fd0443680")]
)
def test_digest_of_known_bits_is_the_number_it_was_when_the_format_was_made(mix: int, expected: str) -> None:
    """A change of this number is a change of the format."""
    space = space_of(2, [(2, 3)], mix)
    bits = np.array([1, 2, 3, 0x3F80, 0x8000, 0xFFFF], np.uint16)
    found = digest(space, memory_of(space, bits), whole(6, 2))
    assert found.hex == expected


@examples
@given(WIDTHS, st.lists(st.integers(1, 2999), max_size=5), SEEDS)
def test_digest_of_slices_adds_up(width: int, cuts: list[int], seed: int) -> None:
    space = space_of(width, [(1000,), (7,), (1500,), (493,)])
    memory = memory_of(space, random_bits(width, 3000, np.random.default_rng(seed)))
    edges = sorted({0, 3000, *cuts})
    parts = [digest(space, memory, Interval(space.dtype, a, b - a)) for a, b in pairwise(edges)]
    assert sum(parts, Digest()) == digest(space, memory, whole(3000, width))
    assert sum(parts[::-1], Digest()) == digest(space, memory, whole(3000, width))


@examples
@given(WIDTHS, MIXES, st.floats(0, 1), SEEDS)
def test_digest_moves_by_the_digest_of_the_change(width: int, mix: int, density: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    space = space_of(width, [(500,), (1,), (0,), (499,)], mix)
    old = random_bits(width, 1000, rng)
    new = change(old, density, rng)
    at = np.flatnonzero(old != new)
    before, after = (digest(space, memory_of(space, b), whole(1000, width)) for b in (old, new))
    assert before + change_digest(space, at, old[at], new[at]) == after


def test_digest_of_zeros_and_of_empty_tensors_is_zero() -> None:
    geometry = Geometry(Layout.of([TensorSpec("a", "BF16", (0, 1024)), TensorSpec("b", "F32", (100,))]))
    assert digest_all(geometry, Memory.allocate(geometry)) == Digest()


def test_digest_all_adds_up_every_dtype_in_any_pool(rng: np.random.Generator) -> None:
    specs = [TensorSpec(f"{dtype}.{i}", dtype, (300, i)) for dtype in DTYPES.values() for i in range(4)]
    tied = TensorSpec("tied", "BF16", (300, 2), tied_to="BF16.2")
    geometry = Geometry(Layout.of([*specs, tied]))
    memory = Memory.allocate(geometry)
    expected = Digest()
    for space in geometry:
        memory.flat(space.dtype)[:] = random_bits(space.width, space.elements, rng)
        for spec in space.specs:
            expected += reference.digest(spec, memory.tensor(spec.name).ravel().tolist())
    with ThreadPoolExecutor(2) as pool:
        assert digest_all(geometry, memory, pool) == expected
    assert digest_all(geometry, memory) == expected


def test_digest_tells_swapped_elements_tensors_and_shapes_apart() -> None:
    flat, tall = space_of(2, [(4,), (4,)]), space_of(2, [(2, 2), (4,)])
    bits = np.array([1, 2, 3, 4, 0, 0, 0, 0], np.uint16)
    states = [(flat, bits), (flat, bits[[1, 0, 2, 3, 4, 5, 6, 7]]), (flat, np.roll(bits, 4)), (tall, bits)]
    assert len({digest(s, memory_of(s, b), whole(8, 2)) for s, b in states}) == 4


def test_interval_outside_the_space_is_refused() -> None:
    space = space_of(2, [(4,)])
    for start, length in [(0, 5), (-1, 2), (4, 0), (3, 2)]:
        with pytest.raises(UsageError, match="not inside"):
            digest(space, memory_of(space, np.zeros(4, np.uint16)), Interval("BF16", start, length))


def test_memory_of_another_layout_is_refused() -> None:
    space, other = space_of(2, [(4,)]), space_of(2, [(2, 2)])
    with pytest.raises(UsageError, match="does not hold"):
        digest(space, memory_of(other, np.zeros(4, np.uint16)), Interval("BF16", 0, 4))
