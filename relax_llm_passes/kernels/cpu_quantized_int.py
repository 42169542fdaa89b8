"""Integer products: the left operand becomes integers too, with a scale for each group.

A float times a small integer needs no fp32 multiplier. With 16 bits the scale is a power of two a
group (the smallest that holds the group's largest value), and x86 multiplies int16 and adds
neighbours in one instruction. For left operands of 16 bits that is exact for every value within
2^-4 (fp16) or 2^-7 (bf16) of the group's largest, and off by at most 2^-15 of the largest for
smaller ones: below what rounding the inputs to 16 bits already costs.

With 8 bits (only when asked for: `QuantSpec.activation_bits`) two 4-bit weights times two left
values are added in one instruction of bytes, half of the work. Each left value is then off by at
most 1/254 of its group's largest, and a result by at most
sum over groups of max|x| / 254 * sum |w|.

Sums of a group are exact in int32. A group with a NaN or an infinity gives NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from .cpu_build import (
    T,
    add_lanes,
    i64,
    let,
    load,
    local,
    reduce_lanes,
    splat,
    store,
    workspace,
)
from .cpu_spec import QuantSpec
from .cpu_tiles import CpuTiles

__all__ = ["Integers", "activation_bits", "integer_step", "integers", "products"]

# Exponents of fp32 between which a group's largest value is taken to be: zeros and tiny groups
# get a scale that is no denormal; 255 is NaN or an infinity.
_SMALLEST, _BROKEN = 40, 255


def activation_bits(quant: QuantSpec, tiles: CpuTiles, lhs_dtype: str, k: int) -> int:
    """Return the bits to which the left operand is rounded: 16, 8, or 0 for fp32 products."""
    asked = quant.activation_bits
    if k < tiles.lanes * quant.group or (lhs_dtype == "float32" and not asked):
        return 0
    # Bytes are for 4-bit weights: products with 8-bit ones would not fit the instruction's int16.
    if asked == 8 and quant.bits == 4 and (tiles.dot8 or tiles.dot8_add):
        return 8
    return 16 if tiles.dot16 else 0


@dataclass(frozen=True)
class Integers:
    """The left operand as integers, in steps of as many groups as a vector has lanes.

    Where the groups are no whole number of steps the last step begins earlier, and the groups that
    it shares with the step before have scale 0 there.

    Attributes
    ----------
    quant : QuantSpec
        How the weights are packed.
    bits : int
        Of the integers: 16 or 8.
    lanes, groups : int
        Groups of a step, groups altogether.
    words : Buffer
        Integers in the order of a word's fields, as int32: for each word first those that meet its
        first field.
    scales, sums : Buffer
        fp32, one for each group of each step: scale, and sum of the integers as int32.
    """

    quant: QuantSpec
    bits: int
    lanes: int
    groups: int
    words: Any
    scales: Any
    sums: Any

    @property
    def steps(self) -> int:
        """Return how many steps there are."""
        return -(-self.groups // self.lanes)

    @property
    def fields(self) -> int:
        """Return how many int32 of the left operand meet one word."""
        return self.quant.per_word * self.bits // 32

    def first_group(self, step: Any) -> Any:
        """Return the first group of a step."""
        first = step * self.lanes
        if self.groups % self.lanes:
            first = tirx.min(first, i64(self.groups - self.lanes))
        return first

    def slot(self, group: Any) -> Any:
        """Return the number of a group, counted with those that are there twice."""
        shift = self.steps * self.lanes - self.groups
        if not shift:
            return group
        last = group >= i64((self.steps - 1) * self.lanes)
        return group + tirx.Select(last, i64(shift), i64(0))


def integers(quant: QuantSpec, lanes: int, lhs: Any, k: int, bits: int) -> Integers:
    """Emit the conversion of one row of K values in fp32; what is not a whole group is left out."""
    groups, group = k // quant.group, quant.group
    steps = -(-groups // lanes)
    per_step = lanes * group
    words = workspace(steps * per_step * bits // 32, "int32")
    scales, sums = workspace(steps * lanes), workspace(steps * lanes, "int32")
    result = Integers(quant, bits, lanes, groups, words, scales, sums)
    whole = max(lanes, quant.per_word)  # values that are put in order at a time
    order = _field_order(quant, bits)
    order = [w + i for w in range(0, whole, quant.per_word) for i in order]
    with T.serial(i64(0), i64(steps)) as step:
        first = let(result.first_group(step))
        start = let(first * group)
        factors, scale = _scales(quant, bits, lanes, lhs, start)
        if groups % lanes:
            number = tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), lanes)
            shared = splat(tirx.Cast("int32", step * lanes - first), lanes)
            scale = tirx.Select(number >= shared, scale, splat(0.0, lanes))
        store(scales, scale, step * lanes, lanes)
        totals = local(lanes * lanes, "int32")
        with T.serial(i64(0), i64(lanes)) as g:
            factor = let(splat(load(factors, g), lanes))
            total = None
            for at in range(0, group, whole):
                parts = []
                for v in range(0, whole, lanes):
                    x = load(lhs, start + g * group + at + v, lanes)
                    value = _rounded(bits, lanes, x * factor)
                    total = value if total is None else let(total + value)
                    parts.append(let(tirx.Cast(f"int{bits}x{lanes}", value)))
                ordered = let(tirx.Shuffle(parts, order))
                count = whole * bits // 32
                ordered = tirx.reinterpret(f"int32x{count}" if count > 1 else "int32", ordered)
                store(words, ordered, (step * per_step + g * group + at) * bits // 32, count)
            store(totals, total, g * lanes, lanes)
        vectors = [load(totals, j * lanes, lanes, "int32") for j in range(lanes)]
        store(sums, add_lanes(vectors, lanes), step * lanes, lanes)
    return result


def _field_order(quant: QuantSpec, bits: int) -> list[int]:
    """Return which integers of a word meet its fields, in the order of the instructions' lanes.

    16 bits: field j of both halves of a word; 8 bits: the low, then the high nibbles of its bytes.
    """
    stride = quant.per_word * bits // 32
    return [i + j for i in range(stride) for j in range(0, quant.per_word, stride)]


def _scales(quant: QuantSpec, bits: int, lanes: int, lhs: Any, start: Any) -> tuple[Any, Any]:
    """Return a buffer of what the values of `lanes` groups are multiplied by, and their scales."""
    largest = local(lanes * lanes, "int32")
    with T.serial(i64(0), i64(lanes)) as group:
        # As integers, floats without their sign keep their order, and NaN is the largest.
        top = None
        for v in range(0, quant.group, lanes):
            value = load(lhs, start + group * quant.group + v, lanes)
            size = tirx.reinterpret(f"int32x{lanes}", value) & splat(0x7FFFFFFF, lanes, "int32")
            top = let(size if top is None else tirx.max(top, size))
        store(largest, top, group * lanes, lanes)
    vectors = [load(largest, j * lanes, lanes, "int32") for j in range(lanes)]
    size = let(reduce_lanes(vectors, lanes, tirx.max))
    broken = size >= splat(_BROKEN << 23, lanes, "int32")
    usual = let(tirx.max(size, splat(_SMALLEST << 23, lanes, "int32")))
    full, shift = f"float32x{lanes}", splat(23, lanes, "int32")
    if bits == 16:
        exponent = let(usual >> shift)
        scale = tirx.reinterpret(full, (exponent - splat(14, lanes, "int32")) << shift)
        factor = tirx.reinterpret(full, (splat(268, lanes, "int32") - exponent) << shift)
    else:
        value = let(tirx.reinterpret(full, usual))
        scale = value * splat(1.0 / 127.0, lanes)
        factor = splat(127.0, lanes) / value
    factors = local(lanes)
    store(factors, factor, 0, lanes)
    return factors, let(tirx.Select(broken, splat(float("nan"), lanes), scale))


def _rounded(bits: int, lanes: int, value: Any) -> Any:
    top = float((1 << (bits - 1)) - 1)
    limited = tirx.min(tirx.max(tirx.nearbyint(value), splat(-top, lanes)), splat(top, lanes))
    return let(tirx.Cast(f"int32x{lanes}", limited))


def products(
    quant: QuantSpec, tiles: CpuTiles, bits: int, word: Any, xs: list[Any], total: Any
) -> Any:
    """Return `total` plus each word's integers times the left operand's, as int32 vectors.

    Parameters
    ----------
    word : Expr
        Vector of uint32.
    xs : list of Expr
        int32 vectors: what meets each field.
    total : Expr or None
        Sums so far.
    """
    lanes = tiles.lanes
    if bits == 16:
        pair = f"int16x{2 * lanes}"
        halves = let(tirx.reinterpret(f"uint16x{2 * lanes}", word))
        mask = (1 << quant.bits) - 1
        for j, x in enumerate(xs):
            field = halves >> splat(quant.bits * j, 2 * lanes, "uint16") if j else halves
            if j < len(xs) - 1:
                field = field & splat(mask, 2 * lanes, "uint16")
            field = tirx.reinterpret(pair, field)
            x = tirx.reinterpret(pair, x)
            product = tirx.call_llvm_pure_intrin(f"int32x{lanes}", tiles.dot16, field, x)
            total = let(product if total is None else total + product)
        return total
    kind, pair = f"int8x{4 * lanes}", f"int16x{2 * lanes}"
    pairs = None
    if tiles.dot8_add and total is None:
        total = splat(0, lanes, "int32")
    for j, x in enumerate(xs):
        field = word >> splat(quant.bits * j, lanes, "uint32") if j else word
        field = tirx.reinterpret(kind, field & splat(0x0F0F0F0F, lanes, "uint32"))
        x = tirx.reinterpret(kind, x)
        if tiles.dot8_add:
            kind32 = f"int32x{lanes}"
            total = let(tirx.call_llvm_pure_intrin(kind32, tiles.dot8_add, total, field, x))
            continue
        product = tirx.call_llvm_pure_intrin(pair, tiles.dot8, field, x)
        # At most 4 products of 15 times 127.
        pairs = let(product if pairs is None else pairs + product)
    if tiles.dot8_add:
        return total
    ones = splat(1, 2 * lanes, "int16")
    product = tirx.call_llvm_pure_intrin(f"int32x{lanes}", tiles.dot16, pairs, ones)
    return let(product if total is None else total + product)


def integer_step(
    quant: QuantSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any, k: int, bits: int
) -> Any:
    """Return steps and the code of one for (N, K) weights: `step(acc, rows, number)`."""
    from .cpu_quantized import group_order, load_in_order, prefetch_words, spread_scales

    lanes, per, group_words = tiles.lanes, quant.per_word, quant.group // quant.per_word
    row_words, row_groups = -(-k // per), -(-k // quant.group)
    packed, scales = buffers["rhs_packed"], buffers["rhs_scale"]
    left = integers(quant, lanes, lhs, k, bits)
    vectors, fields = group_words, left.fields
    order = group_order(lanes, group_words)
    xs, factors, starts = _vectors(left, order)
    # The offset's part of a group's sum: as fp32 once a step for 4 bits. 8-bit weights have larger
    # offsets than values, so that it is taken off while the sums are exact.
    late = quant.bits == 4

    def step(acc: Any, rows: list[Any], number: Any) -> None:
        group = let(left.first_group(number))
        factor = let(load(factors, number * lanes, lanes))
        firsts, row_scales, totals = [], [], []
        for c, row in enumerate(rows):
            firsts.append(let(row * row_words + group * group_words))
            prefetch_words(packed, firsts[-1], lanes * group_words)
            scale = let(load_in_order(scales, row * row_groups + group, order) * factor)
            total = load(acc, c * lanes, lanes)
            if late:
                total = let(total + scale * load(starts, number * lanes, lanes))
            row_scales.append(scale)
            totals.append(total)
        # What meets a word is loaded once for all rows: one by one, LLVM keeps it on the stack.
        for v in range(vectors):
            at = let(number * vectors + v)
            x = [let(load(xs, (at * fields + j) * lanes, lanes, "int32")) for j in range(fields)]
            start = None if late else let(load(starts, at * lanes, lanes, "int32"))
            for c, (first, scale) in enumerate(zip(firsts, row_scales, strict=True)):
                word = let(load(packed, first + v * lanes, lanes, "uint32"))
                product = products(quant, tiles, bits, word, x, start)
                value = tirx.Cast(f"float32x{lanes}", product)
                spread = spread_scales(scale, order, v, lanes, group_words)
                totals[c] = let(totals[c] + spread * value)
        for c, total in enumerate(totals):
            store(acc, total, c * lanes, lanes)

    return left.steps, step


def _vectors(left: Integers, order: list[int]) -> tuple[Any, Any, Any]:
    """Emit what a step loads as vectors: integers by field, factors in order, start values."""
    quant, lanes, fields = left.quant, left.lanes, left.fields
    group_words = quant.group // quant.per_word
    vectors, late = group_words, quant.bits == 4
    total = left.steps * vectors * lanes
    xs, factors = workspace(total * fields, "int32"), workspace(left.steps * lanes)
    starts = workspace(left.steps * lanes) if late else workspace(total, "int32")
    with T.serial(i64(0), i64(left.steps * vectors)) as v:
        at = let(v * (fields * lanes))
        some = [let(load(left.words, at + j * lanes, lanes, "int32")) for j in range(fields)]
        for j, vector in enumerate(_deinterleave(some, lanes)):
            store(xs, vector, at + j * lanes, lanes)
    with T.serial(i64(0), i64(left.steps)) as step:
        at = let(step * lanes)
        store(factors, tirx.Shuffle([let(load(left.scales, at, lanes))], order), at, lanes)
        offset = let(load(left.sums, at, lanes, "int32") * splat(-quant.offset, lanes, "int32"))
        if late:
            offset = tirx.Cast(f"float32x{lanes}", tirx.Shuffle([offset], order))
            store(starts, offset, at, lanes)
    if not late:
        with T.serial(i64(0), i64(total)) as word:
            store(starts, tirx.const(0, "int32"), word)
        with T.serial(i64(0), i64(left.steps * lanes)) as group:
            offset = load(left.sums, group, 1, "int32") * tirx.const(-quant.offset, "int32")
            store(starts, offset, group * group_words)
    return xs, factors, starts


def _deinterleave(vectors: list[Any], lanes: int) -> list[Any]:
    """Return vectors of every n-th element of `n` vectors, a power of two."""
    if len(vectors) == 1:
        return vectors
    even, odd = list(range(0, 2 * lanes, 2)), list(range(1, 2 * lanes, 2))
    halves = []
    for indices in (even, odd):
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        halves.append([let(tirx.Shuffle([a, b], indices)) for a, b in pairs])
    first, second = (_deinterleave(half, lanes) for half in halves)
    return [vector for pair in zip(first, second, strict=True) for vector in pair]
