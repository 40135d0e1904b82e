"""Vector operations of coding: gaps parted into high and low bits, eight at a time, and where a byte occurs.

numba's cache looks only at the file of the outermost kernel, not at this one: after a change here, touch all files with
kernels.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import GROUP, I64, LANES, emit_broadcast, emit_splat, pointer_of
from .jit_find import emit_note


@intrinsic
def part_gaps(typingctx: Any, positions: Any, before: Any, shift: Any) -> Any:
    """part_gaps(positions: uint64, before: uint32, shift: int64) -> (uint64, uint64, bool).

    Of the 8 ascending uint32 at the address `positions`: the high bits of the gaps between them, a byte each; their low
    `shift` bits, at most 8, one behind the other; and whether all high bits are below 255. `before`: the position
    before the first, -1 modulo 2^32 if there is none.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        vector, wide = ir.VectorType(word, LANES), ir.VectorType(I64, LANES)
        found = builder.load(pointer_of(builder, args[0], vector), align=1)
        order = ir.Constant(vector, [LANES, *range(LANES - 1)])
        previous = builder.shuffle_vector(found, emit_broadcast(builder, args[1], vector), order)
        gaps = builder.zext(builder.sub(builder.sub(found, previous), emit_splat(vector, 1)), wide)
        shift = emit_broadcast(builder, args[2], wide)
        highs = builder.lshr(gaps, shift)
        over = builder.bitcast(builder.icmp_unsigned(">", highs, emit_splat(wide, 254)), ir.IntType(LANES))
        ones = builder.sub(builder.shl(emit_splat(wide, 1), shift), emit_splat(wide, 1))
        places = builder.mul(ir.Constant(wide, list(range(LANES))), shift)
        lows = builder.shl(builder.and_(gaps, ones), places)
        total = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(I64, [wide]), f"llvm.vector.reduce.or.v{LANES}i64"
        )
        narrow = builder.trunc(highs, ir.VectorType(ir.IntType(8), LANES))
        fits = builder.icmp_unsigned("==", over, ir.Constant(over.type, 0))
        parts = [builder.bitcast(narrow, I64), builder.call(total, [lows]), fits]
        return context.make_tuple(builder, signature.return_type, parts)

    returned = types.Tuple([types.uint64, types.uint64, types.boolean])
    return returned(types.uint64, types.uint32, types.int64), codegen


@intrinsic
def note_bytes(typingctx: Any, address: Any, groups: Any, byte: Any, out: Any) -> Any:
    """note_bytes(address: uint64, groups: int64, byte: uint8, out: uint64) -> int64: where a byte is among others.

    Writes the number of each of the `64 * groups` bytes at `address` that is equal, as uint32, in order, to `out`, and
    returns how many. Up to `GROUP` entries more are overwritten. Needs `COMPRESSES`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, word = ir.VectorType(ir.IntType(8), GROUP), ir.IntType(32)
        found = cgutils.alloca_once_value(builder, I64(0))
        wanted = emit_broadcast(builder, args[2], vector)
        with cgutils.for_range(builder, args[1], intp=I64) as loop:
            first = builder.mul(loop.index, I64(GROUP))
            group = builder.load(pointer_of(builder, builder.add(args[0], first), vector), align=1)
            mask = builder.bitcast(builder.icmp_unsigned("==", group, wanted), I64)
            at = builder.add(args[3], builder.mul(builder.load(found), I64(4)))
            count = emit_note(builder, mask, builder.trunc(first, word), at)
            builder.store(builder.add(builder.load(found), count), found)
        return builder.load(found)

    return types.int64(types.uint64, types.int64, types.uint8, types.uint64), codegen
