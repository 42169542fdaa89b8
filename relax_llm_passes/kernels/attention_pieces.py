"""What the attention kernels have in common: a plan's expressions at the loops of a kernel.

LLVM does not reassociate sums, so kernels write out vectors of partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
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

__all__ = [
    "LOWEST",
    "AttentionKernel",
    "aligned_width",
    "begin_function",
    "cast_to",
    "contiguous_in",
    "f32",
    "hoist_row_values",
    "local",
    "opaque",
    "static_int",
    "uncast",
    "vector_tanh",
    "vector_width",
]

LOWEST = -math.inf


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


def f32(value: float) -> Any:
    return tirx.FloatImm("float32", value)


def local(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return T.alloc_buffer(shape, dtype, scope="local")


def contiguous_in(expr: Any, var: Any) -> bool:
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


def aligned_width(plan: AttentionPlan, expr: Any, var: Any, size: int) -> int:
    """Return how many elements of `expr` along `var` are one aligned read of up to 16 bytes."""
    load = expr.value if isinstance(expr, tirx.Cast) else expr
    if not isinstance(load, TensorLoad) or not contiguous_in(load, var):
        return 1
    most = 16 * 8 // tvm.DataType(dtype_of(load)).bits
    flat: Any = i64(0)
    for index, extent in zip(load.indices, load.source.shape, strict=True):
        flat = flat * i64(extent) + i64(index)
    for width in (8, 4, 2):
        if size % width or width > most:
            continue
        analyzer = bound_analyzer(plan.ranges)
        at = substitute(flat, {var: tirx.Var("step", "int64") * i64(width)})
        if analyzer.can_prove_equal(tirx.floormod(at, i64(width)), i64(0)):
            return width
    return 1


class AttentionKernel:
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

    def work(self, rows: Any) -> Any:
        """Return the multiply-adds of the whole kernel with `rows` query rows per batch index.

        An upper bound: all keys for every row, where masks leave out some of them.
        """
        plan = self.plan
        work = i64(plan.T) * i64(rows) * i64(plan.D + plan.E)
        for extent in self.extents:
            work = work * extent
        return bound_analyzer({}).simplify(work)

    def written_end(self, key_end: Any) -> Any:
        """Return where the rows end that an append reads or writes."""
        append = self.plan.append_k
        assert append is not None
        whole = self.at(i64(self.plan.T))
        if not append.in_place:
            return whole
        behind = self.at(append.start) + self.at(append.rows)
        return tirx.Max(i64(0), tirx.Min(whole, tirx.Max(key_end, behind)))

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
        ratio = (f32(1.0) - e) / (f32(1.0) + e)
        ratio = tirx.Let(e, exp_nonpositive(f32(-2.0) * size), ratio)
        square = y * y
        series = f32(62.0 / 2835.0)
        for c in (-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0):
            series = series * square + f32(c)
        small = y + y * square * series
        far = tirx.Select(y < f32(0.0), -ratio, ratio)
        value = tirx.Select(size < f32(0.25), small, far)
        return tirx.Let(y, vector_tanh(node.args[0]), value)

    return rewrite(expr, replace)


def begin_function(plan: AttentionPlan, name: str) -> None:
    T.func_name(name)
    T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": 1, "global_symbol": name})
    # Sizes that no shape gives stand between inputs and outputs, where call_tir puts them.
    for bufr in plan.inputs:
        T.arg(bufr.name, bufr)
    for var in plan.tir_vars:
        T.arg(var.name, var)
    for bufr in plan.outputs:
        T.arg(bufr.name, bufr)


def cast_to(value: Any, dtype: str) -> Any:
    return value if dtype_of(value) == dtype else tirx.Cast(dtype, value)


def opaque() -> None:
    # Opaque block: nothing schedules it further, call_tir only needs that there is one.
    T.reads()
    T.writes()


def uncast(value: Any, dtype: str) -> Any:
    """Return a float32 expression in `dtype` (a load of that dtype is taken without its cast)."""
    if isinstance(value, tirx.Cast) and dtype_of(value.value) == dtype:
        return value.value
    return cast_to(value, dtype)
