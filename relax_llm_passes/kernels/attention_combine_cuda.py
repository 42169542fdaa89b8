"""The end of a CUDA decode attention: storing a row, and combining the parts of the keys."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .attention_pieces import LOWEST, cast_to, f32, local
from .attention_pieces_cuda import THREADS, CudaKernel, exp
from .scalar_expr import i64

__all__ = ["combine", "store_out"]


def store_out(kernel: CudaKernel, member: int, s: Any, e: Any, value: Any, total: Any) -> None:
    """Store one element of the result: a sum of weighted values over the sum of weights."""
    plan = kernel.plan
    quotient = value / total
    if plan.zero_if_masked:
        quotient = tirx.Select(total == f32(0.0), f32(0.0), quotient)
    where = [kernel.at(i, member, s=s, e=e) for i in plan.out_index]
    T.buffer_store(plan.out, cast_to(quotient, str(plan.out.dtype)), where)


def combine(
    kernel: CudaKernel,
    rows: list[tuple[int, int]],
    splits: int,
    block: Any,
    thread: Any,
    partial: Any,
    state: Any,
) -> None:
    """Combine the parts' sums (blocks, rows, E) by their states (blocks, rows, [top, total])."""
    E = kernel.plan.E
    base = block * i64(splits)
    for r, (member, s) in enumerate(rows):
        top, shift, total = local((1,)), local((1,)), local((1,))
        T.buffer_store(top, f32(LOWEST), [0])
        with T.serial(i64(splits)) as p:
            T.buffer_store(top, tirx.Max(top[0], state[base + p, i64(r), i64(0)]), [0])
        none = top[0] == f32(LOWEST)
        T.buffer_store(shift, tirx.Select(none, f32(0.0), top[0]), [0])
        T.buffer_store(total, f32(0.0), [0])
        with T.serial(i64(splits)) as p:
            weight = exp(state[base + p, i64(r), i64(0)] - shift[0])
            T.buffer_store(total, total[0] + weight * state[base + p, i64(r), i64(1)], [0])
        with T.serial(i64(-(-E // THREADS))) as it:
            e = it * i64(THREADS) + thread
            with T.If(e < i64(E)), T.Then():
                value = local((1,))
                T.buffer_store(value, f32(0.0), [0])
                with T.serial(i64(splits)) as p:
                    weight = exp(state[base + p, i64(r), i64(0)] - shift[0])
                    # A part without keys wrote no sums.
                    part = weight * partial[base + p, i64(r), e]
                    part = tirx.if_then_else(weight != f32(0.0), part, f32(0.0))
                    T.buffer_store(value, value[0] + part, [0])
                store_out(kernel, member, i64(s), e, value[0], total[0])
