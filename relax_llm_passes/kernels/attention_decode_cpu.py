"""CPU attention for a few query rows: the cache is streamed once. Reads only plans.

A running maximum and sum per row (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"), float32 accumulation, masks from the plan's score expression.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
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
    static_int,
    uncast,
    vector_width,
)
from .attention_plan import AttentionPlan
from .cpu_build import choose, is_little
from .scalar_expr import bound_analyzer, exp_nonpositive, i64

__all__ = ["attention_decode_cpu"]


def attention_decode_cpu(
    plan: AttentionPlan, lanes: int, splits: int = 1, block: int = 64, name: str = "attention"
) -> Any:
    """Return a PrimFunc for a few query rows (static S) against a long cache.

    Parallel over groups of query heads that share keys and, with `splits` > 1, over ranges of
    keys whose partial results are combined by a second loop. Reads every key and value once; with
    an append each row of the caches goes out in the same pass, or, where the append is in place,
    only the new rows are written.

    Parameters
    ----------
    plan : AttentionPlan
        `plan.S` is static.
    lanes : int
        float32 values in a vector register.
    splits : int
        Parts of the key axis.
    block : int
        Keys between two updates of the running maximum; a multiple of `lanes`.
    """
    S = static_int(plan.S)
    assert S is not None  # the implementation checks
    rows = [(member, s) for member in range(plan.group) for s in range(S)]
    kernel = AttentionKernel(plan, lanes)
    count: Any = i64(1)
    for extent in kernel.extents:
        count = count * extent
    count = bound_analyzer({}).simplify(count)
    E = plan.E
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        begin_function(plan, name)
        with T.sblock("attention"):
            opaque()
            partial: Any = None
            state: Any = None
            if splits > 1:
                shape = (count * i64(splits), i64(len(rows)))
                partial = T.sblock_alloc_buffer((*shape, E), "float32")
                state = T.sblock_alloc_buffer((*shape, 2), "float32")

            def rows_with(loop: Callable[[Any], Any]) -> None:
                with loop(count * i64(splits)) as index:
                    if splits > 1:
                        part = T.bind(tirx.floormod(index, i64(splits)))
                        kernel.bind_outer(tirx.floordiv(index, i64(splits)))
                    else:
                        part = None
                        kernel.bind_outer(index)
                    _decode_rows(kernel, rows, S, block, part, splits, index, partial, state)
                if splits > 1:
                    with loop(count) as index:
                        kernel.bind_outer(index)
                        _combine(kernel, rows, splits, index, partial, state)

            choose(
                is_little(kernel.work(len(rows))),
                functools.partial(rows_with, T.serial),
                functools.partial(rows_with, T.parallel),
            )
    return builder.get()


def _decode_rows(
    kernel: AttentionKernel,
    rows: list[tuple[int, int]],
    S: int,
    block: int,
    part: Any,
    splits: int,
    index: Any,
    partial: Any,
    state: Any,
) -> None:
    plan, R = kernel.plan, len(rows)
    D, E = plan.D, plan.E
    begin, end = kernel.at(plan.key_begin, s=i64(0)), kernel.at(plan.key_end, s=i64(S - 1))
    begin, end = T.bind(begin), T.bind(end)
    queries = [local((D,)) for _ in rows]
    scores = [local((block,)) for _ in rows]
    sums = [local((E,)) for _ in rows]
    top = local((R,))
    total = local((R,))
    for r, (member, s) in enumerate(rows):
        kernel.bind_row_values(r, member, i64(s))
        with T.serial(i64(D)) as d:
            T.buffer_store(queries[r], kernel.at(plan.q, member, s=i64(s), d=d), [d])
        kernel.store_vector(sums[r], E, kernel.we, lambda _: f32(0.0))
        if plan.sink is not None:
            first = kernel.at(plan.sink, member)
            one = f32(1.0)
            if part is not None:
                first = tirx.Select(part == i64(0), first, f32(LOWEST))
                one = tirx.Select(part == i64(0), one, f32(0.0))
            T.buffer_store(top, first, [r])
            T.buffer_store(total, one, [r])
        else:
            T.buffer_store(top, f32(LOWEST), [r])
            T.buffer_store(total, f32(0.0), [r])
    blocks = _KeyBlocks(kernel, rows, block, queries, scores, sums, top, total)
    if plan.append_k is None:
        if part is not None:
            chunk = _chunk(begin, end, splits, block)
            begin, end = _slice(begin, end, part, chunk)
        blocks.take(begin, end, plan.k, plan.v, copy=False)
    else:
        low, high = i64(0), T.bind(kernel.written_end(end))
        if part is not None:
            low, high = _slice(low, high, part, _chunk(low, high, splits, block))
        _rows_with_append(blocks, begin, end, low, high)
    for r, (member, s) in enumerate(rows):
        if part is None:
            _finish_row(kernel, member, i64(s), functools.partial(_element, sums[r]), total[r])
        else:
            T.buffer_store(state, top[r], [index, i64(r), i64(0)])
            T.buffer_store(state, total[r], [index, i64(r), i64(1)])
            with T.serial(i64(E // kernel.we)) as o, T.vectorized(i64(kernel.we)) as lane:
                e = o * i64(kernel.we) + lane
                T.buffer_store(partial, sums[r][e], [index, i64(r), e])


def _element(buffer: Any, index: Any) -> Any:
    return buffer[index]


def _chunk(begin: Any, end: Any, splits: int, block: int) -> Any:
    size = tirx.floordiv(end - begin + i64(splits - 1), i64(splits))
    return tirx.floordiv(tirx.Max(size, i64(0)) + i64(block - 1), i64(block)) * i64(block)


def _slice(begin: Any, end: Any, part: Any, chunk: Any) -> tuple[Any, Any]:
    low = T.bind(tirx.Min(begin + part * chunk, end))
    return low, T.bind(tirx.Min(low + chunk, end))


def _finish_row(
    kernel: AttentionKernel, member: int, s: Any, value: Callable[[Any], Any], total: Any
) -> None:
    """Write one row of the output: the weighted sum divided by the softmax's sum."""
    plan, width = kernel.plan, kernel.we
    scale = local((1,))
    quotient = f32(1.0) / total
    if plan.zero_if_masked:
        quotient = tirx.Select(total == f32(0.0), f32(0.0), quotient)
    T.buffer_store(scale, quotient, [0])
    with T.serial(i64(plan.E // width)) as o, T.vectorized(i64(width)) as lane:
        e = o * i64(width) + lane
        where = [kernel.at(i, member, s=s, e=e) for i in plan.out_index]
        T.buffer_store(plan.out, cast_to(value(e) * scale[0], str(plan.out.dtype)), where)


def _copy_row(kernel: AttentionKernel, t: Any) -> None:
    plan = kernel.plan
    for append, axis, size in ((plan.append_k, "d", plan.D), (plan.append_v, "e", plan.E)):
        assert append is not None
        width = vector_width(size, kernel.lanes)
        with T.serial(i64(size // width)) as o, T.vectorized(i64(width)) as lane:
            at = {axis: o * i64(width) + lane, "t": t}
            where = [kernel.at(i, **at) for i in append.index]
            value = uncast(kernel.at(append.past, **at), str(append.cache.dtype))
            T.buffer_store(append.cache, value, where)


def _write_new(kernel: AttentionKernel, t: Any, start: Any) -> None:
    """Write row t of both caches from the new keys (rotated) and values, which begin at `start`."""
    plan = kernel.plan
    for append, axis, size in ((plan.append_k, "d", plan.D), (plan.append_v, "e", plan.E)):
        assert append is not None
        with T.serial(i64(size)) as c:
            where = [kernel.at(i, **{axis: c, "t": t}) for i in append.index]
            value = kernel.at(append.new, **{axis: c, "t": t - start})
            T.buffer_store(append.cache, cast_to(value, str(append.cache.dtype)), where)


@dataclass
class _KeyBlocks:
    """The running softmax of all rows, which takes ranges of keys one after the other."""

    kernel: AttentionKernel
    rows: list[tuple[int, int]]
    block: int
    queries: list[Any]
    scores: list[Any]
    sums: list[Any]
    top: Any
    total: Any

    def take(self, begin: Any, end: Any, k: Any, v: Any, copy: bool) -> None:
        """Take the keys of [begin, end) in; with `copy` their rows go out to the new caches."""
        kernel, rows, block, top, total = self.kernel, self.rows, self.block, self.top, self.total
        queries, scores, sums = self.queries, self.scores, self.sums
        plan, lanes = kernel.plan, kernel.lanes
        D, E, wd, we = plan.D, plan.E, kernel.wd, kernel.we
        begin = T.bind(begin)
        length = T.bind(tirx.Max(end - begin, i64(0)))
        with T.serial(tirx.floordiv(length + i64(block - 1), i64(block))) as kb:
            first = T.bind(begin + kb * i64(block))
            size = T.bind(tirx.Min(i64(block), end - first))
            _products(kernel, rows, block, first, size, k, queries, scores)
            correction = local((len(rows),))
            for r, (member, s) in enumerate(rows):
                top_lanes, sum_lanes = local((lanes,)), local((lanes,))
                with T.vectorized(i64(lanes)) as lane:
                    T.buffer_store(top_lanes, f32(LOWEST), [lane])
                    T.buffer_store(sum_lanes, f32(0.0), [lane])
                with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
                    at = o * i64(lanes) + lane
                    # Lanes past the end repeat the last key: no mask is read out of bounds.
                    safe = tirx.Min(first + at, end - i64(1))
                    value = kernel.row_score(r, member, scores[r][at], i64(s), safe)
                    value = tirx.Select(at < size, value, f32(LOWEST))
                    T.buffer_store(scores[r], value, [at])
                with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
                    at = o * i64(lanes) + lane
                    T.buffer_store(top_lanes, tirx.Max(top_lanes[lane], scores[r][at]), [lane])
                highest = local((1,))
                T.buffer_store(highest, top[r], [0])
                with T.serial(i64(lanes)) as lane:
                    T.buffer_store(highest, tirx.Max(highest[0], top_lanes[lane]), [0])
                # While all is masked the maximum is -inf; subtracting 0 instead avoids inf - inf.
                shift = local((1,))
                T.buffer_store(
                    shift,
                    tirx.Select(highest[0] == f32(LOWEST), f32(0.0), highest[0]),
                    [0],
                )
                T.buffer_store(correction, exp_nonpositive(top[r] - shift[0]), [r])
                T.buffer_store(top, highest[0], [r])
                with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
                    at = o * i64(lanes) + lane
                    T.buffer_store(scores[r], exp_nonpositive(scores[r][at] - shift[0]), [at])
                with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
                    at = o * i64(lanes) + lane
                    T.buffer_store(sum_lanes, sum_lanes[lane] + scores[r][at], [lane])
                T.buffer_store(total, total[r] * correction[r], [r])
                with T.serial(i64(lanes)) as lane:
                    T.buffer_store(total, total[r] + sum_lanes[lane], [r])
                with T.serial(i64(E // we)) as o, T.vectorized(i64(we)) as lane:
                    e = o * i64(we) + lane
                    T.buffer_store(sums[r], sums[r][e] * correction[r], [e])
            full = T.bind(tirx.floordiv(size, i64(4)))
            with T.serial(full) as quad:
                _add_values(kernel, len(rows), v, scores, sums, first, quad * i64(4), 4, copy)
            with T.serial(size - full * i64(4)) as rest:
                _add_values(
                    kernel, len(rows), v, scores, sums, first, full * i64(4) + rest, 1, copy
                )
            if copy:
                with T.serial(size) as kt, T.serial(i64(D // wd)) as o:
                    _copy_chunk(kernel, plan.append_k, "d", first + kt, o, wd)


def _rows_with_append(blocks: _KeyBlocks, begin: Any, end: Any, low: Any, high: Any) -> None:
    """Attend to the rows of [low, high) that [begin, end) holds; write all of [low, high)."""
    kernel, plan = blocks.kernel, blocks.kernel.plan
    append = plan.append_k
    assert append is not None
    start = T.bind(kernel.at(append.start))
    last = high
    if not append.grows:  # rows outside of the cache are not written
        last = T.bind(tirx.Min(tirx.Max(start + kernel.at(append.rows), low), high))
    first = T.bind(tirx.Max(start, low))
    if append.in_place:
        with T.serial(tirx.Max(last - first, i64(0))) as t:
            _write_new(kernel, first + t, start)
        blocks.take(tirx.Max(begin, low), tirx.Min(end, high), plan.k, plan.v, copy=False)
        return
    past_k, past_v = plan.past_rows()

    def old(low: Any, high: Any) -> None:
        # Rows that a mask excludes are copied all the same: the cache is an output.
        first = T.bind(tirx.Min(tirx.Max(begin, low), tirx.Max(low, high)))
        last = T.bind(tirx.Max(tirx.Min(end, high), first))
        with T.serial(first - low) as t:
            _copy_row(kernel, low + t)
        blocks.take(first, last, past_k, past_v, copy=True)
        with T.serial(tirx.Max(high - last, i64(0))) as t:
            _copy_row(kernel, last + t)

    old(low, T.bind(tirx.Min(first, high)))
    with T.serial(tirx.Max(last - first, i64(0))) as t:
        _write_new(kernel, first + t, start)
    end_new = tirx.Min(tirx.Max(end, first), last)
    blocks.take(tirx.Max(begin, first), end_new, plan.k, plan.v, copy=False)
    if not append.grows:
        old(T.bind(tirx.Min(tirx.Max(last, low), high)), high)


def _add_values(
    kernel: AttentionKernel,
    rows: int,
    v: Any,
    scores: list[Any],
    sums: list[Any],
    first: Any,
    at: Any,
    count: int,
    copy: bool,
) -> None:
    """Add the weighted values of keys first + at .. first + at + count - 1; copy them if asked."""
    we = kernel.we
    with T.serial(i64(kernel.plan.E // we)) as o:
        for r in range(rows):
            with T.vectorized(i64(we)) as lane:
                e = o * i64(we) + lane
                value = sums[r][e]
                for j in range(count):
                    load = kernel.at(v, t=first + at + i64(j), e=e)
                    value = value + scores[r][at + i64(j)] * load
                T.buffer_store(sums[r], value, [e])
        if copy:
            for j in range(count):
                _copy_chunk(kernel, kernel.plan.append_v, "e", first + at + i64(j), o, we)


def _copy_chunk(
    kernel: AttentionKernel, append: Any, axis: str, t: Any, o: Any, width: int
) -> None:
    with T.vectorized(i64(width)) as lane:
        at = {axis: o * i64(width) + lane, "t": t}
        where = [kernel.at(i, **at) for i in append.index]
        value = uncast(kernel.at(append.past, **at), str(append.cache.dtype))
        T.buffer_store(append.cache, value, where)


def _products(
    kernel: AttentionKernel,
    rows: list[tuple[int, int]],
    block: int,
    first: Any,
    size: Any,
    k: Any,
    queries: list[Any],
    scores: list[Any],
) -> None:
    """Store q.k of `size` keys from `first` on; the vector runs over depth, or over keys."""
    plan = kernel.plan
    D = plan.D
    if not contiguous_in(k, plan.d) and contiguous_in(k, plan.t):
        for r in range(len(rows)):
            with T.serial(i64(block)) as kt:
                T.buffer_store(scores[r], f32(0.0), [kt])
        width = kernel.lanes
        with T.serial(i64(D)) as d:
            full = T.bind(tirx.floordiv(size, i64(width)))
            with T.serial(full) as o:
                for r in range(len(rows)):
                    with T.vectorized(i64(width)) as lane:
                        at = o * i64(width) + lane
                        value = kernel.at(k, t=first + at, d=d)
                        T.buffer_store(scores[r], scores[r][at] + queries[r][d] * value, [at])
            with T.serial(size - full * i64(width)) as rest:
                for r in range(len(rows)):
                    at = full * i64(width) + rest
                    value = kernel.at(k, t=first + at, d=d)
                    T.buffer_store(scores[r], scores[r][at] + queries[r][d] * value, [at])
        return
    # Several keys at once hide the latency of the multiply-adds.
    step = max(1, 8 // len(rows)) if len(rows) <= 4 else 1
    step = min(step, 4)
    full = T.bind(tirx.floordiv(size, i64(step)))
    with T.serial(full) as group:
        _dot_products(kernel, len(rows), k, queries, scores, first, group * i64(step), step)
    if step > 1:
        with T.serial(size - full * i64(step)) as rest:
            at = full * i64(step) + rest
            _dot_products(kernel, len(rows), k, queries, scores, first, at, 1)


def _dot_products(
    kernel: AttentionKernel,
    rows: int,
    k: Any,
    queries: list[Any],
    scores: list[Any],
    first: Any,
    at: Any,
    count: int,
) -> None:
    """Store q.k for keys first + at .. first + at + count - 1, all rows."""
    wd = kernel.wd
    partial = {(r, j): local((wd,)) for r in range(rows) for j in range(count)}
    for buffer in partial.values():
        with T.vectorized(i64(wd)) as lane:
            T.buffer_store(buffer, f32(0.0), [lane])
    with T.serial(i64(kernel.plan.D // wd)) as o:
        for (r, j), buffer in partial.items():
            with T.vectorized(i64(wd)) as lane:
                d = o * i64(wd) + lane
                value = kernel.at(k, t=first + at + i64(j), d=d)
                T.buffer_store(buffer, buffer[lane] + queries[r][d] * value, [lane])
    for (r, j), buffer in partial.items():
        _fold_lanes(buffer, wd)
        T.buffer_store(scores[r], buffer[0], [at + i64(j)])


def _fold_lanes(buffer: Any, width: int) -> None:
    """Add up a vector's lanes into lane 0, halving it each time."""
    while width > 1:
        width //= 2
        with T.vectorized(i64(width)) as lane:
            T.buffer_store(buffer, buffer[lane] + buffer[lane + i64(width)], [lane])


def _combine(
    kernel: AttentionKernel,
    rows: list[tuple[int, int]],
    splits: int,
    index: Any,
    partial: Any,
    state: Any,
) -> None:
    """Merge the partial results of the key ranges."""
    plan = kernel.plan
    for r, (member, s) in enumerate(rows):
        top, total, weight = local((1,)), local((1,)), local((splits,))
        T.buffer_store(top, f32(LOWEST), [0])
        T.buffer_store(total, f32(0.0), [0])
        base = index * i64(splits)
        with T.serial(i64(splits)) as p:
            T.buffer_store(top, tirx.Max(top[0], state[base + p, i64(r), i64(0)]), [0])
        with T.serial(i64(splits)) as p:
            mine = state[base + p, i64(r), i64(0)]
            gone = mine == f32(LOWEST)
            shift = tirx.Select(gone, f32(0.0), top[0])
            T.buffer_store(weight, exp_nonpositive(mine - shift), [p])
            T.buffer_store(total, total[0] + weight[p] * state[base + p, i64(r), i64(1)], [0])
        sums = local((plan.E,))
        kernel.store_vector(sums, plan.E, kernel.we, lambda _: f32(0.0))
        with T.serial(i64(splits)) as p, T.serial(i64(plan.E // kernel.we)) as o:
            with T.vectorized(i64(kernel.we)) as lane:
                e = o * i64(kernel.we) + lane
                value = sums[e] + weight[p] * partial[base + p, i64(r), e]
                T.buffer_store(sums, value, [e])
        _finish_row(kernel, member, i64(s), functools.partial(_element, sums), total[0])
