"""Products by group-quantised weights that lie as (K, N), packed along K.

A row of words holds `per_word` rows of integers for all columns, a row of scales a group of them.
The sums of a group are kept in registers for a few vectors of columns, then scaled and added to
the columns' sums, which stay in the first-level cache. As for (N, K) weights (`cpu_quantized`),
a field of bits is masked where it lies and multiplied by a left operand that was divided by the
field's power of two, and the offset is paid once a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from .cpu_axpy import STRIP, strips_of
from .cpu_build import (
    T,
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
from .cpu_quantized import field
from .cpu_quantized_lines import emit_quantised_lines
from .cpu_spec import GemmSpec, QuantSpec
from .cpu_tiles import CpuTiles

__all__ = ["emit_quantised_columns"]

# Vectors of columns that share a broadcast of the left operand.
_VECTORS = 2
# Rows of the left operand at a time.
_ROWS = 4


def _prepare(quant: QuantSpec, lhs: Any, k: int, groups: int, m: Any) -> tuple[Any, Any]:
    """Return `m` rows of the left operand divided by the fields' powers, and groups' starts."""
    per, whole = quant.per_word, groups * quant.group
    values, starts = workspace(m * whole), workspace(m * groups)
    with T.serial(i64(0), i64(m) * groups) as at:
        row = let(tirx.floordiv(at, i64(groups)))
        first = let((at - row * groups) * quant.group)
        total = local(1)
        store(total, splat(0.0, 1), 0)
        with T.serial(i64(0), i64(quant.group // per)) as word:
            for j in range(per):
                k_at = let(first + word * per + j)
                # Beyond K there are no integers worth reading: times zero.
                inside = load(lhs, row * k + tirx.min(k_at, i64(k - 1)))
                x = let(tirx.Select(k_at < k, inside, splat(0.0, 1))) if k % quant.group else inside
                power = 1.0 if j == per - 1 else 2.0 ** (-quant.bits * j)
                store(total, load(total, 0) + x, 0)
                store(values, x * splat(power, 1), row * whole + k_at)
        store(starts, load(total, 0) * splat(-float(quant.offset), 1), at)
    return values, starts


def emit_quantised_columns(
    spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any, m: Any
) -> None:
    """Emit the product of `m` rows, an int or an expression; `lhs` is fp32."""
    quant = spec.quant
    assert quant is not None
    if isinstance(m, int) and m == 1:
        emit_quantised_lines(spec, tiles, buffers, lhs)
        return
    lanes, n, k, per = tiles.lanes, spec.n, spec.k, quant.per_word
    groups, words = -(-k // quant.group), -(-k // per)
    group_words = quant.group // per
    packed, scales = buffers["rhs_packed"], buffers["rhs_scale"]
    rows = min(_ROWS, m) if isinstance(m, int) else _ROWS
    together = _VECTORS
    wanted = 1
    if isinstance(n, int):
        wanted = max(-(-n // STRIP), min(tiles.cores, max(1, n // (together * lanes))))
    strip, strips = strips_of(n, lanes * together, wanted)
    values, starts = _prepare(quant, lhs, k, groups, m)

    def columns(acc: Any, left: list[Any], group: Any, column: Any, at: Any, size: int, width: int):
        """Emit the sums of a group for `size` vectors (or one column, width 1)."""
        sums = local(len(left) * size * width)
        for i, r in enumerate(left):
            start = let(splat(load(starts, r * groups + group), width))
            for v in range(size):
                store(sums, start, (i * size + v) * width, width)
        with T.serial(i64(0), i64(group_words)) as w:
            line = group * group_words + w
            # The last group may be short; what is read instead is multiplied by zero.
            line = let(tirx.min(line, i64(words - 1)) if k % quant.group else line)
            start = let(line * n + column + at)
            found = [let(load(packed, start + v * width, width, "uint32")) for v in range(size)]
            for v in range(0, size * width * 4, 64):
                prefetch(packed, start + group_words * n + v // 4)
            for j in range(per):
                fields = [let(field(quant, width, word, j)) for word in found]
                for i, r in enumerate(left):
                    x_at = (r * groups + group) * quant.group + w * per + j
                    x = let(splat(load(values, x_at), width))
                    for v, weight in enumerate(fields):
                        slot = (i * size + v) * width
                        store(sums, load(sums, slot, width) + weight * x, slot, width)
        for v in range(size):
            scale = let(load(scales, group * n + column + at + v * width, width))
            for i in range(len(left)):
                slot = i * strip + at + v * width
                total = load(sums, (i * size + v) * width, width) * scale
                store(acc, load(acc, slot, width) + total, slot, width)

    with T.parallel(i64(0), i64(strips)) as task:
        acc = workspace(rows * strip)
        column = let(task * strip)
        width = let(tirx.min(i64(strip), i64(n) - column)) if not divides(strip, n) else i64(strip)
        with T.serial(i64(0), ceil_div(m, rows)) as block:
            left = [let(tirx.min(block * rows + r, m - 1)) for r in range(rows)]
            with T.serial(i64(0), i64(rows * strip // lanes)) as v:
                store(acc, splat(0.0, lanes), v * lanes, lanes)
            with T.serial(i64(0), i64(groups)) as group:
                whole = let(tirx.floordiv(width, i64(lanes * together)))
                with T.serial(i64(0), whole) as v:
                    at = let(v * (lanes * together))
                    columns(acc, left, group, column, at, together, lanes)
                if not divides(lanes * together, n):
                    done = let(whole * (lanes * together))
                    with T.serial(i64(0), width - done) as v:
                        columns(acc, left, group, column, let(done + v), 1, 1)
            with T.serial(i64(0), tirx.min(i64(rows), m - block * rows)) as r:
                with T.serial(i64(0), ceil_div(width, lanes)) as v:
                    value = let(load(acc, r * strip + v * lanes, lanes))
                    start = let((block * rows + r) * n)
                    at = let(column + v * lanes)
                    emit_finish_tail(spec, buffers, value, start, at, lanes)
