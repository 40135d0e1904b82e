"""Vector operations of the loop that finds changes; see `jit`.

numba's cache does not look at this file either: after a change here, touch `kernels_find.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from .jit import (
    GOLDEN,
    GROUP,
    I64,
    LANES,
    emit_broadcast,
    emit_mix,
    emit_prefetch,
    emit_reverse,
    emit_splat,
    pointer_of,
)

COMPRESSES: Final = not config.CPU_NAME and get_host_cpu_features().get("avx512vbmi2", False)
"""Whether the machine moves marked elements of a vector together in one instruction, of any width."""


@intrinsic
def compare_group(
    typingctx: Any, old: Any, new: Any, ahead: Any, z0: Any, z1: Any, sums: Any, tag: Any
) -> Any:
    """compare_group(old, new: uint64, ahead: int64, z0, z1, sums: uint64, tag) -> uint64: `differ` and `weigh` at once.

    Bit j of the result says whether elements j of two groups differ. The digest of the new one is added to `sums`, the
    address of two vectors of words. z0 and z1 are as for `weigh`; what lies `ahead` bytes further on is fetched.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_value_type(tag)
        mask = I64(0)
        for k, marks, _, _ in _compared(builder, args[:6], element):
            bits = builder.zext(builder.bitcast(marks, ir.IntType(marks.type.count)), I64)
            mask = builder.or_(mask, builder.shl(bits, I64(marks.type.count * k)))
        return mask

    u64 = types.uint64
    return u64(u64, u64, types.int64, u64, u64, u64, tag), codegen


@intrinsic
def note_group(
    typingctx: Any, old: Any, new: Any, ahead: Any, z0: Any, z1: Any, sums: Any,
    relative: Any, positions: Any, olds: Any, news: Any, found: Any, tag: Any,
) -> Any:  # fmt: skip
    """note_group(as `compare_group`, relative: uint32, positions, olds, news: uint64, found: int64, tag) -> int64.

    Writes relative + j and both sides of the elements j that differ to three arrays at these addresses, from entry
    `found` on; the new `found`. Up to `GROUP` entries from there on are overwritten. Needs `COMPRESSES`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        relative, positions, olds, news, found = args[6:11]
        element, byte, word = context.get_value_type(tag), ir.IntType(8), ir.IntType(32)
        for k, marks, before, after in _compared(builder, args[:6], element):
            count = marks.type.count
            for side, content in ((olds, before), (news, after)):
                at = builder.add(side, builder.mul(found, I64(tag.bitwidth // 8)))
                builder.store(
                    _compress(builder, content, marks), pointer_of(builder, at, content.type), align=1
                )
            size = max(count, 16)  # no machine compresses 8 bytes
            places = ir.Constant(ir.VectorType(byte, size), [k * count + i for i in range(size)])
            none = ir.Constant(marks.type, [0] * count)
            order = ir.Constant(ir.VectorType(word, size), list(range(size)))
            offsets = _compress(builder, places, builder.shuffle_vector(marks, none, order))
            base = emit_broadcast(builder, relative, ir.VectorType(word, min(count, 16)))
            at = builder.add(positions, builder.mul(found, I64(4)))
            for i in range(0, count, 16):
                order = ir.Constant(
                    ir.VectorType(word, base.type.count), [i + j for j in range(base.type.count)]
                )
                part = builder.zext(builder.shuffle_vector(offsets, offsets, order), base.type)
                there = pointer_of(builder, builder.add(at, I64(4 * i)), base.type)
                builder.store(builder.add(part, base), there, align=1)
            bits = builder.bitcast(marks, ir.IntType(count))
            found = builder.add(found, builder.zext(builder.ctpop(bits), I64))
        return found

    u64, i64 = types.uint64, types.int64
    return i64(u64, u64, i64, u64, u64, u64, types.uint32, u64, u64, u64, i64, tag), codegen


def _compared(builder: Any, args: Any, element: ir.Type) -> Iterator[tuple[int, Any, Any, Any]]:
    """Each vector of a group: its number, what differs, both sides. Adds the digest of the new one to `sums`."""
    old, new, ahead, z0, z1, sums = args
    vector = ir.VectorType(I64, LANES)
    elements = ir.VectorType(element, LANES * 64 // element.width)
    places = [pointer_of(builder, builder.add(sums, I64(8 * LANES * k)), vector) for k in (0, 1)]
    totals = [builder.load(place, align=1) for place in places]
    firsts = [emit_broadcast(builder, z, vector) for z in (z0, z1)]
    for k in range(GROUP // elements.count):
        here, there = (builder.add(side, I64(8 * LANES * k)) for side in (new, old))
        for at in (here, there):
            emit_prefetch(builder, builder.add(at, ahead))
        words = builder.load(pointer_of(builder, here, vector), align=1)
        before = builder.load(pointer_of(builder, there, elements), align=1)
        after = builder.bitcast(words, elements)
        ramp = ir.Constant(vector, [(k * LANES + i) * GOLDEN & (2**64 - 1) for i in range(LANES)])
        for lane, content in enumerate((words, emit_reverse(builder, words, element.width))):
            weights = emit_mix(builder, builder.add(firsts[lane], ramp), vector)
            totals[lane] = builder.add(totals[lane], builder.mul(content, weights))
        yield k, builder.icmp_unsigned("!=", after, before), before, after
    for place, total in zip(places, totals, strict=True):
        builder.store(total, place, align=1)


def _compress(builder: Any, content: Any, marks: Any) -> Any:
    """The marked elements of a vector, at its beginning; after them anything."""
    size, width = content.type.count, content.type.element.width
    kind = ir.FunctionType(content.type, [content.type, content.type, marks.type])
    name = f"llvm.x86.avx512.mask.compress.v{size}i{width}"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [content, emit_splat(content.type, 0), marks])
