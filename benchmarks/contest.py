"""A contest of codecs over two states of one model, in one process, in turns.

Every time is the best of several rounds, and the rounds of all contestants are interleaved, so that ratios hold on a
busy machine. Contestants work on one row (or as many elements) at a time, spread over a thread pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import numpy as np

from weightcast.codec import Geometry, Interval, Memory, encode, joined, update
from weightcast.codec.digest import digest
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.settings import PublisherSettings
from weightcast.schemas.shard import Codec, Row, store_shard

from . import yardsticks
from .part import cores
from .yardsticks import U16, Format

A = TypeVar("A")
B = TypeVar("B")

CODECS: Final[tuple[Codec, ...]] = ("gap", "class")


class Pair:
    """Two states of one model in bf16, and a third array that contestants bring from the one to the other.

    Attributes:
        old, new, scratch: uint16, all tensors end to end.
        old_memory, new_memory, scratch_memory: the same for the codec.
        geometry, space: of the model.
        intervals: as a publisher cuts it.
    """

    def __init__(self, old: Mapping[str, U16], new: Mapping[str, U16]) -> None:
        self.old, self.new = (np.concatenate([bits[n].reshape(-1) for n in old]) for bits in (old, new))
        self.scratch = self.old.copy()
        self.shapes = {name: bits.shape for name, bits in old.items()}
        self.geometry = Geometry(Layout.of(TensorSpec(n, "BF16", shape) for n, shape in self.shapes.items()))
        self.space = self.geometry["BF16"]
        self.intervals = self.geometry.intervals(PublisherSettings().row_elements)
        self.old_memory, self.new_memory, self.scratch_memory = map(
            self._memory, (self.old, self.new, self.scratch)
        )

    def _memory(self, bits: U16) -> Memory:
        """A flat array as the codec's memory. The layout sorts its tensors, the array need not."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        return Memory.over(self.geometry, dict(zip(self.shapes, np.split(bits, ends[:-1]), strict=True)))

    def rows(self, codec: Codec) -> list[Interval]:
        """What each row covers when a publisher codes it so."""
        return joined(self.intervals, PublisherSettings().row_elements, codec)

    @cached_property
    def changed(self) -> int:
        """Elements that differ."""
        return int(np.count_nonzero(self.old != self.new))

    @property
    def density(self) -> float:
        """Their share."""
        return self.changed / len(self.old)

    def slices(self, *, by_tensor: bool) -> list[Piece]:
        """What a foreign format is given at a time: as many elements as a row, or a tensor."""
        if by_tensor:
            sizes = [(int(np.prod(shape)), shape) for shape in self.shapes.values()]
        else:
            most = max(interval.length for interval in self.intervals)
            sizes = [
                (n, (n,)) for n in (min(most, len(self.old) - at) for at in range(0, len(self.old), most))
            ]
        starts = np.cumsum([0, *(size for size, _ in sizes)])
        return [Piece(int(at), size, shape) for at, (size, shape) in zip(starts, sizes, strict=False)]


@dataclass(frozen=True)
class Piece:
    """Part of the flat arrays, and the shape it is looked at in."""

    start: int
    length: int
    shape: tuple[int, ...]

    def of(self, bits: U16) -> U16:
        """A view of it."""
        view: U16 = bits[self.start : self.start + self.length].reshape(self.shape)
        return view


@dataclass(frozen=True)
class Entry:
    """A contestant: what it is called with, again and again.

    Attributes:
        title: in tables.
        against: the entry that it is compared with.
        call, items: one round is `call` of each item.
        wire_bytes: what it sends, if it sends anything.
    """

    title: str
    against: str
    call: Callable[[Any], Any]
    items: Sequence[Any]
    wire_bytes: int | None = None


def entries(pair: Pair, formats: Sequence[Format]) -> dict[str, Entry]:
    """All contestants, each checked: those that bring bits over bring exactly the right ones."""
    found = _plain(pair)
    for codec in CODECS:
        found |= _ours(pair, codec)
    for form in formats:
        found |= _theirs(pair, form)
    return found


