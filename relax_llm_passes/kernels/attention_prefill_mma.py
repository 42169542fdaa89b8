"""CUDA attention for many query rows on tensor cores: fp16 and bf16, flash style.

A block of warps takes a tile of query rows, 16 a warp, and walks over tiles of keys. Products are
`mma.sync.m16n8k16` with float32 sums; scores, the running softmax and the output stay in registers.
Query heads that share keys are rows of one tile, so a tile of keys is read once for all of them.

    K tile | wait, barrier | scores of the tile       | wait, barrier | weights times V
    V tile |               | is on its way (cp.async) |               | next K on its way

With g = lane / 4 and t = lane % 4, a thread holds rows g and g + 8 of its warp, and of each 8 keys
(or value columns) 2 t and 2 t + 1 (PTX ISA, "Matrix Fragments for mma.m16n8k16"): the weights of 16
keys are the left fragment of the second product as they are. `ldmatrix` reads rows of shared memory
that are an odd multiple of 16 bytes apart: 8 of them lie in 32 different banks.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.backend.cuda.op import ptx_legacy_mma
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx.script.builder import ir as TX

from .attention_pieces import (
    LOWEST,
    aligned_width,
    begin_function,
    cast_to,
    f32,
    local,
    opaque,
)
from .attention_pieces_cuda import (
    CudaKernel,
    all_registers,
    exp,
    held,
    lanes_max,
    lanes_sum,
    sync,
)
from .attention_plan import AttentionPlan
from .attention_tiles_mma import HALVES, MmaTile, SharedRows, i32, mma_dtype, mma_tile, put, rolled
from .limits import KernelLimits
from .scalar_expr import bound_analyzer, i64, substitute

__all__ = ["LIMITS", "attention_prefill_mma"]

# What ptxas may say that it needs; tests/kernels/test_attention_mma.py holds it to that.
LIMITS = KernelLimits(registers=255, resident_threads=128)


def attention_prefill_mma(
    plan: AttentionPlan, tile: MmaTile | None = None, name: str = "attention"
) -> Any:
    """Return a PrimFunc with thread bindings for any number of query rows (sm_80 and newer).

    Parameters
    ----------
    plan : AttentionPlan
        `mma_dtype(plan)` is not None; depths are at most `MAX_DEPTH`; no append.
    tile : MmaTile, optional
        Instead of the one that `mma_tile` gives.

    Notes
    -----
    Weights are rounded to the products' dtype, and their sum is that of the rounded ones: beside
    the rounding of the output the error is at most u * sum(w |v - out|) with weights w that sum to
    1, and u = 2^-11 (fp16) or 2^-8 (bf16).
    """
    dtype = mma_dtype(plan)
    assert plan.append_k is None and dtype is not None
    tile = tile or mma_tile(plan)
    kernel = CudaKernel(plan)
    total = bound_analyzer({}).simplify(i64(plan.S) * i64(plan.group))
    tiles = tirx.floordiv(total + i64(tile.rows - 1), i64(tile.rows))
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        begin_function(plan, name)
        with T.sblock("attention"):
            opaque()
            blocks = bound_analyzer({}).simplify(kernel.count() * tiles)
            with (
                T.launch_thread("blockIdx.x", blocks) as block,
                T.launch_thread("threadIdx.x", i64(tile.threads)) as thread,
                # Loops are left to nvcc to unroll: TVM's passes are slow on what they write out.
                T.attr(i32(0), "pragma_unroll_explicit", i32(0)),
                all_registers(),
            ):
                tiles = held(tiles)
                kernel.bind_outer(tirx.truncdiv(block, tiles))
                # Long rows first: under a causal mask the last tiles have the most work.
                first = (tiles - i64(1) - tirx.truncmod(block, tiles)) * i64(tile.rows)
                _Block(kernel, tile, dtype, held(first), total, thread).emit()
    return builder.get()


class _Block:
    def __init__(
        self, kernel: CudaKernel, tile: MmaTile, dtype: str, first: Any, total: Any, thread: Any
    ) -> None:
        self.kernel, self.plan, self.tile, self.dtype = kernel, kernel.plan, tile, dtype
        self.first, self.total = first, total
        plan = self.plan
        self.thread = held(tirx.Cast("int32", thread))
        lane = held(tirx.floormod(self.thread, i32(32)))
        self.warp = held(tirx.floordiv(self.thread, i32(32)))
        self.g = held(tirx.floordiv(lane, i32(4)))
        self.t = held(tirx.floormod(lane, i32(4)))
        # This lane's row in the matrix whose address it gives, and which matrix that is.
        self.matrix_row = held(tirx.floormod(lane, i32(8)))
        self.low = held(tirx.floormod(tirx.floordiv(lane, i32(8)), i32(2)) * i32(8))
        self.high = held(tirx.floordiv(lane, i32(16)) * i32(8))
        # A query that goes to registers is where the keys will be.
        self.v = SharedRows(tile, tile.keys, plan.E, dtype)
        if tile.query_in_registers and tile.keys >= tile.rows:
            self.k = SharedRows(tile, tile.keys, plan.D, dtype)
            self.q = SharedRows(tile, tile.rows, plan.D, dtype, self.k)
        else:
            self.q = SharedRows(tile, tile.rows, plan.D, dtype)
            shared = self.q if tile.query_in_registers else None
            self.k = SharedRows(tile, tile.keys, plan.D, dtype, shared)
        self.steps = self.k.padded // 16
        self.columns = self.v.padded // 8
        self.score = local((tile.keys // 2,))
        self.sums = local((self.columns * 4,))
        self.top, self.sum = local((2,)), local((2,))

    def _row(self, row: Any) -> tuple[Any, Any]:
        """Return (query position, member of the group) of a row of all rows, clamped."""
        group = self.plan.group
        row = tirx.Min(row, self.total - i64(1))
        if group == 1:
            return row, i64(0)
        return tirx.floordiv(row, i64(group)), tirx.floormod(row, i64(group))

    def _of_row(self, expr: Any, position: tuple[Any, Any], **axes: Any) -> Any:
        """Return an expression for a query row."""
        plan, (s, member) = self.plan, position
        values = {**self.kernel.outer, plan.s: s}
        values.update({getattr(plan, n): v for n, v in axes.items()})
        if plan.group > 1:
            head = plan.batch[-1][0]
            values[head] = self.kernel.outer[head] * i64(plan.group) + member
        return substitute(expr, values)

    def _mma(self, left: Any, a: Any, right: Any, b: int, sums: Any, c: Any) -> None:
        kind = HALVES[self.dtype]
        T.evaluate(ptx_legacy_mma("m16n8k16", "row", "col", kind, kind, "fp32", left.data, a,
                                  right.data, i32(b), sums.data, c, False))  # fmt: skip

    def emit(self) -> None:
        plan, tile = self.plan, self.tile
        with T.unroll(i32(self.columns * 4)) as index:
            put(self.sums, f32(0.0), index)
        self._load_query()
        rows = [self.first + tirx.Cast("int64", self.warp * i32(16) + self.g + i32(8 * m))
                for m in range(2)]  # fmt: skip
        self.rows = [held(row) for row in rows]
        self.places = []
        for m in range(2):
            s, member = self._row(self.rows[m])
            self.places.append((held(s), held(member)))
        self.values = [
            {var: held(self._of_row(x, place)) for var, x in self.kernel.row_values}
            for place in self.places
        ]
        for m in range(2):
            sink = None if plan.sink is None else self._of_row(plan.sink, self.places[m])
            put(self.top, f32(LOWEST) if sink is None else sink, i32(m))
            # Four lanes add up a row; one of them counts the sink.
            one = tirx.Select(tirx.EQ(self.t, i32(0)), f32(1.0), f32(0.0))
            put(self.sum, f32(0.0) if sink is None else one, i32(m))
        low, _ = self._row(self.first)
        high, _ = self._row(self.first + i64(tile.rows - 1))
        begin = held(self.kernel.at(plan.key_begin, s=low))
        self.end = held(self.kernel.at(plan.key_end, s=high))
        size = held(tirx.Max(self.end - begin, i64(0)))
        count = held(tirx.floordiv(size + i64(tile.keys - 1), i64(tile.keys)))
        with T.If(count > i64(0)), T.Then():
            self._copy(self.k, plan.k, "d", begin)
        with T.serial(count) as step:
            first = begin + step * i64(tile.keys)
            _arrived()
            self._copy(self.v, plan.v, "e", first)
            self._scores()
            self._softmax(first)
            _arrived()
            with T.If(step + i64(1) < count), T.Then():
                self._copy(self.k, plan.k, "d", first + i64(tile.keys))
            self._weighted()
        self._store()

    def _load_query(self) -> None:
        plan = self.plan
        fewer, more = sorted((self.q, self.k), key=lambda tile: tile.rows)
        for tile in (more, self.v) if fewer.buffer is more.buffer else (fewer, more, self.v):
            tile.clear_padding(self.thread)

        def at(expr: Any, row: Any, col: Any) -> Any:
            place = self._row(self.first + tirx.Cast("int64", row))
            return self._of_row(expr, place, d=tirx.Cast("int64", col))

        width = aligned_width(plan, plan.q, plan.d, plan.D)
        self.q.fill(self.thread, plan.q, plan.d, width, at)
        _arrived()
        if self.tile.query_in_registers:
            self.query = T.alloc_buffer((self.steps * 8,), self.dtype, scope="local")
            with T.unroll(i32(self.steps)) as k:
                self._query_fragment(self.query, k * i32(8), k)
            sync()  # the keys go where the query was

    def _query_fragment(self, registers: Any, offset: Any, k: Any) -> None:
        row = self.warp * i32(16) + self.low + self.matrix_row
        self.q.load(registers, offset, row, self.high + k * i32(16), False)

    def _copy(self, tile: SharedRows, expr: Any, axis: str, first: Any) -> None:
        plan = self.plan
        var, size = (plan.d, plan.D) if axis == "d" else (plan.e, plan.E)

        def at(expr: Any, row: Any, col: Any) -> Any:
            # Beyond the end the last key is repeated; its weights there are 0.
            t = tirx.Min(first + tirx.Cast("int64", row), self.end - i64(1))
            return self.kernel.at(expr, **{axis: tirx.Cast("int64", col), "t": t})

        width = aligned_width(plan, expr, var, size)
        tile.fill(self.thread, expr, var, width, at)

    def _scores(self) -> None:
        """Products of this warp's 16 rows with the tile's keys."""
        with T.unroll(i32(self.tile.keys // 2)) as index:
            put(self.score, f32(0.0), index)
        keys = T.alloc_buffer((8,), self.dtype, scope="local")
        ready = self.tile.query_in_registers
        query = self.query if ready else T.alloc_buffer((8,), self.dtype, scope="local")
        with self._depths() as k:
            if not ready:
                self._query_fragment(query, i32(0), k)
            with T.unroll(i32(self.tile.keys // 16)) as n:
                row = self.high + self.matrix_row + n * i32(16)
                self.k.load(keys, i32(0), row, self.low + k * i32(16), False)
                for half in range(2):
                    at = n * i32(8) + i32(4 * half)
                    offset = k * i32(8) if ready else i32(0)
                    self._mma(query, offset, keys, 4 * half, self.score, at)

    def _depths(self) -> Any:
        if self.tile.query_in_registers:
            return T.unroll(i32(self.steps))
        # Written out it would need more registers than there are.
        return rolled(self.steps)

    def _softmax(self, first: Any) -> None:
        """Replace products by weights; the sums so far are scaled to the new maximum."""
        score = self.score
        highest, shift, factor = local((1,)), local((1,)), local((1,))
        pairs = i32(self.tile.keys // 8)
        for m in range(2):
            put(highest, f32(LOWEST), i32(0))
            with T.unroll(pairs) as n, T.unroll(i32(2)) as c:
                index = n * i32(4) + i32(2 * m) + c
                column = self.t * i32(2) + n * i32(8) + c
                t = first + tirx.Cast("int64", column)
                last = self.end - i64(1)
                value = self._of_row(
                    self.kernel.score, self.places[m], x=score[index], t=tirx.Min(t, last)
                )
                value = substitute(value, self.values[m])
                put(score, tirx.Select(t <= last, value, f32(LOWEST)), index)
                put(highest, tirx.Max(highest[0], score[index]), i32(0))
            lanes_max(highest, 0, 4)
            put(highest, tirx.Max(highest[0], self.top[m]), i32(0))
            # While all is masked the maximum is -inf; subtracting 0 instead avoids inf - inf.
            none = highest[0] == f32(LOWEST)
            put(shift, tirx.Select(none, f32(0.0), highest[0]), i32(0))
            put(factor, exp(self.top[m] - shift[0]), i32(0))
            put(self.top, highest[0], i32(m))
            put(self.sum, self.sum[m] * factor[0], i32(m))
            with T.unroll(pairs) as n, T.unroll(i32(2)) as c:
                index = n * i32(4) + i32(2 * m) + c
                # What the second product sees is also what is added up.
                weight = tirx.Cast(self.dtype, exp(score[index] - shift[0]))
                put(score, tirx.Cast("float32", weight), index)
                put(self.sum, self.sum[m] + score[index], i32(m))
            with T.unroll(i32(self.columns)) as n, T.unroll(i32(2)) as c:
                index = n * i32(4) + i32(2 * m) + c
                put(self.sums, self.sums[index] * factor[0], index)

    def _weighted(self) -> None:
        """Add weights times values."""
        weights = T.alloc_buffer((8,), self.dtype, scope="local")
        values = T.alloc_buffer((8,), self.dtype, scope="local")
        with T.unroll(i32(self.tile.keys // 16)) as n:
            with T.unroll(i32(8)) as index:
                value = self.score[n * i32(8) + index]
                put(weights, tirx.Cast(self.dtype, value), index)
            with T.unroll(i32(self.columns // 2)) as pair:
                row = self.low + self.matrix_row + n * i32(16)
                self.v.load(values, i32(0), row, self.high + pair * i32(16), True)
                for half in range(2):
                    at = pair * i32(8) + i32(4 * half)
                    self._mma(weights, i32(0), values, 4 * half, self.sums, at)

    def _store(self) -> None:
        plan = self.plan
        width = 2 if plan.E % 2 == 0 else 1
        for m in range(2):
            lanes_sum(self.sum, m, 4)
            # Vectors of two below: what they store is made here, number by number.
            with T.unroll(i32(self.columns)) as n, T.unroll(i32(2)) as c:
                index = n * i32(4) + i32(2 * m) + c
                value = self.sums[index] / self.sum[m]
                if plan.zero_if_masked:
                    value = tirx.Select(self.sum[m] == f32(0.0), f32(0.0), value)
                put(self.sums, value, index)
            with T.If(self.rows[m] < self.total), T.Then(), T.unroll(i32(self.columns)) as n:
                for c in range(0, 2, width):
                    e = self.t * i32(2) + n * i32(8) + i32(c)
                    with T.If(e < i32(plan.E)), T.Then():
                        self._store_columns(m, n * i32(4) + i32(2 * m + c), e, width)

    def _store_columns(self, m: int, index: Any, e: Any, count: int) -> None:
        plan = self.plan
        with T.vectorized(i32(count)) as i:
            at = tirx.Cast("int64", e + i)
            where = [self._of_row(x, self.places[m], e=at) for x in plan.out_index]
            value = cast_to(self.sums[index + i], str(plan.out.dtype))
            T.buffer_store(plan.out, value, where)


def _arrived() -> None:
    """Wait for this thread's copies, then for all threads."""
    T.evaluate(TX.ptx["cp.async.wait_all"]())
    sync()
