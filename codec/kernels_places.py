"""The loops over elements that lie wherever an engine keeps them; see `places` for who prepares them.

Common arguments: `table`, the moves of a flat space as (`dims` int64 [m], `shape`, `sources` and `targets`
int64 [m, d] of which the first `dims` count, `begin` int64 [m] the flat element of each source's first, `tensor`
int64 [m] its tensor, `address` uint64 [m] the byte address of each target's first element). `task`, what to do for
which move: int64 [t, 4] of (move, first position, one past the last, where its output begins). `positions` and
`values` are addresses of ascending int64 and of elements, since arrays that may be written and ones that may
not would each compile a variant. `spare`: an empty buffer that holds `BLOCK` elements. `starts`, `seeds`, `tag`: as
in `kernels`. Nothing here is checked.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .jit import kernel, load, prefetch, store, width
from .kernels import Bits, Ints, Seed, Words, digest_change, digest_run, digest_word, fetch, seed_of

BLOCK: Final = 512
"""Changes handled at once: they and the cache lines they touch stay in a first-level cache. 128, 4096: slower."""

DIGEST_BYTES: Final = 1024
AHEAD_BYTES: Final = 2048
"""As in `kernels`: bytes digested at once, and how far ahead of that memory is fetched."""

_POSITION: Final = np.int64(0)
"""Tag of a position."""

_FAR: Final = 1 << 62
"""Further than any two elements are apart."""


@kernel
def locate(table: Any, move: int, rest: int) -> Any:
    """(start of the innermost run at or before source element `rest`, target element of it, whether it is one).

    Both counted from the first element of the source and of the target.
    """
    dims, shape, sources, targets = table[:4]
    start, target, inside = np.int64(0), np.int64(0), True
    for d in range(dims[move] - 1):
        index = (rest - start) // sources[move, d]
        inside &= 0 <= index < shape[move, d]
        start += index * sources[move, d]
        target += index * targets[move, d]
    return start, target, inside


@kernel
def select(
    table: Any, move: int, first: int, last: int, positions: np.uint64,
    at: Ints, found: Ints, places: Words, tag: Any,
) -> int:  # fmt: skip
    """Those of positions [first, last) that are in the source of a move; returns how many.

    at: their flat positions; found: which they are; places: byte addresses of them in the target, and never outside
    of it, even if the positions do not ascend. Then some are left out: all of them if the source is contiguous.
    """
    dims, shape, sources, targets, begin, _, address = table
    inner = dims[move] - 1
    start, size, step = begin[move], shape[move, inner], sources[move, inner]
    scale = targets[move, inner] * width(tag)
    if inner == 0 and step == 1:  # all of them: no branch, so that it becomes vectors
        fits: Any = True
        for i in range(last - first):
            flat = np.int64(load(positions + np.uint64((first + i) * 8), _POSITION))
            at[i], found[i] = flat, first + i
            places[i] = address[move] + np.uint64((flat - start) * scale)
            fits &= np.uint64(flat - start) < np.uint64(size)
        return last - first if fits else 0
    outer = sources[move, inner - 1] if inner > 0 else _FAR
    base, origin, inside, count = -_FAR, address[move], False, 0
    for i in range(last - first):
        flat = np.int64(load(positions + np.uint64((first + i) * 8), _POSITION))
        if flat - start - base >= outer:
            base, element, inside = locate(table, move, flat - start)
            origin = address[move] + np.uint64(element * width(tag))
        ahead = flat - start - base
        index = ahead if step == 1 else ahead // step
        at[count], found[count] = flat, first + i
        places[count] = origin + np.uint64(index * scale)
        count += inside and 0 <= index < size and index * step == ahead
    return count


@kernel
def replace(
    places: Words, found: Ints, count: int, values: np.uint64, olds: Bits, news: Bits, tag: Any
) -> None:
    """olds[k] = the element at places[k], news[k] = the value of position found[k]."""
    for k in range(count):
        prefetch(places[k])
    for k in range(count):
        news[k] = load(values + np.uint64(found[k] * width(tag)), tag)
    for k in range(count):
        olds[k] = load(places[k], tag)


@kernel
def put(places: Words, count: int, news: Bits, tag: Any) -> bool:
    """Write, then read back; whether everything was found as it was written."""
    for k in range(count):
        store(places[k], news[k])
    same = True
    for k in range(count):
        same &= load(places[k], tag) == news[k]
    return same


@kernel
def write(
    table: Any, task: Ints, positions: np.uint64, values: np.uint64, starts: Ints, seeds: Words,
    spare: Bits, lanes: Words, tag: Any,
) -> int:  # fmt: skip
    """Write values to every place of the moves in `task`; the number of the first task that failed, or -1.

    lanes: uint64 [t, 2], how far each task moved its digest. A task fails if what it wrote does not read back.
    """
    at, found, places = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64)
    olds, news = np.empty_like(spare), np.empty_like(spare)
    for t in range(task.shape[0]):
        move, last = task[t, 0], task[t, 2]
        tensor = table[5][move]
        for first in range(task[t, 1], last, BLOCK):
            count = select(table, move, first, min(first + BLOCK, last), positions, at, found, places, tag)
            replace(places, found, count, values, olds, news, tag)
            part0, part1 = digest_change(starts, seeds, tensor, at, 0, olds, news, count)
            lanes[t, 0] += part0
            lanes[t, 1] += part1
            if not put(places, count, news, tag):
                return t
    return -1


@kernel
def count(table: Any, task: Ints, positions: np.uint64, counts: Ints, tag: Any) -> None:
    """counts[t] = how many of its positions are in the source of task t's move."""
    at, found, places = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64)
    for t in range(task.shape[0]):
        for first in range(task[t, 1], task[t, 2], BLOCK):
            last = min(first + BLOCK, task[t, 2])
            counts[t] += select(table, task[t, 0], first, last, positions, at, found, places, tag)