def _plain(pair: Pair) -> dict[str, Entry]:
    """What bounds all others."""
    whole = pair.slices(by_tensor=False)
    new = pair.new_memory
    changed = [
        at
        for piece in whole
        if len(at := np.flatnonzero(piece.of(pair.old) != piece.of(pair.new)) + piece.start)
    ]

    def scan(piece: Piece) -> None:
        even = piece.length & ~3
        yardsticks.scan(*(piece.of(bits)[:even].view(np.uint64) for bits in (pair.old, pair.new)))

    return {
        "scan": Entry("read both arrays", "scan", scan, whole),
        "copy": Entry(
            "dense copy",
            "scan",
            lambda piece: np.copyto(piece.of(pair.scratch), piece.of(pair.new)),
            whole,
            pair.new.nbytes,
        ),
        "digest": Entry("digest alone", "scan", lambda i: digest(pair.space, new, i), pair.intervals),
        "compare": Entry(
            "compare and digest, nothing changed",
            "scan",
            lambda i: encode(pair.space, new, new, i),
            pair.intervals,
        ),
        "touch_apply": Entry(
            "read and write what changed, nothing else",
            "xor_zstd_apply",
            lambda at: yardsticks.touch(pair.scratch, at),
            changed,
        ),
    }


def _ours(pair: Pair, codec: Codec) -> dict[str, Entry]:
    old, new, target = pair.old_memory, pair.new_memory, pair.scratch_memory

    def write(interval: Interval) -> Row | None:
        return encode(pair.space, new, old, interval, codec=codec).row

    intervals = pair.rows(codec)
    rows = [row for row in _all(write, intervals) if row is not None]

    def apply(row: Row) -> None:
        update(pair.space, row, target)

    _check(pair, codec, apply, rows)
    return {
        codec: Entry(
            f"`{codec}`: compare, digest, encode", "xor_zstd", write, intervals, len(store_shard(rows))
        ),
        f"{codec}_apply": Entry(f"`{codec}`: decode, digest, apply", "xor_zstd_apply", apply, rows),
    }


def _theirs(pair: Pair, form: Format) -> dict[str, Entry]:
    pieces = pair.slices(by_tensor=form.by_tensor)

    def write(piece: Piece) -> bytes:
        return form.encode(piece.of(pair.old), piece.of(pair.new))

    frames = list(zip(pieces, _all(write, pieces), strict=True))
    wire_bytes = sum(len(frame) for _, frame in frames)

    def apply(item: tuple[Piece, bytes]) -> None:
        form.apply(item[1], item[0].of(pair.scratch))

    _check(pair, form.name, apply, frames)
    return {
        form.name: Entry(form.title, "xor_zstd", write, pieces, wire_bytes),
        f"{form.name}_apply": Entry(f"{form.title}, back and apply", "xor_zstd_apply", apply, frames),
    }


def _all(call: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """What `call` returns for each item, on all cores; not timed."""
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(call, items))


def _check(pair: Pair, name: str, apply: Callable[[Any], None], items: Sequence[Any]) -> None:
    """Stop the benchmark if a contestant is not exact."""
    pair.scratch[:] = pair.old
    _all(apply, items)
    if not np.array_equal(pair.scratch, pair.new):
        raise SystemExit(f"{name} is not exact")


def best_times(pair: Pair, found: Mapping[str, Entry], rounds: int, threads: int) -> dict[str, float]:
    """Best seconds of each contestant over all its items, in turns."""
    best = dict.fromkeys(found, float("inf"))
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            for name, entry in found.items():
                if name.endswith("_apply"):
                    pair.scratch[:] = pair.old
                begin = time.perf_counter()
                list(pool.map(entry.call, entry.items))
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def planes(pair: Pair, codec: Codec) -> dict[str, float]:
    """Bits a change of each plane of our rows."""
    old, new = pair.old_memory, pair.new_memory
    rows = _all(lambda i: encode(pair.space, new, old, i, codec=codec).row, pair.rows(codec))
    names = ("gaps", "lows", "steps", "escapes")
    return {n: 8 * sum(len(getattr(r, n)) for r in rows if r is not None) / pair.changed for n in names}


def bits_per_change(pair: Pair, found: Mapping[str, Entry]) -> dict[str, float]:
    """Bits on the wire for each change, of those that send something."""
    return {
        name: 8 * entry.wire_bytes / pair.changed
        for name, entry in found.items()
        if entry.wire_bytes is not None
    }
