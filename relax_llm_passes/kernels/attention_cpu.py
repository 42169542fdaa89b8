"""CPU attention kernels: decode streams the cache once, prefill works on tiles. Reads only plans.

Both keep a running maximum and sum per row (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"), accumulate in float32, and take masks from the plan's score expression.
LLVM does not reassociate sums, so vectors of partial sums are written out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .attention_plan import AttentionPlan, grouped
from .scalar_expr import (
    TensorLoad,
    any_node,
    bound_analyzer,
    buffer_loads,
    call_name,
    depends_on,
    dtype_of,
    exp_nonpositive,
    i64,
    rewrite,
    substitute,
)

__all__ = ["attention_decode_cpu", "attention_prefill_cpu", "static_int", "vector_width"]

_LOWEST = -math.inf


def static_int(expr: Any) -> int | None:
    """Return the value of a constant expression, else None."""
    if isinstance(expr, int):
        return expr
    return int(expr.value) if isinstance(expr, tirx.IntImm) else None


def vector_width(size: int, lanes: int) -> int:
    """Return the largest power of two that divides `size` and is at most `lanes`."""
    width = lanes
    while size % width:
        width //= 2
    return width


def _f32(value: float) -> Any:
    return tirx.FloatImm("float32", value)


def _local(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return T.alloc_buffer(shape, dtype, scope="local")


def _contiguous_in(expr: Any, var: Any) -> bool:
    """Tell whether every load that depends on `var` does so by `+ var` in its last index only."""
    for load in buffer_loads(expr):
        if not depends_on(load, var):
            continue
        indices = list(load.indices)
        if any(depends_on(i, var) for i in indices[:-1]):
            return False
        step = substitute(indices[-1], {var: var + i64(1)}) - indices[-1]
        if static_int(bound_analyzer({}).simplify(step)) != 1:
            return False
    return True


class _Kernel:
    """Pieces that both kernels use; `outer` maps the plan's batch variables to loop variables."""

    def __init__(self, plan: AttentionPlan, lanes: int) -> None:
        self.plan = plan
        self.lanes = lanes
        self.wd = vector_width(plan.D, lanes)
        self.we = vector_width(plan.E, lanes)
        self.group = plan.group
        self.outer: dict[Any, Any] = {}
        self.row_values, score = hoist_row_values(plan)
        self.score = vector_tanh(score)
        self.bound: dict[Any, Any] = {}
        self.rows: dict[int, dict[Any, Any]] = {}

    @property
    def extents(self) -> list[Any]:
        found = [i64(extent) for _, extent in self.plan.batch]
        if found:
            found[-1] = bound_analyzer({}).simplify(tirx.floordiv(found[-1], i64(self.group)))
        return found

    def bind_outer(self, index: Any) -> None:
        """Split one parallel index into the batch variables."""
        rest = index
        values = []
        for extent in reversed(self.extents):
            values.append(tirx.floormod(rest, extent))
            rest = tirx.floordiv(rest, extent)
        for (var, _), value in zip(self.plan.batch, reversed(values), strict=True):
            self.outer[var] = T.bind(bound_analyzer({}).simplify(value))

    def at(self, expr: Any, member: int = 0, **axes: Any) -> Any:
        """Return a plan expression for one member of the group, at the given axes."""
        plan = self.plan
        values = {getattr(plan, name): value for name, value in axes.items()}
        return substitute(grouped(plan, expr, member), {**self.outer, **values})

    def bind_row_values(self, row: int, member: int, s: Any) -> None:
        """Compute what the scores of one row have in common."""
        self.rows[row] = {var: T.bind(self.at(expr, member, s=s)) for var, expr in self.row_values}

    def row_score(self, row: int, member: int, x: Any, s: Any, t: Any) -> Any:
        """Return the score of a row at key t, for the product x."""
        plan = self.plan
        values = {**self.outer, **self.rows[row], plan.x: x, plan.s: s, plan.t: t}
        return substitute(grouped(plan, self.score, member), values)

    def store_vector(self, buffer: Any, size: int, width: int, value: Callable[[Any], Any]) -> None:
        """Store value(i) to buffer[..., i] for i < size."""
        with T.serial(i64(size // width)) as outer, T.vectorized(i64(width)) as lane:
            index = outer * i64(width) + lane
            T.buffer_store(buffer, value(index), [index])


def hoist_row_values(plan: AttentionPlan) -> tuple[list[tuple[Any, Any]], Any]:
    """Take what does not depend on the key out of the score (ALiBi's slopes, say).

    Returns (variable, float32 expression) pairs, to be computed once a row, and the score with the
    variables in their place.
    """
    found: list[tuple[Any, Any]] = []

    def replace(node: Any) -> Any:
        if isinstance(node, (tirx.FloatImm, tirx.IntImm, tirx.Var)):
            return None
        if dtype_of(node) != "float32" or depends_on(node, plan.t, plan.x):
            return None
        work = any_node(node, lambda n: isinstance(n, (tirx.Div, TensorLoad)) or _is_call(n))
        if not work:
            return None
        for var, expr in found:
            if tvm_ffi.structural_equal(expr, node):
                return var
        var = tirx.Var(f"row{len(found)}", "float32")
        found.append((var, node))
        return var

    return found, rewrite(plan.score, replace)


def _is_call(node: Any) -> bool:
    return isinstance(node, tvm.ir.Call)


def vector_tanh(expr: Any) -> Any:
    """Write tanh as arithmetic that LLVM vectorises: a polynomial near 0, else by exp."""

    def replace(node: Any) -> Any:
        if call_name(node) != "tanh":
            return None
        y = tirx.Var("y", "float32")
        size = tirx.Max(y, -y)
        e = tirx.Var("e", "float32")
        ratio = (_f32(1.0) - e) / (_f32(1.0) + e)
        ratio = tirx.Let(e, exp_nonpositive(_f32(-2.0) * size), ratio)
        square = y * y
        series = _f32(62.0 / 2835.0)
        for c in (-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0):
            series = series * square + _f32(c)
        small = y + y * square * series
        far = tirx.Select(y < _f32(0.0), -ratio, ratio)
        value = tirx.Select(size < _f32(0.25), small, far)
        return tirx.Let(y, vector_tanh(node.args[0]), value)

    return rewrite(expr, replace)


def _begin(plan: AttentionPlan, name: str) -> None:
    T.func_name(name)
    T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": 1, "global_symbol": name})
    # Sizes that no shape gives stand between inputs and outputs, where call_tir puts them.
    for bufr in plan.inputs:
        T.arg(bufr.name, bufr)
    for var in plan.tir_vars:
        T.arg(var.name, var)
    for bufr in plan.outputs:
        T.arg(bufr.name, bufr)


def _element(buffer: Any, index: Any) -> Any:
    return buffer[index]


def _cast(value: Any, dtype: str) -> Any:
    return value if dtype_of(value) == dtype else tirx.Cast(dtype, value)


def _regions() -> None:
    # Opaque block: nothing schedules it further, call_tir only needs that there is one.
    T.reads()
    T.writes()


def attention_decode_cpu(
    plan: AttentionPlan, lanes: int, splits: int = 1, block: int = 64, name: str = "attention"
) -> Any:
    """Return a PrimFunc for a few query rows (static S) against a long cache.

    Parallel over groups of query heads that share keys and, with `splits` > 1, over ranges of
    keys whose partial results are combined by a second loop. Reads every key and value once; with
    an append each row of the caches goes out in the same pass.

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
    kernel = _Kernel(plan, lanes)
    count: Any = i64(1)
    for extent in kernel.extents:
        count = count * extent
    count = bound_analyzer({}).simplify(count)
    E = plan.E
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        _begin(plan, name)
        with T.sblock("attention"):
            _regions()
            partial = state = None
            if splits > 1:
                shape = (count * i64(splits), i64(len(rows)))
                partial = T.sblock_alloc_buffer((*shape, E), "float32")
                state = T.sblock_alloc_buffer((*shape, 2), "float32")
            with T.parallel(count * i64(splits)) as index:
                if splits > 1:
                    part = T.bind(tirx.floormod(index, i64(splits)))
                    kernel.bind_outer(tirx.floordiv(index, i64(splits)))
                else:
                    part = None
                    kernel.bind_outer(index)
                _decode_rows(kernel, rows, S, block, part, splits, index, partial, state)
            if splits > 1:
                with T.parallel(count) as index:
                    kernel.bind_outer(index)
                    _combine(kernel, rows, splits, index, partial, state)
    return builder.get()


def _decode_rows(
    kernel: _Kernel,
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
    queries = [_local((D,)) for _ in rows]
    scores = [_local((block,)) for _ in rows]
    sums = [_local((E,)) for _ in rows]
    top = _local((R,))
    total = _local((R,))
    for r, (member, s) in enumerate(rows):
        kernel.bind_row_values(r, member, i64(s))
        with T.serial(i64(D)) as d:
            T.buffer_store(queries[r], kernel.at(plan.q, member, s=i64(s), d=d), [d])
        kernel.store_vector(sums[r], E, kernel.we, lambda _: _f32(0.0))
        if plan.sink is not None:
            first = kernel.at(plan.sink, member)
            one = _f32(1.0)
            if part is not None:
                first = tirx.Select(part == i64(0), first, _f32(_LOWEST))
                one = tirx.Select(part == i64(0), one, _f32(0.0))
            T.buffer_store(top, first, [r])
            T.buffer_store(total, one, [r])
        else:
            T.buffer_store(top, _f32(_LOWEST), [r])
            T.buffer_store(total, _f32(0.0), [r])
    append_k = plan.append_k
    T_all = kernel.at(i64(plan.T))
    if append_k is None:
        if part is not None:
            chunk = _chunk(begin, end, splits, block)
            begin, end = _slice(begin, end, part, chunk)
        _key_blocks(kernel, rows, block, begin, end, plan.k, plan.v, queries, scores, sums,
                    top, total, copy=False)  # fmt: skip
    else:
        past = T.bind(kernel.at(append_k.past_length))
        low, high = i64(0), past
        if part is not None:
            chunk = _chunk(low, high, splits, block)
            low, high = _slice(low, high, part, chunk)
        # Rows that a window excludes are copied all the same: the cache is an output.
        seen = T.bind(tirx.Min(tirx.Max(begin, low), high))
        with T.serial(tirx.Max(seen - low, i64(0))) as t:
            _copy_row(kernel, low + t)
        past_k, past_v = plan.past_rows()
        _key_blocks(kernel, rows, block, seen, high, past_k, past_v, queries, scores,
                    sums, top, total, copy=True)  # fmt: skip
        only_last = None if part is None else part == i64(splits - 1)

        def new_rows() -> None:
            with T.serial(T_all - past) as t:
                _write_new(kernel, t, past)
            _key_blocks(kernel, rows, block, tirx.Max(begin, past), end, plan.k, plan.v, queries,
                        scores, sums, top, total, copy=False)  # fmt: skip

        if only_last is None:
            new_rows()
        else:
            with T.If(only_last), T.Then():
                new_rows()
    for r, (member, s) in enumerate(rows):
        if part is None:
            _finish_row(kernel, member, i64(s), functools.partial(_element, sums[r]), total[r])
        else:
            T.buffer_store(state, top[r], [index, i64(r), i64(0)])
            T.buffer_store(state, total[r], [index, i64(r), i64(1)])
            with T.serial(i64(E // kernel.we)) as o, T.vectorized(i64(kernel.we)) as lane:
                e = o * i64(kernel.we) + lane
                T.buffer_store(partial, sums[r][e], [index, i64(r), e])


def _chunk(begin: Any, end: Any, splits: int, block: int) -> Any:
    size = tirx.floordiv(end - begin + i64(splits - 1), i64(splits))
    return tirx.floordiv(tirx.Max(size, i64(0)) + i64(block - 1), i64(block)) * i64(block)


def _slice(begin: Any, end: Any, part: Any, chunk: Any) -> tuple[Any, Any]:
    low = T.bind(tirx.Min(begin + part * chunk, end))
    return low, T.bind(tirx.Min(low + chunk, end))


def _finish_row(
    kernel: _Kernel, member: int, s: Any, value: Callable[[Any], Any], total: Any
) -> None:
    """Write one row of the output: the weighted sum divided by the softmax's sum."""
    plan, width = kernel.plan, kernel.we
    scale = _local((1,))
    quotient = _f32(1.0) / total
    if plan.zero_if_masked:
        quotient = tirx.Select(total == _f32(0.0), _f32(0.0), quotient)
    T.buffer_store(scale, quotient, [0])
    with T.serial(i64(plan.E // width)) as o, T.vectorized(i64(width)) as lane:
        e = o * i64(width) + lane
        where = [kernel.at(i, member, s=s, e=e) for i in plan.out_index]
        T.buffer_store(plan.out, _cast(value(e) * scale[0], str(plan.out.dtype)), where)


def _copy_row(kernel: _Kernel, t: Any) -> None:
    plan = kernel.plan
    for append, axis, size in ((plan.append_k, "d", plan.D), (plan.append_v, "e", plan.E)):
        assert append is not None
        width = vector_width(size, kernel.lanes)
        with T.serial(i64(size // width)) as o, T.vectorized(i64(width)) as lane:
            at = {axis: o * i64(width) + lane, "t": t}
            where = [kernel.at(i, **at) for i in append.index]
            value = _uncast(kernel.at(append.past, **at), str(append.cache.dtype))
            T.buffer_store(append.cache, value, where)


def _uncast(value: Any, dtype: str) -> Any:
    """Return a float32 expression in `dtype` (a load of that dtype is taken without its cast)."""
    if isinstance(value, tirx.Cast) and dtype_of(value.value) == dtype:
        return value.value
    return _cast(value, dtype)


def _write_new(kernel: _Kernel, t: Any, past: Any) -> None:
    """Write row `past + t` of both caches from the new keys (rotated) and values."""
    plan = kernel.plan
    for append, axis, size in ((plan.append_k, "d", plan.D), (plan.append_v, "e", plan.E)):
        assert append is not None
        with T.serial(i64(size)) as c:
            where = [kernel.at(i, **{axis: c, "t": past + t}) for i in append.index]
            value = kernel.at(append.new, **{axis: c, "t": t})
            T.buffer_store(append.cache, _cast(value, str(append.cache.dtype)), where)


def _key_blocks(
    kernel: _Kernel,
    rows: list[tuple[int, int]],
    block: int,
    begin: Any,
    end: Any,
    k: Any,
    v: Any,
    queries: list[Any],
    scores: list[Any],
    sums: list[Any],
    top: Any,
    total: Any,
    copy: bool,
) -> None:
    """Take the keys of [begin, end) into the running softmax of all rows."""
    plan, lanes = kernel.plan, kernel.lanes
    D, E, wd, we = plan.D, plan.E, kernel.wd, kernel.we
    begin = T.bind(begin)
    length = T.bind(tirx.Max(end - begin, i64(0)))
    with T.serial(tirx.floordiv(length + i64(block - 1), i64(block))) as kb:
        first = T.bind(begin + kb * i64(block))
        size = T.bind(tirx.Min(i64(block), end - first))
        _products(kernel, rows, block, first, size, k, queries, scores)
        correction = _local((len(rows),))
        for r, (member, s) in enumerate(rows):
            top_lanes, sum_lanes = _local((lanes,)), _local((lanes,))
            with T.vectorized(i64(lanes)) as lane:
                T.buffer_store(top_lanes, _f32(_LOWEST), [lane])
                T.buffer_store(sum_lanes, _f32(0.0), [lane])
            with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
                at = o * i64(lanes) + lane
                # Lanes past the end repeat the last key: no mask is read out of bounds.
                safe = tirx.Min(first + at, end - i64(1))
                value = kernel.row_score(r, member, scores[r][at], i64(s), safe)
                value = tirx.Select(at < size, value, _f32(_LOWEST))
                T.buffer_store(scores[r], value, [at])
            with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
                at = o * i64(lanes) + lane
                T.buffer_store(top_lanes, tirx.Max(top_lanes[lane], scores[r][at]), [lane])
            highest = _local((1,))
            T.buffer_store(highest, top[r], [0])
            with T.serial(i64(lanes)) as lane:
                T.buffer_store(highest, tirx.Max(highest[0], top_lanes[lane]), [0])
            # While all is masked the maximum is -inf; subtracting 0 instead avoids inf - inf.
            shift = _local((1,))
            T.buffer_store(
                shift,
                tirx.Select(highest[0] == _f32(_LOWEST), _f32(0.0), highest[0]),
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
            _add_values(kernel, len(rows), v, scores, sums, first, full * i64(4) + rest, 1, copy)
        if copy:
            with T.serial(size) as kt, T.serial(i64(D // wd)) as o:
                _copy_chunk(kernel, plan.append_k, "d", first + kt, o, wd)


def _add_values(
    kernel: _Kernel,
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


def _copy_chunk(kernel: _Kernel, append: Any, axis: str, t: Any, o: Any, width: int) -> None:
    with T.vectorized(i64(width)) as lane:
        at = {axis: o * i64(width) + lane, "t": t}
        where = [kernel.at(i, **at) for i in append.index]
        value = _uncast(kernel.at(append.past, **at), str(append.cache.dtype))
        T.buffer_store(append.cache, value, where)


def _products(
    kernel: _Kernel,
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
    if not _contiguous_in(k, plan.d) and _contiguous_in(k, plan.t):
        for r in range(len(rows)):
            with T.serial(i64(block)) as kt:
                T.buffer_store(scores[r], _f32(0.0), [kt])
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
    kernel: _Kernel,
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
    partial = {(r, j): _local((wd,)) for r in range(rows) for j in range(count)}
    for buffer in partial.values():
        with T.vectorized(i64(wd)) as lane:
            T.buffer_store(buffer, _f32(0.0), [lane])
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
    kernel: _Kernel,
    rows: list[tuple[int, int]],
    splits: int,
    index: Any,
    partial: Any,
    state: Any,
) -> None:
    """Merge the partial results of the key ranges."""
    plan = kernel.plan
    for r, (member, s) in enumerate(rows):
        top, total, weight = _local((1,)), _local((1,)), _local((splits,))
        T.buffer_store(top, _f32(_LOWEST), [0])
        T.buffer_store(total, _f32(0.0), [0])
        base = index * i64(splits)
        with T.serial(i64(splits)) as p:
            T.buffer_store(top, tirx.Max(top[0], state[base + p, i64(r), i64(0)]), [0])
        with T.serial(i64(splits)) as p:
            mine = state[base + p, i64(r), i64(0)]
            gone = mine == _f32(_LOWEST)
            shift = tirx.Select(gone, _f32(0.0), top[0])
            T.buffer_store(weight, exp_nonpositive(mine - shift), [p])
            T.buffer_store(total, total[0] + weight[p] * state[base + p, i64(r), i64(1)], [0])
        sums = _local((plan.E,))
        kernel.store_vector(sums, plan.E, kernel.we, lambda _: _f32(0.0))
        with T.serial(i64(splits)) as p, T.serial(i64(plan.E // kernel.we)) as o:
            with T.vectorized(i64(kernel.we)) as lane:
                e = o * i64(kernel.we) + lane
                value = sums[e] + weight[p] * partial[base + p, i64(r), e]
                T.buffer_store(sums, value, [e])
        _finish_row(kernel, member, i64(s), functools.partial(_element, sums), total[0])


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
    kernel = _Kernel(plan, lanes)
    kernel.group = 1
    count: Any = i64(1)
    for extent in kernel.extents:
        count = count * extent
    S = i64(plan.S)
    tiles = tirx.floordiv(S + i64(rows - 1), i64(rows))
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        _begin(plan, name)
        with T.sblock("attention"):
            _regions()
            with T.parallel(bound_analyzer({}).simplify(count * tiles)) as index:
                kernel.bind_outer(tirx.floordiv(index, tiles))
                # The last tiles see the most keys under a causal mask: start with them.
                tile = T.bind(tiles - i64(1) - tirx.floormod(index, tiles))
                _prefill_tile(kernel, tile * i64(rows), S, rows, block)
    return builder.get()


def _plain(kernel: _Kernel, expr: Any, **axes: Any) -> Any:
    plan = kernel.plan
    values = {getattr(plan, name): value for name, value in axes.items()}
    return substitute(expr, {**kernel.outer, **values})


def _prefill_tile(kernel: _Kernel, first_row: Any, S: Any, rows: int, block: int) -> None:
    plan = kernel.plan
    D, E, we = plan.D, plan.E, kernel.we
    MR = 4
    first_row = T.bind(first_row)
    count = T.bind(tirx.Min(i64(rows), S - first_row))
    last_row = first_row + count - i64(1)
    begin = T.bind(_plain(kernel, plan.key_begin, s=first_row))
    end = T.bind(_plain(kernel, plan.key_end, s=last_row))
    query = _local((rows * D,))
    keys = _local((D * block,))
    scores = _local((rows * block,))
    sums = _local((rows * E,))
    top, total, correction = _local((rows,)), _local((rows,)), _local((rows,))
    with T.serial(i64(rows)) as r:
        # Rows past the end repeat the last one, so nothing is read out of bounds.
        s = tirx.Min(first_row + r, S - i64(1))
        with T.serial(i64(D)) as d:
            T.buffer_store(query, _plain(kernel, plan.q, s=s, d=d), [r * i64(D) + d])
        with T.serial(i64(E // we)) as o, T.vectorized(i64(we)) as lane:
            T.buffer_store(sums, _f32(0.0), [r * i64(E) + o * i64(we) + lane])
        if plan.sink is not None:
            T.buffer_store(top, _plain(kernel, plan.sink), [r])
            T.buffer_store(total, _f32(1.0), [r])
        else:
            T.buffer_store(top, _f32(_LOWEST), [r])
            T.buffer_store(total, _f32(0.0), [r])
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


def _finish_row_plain(kernel: _Kernel, s: Any, r: Any, sums: Any, total: Any) -> None:
    plan, width = kernel.plan, kernel.we
    quotient = _f32(1.0) / total[r]
    if plan.zero_if_masked:
        quotient = tirx.Select(total[r] == _f32(0.0), _f32(0.0), quotient)
    scale = _local((1,))
    T.buffer_store(scale, quotient, [0])
    with T.serial(i64(plan.E // width)) as o, T.vectorized(i64(width)) as lane:
        e = o * i64(width) + lane
        where = [_plain(kernel, i, s=s, e=e) for i in plan.out_index]
        value = sums[r * i64(plan.E) + e] * scale[0]
        T.buffer_store(plan.out, _cast(value, str(plan.out.dtype)), where)


def _pack_keys(kernel: _Kernel, keys: Any, first: Any, size: Any, block: int) -> None:
    """Copy keys [first, first + size) as (depth, key); the rest of the block becomes zero."""
    plan = kernel.plan
    D, lanes = plan.D, kernel.lanes
    if _contiguous_in(plan.k, plan.t):
        with T.serial(i64(D)) as d:
            with T.serial(size) as kt:
                value = _plain(kernel, plan.k, t=first + kt, d=d)
                T.buffer_store(keys, value, [d * i64(block) + kt])
            with T.serial(i64(block) - size) as rest:
                T.buffer_store(keys, _f32(0.0), [d * i64(block) + size + rest])
        return
    with T.serial(i64(block // lanes)) as kq, T.serial(i64(D)) as d:
        with T.vectorized(i64(lanes)) as lane:
            kt = kq * i64(lanes) + lane
            safe = tirx.Min(first + kt, first + size - i64(1))
            value = _plain(kernel, plan.k, t=safe, d=d)
            T.buffer_store(keys, value, [d * i64(block) + kt])


def _tile_products(
    kernel: _Kernel, query: Any, keys: Any, scores: Any, rows: int, block: int, MR: int
) -> None:
    D, lanes = kernel.plan.D, kernel.lanes
    NV = 2
    with T.serial(i64(block // (NV * lanes))) as kq, T.serial(i64(rows // MR)) as rq:
        acc = _local((MR * NV * lanes,))
        for m in range(MR * NV):
            with T.vectorized(i64(lanes)) as lane:
                T.buffer_store(acc, _f32(0.0), [i64(m * lanes) + lane])
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
    kernel: _Kernel,
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
    top_lanes, sum_lanes = _local((lanes,)), _local((lanes,))
    with T.vectorized(i64(lanes)) as lane:
        T.buffer_store(top_lanes, _f32(_LOWEST), [lane])
        T.buffer_store(sum_lanes, _f32(0.0), [lane])
    with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
        at = o * i64(lanes) + lane
        safe = tirx.Min(first + at, end - i64(1))
        x = scores[r * i64(block) + at]
        value = _plain(kernel, kernel.score, x=x, s=s, t=safe)
        value = substitute(value, kernel.bound)
        value = tirx.Select(at < size, value, _f32(_LOWEST))
        T.buffer_store(scores, value, [r * i64(block) + at])
    with T.serial(i64(block // lanes)) as o, T.vectorized(i64(lanes)) as lane:
        value = tirx.Max(top_lanes[lane], scores[r * i64(block) + o * i64(lanes) + lane])
        T.buffer_store(top_lanes, value, [lane])
    highest, shift = _local((1,)), _local((1,))
    T.buffer_store(highest, top[r], [0])
    with T.serial(i64(lanes)) as lane:
        T.buffer_store(highest, tirx.Max(highest[0], top_lanes[lane]), [0])
    T.buffer_store(shift, tirx.Select(highest[0] == _f32(_LOWEST), _f32(0.0), highest[0]), [0])
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
    kernel: _Kernel,
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
        acc = _local((MR * NV * we,))

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
