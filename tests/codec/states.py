"""States of small layouts, and how the property tests of this folder run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from weightcast.codec import FlatSpace, Geometry, Memory, Region
from weightcast.schemas.layout import MIX, Layout, TensorSpec
from weightcast.schemas.shard import Coding

examples = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
"""Few examples, for the reference is slow, and no deadline, for kernels are compiled by the first one."""

DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}
"""A dtype of each width."""

CODINGS: Final[tuple[Coding, ...]] = ("gap", "pairs", "dense", "whole")

Bits = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


def space_of(width: int, shapes: Sequence[tuple[int, ...]], mix: int = MIX) -> FlatSpace:
    """The space of tensors t00000, t00001 … of these shapes."""
    specs = [TensorSpec(f"t{i:05d}", DTYPES[width], shape) for i, shape in enumerate(shapes)]
    return Geometry(Layout.of(specs, mix))[DTYPES[width]]


def geometry_of(space: FlatSpace) -> Geometry:
    """A geometry of this space alone."""
    return Geometry(Layout.of(space.specs, space.mix))


def memory_of(space: FlatSpace, bits: Bits, *, lead: int | None = None) -> Memory:
    """`bits` [elements] in memory of their own; with `lead`, each tensor apart, at an address off by it."""
    geometry = geometry_of(space)
    if lead is None:
        memory = Memory.allocate(geometry)
        memory.flat(space.dtype)[:] = bits
        return memory
    buffers = {}
    for spec, start in zip(space.specs, space.starts, strict=False):
        raw = np.zeros(spec.nbytes + lead, np.uint8)
        part = raw[lead:].view(bits.dtype)
        part[:] = bits[int(start) : int(start) + spec.elements]
        buffers[spec.name] = part
    return Memory.over(geometry, buffers)


def bits_of(space: FlatSpace, memory: Memory) -> Bits:
    """All bits of a space, in flat order."""
    parts = [memory.tensor(name).ravel() for name in space.names]
    return np.concatenate([np.zeros(0, f"u{space.width}"), *parts])


def change(bits: Bits, density: float, rng: np.random.Generator, reach: int = 100) -> Bits:
    """A copy of which about `density` changed, by up to `reach`, one in ten of them to anything."""
    new = bits.copy()
    at = np.flatnonzero(rng.random(len(bits)) < density)
    new[at] += rng.integers(1, reach + 1, len(at)).astype(bits.dtype) * rng.choice([1, -1], len(at)).astype(
        bits.dtype
    )
    wild = at[rng.random(len(at)) < 0.1]
    new[wild] = rng.integers(0, 1 << 63, len(wild), dtype=np.uint64).astype(bits.dtype)
    return new


def random_bits(width: int, count: int, rng: np.random.Generator) -> Bits:
    """Any bits."""
    return np.frombuffer(rng.bytes(count * width), f"u{width}").copy()


def elements_of(region: Region) -> Ints:
    """The flat elements of a region, in the order of its indices."""
    found = np.full(region.shape, region.offset, np.int64)
    for grid, stride in zip(np.indices(region.shape, np.int64), region.strides, strict=True):
        found += grid * stride
    return found.ravel()


@st.composite
def nested(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """A region of this shape with its dimensions in any order in memory, and gaps."""
    strides, reach = [0] * len(shape), 0
    for d in draw(st.permutations(range(len(shape)))):
        strides[d] = reach + 1 + draw(st.sampled_from([0, 0, 1, 3]))
        reach += max(shape[d] - 1, 0) * strides[d]
    return Region(shape, tuple(strides), draw(st.integers(0, 5)))
