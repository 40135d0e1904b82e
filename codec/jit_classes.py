"""Vector operations of the coding `class`, beside those in `jit`: classes of elements, and who is in a class.

numba's cache looks at the file a kernel is in, not at this one: after a change here, touch `kernels_classes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

CLASSES: Final = 12
"""Classes of exponents (docs/format.md, class)."""

GROUPS: Final = 8
"""Groups of 64 elements whose classes are counted at once. Sums of a class each must fit a byte: at most 23."""

BLOCK: Final = 64 * GROUPS
"""Elements whose classes are counted at once."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES: Final = ir.VectorType(_I8, 64)


def _splat(builder: Any, scalar: Any, vector: ir.VectorType) -> Any:
    if scalar.type.width > vector.element.width:
        scalar = builder.trunc(scalar, vector.element)
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, _I32(0))
    return builder.shuffle_vector(
        one, undefined, ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    )


def _constant(value: int) -> ir.Constant:
    return ir.Constant(_BYTES, [value] * 64)


def _at(builder: Any, address: Any, offset: int, kind: ir.Type) -> Any:
    return builder.inttoptr(builder.add(address, _I64(offset)), kind.as_pointer())


@intrinsic
def classify(
    typingctx: Any, address: Any, shift: Any, mask: Any, top: Any, classes: Any, counts: Any, tag: Any
) -> Any:
    """classify(address, shift, mask, top, classes, counts: uint64, tag): classes of BLOCK elements at `address`.

    A class is top - (bits >> shift & mask), held within [0, CLASSES). Writes a byte each to the address `classes`,
    and CLASSES int64 to the address `counts`: how many elements are in each.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, shift, mask, top, classes, counts = args[:6]
        elements = ir.VectorType(context.get_value_type(tag), 64)
        shift = _splat(builder, shift, elements)
        mask, top, last = _splat(builder, mask, _BYTES), _splat(builder, top, _BYTES), _constant(CLASSES - 1)
        sums = [_constant(0)] * CLASSES
        for group in range(GROUPS):
            bits = builder.load(_at(builder, address, group * 8 * tag.bitwidth, elements), align=1)
            exponent = builder.and_(_low_bytes(builder, builder.lshr(bits, shift)), mask)
            below = builder.icmp_unsigned("<", exponent, top)
            kind = builder.select(below, builder.sub(top, exponent), _constant(0))
            kind = _least(builder, kind, last)
            builder.store(kind, _at(builder, classes, group * 64, _BYTES), align=1)
            for c in range(1, CLASSES):
                sums[c] = builder.add(sums[c], _least(builder, kind, _constant(c)))
        _store_counts(builder, sums, counts)
        return context.get_dummy_value()

    word = types.uint64
    return types.void(word, word, word, word, word, word, tag), codegen


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


def _store_counts(builder: Any, sums: list[Any], counts: Any) -> None:
    """Store how many elements are in each class, from the sums, by lanes, of what is the least of c and a class.

    The sum of min(class, c), less that of min(class, c - 1), is how many elements have at least class c.
    """
    fours = [_totals(builder, sums[c : c + 4]) for c in range(0, CLASSES, 4)]
    none, all_of_them = (ir.Constant(fours[0].type, [value] * 4) for value in (0, -BLOCK))
    before = (
        _shuffle(builder, *pair, range(3, 7)) for pair in zip([all_of_them, *fours], fours, strict=False)
    )
    least = [builder.sub(*pair) for pair in zip(fours, before, strict=True)]
    for i, pair in enumerate(zip(least, [*least[1:], none], strict=True)):
        count = builder.sub(pair[0], _shuffle(builder, *pair, range(1, 5)))
        builder.store(count, _at(builder, counts, 32 * i, count.type), align=1)


def _totals(builder: Any, vectors: list[Any]) -> Any:
    """Four int64: the sums of four vectors of 64 bytes."""
    halves, words = ir.VectorType(ir.IntType(16), 32), ir.VectorType(_I64, 8)
    vectors = [_add_pairs(builder, builder.bitcast(v, halves), 8) for v in vectors]
    for run in (16, 8):  # two vectors become one, until each has a quarter of it
        vectors = [_fold(builder, a, b, run) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    total = _add_pairs(builder, builder.bitcast(vectors[0], ir.VectorType(_I32, 16)), 16)
    total = _add_pairs(builder, builder.bitcast(total, words), 32)
    return builder.add(*(_shuffle(builder, total, total, range(i, 8, 2)) for i in (0, 1)))


def _add_pairs(builder: Any, vector: Any, bits: int) -> Any:
    """The lower `bits` of each lane, which has twice as many, and its upper ones, added up."""
    lower = ir.Constant(vector.type, [(1 << bits) - 1] * vector.type.count)
    upper = builder.lshr(vector, ir.Constant(vector.type, [bits] * vector.type.count))
    return builder.add(builder.and_(vector, lower), upper)


def _fold(builder: Any, left: Any, right: Any, run: int) -> Any:
    """One vector of 32 lanes from two: of each, its runs of `run` lanes added in pairs, left's first."""
    blocks = range(0, 64, 2 * run)
    orders = ([b + skip + i for b in blocks for i in range(run)] for skip in (0, run))
    return builder.add(*(_shuffle(builder, left, right, order) for order in orders))


@intrinsic
def members(typingctx: Any, classes: Any, kind: Any) -> Any:
    """members(classes, kind: uint64) -> uint64: which of the 64 bytes at `classes` are `kind`, a bit each."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.load(_at(builder, args[0], 0, _BYTES), align=1)
        return builder.bitcast(builder.icmp_unsigned("==", found, _splat(builder, args[1], _BYTES)), _I64)

    return types.uint64(types.uint64, types.uint64), codegen


@intrinsic
def population(typingctx: Any, mask: Any) -> Any:
    """population(mask: uint64) -> int64: how many of its bits are 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), codegen


@intrinsic
def leading_zeros(typingctx: Any, word: Any) -> Any:
    """leading_zeros(word: uint64) -> int64, for a word that is not 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctlz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen
