"""Vector operations on changes: what they move a digest by, and reading many that lie close together.

numba's cache looks only at the file of the outermost kernel, not at this one: after a change here, touch all files with
kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import (
    GOLDEN,
    GROUP,
    I64,
    LANES,
    LINE_BYTES,
    emit_broadcast,
    emit_prefetch,
    emit_splat,
    emit_sum,
    emit_weighed,
    is_own,
    pointer_of,
)
from .jit_find import emit_compress, emit_note


@intrinsic
def weigh_changes(
    typingctx: Any,
    positions: Any,
    olds: Any,
    news: Any,
    vectors: Any,
    shift: Any,
    seed0: Any,
    seed1: Any,
    mix: Any,
    position: Any,
    tag: Any,
) -> Any:
    """weigh_changes(positions, olds, news: uint64, vectors, shift: int64, seed0, seed1: uint64, mix, position,
    tag) -> (uint64, uint64): sum of (new - old) * R.

    Of the `8 * vectors` changes at these addresses; those of positions are of the type of `position`, and with `shift`
    added they are elements of one tensor. mix: as for `weigh_words`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, bits = ir.VectorType(I64, LANES), tag.bitwidth
        sums = [cgutils.alloca_once_value(builder, emit_splat(vector, 0)) for _ in range(2)]
        by = emit_broadcast(builder, args[4], vector)
        seeds = [emit_broadcast(builder, seed, vector) for seed in args[5:7]]
        with cgutils.for_range(builder, args[3], intp=I64) as loop:

            def read(address: Any, width: int) -> Any:
                at = builder.add(address, builder.mul(loop.index, I64(LANES * width // 8)))
                found = builder.load(
                    pointer_of(builder, at, ir.VectorType(ir.IntType(width), LANES)), align=1
                )
                return builder.zext(found, vector) if width < 64 else found

            index = builder.add(read(args[0], position.bitwidth), by)
            step = builder.sub(read(args[2], bits), read(args[1], bits))
            word, slots = emit_words(builder, index, bits)
            totals = emit_moved(builder, [builder.load(s) for s in sums], step, word, slots, seeds, mix)
            for place, total in zip(sums, totals, strict=True):
                builder.store(total, place)
        lanes = [emit_sum(builder, builder.load(total)) for total in sums]
        return context.make_tuple(builder, signature.return_type, lanes)

    u64, i64 = types.uint64, types.int64
    return types.UniTuple(u64, 2)(u64, u64, u64, i64, i64, u64, u64, mix, position, tag), codegen


def emit_words(builder: Any, index: Any, bits: int) -> tuple[Any, tuple[Any, Any]]:
    """Of a vector of elements by number: their words, and how far they are shifted in these, a lane each."""
    vector, each = index.type, 64 // bits
    slot = builder.mul(builder.and_(index, emit_splat(vector, each - 1)), emit_splat(vector, bits))
    word = builder.lshr(index, emit_splat(vector, each.bit_length() - 1))
    return word, (slot, builder.sub(emit_splat(vector, 64 - bits), slot))


def emit_moved(
    builder: Any,
    sums: Sequence[Any],
    step: Any,
    word: Any,
    slots: Sequence[Any],
    seeds: Sequence[Any],
    mix: Any,
) -> list[Any]:
    """sums + step * W, a lane each, of elements in these words and slots."""
    golden = builder.mul(word, emit_splat(word.type, GOLDEN))
    zs = [builder.add(seeds[0], golden), builder.add(seeds[1], golden) if is_own(mix) else seeds[1]]
    return emit_weighed(builder, sums, [builder.shl(step, place) for place in slots], zs, mix)


@intrinsic
def take_groups(
    typingctx: Any,
    old: Any,
    new: Any,
    groups: Any,
    relative: Any,
    positions: Any,
    olds: Any,
    news: Any,
    tag: Any,
) -> Any:
    """take_groups(old, new: uint64, groups: int64, relative: uint32, positions, olds, news: uint64, tag) -> int64.

    Writes relative + i for each element i that differs, as uint32, to the address `positions`, and what it is on either
    side to `olds` and `news`; returns how many. All three are in order, and have `GROUP` entries more than there are
    elements, any of which may be overwritten. Needs `COMPRESSES`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = ir.IntType(tag.bitwidth)
        each = LANES * 64 // tag.bitwidth
        elements, nbytes = ir.VectorType(element, each), tag.bitwidth // 8
        found = cgutils.alloca_once_value(builder, I64(0))
        with cgutils.for_range(builder, args[2], intp=I64) as loop:
            first, mask = builder.load(found), I64(0)
            for k in range(GROUP // each):
                here = builder.add(builder.mul(loop.index, I64(GROUP * nbytes)), I64(each * nbytes * k))
                sides = [
                    builder.load(pointer_of(builder, builder.add(side, here), elements), align=1)
                    for side in args[:2]
                ]
                marks = builder.icmp_unsigned("!=", *sides)
                bits = builder.zext(builder.bitcast(marks, ir.IntType(each)), I64)
                mask = builder.or_(mask, builder.shl(bits, I64(each * k)))
                written = builder.mul(builder.load(found), I64(nbytes))
                for side, out in zip(sides, args[5:7], strict=True):
                    at = pointer_of(builder, builder.add(out, written), elements)
                    builder.store(emit_compress(builder, side, marks), at, align=1)
                builder.store(builder.add(builder.load(found), builder.ctpop(bits)), found)
            group = builder.trunc(builder.mul(loop.index, I64(GROUP)), ir.IntType(32))
            at = builder.add(args[4], builder.mul(first, I64(4)))
            emit_note(builder, mask, builder.add(args[3], group), at)
        return builder.load(found)

    u64, i64 = types.uint64, types.int64
    return i64(u64, u64, i64, types.uint32, u64, u64, u64, tag), codegen


@intrinsic
def read_changes(
    typingctx: Any,
    old: Any,
    new: Any,
    positions: Any,
    olds: Any,
    news: Any,
    count: Any,
    relative: Any,
    index: Any,
    ahead: Any,
    seed0: Any,
    seed1: Any,
    mix: Any,
    tag: Any,
) -> Any:
    """read_changes(old, new, positions, olds, news: uint64, count, relative, index, ahead: int64, seed0, seed1: uint64,
    mix, tag) -> (int64, uint64, uint64).

    Of `count` entries at the address `positions` (uint32), keeps those whose elements differ, together, and writes what
    these are on either side to `olds` and `news`; returns how many, and the sum of (new - old) * R. The element at
    position p is element p - relative of both sides, less than 2^28 bytes on, and element p - relative + index of its
    tensor. Entries behind those kept, up to the next multiple of `LANES`, are overwritten. For every `LANES` entries
    one more line of both sides is fetched, from `ahead` bytes on. mix: as for `weigh_words`. Both sides must be aligned
    to their elements. Needs `COMPRESSES`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        old, new, positions, olds, news, count, relative, index, ahead, seed0, seed1 = args[:11]
        element, nbytes = ir.IntType(tag.bitwidth), tag.bitwidth // 8
        vector, words = ir.VectorType(I64, LANES), ir.VectorType(ir.IntType(32), LANES)
        kept = cgutils.alloca_once_value(builder, I64(0))
        sums = [cgutils.alloca_once_value(builder, emit_splat(vector, 0)) for _ in range(2)]
        seeds = [emit_broadcast(builder, seed, vector) for seed in (seed0, seed1)]
        back = emit_broadcast(builder, builder.trunc(relative, words.element), words)
        before = emit_broadcast(builder, index, vector)
        vectors = builder.lshr(builder.add(count, I64(LANES - 1)), I64(LANES.bit_length() - 1))
        with cgutils.for_range(builder, vectors, intp=I64) as loop:
            first = builder.mul(loop.index, I64(LANES))
            left = builder.trunc(builder.sub(count, first), words.element)
            ramp = ir.Constant(words, list(range(LANES)))
            active = builder.icmp_signed("<", ramp, emit_broadcast(builder, left, words))
            at = builder.add(positions, builder.mul(first, I64(4)))
            here = builder.load(pointer_of(builder, at, words), align=1)
            number = builder.sub(here, back)
            sides = [emit_elements(builder, side, number, active, element) for side in (old, new)]
            line = builder.add(ahead, builder.mul(first, I64(LINE_BYTES // LANES)))
            for side in (old, new):
                emit_prefetch(builder, builder.add(side, line))
            marks = builder.icmp_unsigned("!=", *sides)  # not where inactive: 0 on both sides
            bits = builder.bitcast(marks, ir.IntType(LANES))
            end = builder.load(kept)
            outs = [
                builder.add(out, builder.mul(end, I64(size)))
                for out, size in ((positions, 4), (olds, nbytes), (news, nbytes))
            ]
            all_differ = builder.icmp_unsigned("==", bits, builder.bitcast(active, ir.IntType(LANES)))
            with builder.if_else(all_differ, likely=True) as (alike, fewer):
                with alike:
                    emit_put(builder, outs, (here, *sides), element)
                with fewer:
                    held = [emit_compress(builder, content, marks) for content in (here, *sides)]
                    emit_put(builder, outs, held, element)
            builder.store(builder.add(end, builder.zext(builder.ctpop(bits), I64)), kept)
            wide = [builder.zext(side, vector) if nbytes < 8 else side for side in sides]
            word, slots = emit_words(builder, builder.add(builder.zext(number, vector), before), tag.bitwidth)
            moved = builder.sub(wide[1], wide[0])
            totals = emit_moved(builder, [builder.load(s) for s in sums], moved, word, slots, seeds, mix)
            for total, place in zip(totals, sums, strict=True):
                builder.store(total, place)
        lanes = [emit_sum(builder, builder.load(total)) for total in sums]
        return context.make_tuple(builder, signature.return_type, [builder.load(kept), *lanes])

    u64, i64 = types.uint64, types.int64
    returned = types.Tuple([i64, u64, u64])
    return returned(u64, u64, u64, u64, u64, i64, i64, i64, i64, u64, u64, mix, tag), codegen


def emit_put(builder: Any, outs: Sequence[Any], contents: Sequence[Any], element: ir.IntType) -> None:
    """Write positions, and the elements of both sides, each narrowed to what it is, to an address each."""
    for out, content, kind in zip(outs, contents, (ir.IntType(32), element, element), strict=True):
        narrow = ir.VectorType(kind, LANES)
        value = builder.trunc(content, narrow) if kind.width < content.type.element.width else content
        builder.store(value, pointer_of(builder, out, narrow), align=1)


def emit_elements(builder: Any, address: Any, numbers: Any, active: Any, element: ir.IntType) -> Any:
    """Elements by number from an address on, each in a word of at least 32 bits; 0 where not active.

    The processor gathers words of 32 bits. One that is aligned reaches no page that its element is not on.
    """
    if element.width == 64:
        return emit_gather(builder, address, numbers, active, I64)
    word, kind = ir.IntType(32), numbers.type
    if element.width == 32:
        return emit_gather(builder, address, numbers, active, word)
    low = emit_broadcast(builder, builder.trunc(builder.and_(address, I64(3)), word), kind)
    place = builder.add(builder.mul(numbers, emit_splat(kind, element.width // 8)), low)
    base, which = builder.and_(address, I64(~3)), builder.lshr(place, emit_splat(kind, 2))
    shift = builder.shl(builder.and_(place, emit_splat(kind, 3)), emit_splat(kind, 3))
    found = builder.lshr(emit_gather(builder, base, which, active, word), shift)
    return builder.and_(found, emit_splat(kind, (1 << element.width) - 1))


def emit_gather(builder: Any, address: Any, numbers: Any, active: Any, kind: ir.IntType) -> Any:
    """Words of 32 or 64 bits by number (32 bits, signed) from an address on, 0 where not active."""
    found, byte, scale = ir.VectorType(kind, LANES), ir.IntType(8).as_pointer(), ir.IntType(32)
    name = "gather3siv8.si" if kind.width == 32 else "gather.dpq.512"
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(found, [found, byte, numbers.type, active.type, scale]),
        f"llvm.x86.avx512.mask.{name}",
    )
    base = builder.inttoptr(address, byte)
    return builder.call(function, [emit_splat(found, 0), base, numbers, active, scale(kind.width // 8)])
