"""Vector operations of the coding `class`, beside those in `jit`: classes of elements, and who is in a class.

numba's cache looks only at the file of the outermost kernel, not at this one: after a change here, touch
`kernels_classes.py`, `kernels_lists.py` and `kernels_steps.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import COMPILES_FOR_HOST, emit_broadcast, emit_prefetch

CLASSES: Final = 12
"""Classes of exponents (docs/format.md, class)."""

GROUPS: Final = 8
"""Groups of 64 elements whose classes are counted at once. As many as a vector has words."""

BLOCK: Final = 64 * GROUPS
"""Elements whose classes are counted at once."""

DEPOSITS: Final = COMPILES_FOR_HOST and get_host_cpu_features().get("bmi2", False)
"""Whether the machine moves bits to where a mask says in one instruction."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES: Final = ir.VectorType(_I8, 64)
_WORDS: Final = ir.VectorType(_I64, GROUPS)


def _splat(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    if scalar.type.width > vector.element.width:
        scalar = builder.trunc(scalar, vector.element)
    return emit_broadcast(builder, scalar, vector)


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_BYTES, [value] * 64)


def _at(builder: Any, address: Any, offset: int, kind: ir.Type) -> Any:
    return builder.inttoptr(builder.add(address, _I64(offset)), kind.as_pointer())


def _kinds(builder: Any, bits: Any, shift: Any, mask: Any, top: Any, last: Any) -> Any:
    """The classes of 64 elements."""
    exponent = builder.and_(_low_bytes(builder, builder.lshr(bits, shift)), mask)
    below = builder.icmp_unsigned("<", exponent, top)
    return _least(builder, builder.select(below, builder.sub(top, exponent), _constant(0)), last)


def _low_bytes(builder: Any, elements: Any) -> Any:
    """The lowest byte of each of 64 elements of 8 or 16 bits."""
    if elements.type.element.width == 8:
        return elements
    split = builder.bitcast(elements, ir.VectorType(_I8, 128))
    return _shuffle(builder, split, split, range(0, 128, 2))


def _shuffle(builder: Any, left: Any, right: Any, order: Iterable[int]) -> Any:
    indices = list(order)
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(_I32, len(indices)), indices))


def _least(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_unsigned("<", left, right), left, right)


@intrinsic
def separate(
    typingctx: Any,
    address: Any,
    ahead: Any,
    shift: Any,
    mask: Any,
    top: Any,
    found: Any,
    seen: Any,
    room: Any,
    tag: Any,
) -> Any:
    """separate(address: uint64, ahead: int64, shift, mask, top, found, seen, room: uint64, tag): who is in which class.

    Of BLOCK elements at `address`; a class is top - (bits >> shift & mask), held within [0, CLASSES). Writes a word for
    each group of 64 elements, in which bit j says whether element j is in the class, to [CLASSES, GROUPS] words at the
    address `found`, and adds how many those are to as many words at `seen`. room: the address of 4 * GROUPS words. What
    lies `ahead` bytes further on is fetched.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *where, found, seen, room = args[:8]
        for c, inside in enumerate(_insides(builder, where, room, context.get_value_type(tag))):
            builder.store(inside, _at(builder, found, 8 * GROUPS * c, _WORDS), align=1)
            at = _at(builder, seen, 8 * GROUPS * c, _WORDS)
            builder.store(builder.add(builder.load(at, align=1), _populations(builder, inside)), at, align=1)
        return context.get_dummy_value()

    word = types.uint64
    return types.void(word, types.int64, word, word, word, word, word, word, tag), codegen


def _insides(builder: Any, where: Any, room: Any, element: ir.Type) -> list[Any]:
    """Of each class a vector of words: who is in it, as `separate` says; `where` is its first five arguments."""
    address, ahead, shift, mask, top = where
    elements = ir.VectorType(element, 64)
    shift = _splat(builder, shift, elements)
    mask, top, last = _splat(builder, mask, _BYTES), _splat(builder, top, _BYTES), _constant(CLASSES - 1)
    for group in range(GROUPS):
        place = group * 8 * element.width
        for line in range(place, place + 8 * element.width, 64):
            emit_prefetch(builder, builder.add(builder.add(address, ahead), _I64(line)))
        bits = builder.load(_at(builder, address, place, elements), align=1)
        kind = _kinds(builder, bits, shift, mask, top, last)
        for b in range(4):
            has = builder.icmp_unsigned("!=", builder.and_(kind, _constant(1 << b)), _constant(0))
            builder.store(
                builder.bitcast(has, _I64), _at(builder, room, 8 * (GROUPS * b + group), _I64), align=1
            )
    ones = [builder.load(_at(builder, room, 8 * GROUPS * b, _WORDS), align=1) for b in range(4)]
    zeros = [builder.not_(plane) for plane in ones]
    insides = []
    for c in range(CLASSES):
        low, high = ([ones[b] if c >> b & 1 else zeros[b] for b in pair] for pair in ((0, 1), (2, 3)))
        insides.append(builder.and_(builder.and_(*low), builder.and_(*high)))
    return insides


@intrinsic
def pass_over(
    typingctx: Any,
    address: Any,
    ahead: Any,
    shift: Any,
    mask: Any,
    top: Any,
    found: Any,
    left: Any,
    room: Any,
    tag: Any,
) -> Any:
    """pass_over(as `separate`, but `left` for `seen`) -> uint64: classes whose next change is in a block, a bit each.

    Writes the words of `separate` to `found`. left: the address of [2, 2 * GROUPS] int64; of each class how many of it
    lie before its next change, and below that room for how many of it are in the block, which are taken off. The result
    says which classes fall below 0 by that.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *where, found, left, room = args[:8]
        insides = _insides(builder, where, room, context.get_value_type(tag))
        for c, inside in enumerate(insides):
            builder.store(inside, _at(builder, found, 8 * GROUPS * c, _WORDS), align=1)
        counts = [_populations(builder, inside) for inside in insides]
        counts += [ir.Constant(_WORDS, [0] * GROUPS)] * (2 * GROUPS - CLASSES)
        result = _I64(0)
        for half in (0, 1):
            at = _at(builder, left, 8 * GROUPS * half, _WORDS)
            sums = _transposed_sums(builder, counts[GROUPS * half : GROUPS * (half + 1)])
            rest = builder.sub(builder.load(at, align=1), sums)
            builder.store(rest, at, align=1)
            builder.store(sums, _at(builder, left, 8 * GROUPS * (2 + half), _WORDS), align=1)
            below = builder.icmp_signed("<", rest, ir.Constant(_WORDS, [0] * GROUPS))
            bits = builder.zext(builder.bitcast(below, ir.IntType(GROUPS)), _I64)
            result = builder.or_(result, builder.shl(bits, _I64(GROUPS * half)))
        return result

    word = types.uint64
    return word(word, types.int64, word, word, word, word, word, word, tag), codegen


def _transposed_sums(builder: Any, vectors: list[Any]) -> Any:
    """One vector: lane i is the sum of the lanes of vector i. There are as many as each has lanes."""
    for run in (
        1,
        2,
        4,
    ):  # of two vectors comes one, in turns `run` lanes of the first and `run` of the second
        starts = range(0, GROUPS, 2 * run)
        orders = [
            [side + s + skip + i for s in starts for side in (0, GROUPS) for i in range(run)]
            for skip in (0, run)
        ]
        vectors = [
            builder.add(*(_shuffle(builder, a, b, order) for order in orders))
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


@intrinsic
def nth_in(typingctx: Any, words: Any, rank: Any) -> Any:
    """nth_in(words: uint64, rank: int64) -> (int64, int64): the group that has the 1 bit of this rank, its rank in it.

    words: the address of GROUPS words of 64 bits, which have more 1 bits than `rank`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counts = _populations(builder, builder.load(_at(builder, args[0], 0, _WORDS), align=1))
        zeros, ends = ir.Constant(_WORDS, [0] * GROUPS), counts
        for run in (1, 2, 4):  # sums of each lane and all before it
            order = [GROUPS + i - run if i >= run else 0 for i in range(GROUPS)]
            ends = builder.add(ends, _shuffle(builder, zeros, ends, order))
        before = builder.icmp_signed("<=", ends, _splat(builder, args[1], _WORDS))
        mask = builder.zext(builder.bitcast(before, ir.IntType(GROUPS)), _I64)
        group = builder.ctpop(mask)
        start = builder.extract_element(builder.sub(ends, counts), builder.trunc(group, _I32))
        return context.make_tuple(builder, signature.return_type, [group, builder.sub(args[1], start)])

    return types.UniTuple(types.int64, 2)(types.uint64, types.int64), codegen


@intrinsic
def deposit(typingctx: Any, bits: Any, mask: Any) -> Any:
    """deposit(bits, mask: uint64) -> uint64: the lowest bits, one at each 1 of the mask. Needs `DEPOSITS`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64, _I64])
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.bmi.pdep.64"), args
        )

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def rank_in(typingctx: Any, found: Any, seen: Any, inside: Any) -> Any:
    """rank_in(found, seen, inside: uint64) -> int64: how many of a class lie before element `inside` of a block.

    found, seen: addresses of the class's words after `separate`. All of them are looked at: no processor predicts where
    changes are.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found, seen, inside = args
        zero, most, every = (ir.Constant(_WORDS, [value] * GROUPS) for value in (0, 63, 2**64 - 1))
        ahead = builder.sub(
            _splat(builder, inside, _WORDS), ir.Constant(_WORDS, [64 * group for group in range(GROUPS)])
        )
        shift = builder.select(builder.icmp_signed(">", ahead, zero), ahead, zero)
        later = builder.select(
            builder.icmp_unsigned(">", shift, most), zero, builder.shl(every, builder.and_(shift, most))
        )
        rest = _populations(
            builder, builder.and_(builder.load(_at(builder, found, 0, _WORDS), align=1), later)
        )
        total = builder.sub(builder.load(_at(builder, seen, 0, _WORDS), align=1), rest)
        for half in (4, 2, 1):
            order = [(i + half) % GROUPS for i in range(GROUPS)]
            total = builder.add(total, _shuffle(builder, total, total, order))
        return builder.extract_element(total, _I32(0))

    word = types.uint64
    return types.int64(word, word, word), codegen


def _populations(builder: Any, words: Any) -> Any:
    """Of each word how many of its bits are 1."""
    kind = ir.FunctionType(words.type, [words.type])
    name = f"llvm.ctpop.v{words.type.count}i64"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [words])
