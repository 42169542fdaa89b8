"""CUDA attention for many query rows: tiles of rows against tiles of keys.

A block holds a tile of rows in shared memory and walks over tiles of keys; scores live in registers
and shared memory only. Sums are float32.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .attention_pieces import LOWEST, begin_function, cast_to, f32, local, opaque
from .attention_pieces_cuda import (
    THREADS,
    CudaKernel,
    all_registers,
    exp,
    held,
    lanes_max,
    lanes_sum,
    sync,
)
from .attention_plan import AttentionPlan
from .scalar_expr import bound_analyzer, i64, substitute

__all__ = ["attention_prefill_cuda"]


def attention_prefill_cuda(plan: AttentionPlan, name: str = "attention") -> Any:
    """Return a PrimFunc with thread bindings for any number of query rows.

    128 threads work on a tile of 32 rows by 32 keys (16 by 16 for depths above 160, so that the
    tiles fit 48 KiB): 16 lanes share a row group. Plain float32 arithmetic; for fp16 and bf16 there
    is `attention_prefill_mma`.
    """
    assert plan.append_k is None
    kernel = CudaKernel(plan)
    kernel.group = 1
    D, E = plan.D, plan.E
    tile = 32 if max(D, E) <= 160 else 16
    S = i64(plan.S)
    tiles = tirx.floordiv(S + i64(tile - 1), i64(tile))
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        begin_function(plan, name)
        with T.sblock("attention"):
            opaque()
            blocks = bound_analyzer({}).simplify(kernel.count() * tiles)
            with (
                T.launch_thread("blockIdx.x", blocks) as block,
                T.launch_thread("threadIdx.x", i64(THREADS)) as thread,
                all_registers(),
            ):
                tiles = held(tiles)
                kernel.bind_outer(tirx.truncdiv(block, tiles))
                # Long rows first: under a causal mask the last tiles have the most work.
                first = held((tiles - i64(1) - tirx.truncmod(block, tiles)) * i64(tile))
                _prefill_block(kernel, first, S, tile, thread)
    return builder.get()


def _prefill_block(kernel: CudaKernel, first_row: Any, S: Any, tile: int, thread: Any) -> None:
    plan = kernel.plan
    D, E = plan.D, plan.E
    lanes = 16
    groups = THREADS // lanes  # 8 groups of lanes
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
    sums = local((RM * EN,))
    top, total = local((RM,)), local((RM,))

    def fill(target: Any, width: int, value: Any) -> None:
        with T.serial(i64(-(-tile * width // THREADS))) as it:
            flat = it * i64(THREADS) + thread
            with T.If(flat < i64(tile * width)), T.Then():
                row, col = tirx.floordiv(flat, i64(width)), tirx.floormod(flat, i64(width))
                T.buffer_store(target, value(row, col), [row, col])

    fill(query, D, lambda r, c: at(plan.q, s=tirx.Min(first_row + r, S - i64(1)), d=c))
    with T.unroll(i64(RM * EN)) as i:
        T.buffer_store(sums, f32(0.0), [i])
    for m in range(RM):
        sink = plan.sink
        T.buffer_store(top, f32(LOWEST) if sink is None else at(sink), [m])
        T.buffer_store(total, f32(0.0 if sink is None else 1.0), [m])
    row_of = [T.bind(tirx.Min(first_row + group * i64(RM) + i64(m), S - i64(1))) for m in range(RM)]
    bound = [
        {var: T.bind(at(expr, s=row_of[m])) for var, expr in kernel.row_values} for m in range(RM)
    ]
    size = T.bind(tirx.Max(end - begin, i64(0)))
    with T.serial(tirx.floordiv(size + i64(tile - 1), i64(tile))) as kb:
        first = T.bind(begin + kb * i64(tile))
        fill(keys, D, lambda r, c: at(plan.k, t=tirx.Min(first + r, end - i64(1)), d=c))
        sync()
        score = local((RM * KN,))
        with T.unroll(i64(RM * KN)) as i:
            T.buffer_store(score, f32(0.0), [i])
        with T.serial(i64(D)) as d:
            for m in range(RM):
                for n in range(KN):
                    a = query[group * i64(RM) + i64(m), d]
                    b = keys[lane + i64(n * lanes), d]
                    T.buffer_store(score, score[m * KN + n] + a * b, [m * KN + n])
        for m in range(RM):
            highest, shift, factor, part = (local((1,)) for _ in range(4))
            T.buffer_store(highest, f32(LOWEST), [0])
            for n in range(KN):
                t = first + lane + i64(n * lanes)
                value = at(kernel.score, x=score[m * KN + n], s=row_of[m],
                           t=tirx.Min(t, end - i64(1)))  # fmt: skip
                value = tirx.Select(t < end, substitute(value, bound[m]), f32(LOWEST))
                T.buffer_store(score, value, [m * KN + n])
                T.buffer_store(highest, tirx.Max(highest[0], score[m * KN + n]), [0])
            lanes_max(highest, 0, lanes)
            T.buffer_store(highest, tirx.Max(highest[0], top[m]), [0])
            none = highest[0] == f32(LOWEST)
            T.buffer_store(shift, tirx.Select(none, f32(0.0), highest[0]), [0])
            T.buffer_store(factor, exp(top[m] - shift[0]), [0])
            T.buffer_store(top, highest[0], [m])
            T.buffer_store(part, f32(0.0), [0])
            for n in range(KN):
                T.buffer_store(score, exp(score[m * KN + n] - shift[0]), [m * KN + n])
                T.buffer_store(part, part[0] + score[m * KN + n], [0])
                T.buffer_store(
                    probs, score[m * KN + n], [group * i64(RM) + i64(m), lane + i64(n * lanes)]
                )
            lanes_sum(part, 0, lanes)
            T.buffer_store(total, total[m] * factor[0] + part[0], [m])
            with T.unroll(i64(EN)) as i:
                where = i64(m * EN) + i
                T.buffer_store(sums, sums[where] * factor[0], [where])
        sync()
        fill(keys, E, lambda r, c: at(plan.v, t=tirx.Min(first + r, end - i64(1)), e=c))
        sync()
        with T.serial(i64(tile)) as kt, T.unroll(i64(EN)) as i:
            e = tirx.Min(lane + i * i64(lanes), i64(E - 1))
            for m in range(RM):
                p = probs[group * i64(RM) + i64(m), kt]
                where = i64(m * EN) + i
                T.buffer_store(sums, sums[where] + p * keys[kt, e], [where])
        sync()
    for m in range(RM):
        s = first_row + group * i64(RM) + i64(m)
        with T.If(s < S), T.Then(), T.unroll(i64(EN)) as i:
            e = lane + i * i64(lanes)
            with T.If(e < i64(E)), T.Then():
                value = sums[i64(m * EN) + i] / total[m]
                if plan.zero_if_masked:
                    value = tirx.Select(total[m] == f32(0.0), f32(0.0), value)
                where = [at(x, s=s, e=e) for x in plan.out_index]
                T.buffer_store(plan.out, cast_to(value, str(plan.out.dtype)), where)
