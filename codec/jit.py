"""How kernels are compiled, and the few operations on raw addresses that numba does not have.

Widths come in through a *tag*, an unsigned numpy scalar whose value is ignored and whose type selects the
variant: one source, one cached variant a width. Vector operations are written as generic LLVM vectors, which
LLVM lowers to whatever the machine has.

numba's cache looks only at the file of the outermost kernel, the one that Python calls: not at this one, nor at those
of kernels that it calls. After a change here, touch all files with kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

COMPILES_FOR_HOST: Final = not config.CPU_NAME and config.CPU_FEATURES is None and bool(config.ENABLE_AVX)
"""Whether numba makes use of all that this machine has. Otherwise LLVM may not know an instruction of its own."""

TAGS: Final = {1: np.uint8(0), 2: np.uint16(0), 4: np.uint32(0), 8: np.uint64(0)}
"""Tag of each width in bytes."""

GROUP: Final = 64
"""Elements `differ` compares at once: one bit each in a 64-bit mask."""

LANES: Final = 8
"""Words that `weigh_words` handles in one vector: one AVX-512 register, or two of AVX2."""

LINE_BYTES: Final = 64
"""Bytes of a cache line."""

GOLDEN: Final = 0x9E3779B97F4A7C15
MIX1: Final = 0xBF58476D1CE4E5B9
MIX2: Final = 0x94D049BB133111EB
MIX3: Final = 0xD6E8FEB86659FD93
"""splitmix64's increment, the multipliers of its finaliser, and one more (docs/format.md, state digest)."""

LOW: Final = 2**32 - 1
"""The lower half of a word."""

OWN: Final = np.uint8(0)
SHARED: Final = np.uint16(0)
"""Tags of how weights are made: `mix_1`, each lane by itself, or `mix_2`, half of it for both. As with widths, the type
selects the variant."""

I64: Final = ir.IntType(64)


def kernel(function: F) -> F:
    """Compile on first call, without the GIL; keep the machine code on disk where a folder can be written."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return cast(F, njit(cache=True, **options)(function))
    except RuntimeError:  # neither the package's folder nor the user's cache folder can be written
        return cast(F, njit(**options)(function))


def pointer_of(builder: Any, address: Any, kind: ir.Type) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


@intrinsic
def width(typingctx: Any, tag: Any) -> Any:
    """width(tag) -> int64: bytes of an element."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return I64(tag.bitwidth // 8)

    return types.int64(tag), codegen


@intrinsic
def load(typingctx: Any, address: Any, tag: Any) -> Any:
    """load(address: uint64, tag) -> unsigned: the element at `address`, which may be unaligned."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer_of(builder, args[0], context.get_value_type(tag)), align=1)

    return tag(types.uint64, tag), codegen


@intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """store(address: uint64, value): write an element to `address`, which may be unaligned."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer_of(builder, args[0], args[1].type), align=1)
        return context.get_dummy_value()

    return types.void(types.uint64, value), codegen


@intrinsic
def trailing_zeros(typingctx: Any, mask: Any) -> Any:
    """trailing_zeros(mask: uint64) -> int64, for a mask that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def differ(typingctx: Any, left: Any, right: Any, tag: Any) -> Any:
    """differ(left, right: uint64, tag) -> uint64: bit j says whether elements j of two groups differ."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        group = ir.VectorType(context.get_value_type(tag), GROUP)
        a, b = (builder.load(pointer_of(builder, args[i], group), align=1) for i in (0, 1))
        return builder.bitcast(builder.icmp_unsigned("!=", a, b), I64)

    return types.uint64(types.uint64, types.uint64, tag), codegen


@intrinsic
def prefetch(typingctx: Any, address: Any) -> Any:
    """prefetch(address: uint64): have its cache line fetched. Any address will do; nothing is read."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.uint64), codegen


def emit_prefetch(builder: Any, address: Any) -> None:
    byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, byte), word(0), word(3), word(1)])  # read, keep, data


@intrinsic
def weigh_words(typingctx: Any, address: Any, vectors: Any, z0: Any, z1: Any, mix: Any, tag: Any) -> Any:
    """weigh_words(address: uint64, vectors: int64, z0, z1: uint64, mix, tag) -> (uint64, uint64): the digest of words.

    Of the `8 * vectors` words at `address`. z0 and z1 are seed + word * GOLDEN of the first, a lane each, but z1 is the
    seed alone under `SHARED`; mix is the tag of either.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, vectors, *starts = args[:4]
        vector = ir.VectorType(I64, LANES)
        firsts = emit_firsts(builder, starts, mix)
        entry = builder.block
        loop, done = builder.append_basic_block("weigh"), builder.append_basic_block("weighed")
        builder.cbranch(builder.icmp_signed(">", vectors, I64(0)), loop, done)
        builder.position_at_end(loop)
        index = builder.phi(I64)
        index.add_incoming(I64(0), entry)
        zs = [builder.phi(vector) for _ in starts]
        sums = [builder.phi(vector) for _ in starts]
        at = builder.add(address, builder.mul(index, I64(LANES * 8)))
        words = builder.load(pointer_of(builder, at, vector), align=1)
        after = builder.add(index, I64(1))
        index.add_incoming(after, loop)
        contents = (words, emit_reverse(builder, words, tag.bitwidth))
        totals = emit_weighed(builder, sums, contents, zs, mix)
        for phis, initials, values in (
            (zs, firsts, emit_next(builder, zs, mix)),
            (sums, [emit_splat(vector, 0)] * 2, totals),
        ):
            for phi, initial, value in zip(phis, initials, values, strict=True):
                phi.add_incoming(initial, entry)
                phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed("<", after, vectors), loop, done)
        builder.position_at_end(done)
        merged = [builder.phi(vector) for _ in starts]
        for phi, total in zip(merged, totals, strict=True):
            phi.add_incoming(emit_splat(vector, 0), entry)
            phi.add_incoming(total, loop)
        lanes = [emit_sum(builder, phi) for phi in merged]
        return context.make_tuple(builder, signature.return_type, lanes)

    result = types.UniTuple(types.uint64, 2)
    return result(types.uint64, types.int64, types.uint64, types.uint64, mix, tag), codegen


