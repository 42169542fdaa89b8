"""Products of a few rows by group-quantised weights: each integer is unpacked once for all rows.

As for one row (`cpu_quantized`): a field of bits is masked where it lies and multiplied by a left
operand that was divided by the field's power of two. Unpacking costs two instructions for eight
weights, which the rows of a tile share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from .cpu_build import T, add_lanes, ceil_div, divides, i64, let, load, local, splat, store
from .cpu_gemv import emit_finish_tail
from .cpu_quantized import (
    arrange,
    field,
    group_order,
    load_in_order,
    prefetch_words,
    spread_scales,
)
from .cpu_spec import GemmSpec
from .cpu_tiles import CpuTiles
from .cpu_weights import row_reader

__all__ = ["emit_quantised_rows"]

# Rows of the left operand at a time: their sums and a word's fields fit 16 registers.
_ROWS = 4


def emit_quantised_rows(
    spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any, m: Any
) -> None:
    """Emit the product of `m` rows, an int or an expression; `lhs` is fp32."""
    quant = spec.quant
    assert quant is not None
    lanes, n, k, per = tiles.lanes, spec.n, spec.k, quant.per_word
    vectors = group_words = quant.group // per
    step_words = vectors * lanes
    steps = k // (step_words * per)
    done, words = steps * step_words * per, steps * step_words
    row_words, row_groups = -(-k // per), -(-k // quant.group)
    order = group_order(lanes, group_words)
    packed, scales = buffers["rhs_packed"], buffers["rhs_scale"]
    read = row_reader(spec, buffers)
    rows = min(_ROWS, m) if isinstance(m, int) else _ROWS
    if steps:
        fields, starts = arrange(quant, lanes, lhs, k, words, m)

    def step(acc: Any, left: list[Any], row: Any, first: Any) -> None:
        group_scales = let(load_in_order(scales, row * row_groups + first // group_words, order))
        for v in range(vectors):
            at = let(first + v * lanes)
            word = let(load(packed, row * row_words + at, lanes, "uint32"))
            sums = [let(load(starts, r * words + at, lanes)) for r in left]
            for j in range(per):
                weight = let(field(quant, lanes, word, j))
                for i, r in enumerate(left):
                    x = load(fields, (r * words + at) * per + j * lanes, lanes)
                    sums[i] = let(sums[i] + weight * x)
            scale = let(spread_scales(group_scales, order, v, lanes, group_words))
            for i, total in enumerate(sums):
                store(acc, load(acc, i * lanes, lanes) + scale * total, i * lanes, lanes)

    with T.parallel(i64(0), i64(ceil_div(n, lanes))) as group:
        folded = local(rows * lanes * lanes)
        with T.serial(i64(0), ceil_div(m, rows)) as block:
            left = [let(tirx.min(block * rows + r, m - 1)) for r in range(rows)]
            with T.serial(i64(0), i64(lanes)) as part:
                row = group * lanes + part
                row = let(tirx.min(row, i64(n - 1)) if not divides(lanes, n) else row)
                acc = local(rows * lanes)
                for r in range(rows):
                    store(acc, splat(0.0, lanes), r * lanes, lanes)
                if steps:
                    with T.serial(i64(0), i64(steps)) as i:
                        first = let(i * step_words)
                        prefetch_words(packed, row * row_words + first, step_words)
                        step(acc, left, row, first)
                if k - done >= lanes:
                    with T.serial(i64(0), i64((k - done) // lanes)) as i:
                        at = let(i * lanes + done)
                        weight = let(read(row, at, lanes))
                        for i_row, r in enumerate(left):
                            total = load(acc, i_row * lanes, lanes)
                            total = total + weight * load(lhs, r * k + at, lanes)
                            store(acc, total, i_row * lanes, lanes)
                for r in range(rows):
                    at = let((r * lanes + part) * lanes)
                    store(folded, load(acc, r * lanes, lanes), at, lanes)
                if k % lanes:
                    with T.serial(i64(k // lanes * lanes), i64(k)) as at:
                        weight = let(read(row, at, 1))
                        for i_row, r in enumerate(left):
                            slot = let((i_row * lanes + part) * lanes)
                            product = load(lhs, r * k + at) * weight
                            store(folded, load(folded, slot) + product, slot)
            with T.serial(i64(0), tirx.min(i64(rows), m - block * rows)) as r:
                at = let(r * (lanes * lanes))
                parts = [load(folded, at + j * lanes, lanes) for j in range(lanes)]
                start = let((block * rows + r) * n)
                total = add_lanes(parts, lanes)
                emit_finish_tail(spec, buffers, total, start, let(group * lanes), lanes)
