"""The vector loop that steps changed elements on: fetch ahead, read, step, weigh, eight changes at a time.

One loop, so that memory is under way as long as there is work: out of memory a change takes what its cache line takes.

numba's cache looks only at the file of the outermost kernel, not at this one: after a change here, touch
`kernels_apply.py`.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import I64, LANES, emit_broadcast, emit_prefetch, emit_splat, emit_sum, pointer_of
from .jit_changes import emit_moved, emit_words
from .jit_find import emit_compress

AHEAD: Final = 64
"""Changes between the one that is fetched and the one that is worked on. In a loop that did nothing else 32 to 256 were
as fast, 16 slower."""


@intrinsic
def step_vectors(
    typingctx: Any,
    origin: Any,
    positions: Any,
    steps: Any,
    olds: Any,
    news: Any,
    far: Any,
    vectors: Any,
    last: Any,
    shift: Any,
    write: Any,
    seed0: Any,
    seed1: Any,
    mix: Any,
    tag: Any,
) -> Any:
    """step_vectors(origin, positions, steps, olds, news, far: uint64, vectors, last, shift: int64, write: bool,
    seed0, seed1: uint64, mix, tag) -> (int64, int64, uint64, uint64).

    How many of `8 * vectors` changes in one tensor are escaped, how many have the step 0, and what the others move the
    digest by. The element at position p (int64) is `width * p` bytes from address `origin`, and element p + shift of
    its tensor. To `olds` go those elements, to `news` what they are after their steps (bytes, in zigzag); with `write`,
    that goes to memory, too. Escapes have the step 255: their numbers go to `far` (int64, with room for 8 more), and
    new bits of theirs are of no meaning. Changes are fetched up to the 8 from number `last` on. Needs `COMPRESSES`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        origin, positions, steps, olds, news, far, vectors, last, shift, write, seed0, seed1 = args[:12]
        element, nbytes = ir.IntType(tag.bitwidth), tag.bitwidth // 8
        vector, elements = ir.VectorType(I64, LANES), ir.VectorType(element, LANES)
        sums = [cgutils.alloca_once_value(builder, emit_splat(vector, 0)) for _ in range(2)]
        found, zeros = (cgutils.alloca_once_value(builder, I64(0)) for _ in range(2))
        seeds = [emit_broadcast(builder, seed, vector) for seed in (seed0, seed1)]
        by = emit_broadcast(builder, shift, vector)
        ramp = ir.Constant(vector, list(range(LANES)))
        with cgutils.for_range(builder, vectors, intp=I64) as loop:
            first = builder.mul(loop.index, I64(LANES))

            def at(base: Any, index: Any, width: int) -> Any:
                return builder.add(base, builder.mul(index, I64(width)))

            def address(index: Any) -> Any:
                position = builder.load(pointer_of(builder, at(positions, index, 8), I64), align=8)
                return at(origin, position, nbytes)

            soon = builder.add(first, I64(AHEAD))
            soon = builder.select(builder.icmp_signed("<", soon, last), soon, last)
            for k in range(LANES):
                emit_prefetch(builder, address(builder.add(soon, I64(k))))
            places = [address(builder.add(first, I64(k))) for k in range(LANES)]
            old = ir.Constant(elements, ir.Undefined)
            for k, place in enumerate(places):
                one = builder.load(pointer_of(builder, place, element), align=1)
                old = builder.insert_element(old, one, ir.IntType(32)(k))
            step = builder.load(
                pointer_of(builder, builder.add(steps, first), ir.VectorType(ir.IntType(8), LANES)), align=1
            )
            step = builder.zext(step, vector)
            escaped = builder.icmp_unsigned("==", step, emit_splat(vector, 255))
            none = builder.icmp_unsigned("==", step, emit_splat(vector, 0))
            ones = builder.sub(emit_splat(vector, 0), builder.and_(step, emit_splat(vector, 1)))
            wide = builder.zext(old, vector) if nbytes < 8 else old
            moved = builder.xor(builder.lshr(step, emit_splat(vector, 1)), ones)
            new = builder.add(wide, moved)
            new = builder.trunc(new, elements) if nbytes < 8 else new
            for values, out in ((old, olds), (new, news)):
                builder.store(values, pointer_of(builder, at(out, first, nbytes), elements), align=1)
            with builder.if_then(write):
                for k, place in enumerate(places):
                    one = builder.extract_element(new, ir.IntType(32)(k))
                    builder.store(one, pointer_of(builder, place, element), align=1)
            numbers = builder.add(emit_broadcast(builder, first, vector), ramp)
            before = builder.load(found)
            listed = emit_compress(builder, numbers, escaped)
            builder.store(listed, pointer_of(builder, at(far, before, 8), vector), align=1)
            for marks, total in ((escaped, found), (none, zeros)):
                bits = builder.zext(builder.bitcast(marks, ir.IntType(LANES)), I64)
                builder.store(builder.add(builder.load(total), builder.ctpop(bits)), total)
            back = builder.zext(new, vector) if nbytes < 8 else new
            differ = builder.select(escaped, emit_splat(vector, 0), builder.sub(back, wide))
            here = builder.load(pointer_of(builder, at(positions, first, 8), vector), align=1)
            word, slots = emit_words(builder, builder.add(here, by), tag.bitwidth)
            totals = emit_moved(builder, [builder.load(s) for s in sums], differ, word, slots, seeds, mix)
            for total, place in zip(totals, sums, strict=True):
                builder.store(total, place)
        lanes = [emit_sum(builder, builder.load(total)) for total in sums]
        return context.make_tuple(
            builder, signature.return_type, [builder.load(found), builder.load(zeros), *lanes]
        )

    u64, i64 = types.uint64, types.int64
    returned = types.Tuple([i64, i64, u64, u64])
    return returned(u64, u64, u64, u64, u64, u64, i64, i64, i64, types.boolean, u64, u64, mix, tag), codegen
