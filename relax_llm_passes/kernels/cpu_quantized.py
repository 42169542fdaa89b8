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

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from .cpu_build import (
    T,
    add_lanes,
    cast,
    ceil_div,
    choose,
    divides,
    i64,
    let,
    load,
    local,
    prefetch,
    splat,
    store,
    tasks,
    workspace,
)
from .cpu_dot_row import runs_of
from .cpu_gemv import emit_finish_tail
from .cpu_quantized_int import activation_bits, integer_step
from .cpu_spec import GemmSpec, QuantSpec
from .cpu_tiles import CpuTiles
from .cpu_weights import row_reader

__all__ = [
    "arrange",
    "emit_quantised_gemv",
    "field",
    "group_order",
    "load_in_order",
    "prefetch_words",
    "spread_scales",
]

# A step is too many instructions for the core to look far ahead, so that words are asked for this
# many bytes before they are used: 1.3 times the speed of int4 on Zen 3, the same from 1.5 to 3 KiB.
_PREFETCH_BYTES, _LINE_BYTES, _WORD_BYTES = 2048, 64, 4
# Runs of rows that a task reads together: 1.2 times the bandwidth of one; more gains nothing.
_STREAMS = 2


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


def emit_quantised_gemv(
    spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any
) -> None:
    """Emit the product of one row; `lhs` is fp32."""
    quant = spec.quant
    assert quant is not None
    lanes, n, k = tiles.lanes, spec.n, spec.k
    read = row_reader(spec, buffers)
    bits = activation_bits(quant, tiles, spec.lhs_dtype, k)
    if bits:
        steps, step = integer_step(quant, tiles, buffers, lhs, k, bits)
        done = k // quant.group * quant.group
    else:
        steps, step = _float_step(quant, tiles, buffers, lhs, k)
        done = steps * lanes * quant.group
    blocks = ceil_div(n, lanes)
    parts, streams, share = runs_of(blocks, tiles.cores, _STREAMS)

    with tasks(i64(parts), n * k if isinstance(n, int) else None) as task:
        folded = local(streams * lanes * lanes)
        with T.serial(i64(0), i64(share)) as i:
            own = [let((task * streams + c) * share + i) for c in range(streams)]
            with T.serial(i64(0), i64(lanes)) as part:
                rows = []
                for block in own:
                    row = block * lanes + part
                    whole = divides(lanes, n) and parts * streams * share == blocks
                    rows.append(let(row if whole else tirx.min(row, i64(n - 1))))
                acc = local(streams * lanes)
                for c in range(streams):
                    store(acc, splat(0.0, lanes), c * lanes, lanes)
                if steps:
                    with T.serial(i64(0), i64(steps)) as number:
                        step(acc, rows, number)
                if k - done >= lanes:
                    with T.serial(i64(0), i64((k - done) // lanes)) as j:
                        at = let(j * lanes + done)
                        x = let(load(lhs, at, lanes))
                        for c, row in enumerate(rows):
                            value = load(acc, c * lanes, lanes) + read(row, at, lanes) * x
                            store(acc, value, c * lanes, lanes)
                for c in range(streams):
                    slot = let((c * lanes + part) * lanes)
                    store(folded, load(acc, c * lanes, lanes), slot, lanes)
                if k % lanes:
                    with T.serial(i64(k // lanes * lanes), i64(k)) as at:
                        for c, row in enumerate(rows):
                            slot = let((c * lanes + part) * lanes)
                            product = load(lhs, at) * read(row, at, 1)
                            store(folded, load(folded, slot) + product, slot)
            for c, block in enumerate(own):
                vectors = [load(folded, (c * lanes + j) * lanes, lanes) for j in range(lanes)]
                column = let(block * lanes)

                def finish(vectors: list[Any] = vectors, column: Any = column) -> None:
                    total = add_lanes(vectors, lanes)
                    emit_finish_tail(spec, buffers, total, i64(0), column, lanes)

                known = isinstance(blocks, int) and parts * streams * share == blocks
                choose(True if known else column < n, finish, lambda: None)


def _float_step(
    quant: QuantSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any, k: int
) -> tuple[int, Any]:
    """Return steps of fp32 products and the code of one: `step(acc, rows, number)`."""
    lanes, per = tiles.lanes, quant.per_word
    vectors = group_words = quant.group // per
    step_words = vectors * lanes
    row_words, row_groups = -(-k // per), -(-k // quant.group)
    packed, scales = buffers["rhs_packed"], buffers["rhs_scale"]
    steps = k // (step_words * per)
    if not steps:
        return 0, None
    fields, starts = arrange(quant, lanes, lhs, k, steps * step_words, 1)
    order = group_order(lanes, group_words)

    def step(acc: Any, rows: list[Any], number: Any) -> None:
        firsts, row_scales = [], []
        for row in rows:
            firsts.append(let(row * row_words + number * step_words))
            prefetch_words(packed, firsts[-1], step_words)
            at = row * row_groups + number * lanes
            row_scales.append(let(load_in_order(scales, at, order)))
        totals = [load(acc, c * lanes, lanes) for c in range(len(rows))]
        # What meets a word is loaded once for all rows: one by one, LLVM keeps it on the stack.
        for v in range(vectors):
            at = let(number * step_words + v * lanes)
            start = let(load(starts, at, lanes))
            xs = [let(load(fields, at * per + j * lanes, lanes)) for j in range(per)]
            for c, (first, scale) in enumerate(zip(firsts, row_scales, strict=True)):
                word = let(load(packed, first + v * lanes, lanes, "uint32"))
                # Two sums: one alone would wait for each multiply-add in turn.
                sums = [start, None]
                for j, x in enumerate(xs):
                    product = field(quant, lanes, word, j) * x
                    sums[j % 2] = let(product if sums[j % 2] is None else sums[j % 2] + product)
                spread = spread_scales(scale, order, v, lanes, group_words)
                totals[c] = let(totals[c] + spread * (sums[0] + sums[1]))
        for c, total in enumerate(totals):
            store(acc, total, c * lanes, lanes)

    return steps, step


def group_order(lanes: int, group_words: int) -> list[int]:
    """Return the order in which the scales of `lanes` groups are held.

    With groups of 4 words, so that each 128-bit part of a vector of words finds its scale in the
    same part of the scales: then a cheap instruction spreads it.
    """
    if group_words != 4:
        return list(range(lanes))
    parts = lanes // 4
    return [v * parts + part for part in range(parts) for v in range(4)]


def load_in_order(scales: Any, at: Any, order: list[int]) -> Any:
    """Load neighbouring scales as fp32, in this order."""
    lanes = len(order)
    if order == list(range(lanes)):
        return load(scales, at, lanes)
    if str(scales.dtype) == "bfloat16":
        return tirx.Shuffle([let(load(scales, at, lanes))], order)
    # Before they are converted: there are half as many bytes to move.
    value = load(scales, at, lanes, str(scales.dtype))
    return cast(tirx.Shuffle([let(value)], order), "float32", lanes)


def spread_scales(scales: Any, order: list[int], vector: int, lanes: int, group_words: int) -> Any:
    """Return, for each word of a vector, its group's entry of a vector of scales in `order`."""
    pick = [order.index((vector * lanes + lane) // group_words) for lane in range(lanes)]
    return tirx.Shuffle([scales], pick)