def emit_reverse(builder: Any, words: Any, bits: int) -> Any:
    """Each word with its elements, of so many bits, in reverse order."""
    each = 64 // bits
    elements = ir.VectorType(ir.IntType(bits), LANES * each)
    order = [i // each * each + each - 1 - i % each for i in range(LANES * each)]
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES * each), order)
    split = builder.bitcast(words, elements)
    return builder.bitcast(builder.shuffle_vector(split, split, mask), words.type)


def emit_splat(vector: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(vector, [value & (2**vector.element.width - 1)] * vector.count)


def emit_broadcast(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
    return builder.shuffle_vector(
        one,
        ir.Constant(vector, ir.Undefined),
        ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count),
    )


def emit_firsts(builder: Any, starts: Sequence[Any], mix: Any) -> list[Any]:
    """What the weights of the first vector of words are made of, a lane each, from what those of its first word are."""
    vector = ir.VectorType(I64, LANES)
    ramp = ir.Constant(vector, [i * GOLDEN & (2**64 - 1) for i in range(LANES)])
    first, second = (emit_broadcast(builder, z, vector) for z in starts)
    return [builder.add(first, ramp), builder.add(second, ramp) if is_own(mix) else second]


def emit_next(builder: Any, zs: Sequence[Any], mix: Any) -> list[Any]:
    """The same of the next vector."""
    step = emit_splat(zs[0].type, LANES * GOLDEN)
    return [builder.add(zs[0], step), builder.add(zs[1], step) if is_own(mix) else zs[1]]


def emit_weighed(
    builder: Any, sums: Sequence[Any], contents: Sequence[Any], zs: Sequence[Any], mix: Any
) -> list[Any]:
    """sums + contents * weights, a lane each. zs: what the weights are made of."""
    weights = emit_weights(builder, zs, mix)
    return [
        builder.add(total, builder.mul(content, weight))
        for total, content, weight in zip(sums, contents, weights, strict=True)
    ]


def emit_weights(builder: Any, zs: Sequence[Any], mix: Any) -> list[Any]:
    """Vectors of weights, a lane each, of vectors seed + word * GOLDEN; of mix_2, the second is the seed alone."""
    vector = zs[0].type

    def shaken(z: Any, bits: int) -> Any:
        return builder.xor(z, builder.lshr(z, emit_splat(vector, bits)))

    def times(z: Any, factor: int) -> Any:
        return builder.mul(z, emit_splat(vector, factor))

    if is_own(mix):
        mixed = [shaken(times(shaken(times(shaken(z, 30), MIX1), 27), MIX2), 31) for z in zs]
    else:
        low, half = emit_splat(vector, LOW), emit_splat(vector, 32)
        turned = builder.or_(builder.shl(zs[0], half), builder.lshr(zs[0], half))
        odd = builder.or_(
            turned, emit_splat(vector, 1)
        )  # a product of halves takes a third of the time of whole words
        both = builder.xor(turned, builder.mul(builder.and_(zs[0], low), builder.and_(odd, low)))
        mixed = [shaken(times(both, MIX2), 32), shaken(times(builder.xor(both, zs[1]), MIX3), 32)]
    return [builder.or_(z, emit_splat(vector, 1)) for z in mixed]


def is_own(mix: Any) -> bool:
    """Whether a tag, as a type, is that of `OWN`."""
    return bool(mix.bitwidth == OWN.itemsize * 8)


def emit_sum(builder: Any, vector: Any) -> Any:
    kind = vector.type
    name = f"llvm.vector.reduce.add.v{kind.count}i{kind.element.width}"
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind.element, [kind]), name)
    return builder.call(function, [vector])


@intrinsic
def leading_zeros(typingctx: Any, word: Any) -> Any:
    """leading_zeros(word: uint64) -> int64, for a word that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen
