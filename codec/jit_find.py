"""Vector operations of the loop that finds changes; see `jit`.

numba's cache looks only at the file of the outermost kernel, not at this one: after a change here, touch all files with
kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import (
    COMPILES_FOR_HOST,
    GROUP,
    I64,
    LANES,
    emit_broadcast,
    emit_firsts,
    emit_next,
    emit_prefetch,
    emit_reverse,
    emit_splat,
    emit_sum,
    emit_weighed,
    pointer_of,
)

COMPRESSES: Final = COMPILES_FOR_HOST and get_host_cpu_features().get("avx512vbmi2", False)
"""Whether the machine moves marked bytes of a vector together in one instruction. Such a one has all of AVX-512 that is
used in this package, as gathers."""

NOTED: Final = 16
"""Changes of a group that are noted without a branch: it has hardly ever more."""


@intrinsic
def compare_groups(
    typingctx: Any,
    old: Any,
    new: Any,
    ahead: Any,
    groups: Any,
    z0: Any,
    z1: Any,
    mix: Any,
    masks: Any,
    tag: Any,
) -> Any:
    """compare_groups(old, new: uint64, ahead, groups: int64, z0, z1: uint64, mix, masks: uint64, tag)
    -> (uint64, uint64).

    `differ` and `weigh_words` at once, for at least one group: a word for each at the address `masks`, whose bit j says
    whether elements j differ, and the digest of the new ones. z0, z1 and mix are as there; what lies `ahead` bytes
    further on is fetched.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def keep(index: Any, mask: Any, state: Any) -> Any:
            at = builder.add(args[7], builder.mul(index, I64(8)))
            builder.store(mask, pointer_of(builder, at, I64), align=1)
            return state

        lanes, _ = _groups(builder, args[:6], mix, tag, I64(0), keep)
        return context.make_tuple(builder, signature.return_type, lanes)

    u64, i64 = types.uint64, types.int64
    return types.UniTuple(u64, 2)(u64, u64, i64, i64, u64, u64, mix, u64, tag), codegen


@intrinsic
def note_groups(
    typingctx: Any,
    old: Any,
    new: Any,
    ahead: Any,
    groups: Any,
    z0: Any,
    z1: Any,
    mix: Any,
    relative: Any,
    positions: Any,
    tag: Any,
) -> Any:
    """note_groups(as `compare_groups` up to mix, relative: uint32, positions: uint64, tag) -> (uint64, uint64, uint64).

    Writes relative + i for each element i that differs, as uint32, in order, to the address `positions`; returns how
    many, and the digest. Up to `GROUP` entries more are overwritten. Needs `COMPRESSES`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)

        def note(index: Any, mask: Any, found: Any) -> Any:
            first = builder.add(args[7], builder.trunc(builder.mul(index, I64(GROUP)), word))
            return builder.add(
                found, emit_note(builder, mask, first, builder.add(args[8], builder.mul(found, I64(4))))
            )

        lanes, found = _groups(builder, args[:6], mix, tag, I64(0), note)
        return context.make_tuple(builder, signature.return_type, [found, *lanes])

    u64, i64 = types.uint64, types.int64
    return types.UniTuple(u64, 3)(u64, u64, i64, i64, u64, u64, mix, types.uint32, u64, tag), codegen


def _groups(
    builder: Any, args: Any, mix: Any, tag: Any, state: Any, each: Callable[[Any, Any, Any], Any]
) -> Any:
    """The loop over groups: (digest, last state). `each` makes a state of a group's number, mask and the one before."""
    old, new, ahead, groups, *starts = args
    vector = ir.VectorType(I64, LANES)
    firsts = emit_firsts(builder, starts, mix)
    entry = builder.block
    loop, done = builder.append_basic_block("compare"), builder.append_basic_block("compared")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, current = builder.phi(I64), builder.phi(state.type)
    zs, sums = ([builder.phi(vector) for _ in firsts] for _ in range(2))
    group = builder.mul(index, I64(GROUP * tag.bitwidth // 8))
    after_zs, totals, mask = zs, sums, I64(0)
    for k in range(GROUP * tag.bitwidth // (64 * LANES)):
        shift = builder.add(group, I64(8 * LANES * k))
        sides = [builder.add(side, shift) for side in (old, new)]
        marks, contents = _compared(builder, sides, ahead, tag)
        totals = emit_weighed(builder, totals, contents, after_zs, mix)
        after_zs = emit_next(builder, after_zs, mix)
        bits = builder.zext(builder.bitcast(marks, ir.IntType(marks.type.count)), I64)
        mask = builder.or_(mask, builder.shl(bits, I64(marks.type.count * k)))
    result = each(index, mask, current)
    after = builder.add(index, I64(1))
    phis = [(index, I64(0), after), (current, state, result)]
    phis += zip(zs, firsts, after_zs, strict=True)
    phis += zip(sums, [emit_splat(vector, 0)] * 2, totals, strict=True)
    for phi, initial, value in phis:
        phi.add_incoming(initial, entry)
        phi.add_incoming(value, builder.block)
    builder.cbranch(builder.icmp_signed("<", after, groups), loop, done)
    builder.position_at_end(done)
    return [emit_sum(builder, total) for total in totals], result


def _compared(builder: Any, sides: list[Any], ahead: Any, tag: Any) -> Any:
    """One vector of both sides: which elements differ; what each lane of the digest weighs of the new one."""
    vector = ir.VectorType(I64, LANES)
    elements = ir.VectorType(ir.IntType(tag.bitwidth), LANES * 64 // tag.bitwidth)
    for at in sides:
        emit_prefetch(builder, builder.add(at, ahead))
    words = builder.load(pointer_of(builder, sides[1], vector), align=1)
    before = builder.load(pointer_of(builder, sides[0], elements), align=1)
    marks = builder.icmp_unsigned("!=", builder.bitcast(words, elements), before)
    return marks, (words, emit_reverse(builder, words, tag.bitwidth))


def emit_note(builder: Any, mask: Any, relative: Any, positions: Any) -> Any:
    """Write relative + j for each bit j of the mask to an address; how many bits it has."""
    words = ir.VectorType(ir.IntType(32), NOTED)
    places = ir.Constant(ir.VectorType(ir.IntType(8), GROUP), list(range(GROUP)))
    offsets = emit_compress(builder, places, builder.bitcast(mask, ir.VectorType(ir.IntType(1), GROUP)))
    base = emit_broadcast(builder, relative, words)

    def put(first: int) -> None:
        order = ir.Constant(words, list(range(first, first + NOTED)))
        part = builder.zext(builder.shuffle_vector(offsets, offsets, order), words)
        at = pointer_of(builder, builder.add(positions, I64(4 * first)), words)
        builder.store(builder.add(part, base), at, align=1)

    count = builder.ctpop(mask)
    put(0)
    with builder.if_then(builder.icmp_unsigned(">", count, I64(NOTED)), likely=False):
        for first in range(NOTED, GROUP, NOTED):
            put(first)
    return count


def emit_compress(builder: Any, content: Any, marks: Any) -> Any:
    """The marked elements of a vector of 64 bytes, at its beginning; after them anything."""
    kind = ir.FunctionType(content.type, [content.type, content.type, marks.type])
    name = f"llvm.x86.avx512.mask.compress.v{content.type.count}i{content.type.element.width}"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [content, emit_splat(content.type, 0), marks])
