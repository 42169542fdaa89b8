"""CPU attention for many query rows, in tiles (flash style). Reads only plans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .attention_pieces import (
    LOWEST,
    AttentionKernel,
    begin_function,
    cast_to,
    contiguous_in,
    f32,
    local,
    opaque,
)
from .attention_plan import AttentionPlan
from .cpu_build import choose, is_little
from .scalar_expr import bound_analyzer, exp_nonpositive, i64, substitute

__all__ = ["attention_prefill_cpu"]


def attention_prefill_cpu(
    plan: AttentionPlan, lanes: int, rows: int = 32, block: int = 64, name: str = "attention"
) -> Any:
    """Return a PrimFunc for any number of query rows, in tiles of `rows` by `block` keys.

    Parallel over batch, heads and tiles of rows. A tile of keys is packed (depth, keys) in
    float32 so that one register tile of 4 rows by 2 vectors does 8 independent multiply-adds.
    Scores never leave the cache.

    Parameters
    ----------
    plan : AttentionPlan
        Without append.
    lanes : int
        float32 values in a vector register.
    rows, block : int
        Tile size; multiples of 4 and of 2 * `lanes`.
    """
    assert plan.append_k is None
    kernel = AttentionKernel(plan, lanes)
    kernel.group = 1
    count: Any = i64(1)
    for extent in kernel.extents:
        count = count * extent
    S = i64(plan.S)
    tiles = tirx.floordiv(S + i64(rows - 1), i64(rows))
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        begin_function(plan, name)
        with T.sblock("attention"):
            opaque()

            def tiles_with(loop: Callable[[Any], Any]) -> None:
                with loop(bound_analyzer({}).simplify(count * tiles)) as index:
                    kernel.bind_outer(tirx.floordiv(index, tiles))
                    # The last tiles see the most keys under a causal mask: start with them.
                    tile = T.bind(tiles - i64(1) - tirx.floormod(index, tiles))
                    _prefill_tile(kernel, tile * i64(rows), S, rows, block)

            choose(
                is_little(kernel.work(S)),
                functools.partial(tiles_with, T.serial),
                functools.partial(tiles_with, T.parallel),
            )
    return builder.get()


def _plain(kernel: AttentionKernel, expr: Any, **axes: Any) -> Any:
    plan = kernel.plan
    values = {getattr(plan, name): value for name, value in axes.items()}
    return substitute(expr, {**kernel.outer, **values})


def _prefill_tile(kernel: AttentionKernel, first_row: Any, S: Any, rows: int, block: int) -> None:
    plan = kernel.plan
    D, E, we = plan.D, plan.E, kernel.we
    MR = 4
    first_row = T.bind(first_row)
    count = T.bind(tirx.Min(i64(rows), S - first_row))
    last_row = first_row + count - i64(1)
    begin = T.bind(_plain(kernel, plan.key_begin, s=first_row))
    end = T.bind(_plain(kernel, plan.key_end, s=last_row))
    query = local((rows * D,))
    keys = local((D * block,))
    scores = local((rows * block,))
    sums = local((rows * E,))
    top, total, correction = local((rows,)), local((rows,)), local((rows,))
    with T.serial(i64(rows)) as r:
        # Rows past the end repeat the last one, so nothing is read out of bounds.
        s = tirx.Min(first_row + r, S - i64(1))
        with T.serial(i64(D)) as d:
            T.buffer_store(query, _plain(kernel, plan.q, s=s, d=d), [r * i64(D) + d])
        with T.serial(i64(E // we)) as o, T.vectorized(i64(we)) as lane:
            T.buffer_store(sums, f32(0.0), [r * i64(E) + o * i64(we) + lane])
        if plan.sink is not None:
            T.buffer_store(top, _plain(kernel, plan.sink), [r])
            T.buffer_store(total, f32(1.0), [r])
        else:
            T.buffer_store(top, f32(LOWEST), [r])
            T.buffer_store(total, f32(0.0), [r])
    length = T.bind(tirx.Max(end - begin, i64(0)))
    with T.serial(tirx.floordiv(length + i64(block - 1), i64(block))) as kb:
        first = T.bind(begin + kb * i64(block))
        size = T.bind(tirx.Min(i64(block), end - first))
        _pack_keys(kernel, keys, first, size, block)
        _tile_products(kernel, query, keys, scores, rows, block, MR)
        with T.serial(i64(rows)) as r:
            _tile_softmax(kernel, r, first_row, S, first, size, end, block, scores, top, total,
                          correction)  # fmt: skip
        _tile_values(kernel, scores, sums, correction, first, size, rows, block, MR)
    with T.serial(count) as r:
        _finish_row_plain(kernel, first_row + r, r, sums, total)


def _finish_row_plain(kernel: AttentionKernel, s: Any, r: Any, sums: Any, total: Any) -> None:
    plan, width = kernel.plan, kernel.we
    quotient = f32(1.0) / total[r]
    if plan.zero_if_masked:
        quotient = tirx.Select(total[r] == f32(0.0), f32(0.0), quotient)
    scale = local((1,))
    T.buffer_store(scale, quotient, [0])
    with T.serial(i64(plan.E // width)) as o, T.vectorized(i64(width)) as lane:
        e = o * i64(width) + lane
        where = [_plain(kernel, i, s=s, e=e) for i in plan.out_index]
        value = sums[r * i64(plan.E) + e] * scale[0]
        T.buffer_store(plan.out, cast_to(value, str(plan.out.dtype)), where)


def _pack_keys(kernel: AttentionKernel, keys: Any, first: Any, size: Any, block: int) -> None:
    """Copy keys [first, first + size) as (depth, key); the rest of the block becomes zero."""
    plan = kernel.plan
    D, lanes = plan.D, kernel.lanes
    if contiguous_in(plan.k, plan.t):
        with T.serial(i64(D)) as d:
            with T.serial(size) as kt:
                value = _plain(kernel, plan.k, t=first + kt, d=d)
                T.buffer_store(keys, value, [d * i64(block) + kt])
            with T.serial(i64(block) - size) as rest:
                T.buffer_store(keys, f32(0.0), [d * i64(block) + size + rest])
        return
    with T.serial(i64(block // lanes)) as kq, T.serial(i64(D)) as d:
        with T.vectorized(i64(lanes)) as lane:
            kt = kq * i64(lanes) + lane
            safe = tirx.Min(first + kt, first + size - i64(1))
            value = _plain(kernel, plan.k, t=safe, d=d)
            T.buffer_store(keys, value, [d * i64(block) + kt])


def _tile_products(
    kernel: AttentionKernel, query: Any, keys: Any, scores: Any, rows: int, block: int, MR: int
) -> None:
    D, lanes = kernel.plan.D, kernel.lanes
    NV = 2
    with T.serial(i64(block // (NV * lanes))) as kq, T.serial(i64(rows // MR)) as rq:
        acc = local((MR * NV * lanes,))
        for m in range(MR * NV):
            with T.vectorized(i64(lanes)) as lane:
                T.buffer_store(acc, f32(0.0), [i64(m * lanes) + lane])
        with T.serial(i64(D)) as d:
            for m in range(MR):
                q = query[(rq * i64(MR) + i64(m)) * i64(D) + d]
                for n in range(NV):
                    with T.vectorized(i64(lanes)) as lane:
                        at = i64((m * NV + n) * lanes) + lane
                        key = keys[d * i64(block) + kq * i64(NV * lanes) + i64(n * lanes) + lane]
                        T.buffer_store(acc, acc[at] + q * key, [at])
        for m in range(MR):
            for n in range(NV):
                with T.vectorized(i64(lanes)) as lane:
                    at = i64((m * NV + n) * lanes) + lane
                    where = (
                        (rq * i64(MR) + i64(m)) * i64(block)
                        + kq * i64(NV * lanes)
                        + i64(n * lanes)
                        + lane
                    )
                    T.buffer_store(scores, acc[at], [where])


def _tile_softmax(
    kernel: AttentionKernel,
    r: Any,
    first_row: Any,
    S: Any,
    first: Any,
    size: Any,
    end: Any,
    block: int,
    scores: Any,
    top: Any,
    total: Any,
    correction: Any,
) -> None:
    lanes = kernel.lanes
    s = tirx.Min(first_row + r, S - i64(1))
    kernel.bound = {var: T.bind(_plain(kernel, e, s=s)) for var, e in kernel.row_values}
    top_lanes, sum_lanes = local((lanes,)), local((lanes,))
    with T.vectorized(i64(lanes)) as lane:
        T.buffer_store(top_lanes, f32(LOWEST), [lane])
        T.buffer_store(sum_lanes, f32(0.0), [lane])
    with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
        at = o * i64(lanes) + lane
        safe = tirx.Min(first + at, end - i64(1))
        x = scores[r * i64(block) + at]
        value = _plain(kernel, kernel.score, x=x, s=s, t=safe)
        value = substitute(value, kernel.bound)
        value = tirx.Select(at < size, value, f32(LOWEST))
        T.buffer_store(scores, value, [r * i64(block) + at])
    with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
        value = tirx.Max(top_lanes[lane], scores[r * i64(block) + o * i64(lanes) + lane])
        T.buffer_store(top_lanes, value, [lane])
    highest, shift = local((1,)), local((1,))
    T.buffer_store(highest, top[r], [0])
    with T.serial(i64(lanes)) as lane:
        T.buffer_store(highest, tirx.Max(highest[0], top_lanes[lane]), [0])
    T.buffer_store(shift, tirx.Select(highest[0] == f32(LOWEST), f32(0.0), highest[0]), [0])
    T.buffer_store(correction, exp_nonpositive(top[r] - shift[0]), [r])
    T.buffer_store(top, highest[0], [r])
    with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
        at = r * i64(block) + o * i64(lanes) + lane
        T.buffer_store(scores, exp_nonpositive(scores[at] - shift[0]), [at])
    with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
        value = sum_lanes[lane] + scores[r * i64(block) + o * i64(lanes) + lane]
        T.buffer_store(sum_lanes, value, [lane])
    T.buffer_store(total, total[r] * correction[r], [r])
    with T.serial(i64(lanes)) as lane:
        T.buffer_store(total, total[r] + sum_lanes[lane], [r])


def _tile_values(
    kernel: AttentionKernel,
    scores: Any,
    sums: Any,
    correction: Any,
    first: Any,
    size: Any,
    rows: int,
    block: int,
    MR: int,
) -> None:
    """sums = sums * correction + scores @ values, 4 rows by up to 2 vectors at a time."""
    plan, we = kernel.plan, kernel.we
    E = plan.E
    NV = 2 if (E // we) % 2 == 0 else 1
    with T.serial(i64(E // (NV * we))) as eq, T.serial(i64(rows // MR)) as rq:
        acc = local((MR * NV * we,))

        def place(m: int, n: int, lane: Any) -> Any:
            row = rq * i64(MR) + i64(m)
            return row * i64(E) + eq * i64(NV * we) + i64(n * we) + lane

        for m in range(MR):
            for n in range(NV):
                with T.vectorized(i64(we)) as lane:
                    value = sums[place(m, n, lane)] * correction[rq * i64(MR) + i64(m)]
                    T.buffer_store(acc, value, [i64((m * NV + n) * we) + lane])
        with T.serial(size) as kt:
            for m in range(MR):
                p = scores[(rq * i64(MR) + i64(m)) * i64(block) + kt]
                for n in range(NV):
                    with T.vectorized(i64(we)) as lane:
                        at = i64((m * NV + n) * we) + lane
                        e = eq * i64(NV * we) + i64(n * we) + lane
                        value = _plain(kernel, plan.v, t=first + kt, e=e)
                        T.buffer_store(acc, acc[at] + p * value, [at])
        for m in range(MR):
            for n in range(NV):
                with T.vectorized(i64(we)) as lane:
                    at = i64((m * NV + n) * we) + lane
                    T.buffer_store(sums, acc[at], [place(m, n, lane)])
