"""Changes into memory: from the planes of coding `gap`, `pairs` or `dense` in one pass, or as they are, read back.

What is to be read or written is fetched some changes ahead: on machines with `COMPRESSES` in the loop that works on
changes (`jit_apply`), on others a block of them ahead, while gaps are added up.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .jit import GROUP, LANES, OWN, SHARED, kernel, load, prefetch, store, width
from .jit_apply import AHEAD, step_vectors
from .jit_find import COMPRESSES
from .kernels import (
    AHEAD_BYTES,
    FETCHED,
    MIX_2,
    Seed,
    digest_change,
    digest_run,
    digest_step,
    fetch,
    part_below,
    seed_of,
)
from .kernels_gaps import read_some
from .kernels_moves import STEPPED, apply_marks, apply_some, escaped_bits, find_some, part_pairs

BLOCK: Final = 128
"""Changes that are decoded at a time. Their old bits are on their way while as many others are worked on: anything
from 64 to 512 is as fast. Even, so that a block begins with a byte of two steps."""

FEW: Final = 12
"""Changes of a tensor, on average of a row, below which blocks are faster, since they fetch across tensors: with 0.6
they took 0.57 of the time, with 10 0.92, with 15 1.12."""

STRETCH: Final = 4096
"""Changes whose positions are decoded before they are worked on. Even, as `BLOCK`, and small enough for what is kept of
each to stay near."""

WRITTEN: Final = 4096
"""Changes written before they are read back: more than a first-level cache holds, less than a second-level one."""

GAPS_FAULT: Final = 4
"""The gaps do not lead to as many elements of the row. Smaller numbers are those of `apply_steps`."""

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[Any]


@kernel
def locate(addresses: Words, starts: Ints, tensor: int, positions: Ints, places: Words, tag: Any) -> int:
    """Byte address of the element at each of the ascending positions; tensor of the last one."""
    done = 0
    while done < positions.size:
        while positions[done] >= starts[tensor + 1]:
            tensor += 1
        stop = part_below(positions, done, positions.size, starts[tensor + 1])
        base = addresses[tensor] - np.uint64(starts[tensor] * width(tag))
        for i in range(done, stop):
            places[i] = base + np.uint64(positions[i] * width(tag))
        done = stop
    return tensor


@kernel
def read_planes(
    gaps: Bytes, lows: Bytes, shift: int, steps: Bytes, paired: bool, used: int, position: Any, first: int,
    positions: Ints, moves: Bytes,
) -> Any:  # fmt: skip
    """`read_some`, and the step bytes of the same changes, to `moves`. `first` must be even."""
    if paired:
        part_pairs(steps[first // 2 :], moves)
    else:
        moves[:] = steps[first : first + moves.size]
    return read_some(gaps, lows, shift, used, position, first, positions)


@kernel
def fault_at_end(
    count: int, gaps: Bytes, lows: Bytes, shift: int, used: int, escapes: Bits, escaped: int
) -> int:
    """0, or what is wrong with a row all of whose changes were read: its planes are to be used up."""
    rest = count * shift & 7
    if used != gaps.size or (rest and lows[-1] >> rest):
        return GAPS_FAULT
    return 0 if escaped == escapes.size else 2


@kernel
def change_by_blocks(
    addresses: Words, starts: Ints, seeds: Words, first: int, start: int, length: int, shift: int,
    gaps: Bytes, lows: Bytes, marks: Bytes, steps: Bytes, escapes: Bits, paired: bool,
    positions: Ints, olds: Bits, news: Bits, write: bool, tag: Any,
) -> Any:  # fmt: skip
    """(0 or what is wrong, lane 0, lane 1): decode a row against memory, and digest the change.

    Args:
        addresses, starts, seeds: of the memory and the space.
        first: tensor in which the row begins.
        start, length: the row; flat.
        shift: the row's gap_shift.
        gaps, lows, steps: its planes; lows of n * shift bits in bytes, steps [n] or, if `paired`, two in a byte.
        escapes: its escaped elements.
        paired: whether the coding is `pairs` (kernels_moves).
        marks: the steps of a dense row, n of which are not 0; gaps, lows and steps are empty then. Else empty.
        positions, olds, news: [n], the result: flat.
        write: whether new bits are written to the memory, too. If something is wrong, some of them are by then.
        tag: of the space.
    """
    n = positions.size
    places, moves = np.empty((2, BLOCK), np.uint64), np.empty((2, BLOCK), np.uint8)
    far = np.empty(BLOCK + GROUP, np.uint32)
    lane0, lane1 = np.uint64(0), np.uint64(0)
    used, marked, escaped, position, tensor, owner = 0, 0, 0, start - 1, first, first
    for begin in range(0, n + BLOCK, BLOCK):
        if begin < n:  # this block's old bits are fetched while the one before is worked on
            here = positions[begin : min(begin + BLOCK, n)]
            move = moves[begin // BLOCK % 2, : here.size]
            if marks.size:
                marked = find_some(marks, marked, start, here, move)
            else:
                used, position = read_planes(
                    gaps, lows, shift, steps, paired, used, position, begin, here, move
                )
            if used < 0 or position >= start + length:
                return GAPS_FAULT, lane0, lane1
            soon = places[begin // BLOCK % 2]
            tensor = locate(addresses, starts, tensor, here, soon, tag)
            for k in range(here.size):
                prefetch(soon[k])
        if begin > 0:
            last = begin - BLOCK
            size = min(BLOCK, n - last)
            where, old, new = places[last // BLOCK % 2], olds[last : last + size], news[last : last + size]
            for k in range(size):
                old[k] = load(where[k], tag)
            escaped = apply_some(moves[last // BLOCK % 2, :size], escapes, escaped, paired, old, new, far)
            if escaped < 0:
                return -escaped, lane0, lane1
            if write:
                for k in range(size):
                    store(where[k], new[k])
            at = positions[last : last + size]
            while at[0] >= starts[owner + 1]:
                owner += 1
            part0, part1 = digest_change(starts, seeds, owner, at, 0, old, new, size)
            lane0 += part0
            lane1 += part1
    return fault_at_end(n, gaps, lows, shift, used, escapes, escaped), lane0, lane1


@kernel
def change_by_vectors(
    addresses: Words, starts: Ints, seeds: Words, first: int, start: int, length: int, shift: int,
    gaps: Bytes, lows: Bytes, marks: Bytes, steps: Bytes, escapes: Bits, paired: bool,
    positions: Ints, olds: Bits, news: Bits, write: bool, tag: Any,
) -> Any:  # fmt: skip
    """As `change_by_blocks`, of a row that is not dense, on machines with `COMPRESSES`."""
    far, moves = np.empty(STRETCH + LANES, np.int64), np.empty(STRETCH, np.uint8)
    lane0, lane1 = np.uint64(0), np.uint64(0)
    used, escaped, position, tensor, n = 0, 0, start - 1, first, positions.size
    for begin in range(0, n, STRETCH):
        end = min(begin + STRETCH, n)
        here, move = positions[begin:end], moves[: end - begin]
        used, position = read_planes(gaps, lows, shift, steps, paired, used, position, begin, here, move)
        if used < 0 or position >= start + length:
            return GAPS_FAULT, lane0, lane1
        done = 0
        while done < here.size:
            while here[done] >= starts[tensor + 1]:
                tensor += 1
            stop = part_below(here, done, here.size, starts[tensor + 1])
            escaped, part0, part1 = step_some(
                addresses[tensor], starts[tensor], seed_of(seeds, tensor), here[done:stop], move[done:stop], escapes,
                escaped, paired, olds[begin + done : begin + stop], news[begin + done : begin + stop], far, write, tag,
            )  # fmt: skip
            if escaped < 0:
                return -escaped, lane0, lane1
            lane0 += part0
            lane1 += part1
            done = stop
    return fault_at_end(n, gaps, lows, shift, used, escapes, escaped), lane0, lane1


@kernel
def step_some(
    address: np.uint64, begin: int, seed: Seed, positions: Ints, steps: Bytes, escapes: Bits, used: int, paired: bool,
    olds: Bits, news: Bits, far: Ints, write: bool, tag: Any,
) -> Any:  # fmt: skip
    """(escapes used up to there or minus what is wrong, lane 0, lane 1), of changes in one tensor.

    It begins at flat element `begin`, at `address`. far: scratch, `LANES` longer than positions.
    """
    size = positions.size
    origin = address - np.uint64(begin * width(tag))
    for k in range(min(AHEAD, size)):
        prefetch(origin + np.uint64(positions[k] * width(tag)))
    lane0, lane1, found, zeros, done = np.uint64(0), np.uint64(0), 0, 0, size // LANES * LANES
    if done:
        at, move = np.uint64(positions.ctypes.data), np.uint64(steps.ctypes.data)
        old, new, out = np.uint64(olds.ctypes.data), np.uint64(news.ctypes.data), np.uint64(far.ctypes.data)
        if seed[2] == MIX_2:
            found, zeros, lane0, lane1 = step_vectors(
                origin, at, move, old, new, out, done // LANES, done - LANES, -begin, write,
                seed[0], seed[1], SHARED, tag,
            )  # fmt: skip
        else:
            found, zeros, lane0, lane1 = step_vectors(
                origin, at, move, old, new, out, done // LANES, done - LANES, -begin, write,
                seed[0], seed[1], OWN, tag,
            )  # fmt: skip
    for k in range(done, size):
        far[found] = k
        found += 1
        olds[k] = load(origin + np.uint64(positions[k] * width(tag)), tag)
        zeros += steps[k] == 0
    if zeros:
        return -1, lane0, lane1
    for k in far[:found]:
        if steps[k] == 255:
            fault, news[k] = escaped_bits(escapes, used, paired, olds[k])
            if fault:
                return -fault, lane0, lane1
            used += 1
        else:
            step = np.int64(steps[k])
            news[k] = olds[k] + np.uint64((step >> 1) ^ -(step & 1))
        if write:
            store(origin + np.uint64(positions[k] * width(tag)), news[k])
        part0, part1 = digest_step(positions[k] - begin, olds[k], news[k], seed)
        lane0 += part0
        lane1 += part1
    return used, lane0, lane1


@kernel
def change_row(
    addresses: Words, starts: Ints, seeds: Words, first: int, start: int, length: int, shift: int,
    gaps: Bytes, lows: Bytes, marks: Bytes, steps: Bytes, escapes: Bits, paired: bool,
    positions: Ints, olds: Bits, news: Bits, write: bool, tag: Any,
) -> Any:  # fmt: skip
    """`change_by_blocks`, by vectors where the machine has them and tensors have more than a few changes each."""
    tensors = np.searchsorted(starts, start + length) - first
    if COMPRESSES and marks.size == 0 and positions.size >= FEW * tensors:
        return change_by_vectors(
            addresses, starts, seeds, first, start, length, shift, gaps, lows, marks, steps, escapes, paired,
            positions, olds, news, write, tag,
        )  # fmt: skip
    return change_by_blocks(
        addresses, starts, seeds, first, start, length, shift, gaps, lows, marks, steps, escapes, paired,
        positions, olds, news, write, tag,
    )  # fmt: skip


@kernel
def change_all(
    addresses: Words, starts: Ints, seeds: Words, first: int, start: int, marks: Bytes, escapes: Bits, tag: Any
) -> Any:  # fmt: skip
    """Write a dense row, which begins in tensor `first`: (0 or what is wrong, lane 0, lane 1), as `change_row`.

    What that moves the digest by is what the bits that are there then have more than those before. After an error some
    are written.
    """
    olds, news = np.empty(STEPPED, escapes.dtype), np.empty(STEPPED, escapes.dtype)
    far = np.empty(STEPPED + GROUP, np.uint32)
    lane0, lane1 = np.uint64(0), np.uint64(0)
    tensor, at, stop, escaped = first, start, start + marks.size, 0
    while at < stop:
        while at >= starts[tensor + 1]:
            tensor += 1
        size = min(STEPPED, min(starts[tensor + 1], stop) - at)
        index, mark = at - starts[tensor], marks[at - start : at - start + size]
        address, seed = addresses[tensor] + np.uint64(index * width(tag)), seed_of(seeds, tensor)
        fetch(address + np.uint64(AHEAD_BYTES), size * width(tag))
        before0, before1 = digest_run(address, index, size, seed, tag)
        old, new = olds[:size], news[:size]
        for k in range(size):
            old[k] = load(address + np.uint64(k * width(tag)), tag)
        escaped = apply_marks(mark, escapes, escaped, False, old, new, far)
        if escaped < 0:
            return -escaped, lane0, lane1
        for k in range(size):
            store(address + np.uint64(k * width(tag)), new[k])
        after0, after1 = digest_run(address, index, size, seed, tag)
        lane0 += after0 - before0
        lane1 += after1 - before1
        at += size
    return 0 if escaped == escapes.size else 2, lane0, lane1


@kernel
def put(addresses: Words, starts: Ints, first: int, positions: Ints, values: Bits, tag: Any) -> bool:
    """Write values at positions, which must ascend from tensor `first` on, and read back; whether all are there."""
    places, tensor, same = np.empty(WRITTEN, np.uint64), first, True
    for begin in range(0, positions.size, WRITTEN):
        new = values[begin : begin + WRITTEN]
        tensor = locate(addresses, starts, tensor, positions[begin : begin + WRITTEN], places, tag)
        for k in range(min(FETCHED, new.size)):
            prefetch(places[k])
        for k in range(new.size):
            prefetch(places[min(k + FETCHED, new.size - 1)])
            store(places[k], new[k])
        for k in range(new.size):
            same &= load(places[k], tag) == new[k]
    return same
