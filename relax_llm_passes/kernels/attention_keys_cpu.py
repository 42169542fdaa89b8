"""The running softmax of CPU attention over blocks of keys.

LLVM does not reassociate sums, so that vectors of partial sums are written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .attention_copy_cpu import RowCopy
from .attention_pieces import LOWEST, AttentionKernel, contiguous_in, f32, local
from .scalar_expr import exp_nonpositive, i64

__all__ = ["KeyBlocks"]


@dataclass
class KeyBlocks:
    """The running softmax of all rows, which takes ranges of keys one after the other."""

    kernel: AttentionKernel
    rows: list[tuple[int, int]]
    block: int
    queries: list[Any]
    scores: list[Any]
    sums: list[Any]
    top: Any
    total: Any

    def take(self, begin: Any, end: Any, k: Any, v: Any, copies: Sequence[RowCopy] = ()) -> None:
        """Take the keys of [begin, end) in; `copies` are made of their rows on the way.

        There are two, of keys and of values, or none. A few rows at a time are read and then
        copied: what goes out is on its way while the next rows are read.
        """
        copy_k, copy_v = copies or (None, None)
        kernel, rows, block, top, total = self.kernel, self.rows, self.block, self.top, self.total
        queries, scores, sums = self.queries, self.scores, self.sums
        plan, lanes = kernel.plan, kernel.lanes
        E, we = plan.E, kernel.we
        begin = T.bind(begin)
        length = T.bind(tirx.Max(end - begin, i64(0)))
        with T.serial(tirx.floordiv(length + i64(block - 1), i64(block))) as kb:
            first = T.bind(begin + kb * i64(block))
            size = T.bind(tirx.Min(i64(block), end - first))
            _products(kernel, rows, block, first, size, k, queries, scores, copy_k)
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
                _add_values(kernel, len(rows), v, scores, sums, first, quad * i64(4), 4)
                _copy(copy_v, first + quad * i64(4), 4)
            with T.serial(size - full * i64(4)) as rest:
                _add_values(kernel, len(rows), v, scores, sums, first, full * i64(4) + rest, 1)
                _copy(copy_v, first + full * i64(4) + rest, 1)


def _copy(copy: RowCopy | None, first: Any, count: Any) -> None:
    if copy is not None:
        copy.emit(first, i64(count))


def _add_values(
    kernel: AttentionKernel,
    rows: int,
    v: Any,
    scores: list[Any],
    sums: list[Any],
    first: Any,
    at: Any,
    count: int,
) -> None:
    """Add the weighted values of keys first + at .. first + at + count - 1."""
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


def _products(
    kernel: AttentionKernel,
    rows: list[tuple[int, int]],
    block: int,
    first: Any,
    size: Any,
    k: Any,
    queries: list[Any],
    scores: list[Any],
    copy: RowCopy | None,
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
        _copy(copy, first, size)
        return
    # Several keys at once hide the latency of the multiply-adds.
    step = max(1, 8 // len(rows)) if len(rows) <= 4 else 1
    step = min(step, 4)
    full = T.bind(tirx.floordiv(size, i64(step)))
    with T.serial(full) as group:
        _dot_products(kernel, len(rows), k, queries, scores, first, group * i64(step), step)
        _copy(copy, first + group * i64(step), step)
    if step > 1:
        with T.serial(size - full * i64(step)) as rest:
            at = full * i64(step) + rest
            _dot_products(kernel, len(rows), k, queries, scores, first, at, 1)
            _copy(copy, first + at, 1)


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
