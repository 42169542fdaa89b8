"""Matrix-vector products by group-quantised weights, dequantised in the registers.

A vector of words holds `per_word` vectors of integers, one to each field of bits. A field is not
shifted down: masked where it is, it is the integer times a power of two, exact in fp32, and the
left operand was divided by that power beforehand. So a vector of integers costs a mask, a
conversion and a multiply-add. The offset is paid once a word: the sum over a group of
(integer - offset) x is the sum of integer x, begun at -offset times the sum of x. Scales are
applied to a group's sum, as vectors.

Sums are fp32 throughout: nothing is rounded to the weight's or the scale's type in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx

from .cpu_build import (
    T,
    add_lanes,
    ceil_div,
    divides,
    i64,
    let,
    load,
    local,
    prefetch,
    splat,
    store,
    workspace,
)
from .cpu_gemv import emit_finish_tail
from .cpu_quantized_int import integer_step
from .cpu_spec import GemmSpec, QuantSpec
from .cpu_tiles import CpuTiles
from .cpu_weights import row_reader

__all__ = [
    "arrange",
    "emit_quantised_gemv",
    "field",
    "prefetch_words",
    "spread_scales",
    "words_per_step",
]

# Emits acc += one row's products over a step of words: (acc, row, first word).
Step = Callable[[Any, Any, Any], None]

# A step is too many instructions for the core to look far ahead, so that words are asked for this
# many bytes before they are used: 1.3 times the speed of int4 on Zen 3, the same from 1.5 to 3 KiB.
_PREFETCH_BYTES, _LINE_BYTES, _WORD_BYTES = 2048, 64, 4


def arrange(quant: QuantSpec, lanes: int, lhs: Any, k: int, words: int, m: Any) -> tuple[Any, Any]:
    """Return `m` rows of the left operand in the order of the fields, and the words' start values.

    The first has `words` times the integers of a word for each row, the second `words`.
    """
    per = quant.per_word
    fields, starts = workspace(m * (words * per)), workspace(m * words)
    with T.serial(i64(0), i64(m) * words) as word:
        row = let(tirx.floordiv(word, i64(words)))
        first = let(row * k + (word - row * words) * per)
        # Blocks of `lanes` words; a row is a whole number of them.
        block = let(tirx.floordiv(word, i64(lanes)) * (lanes * per))
        lane = let(block + tirx.floormod(word, i64(lanes)))
        total = None
        for j in range(per):
            x = let(load(lhs, first + j))
            total = x if total is None else let(total + x)
            # The highest field is shifted down instead: in place it would be the sign.
            power = 1.0 if j == per - 1 else 2.0 ** (-quant.bits * j)
            store(fields, x * splat(power, 1), lane + j * lanes)
        store(starts, total * splat(-float(quant.offset), 1), word)
    return fields, starts


def field(quant: QuantSpec, lanes: int, word: Any, j: int) -> Any:
    """Return the j-th integers of a vector of words as fp32, times the field's power of two."""
    if j == quant.per_word - 1:
        value = word >> splat(32 - quant.bits, lanes, "uint32")
    else:
        mask = ((1 << quant.bits) - 1) << (quant.bits * j)
        value = word & splat(mask, lanes, "uint32")
    return tirx.Cast(f"float32x{lanes}", tirx.reinterpret(f"int32x{lanes}", value))


