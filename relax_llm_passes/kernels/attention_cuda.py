"""CUDA attention kernels: decode in one launch (or keys split, and a combine), prefill in tiles.

Decode: lanes of a power of two share one key row, so that each reads 16 bytes; groups of lanes take
different keys and keep their own running softmax in registers; there is no barrier until the end,
where the groups merge through shared memory. Query heads that share keys are served by one block.
Prefill: a block holds a tile of rows in shared memory and walks over tiles of keys; scores live in
registers and shared memory only. Sums are float32.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .attention_cpu import (
    _begin,
    _cast,
    _contiguous_in,
    _f32,
    _Kernel,
    _local,
    _regions,
    _uncast,
    static_int,
)
from .attention_plan import AttentionPlan
from .scalar_expr import TensorLoad, bound_analyzer, buffer_loads, depends_on, i64, substitute

__all__ = ["attention_decode_cuda", "attention_prefill_cuda", "decode_lanes"]

_LOWEST = -math.inf
_FULL_WARP = 0xFFFFFFFF
_THREADS = 128


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


def _i32(value: int) -> Any:
    return tirx.IntImm("int32", value)


def _shuffle_xor(value: Any, step: int) -> Any:
    mask = tirx.IntImm("uint32", _FULL_WARP)
    return T.tvm_warp_shuffle_xor(mask, value, _i32(step), _i32(32), _i32(32))


def _lanes_sum(buffer: Any, index: Any, lanes: int) -> None:
    """Sum buffer[index] over aligned groups of `lanes` threads; all get the sum."""
    step = lanes // 2
    while step:
        T.buffer_store(buffer, buffer[index] + _shuffle_xor(buffer[index], step), [index])
        step //= 2


def _lanes_max(buffer: Any, index: Any, lanes: int) -> None:
    step = lanes // 2
    while step:
        other = _shuffle_xor(buffer[index], step)
        T.buffer_store(buffer, tirx.Max(buffer[index], other), [index])
        step //= 2


def _sync() -> None:
    T.evaluate(T.tvm_storage_sync("shared"))


def _exp(x: Any) -> Any:
    return tirx.exp(x)


class _CudaKernel(_Kernel):
    def __init__(self, plan: AttentionPlan) -> None:
        super().__init__(plan, 1)
        # CUDA has a tanh of its own; keep the plan's.
        self.score = _row_score(self)

    def count(self) -> Any:
        """Blocks for one part of the keys: batch times groups of heads."""
        count: Any = i64(1)
        for extent in self.extents:
            count = count * extent
        return bound_analyzer({}).simplify(count)


def _row_score(kernel: _Kernel) -> Any:
    from .attention_cpu import hoist_row_values

    kernel.row_values, score = hoist_row_values(kernel.plan)
    return score


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
    kernel = _CudaKernel(plan)
    count = kernel.count()
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        _begin(plan, name)
        with T.sblock("attention"):
            _regions()
            partial = state = None
            if splits > 1:
                shape = (count * i64(splits), i64(len(rows)))
                partial = T.sblock_alloc_buffer((*shape, plan.E), "float32")
                state = T.sblock_alloc_buffer((*shape, 2), "float32")
            with (
                T.launch_thread("blockIdx.x", count * i64(splits)) as block,
                T.launch_thread("threadIdx.x", i64(_THREADS)) as thread,
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
                    T.launch_thread("threadIdx.x", i64(_THREADS)) as thread,
                ):
                    kernel.bind_outer(block)
                    _combine(kernel, rows, splits, block, thread, partial, state)
    return builder.get()


class _Decode:
    def __init__(
        self,
        kernel: _CudaKernel,
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
        widest = max([_bits(b) for b in plan.inputs if len(b.shape) > 1] or [32])
        bits = min(widest, 32)
        lanes, self.dv = decode_lanes(plan.D, bits)
        self.lanes = lanes
        self.groups = _THREADS // lanes
        # The same lanes hold the values; a depth they do not divide is guarded.
        self.ev = self.dv
        while plan.E % self.ev:
            self.ev //= 2
        self.dn = plan.D // (lanes * self.dv)
        self.en = -(-plan.E // (lanes * self.ev))
        self.exact = plan.E == self.en * lanes * self.ev

    def emit(self) -> None:
        plan, kernel, rows = self.plan, self.kernel, self.rows
        lane = T.bind(tirx.floormod(self.thread, i64(self.lanes)))
        group = T.bind(tirx.floordiv(self.thread, i64(self.lanes)))
        self.lane, self.group = lane, group
        R = len(rows)
        self.query = [_local((self.dn * self.dv,)) for _ in rows]
        self.sums = [_local((self.en * self.ev,)) for _ in rows]
        self.top, self.total = _local((R,)), _local((R,))
        for r, (member, s) in enumerate(rows):
            kernel.bind_row_values(r, member, i64(s))
            with T.unroll(i64(self.dn)) as i, T.unroll(i64(self.dv)) as j:
                value = kernel.at(plan.q, member, s=i64(s), d=self._depth(i, j, self.dv))
                T.buffer_store(self.query[r], value, [i * i64(self.dv) + j])
            with T.unroll(i64(self.en * self.ev)) as i:
                T.buffer_store(self.sums[r], _f32(0.0), [i])
            T.buffer_store(self.top, _f32(_LOWEST), [r])
            T.buffer_store(self.total, _f32(0.0), [r])
        begin = T.bind(kernel.at(plan.key_begin, s=i64(0)))
        end = T.bind(kernel.at(plan.key_end, s=i64(self.S - 1)))
        if plan.append_k is None:
            low, high = self._slice(begin, end)
            self._keys(low, high, plan.k, plan.v)
        else:
            self._with_append(begin, end)
        self._merge()

    def _depth(self, i: Any, j: Any, vector: int) -> Any:
        return (i * i64(self.lanes) + self.lane) * i64(vector) + j

    def _slice(self, begin: Any, end: Any) -> tuple[Any, Any]:
        if self.part is None:
            return begin, end
        size = tirx.Max(end - begin, i64(0))
        chunk = tirx.floordiv(size + i64(self.splits - 1), i64(self.splits))
        low = T.bind(tirx.Min(begin + self.part * chunk, end))
        return low, T.bind(tirx.Min(low + chunk, end))

    def _with_append(self, begin: Any, end: Any) -> None:
        plan, kernel = self.plan, self.kernel
        append_k, append_v = plan.append_k, plan.append_v
        assert append_k is not None and append_v is not None
        past = T.bind(kernel.at(append_k.past_length))
        low, high = self._slice(i64(0), past)
        # Every row of the old caches goes out, also those that a window excludes.
        size = tirx.Max(high - low, i64(0))
        per_pass = i64(self.groups)
        with T.serial(tirx.floordiv(size + per_pass - i64(1), per_pass)) as it:
            t = low + it * per_pass + self.group
            with T.If(t < high), T.Then():
                self._copy(append_k, "d", t, self.dn, self.dv, True)
                self._copy(append_v, "e", t, self.en, self.ev, self.exact)
        self._keys(tirx.Max(begin, low), high, *plan.past_rows())
        new = kernel.at(plan.T) - past

        def fresh() -> None:
            for append, axis, width in ((append_k, "d", plan.D), (append_v, "e", plan.E)):
                total = new * i64(width)
                with T.serial(tirx.floordiv(total + i64(_THREADS - 1), i64(_THREADS))) as it:
                    flat = it * i64(_THREADS) + self.thread
                    with T.If(flat < total), T.Then():
                        row, col = tirx.floordiv(flat, i64(width)), tirx.floormod(flat, i64(width))
                        where = [kernel.at(i, **{axis: col, "t": past + row}) for i in append.index]
                        value = kernel.at(append.new, **{axis: col, "t": row})
                        T.buffer_store(append.cache, _cast(value, str(append.cache.dtype)), where)
            _sync()
            self._keys(tirx.Max(begin, past), end, plan.k, plan.v)

        if self.part is None:
            fresh()
        else:
            with T.If(self.part == i64(self.splits - 1)), T.Then():
                fresh()

    def _copy(self, append: Any, axis: str, t: Any, n: int, vector: int, exact: bool) -> None:
        with T.unroll(i64(n)) as i:

            def store() -> None:
                with T.vectorized(i64(vector)) as j:
                    at = {axis: self._depth(i, j, vector), "t": t}
                    where = [self.kernel.at(x, **at) for x in append.index]
                    value = _uncast(self.kernel.at(append.past, **at), str(append.cache.dtype))
                    T.buffer_store(append.cache, value, where)

            if exact:
                store()
            else:
                limit = i64(self.plan.E if axis == "e" else self.plan.D)
                with T.If(self._depth(i, i64(0), vector) < limit), T.Then():
                    store()

    def _stage(self, expr: Any, axis: str, t: Any, n: int, vector: int, exact: bool) -> Any:
        """Load one row's part of this thread into registers; 16-byte reads where rows allow."""
        kernel, plan = self.kernel, self.plan
        var = plan.d if axis == "d" else plan.e
        values = _local((n * vector,))
        loads = [load for load in buffer_loads(expr) if depends_on(load, var)]
        simple = len(loads) == 1 and _contiguous_in(expr, var)
        size = plan.D if axis == "d" else plan.E

        def safe(index: Any) -> Any:
            return index if exact else tirx.Min(index, i64(size - 1))

        if simple and exact and vector > 1:
            raw = _local((n * vector,), str(loads[0].ty.dtype))
            with T.unroll(i64(n)) as i, T.vectorized(i64(vector)) as j:
                value = kernel.at(loads[0], **{axis: self._depth(i, j, vector), "t": t})
                T.buffer_store(raw, value, [i * i64(vector) + j])
            with T.unroll(i64(n * vector)) as i:
                value = _replace_load(expr, loads[0], raw[i])
                T.buffer_store(values, kernel.at(value, t=t), [i])
            return values
        with T.unroll(i64(n)) as i, T.unroll(i64(vector)) as j:
            value = kernel.at(expr, **{axis: safe(self._depth(i, j, vector)), "t": t})
            T.buffer_store(values, value, [i * i64(vector) + j])
        return values

    def _keys(self, begin: Any, end: Any, k: Any, v: Any) -> None:
        """Take the keys of [begin, end) into the running softmax; every lane loops alike."""
        kernel, rows, KT = self.kernel, self.rows, self.keys
        begin, end = T.bind(begin), T.bind(end)
        size = tirx.Max(end - begin, i64(0))
        per_pass = i64(self.groups * KT)
        with T.serial(tirx.floordiv(size + per_pass - i64(1), per_pass)) as it:
            base = T.bind(begin + it * per_pass + self.group)
            at = [T.bind(tirx.Min(base + i64(n * self.groups), end - i64(1))) for n in range(KT)]
            scores = [_local((KT,)) for _ in rows]
            for n in range(KT):
                key = self._stage(k, "d", at[n], self.dn, self.dv, True)
                for r in range(len(rows)):
                    T.buffer_store(scores[r], _f32(0.0), [n])
                    with T.unroll(i64(self.dn * self.dv)) as i:
                        T.buffer_store(scores[r], scores[r][n] + self.query[r][i] * key[i], [n])
                    _lanes_sum(scores[r], n, self.lanes)
            for r, (member, s) in enumerate(rows):
                highest, shift, factor = _local((1,)), _local((1,)), _local((1,))
                T.buffer_store(highest, self.top[r], [0])
                for n in range(KT):
                    value = kernel.row_score(r, member, scores[r][n], i64(s), at[n])
                    inside = base + i64(n * self.groups) < end
                    T.buffer_store(scores[r], tirx.Select(inside, value, _f32(_LOWEST)), [n])
                    T.buffer_store(highest, tirx.Max(highest[0], scores[r][n]), [0])
                none = highest[0] == _f32(_LOWEST)
                T.buffer_store(shift, tirx.Select(none, _f32(0.0), highest[0]), [0])
                T.buffer_store(factor, _exp(self.top[r] - shift[0]), [0])
                T.buffer_store(self.top, highest[0], [r])
                T.buffer_store(self.total, self.total[r] * factor[0], [r])
                with T.unroll(i64(self.en * self.ev)) as i:
                    T.buffer_store(self.sums[r], self.sums[r][i] * factor[0], [i])
                for n in range(KT):
                    T.buffer_store(scores[r], _exp(scores[r][n] - shift[0]), [n])
                    T.buffer_store(self.total, self.total[r] + scores[r][n], [r])
            for n in range(KT):
                value = self._stage(v, "e", at[n], self.en, self.ev, self.exact)
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
                _sync()
            with T.If(self.lane == i64(0)), T.Then():
                T.buffer_store(shared_top, self.top[r], [self.group])
                T.buffer_store(shared_total, self.total[r], [self.group])
            with T.unroll(i64(self.en)) as i, T.unroll(i64(self.ev)) as j:
                e = self._depth(i, j, self.ev)
                with T.If(e < i64(E)), T.Then():
                    T.buffer_store(shared_sums, self.sums[r][i * i64(self.ev) + j], [self.group, e])
            _sync()
            top, shift, total = _local((1,)), _local((1,)), _local((1,))
            first = _f32(_LOWEST)
            if plan.sink is not None:
                first = kernel.at(plan.sink, member)
                if self.part is not None:
                    first = tirx.Select(self.part == i64(0), first, _f32(_LOWEST))
            T.buffer_store(top, first, [0])
            with T.unroll(i64(G)) as g:
                T.buffer_store(top, tirx.Max(top[0], shared_top[g]), [0])
            none = top[0] == _f32(_LOWEST)
            T.buffer_store(shift, tirx.Select(none, _f32(0.0), top[0]), [0])
            T.buffer_store(
                total, _exp(first - shift[0]) if plan.sink is not None else _f32(0.0), [0]
            )
            weight = _local((G,))
            with T.unroll(i64(G)) as g:
                T.buffer_store(weight, _exp(shared_top[g] - shift[0]), [g])
                T.buffer_store(total, total[0] + shared_total[g] * weight[g], [0])
            with T.serial(i64(-(-E // _THREADS))) as it:
                e = it * i64(_THREADS) + self.thread
                with T.If(e < i64(E)), T.Then():
                    value = _local((1,))
                    T.buffer_store(value, _f32(0.0), [0])
                    with T.unroll(i64(G)) as g:
                        T.buffer_store(value, value[0] + weight[g] * shared_sums[g, e], [0])
                    if self.part is None:
                        _store_out(kernel, member, i64(s), e, value[0], total[0])
                    else:
                        T.buffer_store(self.partial, value[0], [self.block, i64(r), e])
            if self.part is not None:
                with T.If(self.thread == i64(0)), T.Then():
                    T.buffer_store(self.state, top[0], [self.block, i64(r), i64(0)])
                    T.buffer_store(self.state, total[0], [self.block, i64(r), i64(1)])


def _bits(buffer: Any) -> int:
    import tvm

    return int(tvm.DataType(str(buffer.dtype)).bits)


def _replace_load(expr: Any, load: Any, value: Any) -> Any:
    from .scalar_expr import rewrite

    return rewrite(expr, lambda n: value if isinstance(n, TensorLoad) and n.same_as(load) else None)


def _store_out(kernel: _Kernel, member: int, s: Any, e: Any, value: Any, total: Any) -> None:
    plan = kernel.plan
    quotient = value / total
    if plan.zero_if_masked:
        quotient = tirx.Select(total == _f32(0.0), _f32(0.0), quotient)
    where = [kernel.at(i, member, s=s, e=e) for i in plan.out_index]
    T.buffer_store(plan.out, _cast(quotient, str(plan.out.dtype)), where)


def _combine(
    kernel: _CudaKernel,
    rows: list[tuple[int, int]],
    splits: int,
    block: Any,
    thread: Any,
    partial: Any,
    state: Any,
) -> None:
    E = kernel.plan.E
    base = block * i64(splits)
    for r, (member, s) in enumerate(rows):
        top, shift, total = _local((1,)), _local((1,)), _local((1,))
        T.buffer_store(top, _f32(_LOWEST), [0])
        with T.serial(i64(splits)) as p:
            T.buffer_store(top, tirx.Max(top[0], state[base + p, i64(r), i64(0)]), [0])
        none = top[0] == _f32(_LOWEST)
        T.buffer_store(shift, tirx.Select(none, _f32(0.0), top[0]), [0])
        T.buffer_store(total, _f32(0.0), [0])
        with T.serial(i64(splits)) as p:
            weight = _exp(state[base + p, i64(r), i64(0)] - shift[0])
            T.buffer_store(total, total[0] + weight * state[base + p, i64(r), i64(1)], [0])
        with T.serial(i64(-(-E // _THREADS))) as it:
            e = it * i64(_THREADS) + thread
            with T.If(e < i64(E)), T.Then():
                value = _local((1,))
                T.buffer_store(value, _f32(0.0), [0])
                with T.serial(i64(splits)) as p:
                    weight = _exp(state[base + p, i64(r), i64(0)] - shift[0])
                    T.buffer_store(value, value[0] + weight * partial[base + p, i64(r), e], [0])
                _store_out(kernel, member, i64(s), e, value[0], total[0])


def attention_prefill_cuda(plan: AttentionPlan, name: str = "attention") -> Any:
    """Return a PrimFunc with thread bindings for any number of query rows.

    128 threads work on a tile of 32 rows by 32 keys (16 by 16 for depths above 160, so that the
    tiles fit 48 KiB): 16 lanes share a row group. Plain float32 arithmetic, no tensor cores.
    """
    assert plan.append_k is None
    kernel = _CudaKernel(plan)
    kernel.group = 1
    D, E = plan.D, plan.E
    tile = 32 if max(D, E) <= 160 else 16
    S = i64(plan.S)
    tiles = tirx.floordiv(S + i64(tile - 1), i64(tile))
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        _begin(plan, name)
        with T.sblock("attention"):
            _regions()
            blocks = bound_analyzer({}).simplify(kernel.count() * tiles)
            with (
                T.launch_thread("blockIdx.x", blocks) as block,
                T.launch_thread("threadIdx.x", i64(_THREADS)) as thread,
            ):
                kernel.bind_outer(tirx.floordiv(block, tiles))
                # Long rows first: under a causal mask the last tiles have the most work.
                first = T.bind((tiles - i64(1) - tirx.floormod(block, tiles)) * i64(tile))
                _prefill_block(kernel, first, S, tile, thread)
    return builder.get()


def _prefill_block(kernel: _CudaKernel, first_row: Any, S: Any, tile: int, thread: Any) -> None:
    plan = kernel.plan
    D, E = plan.D, plan.E
    lanes = 16
    groups = _THREADS // lanes  # 8 groups of lanes
    RM = tile // groups  # rows a thread works on
    KN = tile // lanes  # keys a thread scores
    EN = -(-E // lanes)

    def at(expr: Any, **axes: Any) -> Any:
        values = {getattr(plan, n): v for n, v in axes.items()}
        return substitute(expr, {**kernel.outer, **values})

    lane = T.bind(tirx.floormod(thread, i64(lanes)))
    group = T.bind(tirx.floordiv(thread, i64(lanes)))
    last_row = T.bind(tirx.Min(first_row + i64(tile), S) - i64(1))
    begin = T.bind(at(plan.key_begin, s=first_row))
    end = T.bind(at(plan.key_end, s=last_row))
    # One word of padding: lanes that read different rows hit different banks.
    query = T.alloc_buffer((tile, D + 1), "float32", scope="shared")
    keys = T.alloc_buffer((tile, max(D, E) + 1), "float32", scope="shared")
    probs = T.alloc_buffer((tile, tile + 1), "float32", scope="shared")
    sums = _local((RM * EN,))
    top, total = _local((RM,)), _local((RM,))

    def fill(target: Any, width: int, value: Any) -> None:
        with T.serial(i64(-(-tile * width // _THREADS))) as it:
            flat = it * i64(_THREADS) + thread
            with T.If(flat < i64(tile * width)), T.Then():
                row, col = tirx.floordiv(flat, i64(width)), tirx.floormod(flat, i64(width))
                T.buffer_store(target, value(row, col), [row, col])

    fill(query, D, lambda r, c: at(plan.q, s=tirx.Min(first_row + r, S - i64(1)), d=c))
    with T.unroll(i64(RM * EN)) as i:
        T.buffer_store(sums, _f32(0.0), [i])
    for m in range(RM):
        sink = plan.sink
        T.buffer_store(top, _f32(_LOWEST) if sink is None else at(sink), [m])
        T.buffer_store(total, _f32(0.0 if sink is None else 1.0), [m])
    row_of = [T.bind(tirx.Min(first_row + group * i64(RM) + i64(m), S - i64(1))) for m in range(RM)]
    bound = [
        {var: T.bind(at(expr, s=row_of[m])) for var, expr in kernel.row_values} for m in range(RM)
    ]
    size = T.bind(tirx.Max(end - begin, i64(0)))
    with T.serial(tirx.floordiv(size + i64(tile - 1), i64(tile))) as kb:
        first = T.bind(begin + kb * i64(tile))
        fill(keys, D, lambda r, c: at(plan.k, t=tirx.Min(first + r, end - i64(1)), d=c))
        _sync()
        score = _local((RM * KN,))
        with T.unroll(i64(RM * KN)) as i:
            T.buffer_store(score, _f32(0.0), [i])
        with T.serial(i64(D)) as d:
            for m in range(RM):
                for n in range(KN):
                    a = query[group * i64(RM) + i64(m), d]
                    b = keys[lane + i64(n * lanes), d]
                    T.buffer_store(score, score[m * KN + n] + a * b, [m * KN + n])
        for m in range(RM):
            highest, shift, factor, part = (_local((1,)) for _ in range(4))
            T.buffer_store(highest, _f32(_LOWEST), [0])
            for n in range(KN):
                t = first + lane + i64(n * lanes)
                value = at(kernel.score, x=score[m * KN + n], s=row_of[m],
                           t=tirx.Min(t, end - i64(1)))  # fmt: skip
                value = tirx.Select(t < end, substitute(value, bound[m]), _f32(_LOWEST))
                T.buffer_store(score, value, [m * KN + n])
                T.buffer_store(highest, tirx.Max(highest[0], score[m * KN + n]), [0])
            _lanes_max(highest, 0, lanes)
            T.buffer_store(highest, tirx.Max(highest[0], top[m]), [0])
            none = highest[0] == _f32(_LOWEST)
            T.buffer_store(shift, tirx.Select(none, _f32(0.0), highest[0]), [0])
            T.buffer_store(factor, _exp(top[m] - shift[0]), [0])
            T.buffer_store(top, highest[0], [m])
            T.buffer_store(part, _f32(0.0), [0])
            for n in range(KN):
                T.buffer_store(score, _exp(score[m * KN + n] - shift[0]), [m * KN + n])
                T.buffer_store(part, part[0] + score[m * KN + n], [0])
                T.buffer_store(
                    probs, score[m * KN + n], [group * i64(RM) + i64(m), lane + i64(n * lanes)]
                )
            _lanes_sum(part, 0, lanes)
            T.buffer_store(total, total[m] * factor[0] + part[0], [m])
            with T.unroll(i64(EN)) as i:
                where = i64(m * EN) + i
                T.buffer_store(sums, sums[where] * factor[0], [where])
        _sync()
        fill(keys, E, lambda r, c: at(plan.v, t=tirx.Min(first + r, end - i64(1)), e=c))
        _sync()
        with T.serial(i64(tile)) as kt, T.unroll(i64(EN)) as i:
            e = tirx.Min(lane + i * i64(lanes), i64(E - 1))
            for m in range(RM):
                p = probs[group * i64(RM) + i64(m), kt]
                where = i64(m * EN) + i
                T.buffer_store(sums, sums[where] + p * keys[kt, e], [where])
        _sync()
    for m in range(RM):
        s = first_row + group * i64(RM) + i64(m)
        with T.If(s < S), T.Then(), T.unroll(i64(EN)) as i:
            e = lane + i * i64(lanes)
            with T.If(e < i64(E)), T.Then():
                value = sums[i64(m * EN) + i] / total[m]
                if plan.zero_if_masked:
                    value = tirx.Select(total[m] == _f32(0.0), _f32(0.0), value)
                where = [at(x, s=s, e=e) for x in plan.out_index]
                T.buffer_store(plan.out, _cast(value, str(plan.out.dtype)), where)
