"""CUDA attention for a few query rows: one launch, or keys split over blocks and a combine.

Lanes of a power of two share one key row, so that each reads 16 bytes; groups of lanes take
different keys and keep their own running softmax in registers; there is no barrier until the end,
where the groups merge through shared memory. Query heads that share keys are served by one block.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .attention_combine_cuda import combine, store_out
from .attention_pieces import (
    LOWEST,
    aligned_width,
    begin_function,
    cast_to,
    contiguous_in,
    f32,
    local,
    opaque,
    static_int,
    uncast,
)
from .attention_pieces_cuda import THREADS, CudaKernel, exp, lanes_sum, sync
from .attention_plan import Append, AttentionPlan
from .scalar_expr import TensorLoad, buffer_loads, depends_on, i64, rewrite

__all__ = ["attention_decode_cuda", "decode_lanes"]


def decode_lanes(size: int, bits: int) -> tuple[int, int]:
    """Return (lanes, vector): how many threads share a row of `size` and how wide each reads."""
    vector = max(1, min(8, 128 // bits))
    while size % vector:
        vector //= 2
    lanes = 32
    while (size // vector) % lanes:
        lanes //= 2
    # Odd sizes (80, 96) would leave few lanes: narrower reads by more lanes are better.
    while lanes < 8 and vector > 1:
        vector //= 2
        lanes = 32
        while (size // vector) % lanes:
            lanes //= 2
    return lanes, vector


def attention_decode_cuda(
    plan: AttentionPlan, splits: int = 1, keys: int = 4, name: str = "attention"
) -> Any:
    """Return a PrimFunc with thread bindings for a few query rows (static S).

    Parameters
    ----------
    plan : AttentionPlan
        `plan.S` is static; S * group is at most 8.
    splits : int
        Blocks per group of heads; more than one adds a kernel that combines.
    keys : int
        Key rows that each group of lanes has in flight.
    """
    S = static_int(plan.S)
    assert S is not None
    rows = [(member, s) for member in range(plan.group) for s in range(S)]
    kernel = CudaKernel(plan)
    count = kernel.count()
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        begin_function(plan, name)
        with T.sblock("attention"):
            opaque()
            partial = state = None
            if splits > 1:
                shape = (count * i64(splits), i64(len(rows)))
                partial = T.sblock_alloc_buffer((*shape, plan.E), "float32")
                state = T.sblock_alloc_buffer((*shape, 2), "float32")
            with (
                T.launch_thread("blockIdx.x", count * i64(splits)) as block,
                T.launch_thread("threadIdx.x", i64(THREADS)) as thread,
            ):
                part = None
                if splits > 1:
                    part = T.bind(tirx.floormod(block, i64(splits)))
                    kernel.bind_outer(tirx.floordiv(block, i64(splits)))
                else:
                    kernel.bind_outer(block)
                _Decode(kernel, rows, S, keys, part, splits, block, thread, partial, state).emit()
            if splits > 1:
                with (
                    T.launch_thread("blockIdx.x", count) as block,
                    T.launch_thread("threadIdx.x", i64(THREADS)) as thread,
                ):
                    kernel.bind_outer(block)
                    combine(kernel, rows, splits, block, thread, partial, state)
    return builder.get()


class _Decode:
    def __init__(
        self,
        kernel: CudaKernel,
        rows: list[tuple[int, int]],
        S: int,
        keys: int,
        part: Any,
        splits: int,
        block: Any,
        thread: Any,
        partial: Any,
        state: Any,
    ) -> None:
        self.kernel, self.rows, self.S = kernel, rows, S
        self.part, self.splits, self.block, self.thread = part, splits, block, thread
        self.partial, self.state = partial, state
        self.keys = keys
        plan = kernel.plan
        self.plan = plan
        # As wide as rows of keys and values allow, whatever other inputs there are.
        rows_of = {load.source for x in (plan.k, plan.v) for load in buffer_loads(x)}
        bits = min(max(_bits(b) for b in rows_of), 32) if rows_of else 32
        lanes, self.dv = decode_lanes(plan.D, bits)
        self.lanes = lanes
        self.groups = THREADS // lanes
        # The same lanes hold the values; a depth they do not divide is guarded.
        self.ev = self.dv
        while plan.E % self.ev:
            self.ev //= 2
        self.dn = plan.D // (lanes * self.dv)
        self.en = -(-plan.E // (lanes * self.ev))
        self.exact = plan.E == self.en * lanes * self.ev

    def emit(self) -> None:
        plan, kernel = self.plan, self.kernel
        begin = T.bind(kernel.at(plan.key_begin, s=i64(0)))
        end = T.bind(kernel.at(plan.key_end, s=i64(self.S - 1)))
        if plan.append_k is None:
            low, high = self._slice(begin, end)
        else:
            low, high = self._slice(i64(0), T.bind(kernel.written_end(end)))
        if self.part is None:
            self._work(begin, end, low, high)
            return
        # Short contexts leave blocks without keys: they say so and read nothing.
        with T.If(tirx.any(self.part == i64(0), low < high)):
            with T.Then():
                self._work(begin, end, low, high)
            with T.Else(), T.If(self.thread == i64(0)), T.Then():
                for r in range(len(self.rows)):
                    self._store_state(r, f32(LOWEST), f32(0.0))

    def _store_state(self, r: int, top: Any, total: Any) -> None:
        T.buffer_store(self.state, top, [self.block, i64(r), i64(0)])
        T.buffer_store(self.state, total, [self.block, i64(r), i64(1)])

    def _work(self, begin: Any, end: Any, low: Any, high: Any) -> None:
        plan, kernel, rows = self.plan, self.kernel, self.rows
        lane = T.bind(tirx.floormod(self.thread, i64(self.lanes)))
        group = T.bind(tirx.floordiv(self.thread, i64(self.lanes)))
        self.lane, self.group = lane, group
        R = len(rows)
        self.query = [local((self.dn * self.dv,)) for _ in rows]
        self.sums = [local((self.en * self.ev,)) for _ in rows]
        self.top, self.total = local((R,)), local((R,))
        for r, (member, s) in enumerate(rows):
            kernel.bind_row_values(r, member, i64(s))
            self._load_query(self.query[r], member, i64(s))
            with T.unroll(i64(self.en * self.ev)) as i:
                T.buffer_store(self.sums[r], f32(0.0), [i])
            T.buffer_store(self.top, f32(LOWEST), [r])
            T.buffer_store(self.total, f32(0.0), [r])
        if plan.append_k is None:
            self._keys(low, high, plan.k, plan.v)
        else:
            self._with_append(begin, end, low, high)
        self._merge()

    def _load_query(self, query: Any, member: int, s: Any) -> None:
        plan, kernel = self.plan, self.kernel
        if self.dv > 1 and aligned_width(plan, plan.q, plan.d, plan.D) >= self.dv:
            load = plan.q.value if isinstance(plan.q, tirx.Cast) else plan.q
            raw = local((self.dn * self.dv,), str(load.ty.dtype))
            with T.unroll(i64(self.dn)) as i, T.vectorized(i64(self.dv)) as j:
                value = kernel.at(load, member, s=s, d=self._depth(i, j, self.dv))
                T.buffer_store(raw, value, [i * i64(self.dv) + j])
            with T.unroll(i64(self.dn * self.dv)) as i:
                T.buffer_store(query, cast_to(raw[i], "float32"), [i])
            return
        with T.unroll(i64(self.dn)) as i, T.unroll(i64(self.dv)) as j:
            value = kernel.at(plan.q, member, s=s, d=self._depth(i, j, self.dv))
            T.buffer_store(query, value, [i * i64(self.dv) + j])

    def _depth(self, i: Any, j: Any, vector: int) -> Any:
        return (i * i64(self.lanes) + self.lane) * i64(vector) + j

    def _slice(self, begin: Any, end: Any) -> tuple[Any, Any]:
        if self.part is None:
            return begin, end
        size = tirx.Max(end - begin, i64(0))
        # Whole passes: a block takes as long for a few keys as for those that fit one pass.
        at_once = self.groups * self.keys
        share = tirx.floordiv(size + i64(self.splits * at_once - 1), i64(self.splits * at_once))
        chunk = T.bind(share * i64(at_once))
        low = T.bind(tirx.Min(begin + self.part * chunk, end))
        return low, T.bind(tirx.Min(low + chunk, end))

    def _with_append(self, begin: Any, end: Any, low: Any, high: Any) -> None:
        """Attend to [begin, end) and write the caches; this part has the rows of [low, high)."""
        plan, kernel = self.plan, self.kernel
        append = plan.append_k
        assert append is not None
        start = T.bind(kernel.at(append.start))
        first = T.bind(tirx.Max(start, low))
        last = high
        if not append.grows:  # rows outside of the cache are not written
            last = T.bind(tirx.Min(tirx.Max(start + kernel.at(append.rows), low), high))
        if append.in_place:
            self._write_new(first, last, start)
            self._keys(tirx.Max(begin, low), tirx.Min(end, high), plan.k, plan.v)
            return
        self._old_rows(begin, end, low, T.bind(tirx.Min(first, high)))
        self._write_new(first, last, start)
        begin_new, end_new = tirx.Max(begin, first), tirx.Min(tirx.Max(end, first), last)
        self._keys(begin_new, end_new, plan.k, plan.v)
        if not append.grows:
            self._old_rows(begin, end, T.bind(tirx.Min(tirx.Max(last, low), high)), high)

    def _old_rows(self, begin: Any, end: Any, low: Any, high: Any) -> None:
        """Copy the rows of [low, high); those of [begin, end) are attended to on the way."""
        # Every row of the old caches goes out, also those that a mask excludes.
        first = T.bind(tirx.Min(tirx.Max(begin, low), tirx.Max(low, high)))
        last = T.bind(tirx.Max(tirx.Min(end, high), first))
        self._copy_rows(low, first)
        self._keys(first, last, *self.plan.past_rows(), copy=True)
        self._copy_rows(last, high)

    def _copy_rows(self, low: Any, high: Any) -> None:
        size = tirx.Max(high - low, i64(0))
        per_pass = i64(self.groups)
        with T.serial(tirx.floordiv(size + per_pass - i64(1), per_pass)) as it:
            t = low + it * per_pass + self.group
            with T.If(t < high), T.Then():
                self._copy(self.plan.append_k, "d", t, self.dn, self.dv, True)
                self._copy(self.plan.append_v, "e", t, self.en, self.ev, self.exact)

    def _copy(self, append: Any, axis: str, t: Any, n: int, vector: int, exact: bool) -> None:
        """Copy this thread's part of row t from the old cache to the new one."""
        with T.unroll(i64(n)) as i:

            def store() -> None:
                with T.vectorized(i64(vector)) as j:
                    at = {axis: self._depth(i, j, vector), "t": t}
                    where = [self.kernel.at(x, **at) for x in append.index]
                    value = uncast(self.kernel.at(append.past, **at), str(append.cache.dtype))
                    T.buffer_store(append.cache, value, where)

            if exact:
                store()
            else:
                limit = i64(self.plan.E if axis == "e" else self.plan.D)
                with T.If(self._depth(i, i64(0), vector) < limit), T.Then():
                    store()

    def _write_new(self, first: Any, last: Any, start: Any) -> None:
        """Write the new rows of [first, last) to both caches; the block sees them afterwards."""
        plan, kernel = self.plan, self.kernel
        count = tirx.Max(last - first, i64(0))
        for append, axis, width in ((plan.append_k, "d", plan.D), (plan.append_v, "e", plan.E)):
            assert append is not None
            total = count * i64(width)
            with T.serial(tirx.floordiv(total + i64(THREADS - 1), i64(THREADS))) as it:
                flat = it * i64(THREADS) + self.thread
                with T.If(flat < total), T.Then():
                    t = first + tirx.floordiv(flat, i64(width))
                    col = tirx.floormod(flat, i64(width))
                    where = [kernel.at(i, **{axis: col, "t": t}) for i in append.index]
                    value = kernel.at(append.new, **{axis: col, "t": t - start})
                    T.buffer_store(append.cache, cast_to(value, str(append.cache.dtype)), where)
        sync()

    def _stage(
        self,
        expr: Any,
        axis: str,
        t: Any,
        n: int,
        vector: int,
        exact: bool,
        copy: Append | None = None,
        inside: Any = None,
    ) -> Any:
        """Load one row's part of this thread into registers; 16-byte reads where rows allow.

        With `copy` the row goes out to that cache as well, where `inside` holds.
        """
        kernel, plan = self.kernel, self.plan
        var = plan.d if axis == "d" else plan.e
        values = local((n * vector,))
        loads = [load for load in buffer_loads(expr) if depends_on(load, var)]
        simple = len(loads) == 1 and contiguous_in(expr, var)
        size = plan.D if axis == "d" else plan.E

        def safe(index: Any) -> Any:
            return index if exact else tirx.Min(index, i64(size - 1))

        if simple and exact and vector > 1:
            raw = local((n * vector,), str(loads[0].ty.dtype))
            with T.unroll(i64(n)) as i, T.vectorized(i64(vector)) as j:
                value = kernel.at(loads[0], **{axis: self._depth(i, j, vector), "t": t})
                T.buffer_store(raw, value, [i * i64(vector) + j])
            if copy is not None:
                self._put(raw, copy, axis, t, n, vector, inside)
            with T.unroll(i64(n * vector)) as i:
                value = _replace_load(expr, loads[0], raw[i])
                T.buffer_store(values, kernel.at(value, t=t), [i])
            return values
        with T.unroll(i64(n)) as i, T.unroll(i64(vector)) as j:
            value = kernel.at(expr, **{axis: safe(self._depth(i, j, vector)), "t": t})
            T.buffer_store(values, value, [i * i64(vector) + j])
        if copy is not None:
            with T.If(inside), T.Then():
                self._copy(copy, axis, t, n, vector, exact)
        return values

    def _put(
        self, raw: Any, append: Append, axis: str, t: Any, n: int, vector: int, inside: Any
    ) -> None:
        """Store the registers that hold a row of the old cache to the new one."""
        assert str(raw.dtype) == str(append.cache.dtype)
        with T.If(inside), T.Then(), T.unroll(i64(n)) as i, T.vectorized(i64(vector)) as j:
            at = {axis: self._depth(i, j, vector), "t": t}
            where = [self.kernel.at(x, **at) for x in append.index]
            T.buffer_store(append.cache, raw[i * i64(vector) + j], where)

    def _keys(self, begin: Any, end: Any, k: Any, v: Any, copy: bool = False) -> None:
        """Take the keys of [begin, end) into the running softmax; every lane loops alike.

        With `copy` their rows go out to the new caches on the way.
        """
        kernel, rows, KT = self.kernel, self.rows, self.keys
        to_k, to_v = (self.plan.append_k, self.plan.append_v) if copy else (None, None)
        begin, end = T.bind(begin), T.bind(end)
        size = tirx.Max(end - begin, i64(0))
        per_pass = i64(self.groups * KT)
        with T.serial(tirx.floordiv(size + per_pass - i64(1), per_pass)) as it:
            base = T.bind(begin + it * per_pass + self.group)
            at = [T.bind(tirx.Min(base + i64(n * self.groups), end - i64(1))) for n in range(KT)]
            inside = [base + i64(n * self.groups) < end for n in range(KT)]
            scores = [local((KT,)) for _ in rows]
            for n in range(KT):
                key = self._stage(k, "d", at[n], self.dn, self.dv, True, to_k, inside[n])
                for r in range(len(rows)):
                    T.buffer_store(scores[r], f32(0.0), [n])
                    with T.unroll(i64(self.dn * self.dv)) as i:
                        T.buffer_store(scores[r], scores[r][n] + self.query[r][i] * key[i], [n])
                    lanes_sum(scores[r], n, self.lanes)
            for r, (member, s) in enumerate(rows):
                highest, shift, factor = local((1,)), local((1,)), local((1,))
                T.buffer_store(highest, self.top[r], [0])
                for n in range(KT):
                    value = kernel.row_score(r, member, scores[r][n], i64(s), at[n])
                    T.buffer_store(scores[r], tirx.Select(inside[n], value, f32(LOWEST)), [n])
                    T.buffer_store(highest, tirx.Max(highest[0], scores[r][n]), [0])
                none = highest[0] == f32(LOWEST)
                T.buffer_store(shift, tirx.Select(none, f32(0.0), highest[0]), [0])
                T.buffer_store(factor, exp(self.top[r] - shift[0]), [0])
                T.buffer_store(self.top, highest[0], [r])
                T.buffer_store(self.total, self.total[r] * factor[0], [r])
                with T.unroll(i64(self.en * self.ev)) as i:
                    T.buffer_store(self.sums[r], self.sums[r][i] * factor[0], [i])
                for n in range(KT):
                    T.buffer_store(scores[r], exp(scores[r][n] - shift[0]), [n])
                    T.buffer_store(self.total, self.total[r] + scores[r][n], [r])
            for n in range(KT):
                value = self._stage(v, "e", at[n], self.en, self.ev, self.exact, to_v, inside[n])
                for r in range(len(rows)):
                    with T.unroll(i64(self.en * self.ev)) as i:
                        T.buffer_store(self.sums[r], self.sums[r][i] + scores[r][n] * value[i], [i])

    def _merge(self) -> None:
        """Merge the groups of lanes through shared memory and write the rows."""
        plan, kernel = self.plan, self.kernel
        E, G = plan.E, self.groups
        shared_top = T.alloc_buffer((G,), "float32", scope="shared")
        shared_total = T.alloc_buffer((G,), "float32", scope="shared")
        shared_sums = T.alloc_buffer((G, E), "float32", scope="shared")
        for r, (member, s) in enumerate(self.rows):
            if r:
                sync()
            with T.If(self.lane == i64(0)), T.Then():
                T.buffer_store(shared_top, self.top[r], [self.group])
                T.buffer_store(shared_total, self.total[r], [self.group])
            with T.unroll(i64(self.en)) as i, T.unroll(i64(self.ev)) as j:
                e = self._depth(i, j, self.ev)
                with T.If(e < i64(E)), T.Then():
                    T.buffer_store(shared_sums, self.sums[r][i * i64(self.ev) + j], [self.group, e])
            sync()
            top, shift, total = local((1,)), local((1,)), local((1,))
            first = f32(LOWEST)
            if plan.sink is not None:
                first = kernel.at(plan.sink, member)
                if self.part is not None:
                    first = tirx.Select(self.part == i64(0), first, f32(LOWEST))
            T.buffer_store(top, first, [0])
            with T.unroll(i64(G)) as g:
                T.buffer_store(top, tirx.Max(top[0], shared_top[g]), [0])
            none = top[0] == f32(LOWEST)
            T.buffer_store(shift, tirx.Select(none, f32(0.0), top[0]), [0])
            T.buffer_store(total, exp(first - shift[0]) if plan.sink is not None else f32(0.0), [0])
            weight = local((G,))
            with T.unroll(i64(G)) as g:
                T.buffer_store(weight, exp(shared_top[g] - shift[0]), [g])
                T.buffer_store(total, total[0] + shared_total[g] * weight[g], [0])
            with T.serial(i64(-(-E // THREADS))) as it:
                e = it * i64(THREADS) + self.thread
                with T.If(e < i64(E)), T.Then():
                    value = local((1,))
                    T.buffer_store(value, f32(0.0), [0])
                    with T.unroll(i64(G)) as g:
                        T.buffer_store(value, value[0] + weight[g] * shared_sums[g, e], [0])
                    if self.part is None:
                        store_out(kernel, member, i64(s), e, value[0], total[0])
                    else:
                        T.buffer_store(self.partial, value[0], [self.block, i64(r), e])
            if self.part is not None:
                with T.If(self.thread == i64(0)), T.Then():
                    self._store_state(r, top[0], total[0])


def _bits(buffer: Any) -> int:

    return int(tvm.DataType(str(buffer.dtype)).bits)


def _replace_load(expr: Any, load: Any, value: Any) -> Any:

    return rewrite(expr, lambda n: value if isinstance(n, TensorLoad) and n.same_as(load) else None)
