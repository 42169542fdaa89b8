"""What the CUDA attention kernels have in common: lanes that add up, and a plan on blocks."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .attention_pieces import AttentionKernel, hoist_row_values
from .attention_plan import AttentionPlan
from .limits import KernelLimits
from .scalar_expr import bound_analyzer, dtype_of, i64

__all__ = [
    "LIMITS",
    "THREADS",
    "CudaKernel",
    "all_registers",
    "exp",
    "held",
    "lanes_max",
    "lanes_sum",
    "shuffle_xor",
    "sync",
]

# What ptxas may say that it needs; tests/cuda/test_limits.py holds it to that.
# Eight query rows of 128 in one block take all registers of a thread, and two blocks still fit.
LIMITS = KernelLimits(registers=255, resident_threads=256)

_FULL_WARP = 0xFFFFFFFF
THREADS = 128


def _i32(value: int) -> Any:
    return tirx.IntImm("int32", value)


def shuffle_xor(value: Any, step: int) -> Any:
    mask = tirx.IntImm("uint32", _FULL_WARP)
    return T.tvm_warp_shuffle_xor(mask, value, _i32(step), _i32(32), _i32(32))


def lanes_sum(buffer: Any, index: Any, lanes: int) -> None:
    """Sum buffer[index] over aligned groups of `lanes` threads; all get the sum."""
    step = lanes // 2
    while step:
        T.buffer_store(buffer, buffer[index] + shuffle_xor(buffer[index], step), [index])
        step //= 2


def lanes_max(buffer: Any, index: Any, lanes: int) -> None:
    step = lanes // 2
    while step:
        other = shuffle_xor(buffer[index], step)
        T.buffer_store(buffer, tirx.Max(buffer[index], other), [index])
        step //= 2


def held(value: Any) -> Any:
    """Keep a scalar in a register.

    TVM's simplifiers write the expression of a bound variable out wherever it is read: a division
    of 64 bits then stands in the innermost loop.
    """
    if isinstance(value, tirx.IntImm):
        return value
    register = T.alloc_buffer((1,), dtype_of(value), scope="local")
    T.buffer_store(register, value, [0])
    return register[0]


def all_registers() -> Any:
    """Return a scope in which ptxas may use 255 registers for blocks of up to 128 threads.

    Two such blocks fit a multiprocessor: left to itself it would rather spill a few for a third.
    """
    return T.attr(_i32(0), "tirx.launch_bounds_min_blocks_per_sm", _i32(2))


def sync() -> None:
    T.evaluate(T.tvm_storage_sync("shared"))


def exp(x: Any) -> Any:
    return tirx.exp(x)


class CudaKernel(AttentionKernel):
    def __init__(self, plan: AttentionPlan) -> None:
        super().__init__(plan, 1)
        # CUDA has a tanh of its own; keep the plan's.
        self.score = _row_score(self)

    def bind_outer(self, index: Any) -> None:
        """Split the block's index into the batch variables; no sizes are negative."""
        rest = index
        values = []
        for extent in reversed(self.extents):
            values.append(tirx.truncmod(rest, extent))
            rest = tirx.truncdiv(rest, extent)
        for (var, _), value in zip(self.plan.batch, reversed(values), strict=True):
            self.outer[var] = held(bound_analyzer({}).simplify(value))

    def count(self) -> Any:
        """Blocks for one part of the keys: batch times groups of heads."""
        count: Any = i64(1)
        for extent in self.extents:
            count = count * extent
        return bound_analyzer({}).simplify(count)


def _row_score(kernel: AttentionKernel) -> Any:
    kernel.row_values, score = hoist_row_values(kernel.plan)
    return score
