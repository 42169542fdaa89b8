"""The same for left operands of 16 bits: integer products.

A 16-bit float times a small integer needs no fp32 multiplier: the left operand becomes int16 with
a power of two a group (the smallest that holds the group's largest value), and x86 multiplies int16
and adds neighbours in one instruction. That is exact for every value within 2^-4 (fp16) or 2^-7
(bf16) of the group's largest, and off by at most 2^-16 of the largest for smaller ones: below what
rounding the inputs to 16 bits already costs. Sums of a group are exact in int32. A group with a NaN
or an infinity gives NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from .cpu_build import T, i64, let, load, local, splat, store, workspace
from .cpu_spec import QuantSpec
from .cpu_tiles import CpuTiles

__all__ = ["integer_step"]


def _arrange(quant: QuantSpec, lanes: int, lhs: Any, words: int) -> tuple[Any, Any, Any]:
    """Return int16 values in the order of the fields, start values of words, scales of groups."""
    per, half = quant.per_word, quant.per_word // 2
    group_words = quant.group // per
    groups = words // group_words
    values = workspace(words * per, "int16")
    starts, scales = workspace(words, "int32"), workspace(groups)
    with T.serial(i64(0), i64(groups)) as group:
        # As integers, floats without their sign keep their order, and NaN is the largest.
        largest = local(1, "int32")
        store(largest, tirx.const(0, "int32"), 0)
        with T.serial(i64(0), i64(quant.group)) as i:
            bits = tirx.reinterpret("int32", load(lhs, group * quant.group + i))
            size = bits & tirx.const(0x7FFFFFFF, "int32")
            store(largest, tirx.max(load(largest, 0, 1, "int32"), size), 0)
        top = let(load(largest, 0, 1, "int32") >> tirx.const(23, "int32"))
        broken = top >= tirx.const(255, "int32")
        exponent = let(tirx.min(tirx.max(top, tirx.const(40, "int32")), tirx.const(200, "int32")))
        scale = tirx.reinterpret("float32", (exponent - 14) << tirx.const(23, "int32"))
        factor = let(tirx.reinterpret("float32", (268 - exponent) << tirx.const(23, "int32")))
        store(scales, tirx.Select(broken, splat(float("nan"), 1), scale), group)
        with T.serial(i64(0), i64(group_words)) as w:
            word = let(group * group_words + w)
            base = let(tirx.floordiv(word, i64(lanes)) * (lanes * per))
            lane = let(base + tirx.floormod(word, i64(lanes)) * 2)
            total = None
            for j in range(per):
                scaled = load(lhs, word * per + j) * factor + splat(0.5, 1)
                limited = tirx.min(
                    tirx.max(tirx.floor(scaled), splat(-32767.0, 1)), splat(32767.0, 1)
                )
                value = let(tirx.Cast("int32", limited))
                total = value if total is None else let(total + value)
                at = lane + (j % half) * (2 * lanes) + j // half
                store(values, tirx.Cast("int16", value), at)
            store(starts, total * tirx.const(-quant.offset, "int32"), word)
    return values, starts, scales


def integer_step(
    quant: QuantSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any, k: int, words: int
) -> Any:
    """Return the code of a step: `step(acc, row, first word)`."""
    from .cpu_quantized import spread_scales, words_per_step

    lanes, per, bits = tiles.lanes, quant.per_word, quant.bits
    half = per // 2
    row_words, row_groups = -(-k // per), -(-k // quant.group)
    group_words = quant.group // per
    packed, scales = buffers["rhs_packed"], buffers["rhs_scale"]
    values, starts, factors = _arrange(quant, lanes, lhs, words)
    vectors, step_words = words_per_step(quant, lanes)
    mask = ((1 << bits) - 1) * 0x10001
    pair = f"int16x{2 * lanes}"

    def step(acc: Any, row: Any, first: Any) -> None:
        count = step_words // group_words
        group = first // group_words
        both = let(load(scales, row * row_groups + group, count) * load(factors, group, count))
        for v in range(vectors):
            at = let(first + v * lanes)
            word = let(load(packed, row * row_words + at, lanes, "uint32"))
            total = load(starts, at, lanes, "int32")
            for j in range(half):
                shifted = word >> splat(bits * j, lanes, "uint32") if j else word
                field = tirx.reinterpret(pair, shifted & splat(mask, lanes, "uint32"))
                x = load(values, at * per + j * (2 * lanes), 2 * lanes, "int16")
                product = tirx.call_llvm_pure_intrin(f"int32x{lanes}", tiles.dot16, field, x)
                total = let(total + product)
            scale = spread_scales(both, count, v, lanes, group_words)
            value = tirx.Cast(f"float32x{lanes}", total)
            store(acc, load(acc, 0, lanes) + scale * value, 0, lanes)

    return step