@kernel
def gather(table: Any, task: Ints, positions: np.uint64, index: Ints, out: Bits, tag: Any) -> None:
    """index: which positions are in the moves of `task`; out: their bits. Each task fills from its own begin on."""
    at, found, places = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64)
    for t in range(task.shape[0]):
        filled, last = task[t, 3], task[t, 2]
        for first in range(task[t, 1], last, BLOCK):
            n = select(table, task[t, 0], first, min(first + BLOCK, last), positions, at, found, places, tag)
            for k in range(n):
                prefetch(places[k])
            for k in range(n):
                index[filled + k] = found[k]
                out[filled + k] = load(places[k], tag)
            filled += n


@kernel
def digest_long(address: np.uint64, index: int, count: int, seed: Seed, tag: Any) -> Any:
    """As `kernels.digest_run`, for runs that are too long for the first-level cache."""
    lane0, lane1, block = np.uint64(0), np.uint64(0), DIGEST_BYTES // width(tag)
    for i in range(0, count, block):
        here = address + np.uint64(i * width(tag))
        n = min(block, count - i)
        fetch(here + np.uint64(AHEAD_BYTES), n * width(tag))
        part0, part1 = digest_run(here, index + i, n, seed, tag)
        lane0 += part0
        lane1 += part1
    return lane0, lane1


@kernel
def digest_strided(
    address: np.uint64, index: int, count: int, scale: int, seed: Seed,
    spare: Bits, tag: Any,
) -> Any:  # fmt: skip
    """As `kernels.digest_run`, of elements that lie `scale` bytes apart in memory."""
    lane0, lane1 = np.uint64(0), np.uint64(0)
    for i in range(0, count, BLOCK):
        n = min(BLOCK, count - i)
        for k in range(n):
            spare[k] = load(address + np.uint64((i + k) * scale), tag)
        part0, part1 = digest_run(np.uint64(spare.ctypes.data), index + i, n, seed, tag)
        lane0 += part0
        lane1 += part1
    return lane0, lane1


@kernel
def digest_row(
    address: np.uint64, index: int, size: int, step: int, scale: int, seed: Seed,
    spare: Bits, tag: Any,
) -> Any:  # fmt: skip
    """Digest of the innermost dimension of a move: `step` elements apart in the tensor, `scale` bytes in memory."""
    if step == 1 and scale == width(tag):
        return digest_long(address, index, size, seed, tag)
    if step == 1:
        return digest_strided(address, index, size, scale, seed, spare, tag)
    lane0, lane1 = np.uint64(0), np.uint64(0)
    for k in range(size):
        here = address + np.uint64(k * scale)
        part0, part1 = digest_word(here, index + k * step, 1, seed, tag)
        lane0 += part0
        lane1 += part1
    return lane0, lane1


@kernel
def digest(
    table: Any, first: int, last: int, starts: Ints, seeds: Words, spare: Bits, lanes: Words, tag: Any
) -> None:
    """lanes[m] = digest of the bits that moves [first, last) lead to: uint64 [m, 2]."""
    dims, shape, sources, targets, begin, tensor, address = table
    for m in range(first, last):
        inner, size = dims[m] - 1, 1
        for d in range(inner):
            size *= shape[m, d]
        seed = seed_of(seeds, tensor[m])
        scale = targets[m, inner] * width(tag)
        for row in range(size):
            rest, index, element = row, begin[m] - starts[tensor[m]], np.int64(0)
            for d in range(inner - 1, -1, -1):
                index += rest % shape[m, d] * sources[m, d]
                element += rest % shape[m, d] * targets[m, d]
                rest //= shape[m, d]
            here = address[m] + np.uint64(element * width(tag))
            part0, part1 = digest_row(
                here, index, shape[m, inner], sources[m, inner], scale, seed, spare, tag
            )
            lanes[m, 0] += part0
            lanes[m, 1] += part1
