"""CPU attention for a few query rows: the cache is streamed once. Reads only plans.

A running maximum and sum per row (Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax"), float32 accumulation, masks from the plan's score expression.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .attention_copy_cpu import RowCopy, copied, past_the_caches, with_copies, write_new_row
from .attention_keys_cpu import KeyBlocks
from .attention_pieces import (
    LOWEST,
    AttentionKernel,
    begin_function,
    cast_to,
    f32,
    local,
    opaque,
    static_int,
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

            def whole() -> None:
                choose(
                    is_little(kernel.work(len(rows))),
                    functools.partial(rows_with, T.serial),
                    functools.partial(rows_with, T.parallel),
                )

            if plan.append_k is None or plan.append_k.in_place:
                whole()
            else:
                with_copies(whole)
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
    blocks = KeyBlocks(kernel, rows, block, queries, scores, sums, top, total)
    if plan.append_k is None:
        if part is not None:
            chunk = _chunk(begin, end, splits, block)
            begin, end = _slice(begin, end, part, chunk)
        blocks.take(begin, end, plan.k, plan.v)
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


def _rows_with_append(blocks: KeyBlocks, begin: Any, end: Any, low: Any, high: Any) -> None:
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
            write_new_row(kernel, first + t, start)
        blocks.take(tirx.Max(begin, low), tirx.Min(end, high), plan.k, plan.v)
        return
    past_k, past_v = plan.past_rows()

    copies = _copies(kernel)

    def old(low: Any, high: Any) -> None:
        # Rows that a mask excludes are copied all the same: the cache is an output.
        first = T.bind(tirx.Min(tirx.Max(begin, low), tirx.Max(low, high)))
        last = T.bind(tirx.Max(tirx.Min(end, high), first))
        for copy in copies:
            copy.emit(low, first - low)
        blocks.take(first, last, past_k, past_v, copies)
        for copy in copies:
            copy.emit(last, high - last)

    old(low, T.bind(tirx.Min(first, high)))
    with T.serial(tirx.Max(last - first, i64(0))) as t:
        write_new_row(kernel, first + t, start)
    end_new = tirx.Min(tirx.Max(end, first), last)
    blocks.take(tirx.Max(begin, first), end_new, plan.k, plan.v)
    if not append.grows:
        old(T.bind(tirx.Min(tirx.Max(last, low), high)), high)
    copied()


def _copies(kernel: AttentionKernel) -> list[RowCopy]:
    plan = kernel.plan
    past = T.bind(past_the_caches(kernel))
    return [
        RowCopy(kernel, append, axis, past)
        for append, axis in ((plan.append_k, "d"), (plan.append_v, "e"))
        if append is not None
    ]


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