def prefetch_words(packed: Any, at: Any, words: int) -> None:
    """Ask for the words of a later step."""
    ahead = at + _PREFETCH_BYTES // _WORD_BYTES
    for line in range(0, words, _LINE_BYTES // _WORD_BYTES):
        prefetch(packed, ahead + line)


def words_per_step(quant: QuantSpec, lanes: int) -> tuple[int, int]:
    """Return (vectors, words) of a step: as many as share one vector of scales."""
    group_words = quant.group // quant.per_word
    vectors = max(1, lanes // max(1, lanes // group_words))
    if group_words > lanes:
        vectors *= group_words // lanes
    return vectors, vectors * lanes


def emit_quantised_gemv(
    spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any
) -> None:
    """Emit the product of one row; `lhs` is fp32."""
    quant = spec.quant
    assert quant is not None
    lanes, n, k, per = tiles.lanes, spec.n, spec.k, quant.per_word
    _, step_words = words_per_step(quant, lanes)
    steps = k // (step_words * per)
    done = steps * step_words * per
    read = row_reader(spec, buffers)
    step = None
    if steps:
        integers = bool(tiles.dot16) and spec.lhs_dtype != "float32"
        make = integer_step if integers else _float_step
        step = make(quant, tiles, buffers, lhs, k, steps * step_words)

    with T.parallel(i64(0), i64(ceil_div(n, lanes))) as group:
        folded = local(lanes * lanes)
        with T.serial(i64(0), i64(lanes)) as part:
            row = group * lanes + part
            row = let(tirx.min(row, i64(n - 1)) if not divides(lanes, n) else row)
            acc = local(lanes)
            store(acc, splat(0.0, lanes), 0, lanes)
            if step is not None:
                with T.serial(i64(0), i64(steps)) as i:
                    at = let(i * step_words)
                    prefetch_words(buffers["rhs_packed"], row * (-(-k // per)) + at, step_words)
                    step(acc, row, at)
            if k - done >= lanes:
                with T.serial(i64(0), i64((k - done) // lanes)) as i:
                    at = let(i * lanes + done)
                    x = let(load(lhs, at, lanes))
                    store(acc, load(acc, 0, lanes) + read(row, at, lanes) * x, 0, lanes)
            store(folded, load(acc, 0, lanes), part * lanes, lanes)
            if k % lanes:
                with T.serial(i64(k // lanes * lanes), i64(k)) as at:
                    slot = let(part * lanes)
                    product = load(lhs, at) * read(row, at, 1)
                    store(folded, load(folded, slot) + product, slot)
        total = add_lanes([load(folded, j * lanes, lanes) for j in range(lanes)], lanes)
        emit_finish_tail(spec, buffers, total, i64(0), let(group * lanes), lanes)


def _float_step(
    quant: QuantSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any, k: int, words: int
) -> Step:
    """Return the code of a step with fp32 fields."""
    lanes, per = tiles.lanes, quant.per_word
    row_words, row_groups = -(-k // per), -(-k // quant.group)
    group_words = quant.group // per
    packed, scales = buffers["rhs_packed"], buffers["rhs_scale"]
    fields, starts = arrange(quant, lanes, lhs, k, words, 1)
    vectors, step_words = words_per_step(quant, lanes)

    def step(acc: Any, row: Any, first: Any) -> None:
        count = step_words // group_words
        group_scales = let(load(scales, row * row_groups + first // group_words, count))
        for v in range(vectors):
            at = let(first + v * lanes)
            word = let(load(packed, row * row_words + at, lanes, "uint32"))
            # Two sums: one alone would wait for each multiply-add in turn.
            sums = [let(load(starts, at, lanes)), None]
            for j in range(per):
                product = field(quant, lanes, word, j) * load(fields, at * per + j * lanes, lanes)
                sums[j % 2] = let(product if sums[j % 2] is None else sums[j % 2] + product)
            scale = spread_scales(group_scales, count, v, lanes, group_words)
            store(acc, load(acc, 0, lanes) + scale * (sums[0] + sums[1]), 0, lanes)

    return step


def spread_scales(scales: Any, count: int, vector: int, lanes: int, group_words: int) -> Any:
    """Return, for each word of a vector, its group's entry of a vector of `count` scales."""
    pick = [(vector * lanes + lane) // group_words for lane in range(lanes)]
    if count == 1:
        return splat(scales, lanes)
    return tirx.Shuffle([scales], pick)
