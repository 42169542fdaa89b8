"""Products of one row by group-quantised weights that lie as (K, N), packed along K.

A row of words holds `per_word` rows of integers for all columns, a row of scales a group of them.
Rows of words are read from end to end, as long runs of memory, while the sums of a group for all
columns of a strip stay in the first-level cache; then they are scaled and added up. Two groups far
apart are read together, as more reads are under way with two runs. With few strips the cores share
out the groups, not the columns, and their sums are added at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from .cpu_axpy import MAX_PARTS, STRIP, strips_of
from .cpu_build import (
    T,
    cast,
    ceil_div,
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
from .cpu_gemv import emit_finish_tail
from .cpu_quantized import field, prefetch_words
from .cpu_quantized_int import activation_bits, integers, products
from .cpu_spec import GemmSpec, QuantSpec
from .cpu_tiles import CpuTiles
from .cpu_weights import column_reader

__all__ = ["emit_quantised_lines"]

# Vectors of columns at a time, groups that are read together, groups that a core gets at least.
_VECTORS, _STREAMS, _MIN_GROUPS = 4, 2, 4


@dataclass(frozen=True)
class _Left:
    """The left operand, as fp32 or as integers.

    Attributes
    ----------
    dtype : str
        Of a group's sums.
    slot : callable
        Where a group is kept, by its number.
    start : callable
        What a group's sums begin with (the part of the weights' offset), by its slot.
    operands : callable
        What meets the fields of a row of words, by slot and number of the row in its group.
    add : callable
        Emits (words, operands, sums) -> sums.
    scale : callable
        What a group's sums are multiplied by, by its slot.
    """

    dtype: str
    slot: Callable[[Any], Any]
    start: Callable[[Any], Any]
    operands: Callable[[Any, Any], list[Any]]
    add: Callable[[Any, list[Any], Any], Any]
    scale: Callable[[Any], Any]


def _integers(quant: QuantSpec, tiles: CpuTiles, lhs: Any, k: int, bits: int) -> _Left:
    left = integers(quant, tiles.lanes, lhs, k, bits)
    group_words = quant.group // quant.per_word

    def operands(slot: Any, row: Any) -> list[Any]:
        at = (slot * group_words + row) * left.fields
        return [load(left.words, at + j, 1, "int32") for j in range(left.fields)]

    return _Left(
        "int32",
        left.slot,
        lambda slot: load(left.sums, slot, 1, "int32") * tirx.const(-quant.offset, "int32"),
        operands,
        lambda word, xs, total: products(quant, tiles, bits, word, xs, total),
        lambda slot: load(left.scales, slot),
    )


def _floats(quant: QuantSpec, tiles: CpuTiles, lhs: Any, k: int) -> _Left:
    """Take values divided by the power of two of the field that they meet (`field`)."""
    lanes, per, groups = tiles.lanes, quant.per_word, k // quant.group
    values, starts = workspace(max(1, groups) * quant.group), workspace(max(1, groups))
    with T.serial(i64(0), i64(groups)) as group:
        total = local(1)
        store(total, splat(0.0, 1), 0)
        with T.serial(i64(0), i64(quant.group // per)) as word:
            for j in range(per):
                at = let(group * quant.group + word * per + j)
                x = let(load(lhs, at))
                store(total, load(total, 0) + x, 0)
                power = 1.0 if j == per - 1 else 2.0 ** (-quant.bits * j)
                store(values, x * splat(power, 1), at)
        store(starts, load(total, 0) * splat(-float(quant.offset), 1), group)

    def operands(slot: Any, row: Any) -> list[Any]:
        return [load(values, slot * quant.group + row * per + j) for j in range(per)]

    def add(word: Any, xs: list[Any], total: Any) -> Any:
        for j, x in enumerate(xs):
            total = let(total + field(quant, lanes, word, j) * x)
        return total

    return _Left(
        "float32",
        lambda group: group,
        lambda slot: load(starts, slot),
        operands,
        add,
        lambda slot: splat(1.0, 1),
    )


def emit_quantised_lines(
    spec: GemmSpec, tiles: CpuTiles, buffers: Mapping[str, Any], lhs: Any
) -> None:
    """Emit the product of one row; `lhs` is fp32."""
    quant = spec.quant
    assert quant is not None
    lanes, n, k = tiles.lanes, spec.n, spec.k
    packed, scales = buffers["rhs_packed"], buffers["rhs_scale"]
    group_words, groups = quant.group // quant.per_word, k // quant.group
    bits = activation_bits(quant, tiles, spec.lhs_dtype, k)
    left = _integers(quant, tiles, lhs, k, bits) if bits else _floats(quant, tiles, lhs, k)
    strip, count = strips_of(n, lanes, -(-n // STRIP) if isinstance(n, int) else 1)
    parts = 1
    if isinstance(count, int):
        parts = max(1, min(-(-tiles.cores // count), groups // _MIN_GROUPS, MAX_PARTS))
    share = -(-groups // parts)
    apart = -(-share // _STREAMS)
    sums = workspace(parts * count * strip) if parts > 1 else None
    read = column_reader(spec, buffers)

    def line(
        totals: Any, places: list[tuple[Any, Any]], row: Any, column: Any, vectors: Any
    ) -> None:
        """Emit a row of words of each group."""
        runs = []
        for group, slot in places:
            xs = [let(splat(x, lanes)) for x in left.operands(slot, row)]
            runs.append((let((group * group_words + row) * n + column), xs))

        def some(at: Any, size: int) -> None:
            for i, (first, xs) in enumerate(runs):
                prefetch_words(packed, first + at, size * lanes)
                for v in range(size):
                    where = let(at + v * lanes)
                    word = let(load(packed, first + where, lanes, "uint32"))
                    total = load(totals, i * strip + where, lanes, left.dtype)
                    store(totals, left.add(word, xs, total), i * strip + where, lanes)

        whole = let(tirx.floordiv(vectors, i64(_VECTORS)))
        with T.serial(i64(0), whole) as v:
            some(let(v * (_VECTORS * lanes)), _VECTORS)
        with T.serial(whole * _VECTORS, vectors) as v:
            some(let(v * lanes), 1)

    def step(acc: Any, totals: Any, first: Any, end: Any, column: Any, vectors: Any) -> None:
        """Emit the sums of a group of each stream."""
        places, factors = [], []
        for i in range(_STREAMS):
            group = let(tirx.min(first + i * apart, i64(groups - 1)))
            slot = let(left.slot(group))
            start = let(splat(left.start(slot), lanes))
            with T.serial(i64(0), vectors) as v:
                store(totals, start, i * strip + v * lanes, lanes)
            # Beyond its share a stream has nothing to add.
            factor = tirx.Select(first + i * apart < end, left.scale(slot), splat(0.0, 1))
            places.append((group, slot))
            factors.append(let(splat(factor, lanes)))
        with T.serial(i64(0), i64(group_words)) as row:
            line(totals, places, row, column, vectors)
        with T.serial(i64(0), vectors) as v:
            at = let(v * lanes)
            value = load(acc, at, lanes)
            for i, ((group, _), factor) in enumerate(zip(places, factors, strict=True)):
                start = let(group * n + column + at)
                prefetch(scales, start + n)
                total = cast(load(totals, i * strip + at, lanes, left.dtype), "float32", lanes)
                value = value + load(scales, start, lanes) * factor * total
            store(acc, value, at, lanes)

    def rest(acc: Any, column: Any, at: Any, width: int, start: int) -> None:
        """Emit the products from `start` on with dequantised weights."""
        with T.serial(i64(start), i64(k)) as row:
            x = let(splat(load(lhs, row), width))
            value = read(row, let(column + at), width)
            store(acc, load(acc, at, width) + x * value, at, width)

    def rests(acc: Any, column: Any, vectors: Any, width: Any) -> None:
        if k % quant.group:
            with T.serial(i64(0), vectors) as v:
                rest(acc, column, let(v * lanes), lanes, groups * quant.group)
        if not divides(lanes, n):
            with T.serial(vectors * lanes, width) as at:
                rest(acc, column, at, 1, 0)

    with tasks(i64(count * parts), n * k if isinstance(n, int) else None) as task:
        acc, totals = workspace(strip), workspace(_STREAMS * strip, left.dtype)
        part = let(tirx.floordiv(task, i64(count)))
        column = let((task - part * count) * strip)
        width = let(tirx.min(i64(strip), i64(n) - column)) if not divides(strip, n) else i64(strip)
        with T.serial(i64(0), i64(strip // lanes)) as v:
            store(acc, splat(0.0, lanes), v * lanes, lanes)
        vectors = let(tirx.floordiv(width, i64(lanes)))
        if groups:
            end = let(tirx.min(part * share + share, i64(groups)))
            with T.serial(part * share, tirx.min(part * share + apart, end)) as first:
                step(acc, totals, first, end, column, vectors)
        if k % quant.group or not divides(lanes, n):
            with T.If(tirx.EQ(part, i64(0))):
                with T.Then():
                    rests(acc, column, vectors, width)
        with T.serial(i64(0), ceil_div(width, lanes)) as v:
            at = let(column + v * lanes)
            value = let(load(acc, v * lanes, lanes))
            if sums is None:
                emit_finish_tail(spec, buffers, value, i64(0), at, lanes)
            else:
                store(sums, value, part * (count * strip) + at, lanes)
    if sums is not None:
        with T.serial(i64(0), i64(-(-n // lanes))) as v:
            total = load(sums, v * lanes, lanes)
            for p in range(1, parts):
                total = total + load(sums, v * lanes + p * count * strip, lanes)
            emit_finish_tail(spec, buffers, let(total), i64(0), let(v * lanes), lanes)
