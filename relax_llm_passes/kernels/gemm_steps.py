"""What every GEMM implementation that calls a library needs: sizes, and the steps left over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.relax import op as O
from tvm.script import relax as R

from ..lower import Composite
from ..patterns.shapes import dims, dtype_of, is_one, static

__all__ = ["GemmSizes", "emit_steps", "gemm_sizes", "result_dims"]


@dataclass(frozen=True)
class GemmSizes:
    """Sizes of a product.

    Attributes
    ----------
    m, n, k : int or None
        Rows, columns and length of the sums; None is symbolic. With a right operand of two axes
        `m` counts the rows of all leading axes together.
    batched : bool
        Whether there are several right operands.
    """

    m: int | None
    n: int | None
    k: int | None
    batched: bool


def gemm_sizes(composite: Composite) -> GemmSizes:
    """Return the sizes of a "gemm" composite with a plain right operand."""
    lhs, rhs = _param_dims(composite, "lhs"), _param_dims(composite, "rhs")
    lhs_swapped = composite.attrs.get("lhs_layout") == "KM"
    rhs_swapped = composite.attrs["rhs_layout"] == "NK"
    k, n = (rhs[-1], rhs[-2]) if rhs_swapped else (rhs[-2], rhs[-1])
    batched = not all(is_one(d) for d in rhs[:-2])
    rows = [lhs[-1]] if lhs_swapped else lhs[-2:-1] if batched else lhs[:-1]
    m: int | None = 1
    for dim in rows:
        size = static(dim)
        m = None if m is None or size is None else m * size
    return GemmSizes(m, static(n), static(k), batched)


def _param_dims(composite: Composite, role: str) -> list[Any]:
    found = dims(composite.func.params[composite.roles[role]])
    assert found is not None, "the recogniser refuses unknown shapes"
    return found


def result_dims(composite: Composite, args: Sequence[relax.Expr]) -> list[Any]:
    """Return the result's dimensions in the sizes of the call (not of the composite)."""
    lhs, rhs = dims(args[composite.roles["lhs"]]), dims(args[composite.roles["rhs"]])
    assert lhs is not None and rhs is not None
    n = rhs[-2] if composite.attrs["rhs_layout"] == "NK" else rhs[-1]
    swapped = composite.attrs.get("lhs_layout") == "KM"
    rows = [lhs[-1]] if swapped else lhs[-2:-1]
    lead, other = lhs[:-2], rhs[:-2]
    if len(other) > len(lead) or (other and all(is_one(d) for d in lead)):
        lead = other
    return [*lead, *rows, n]


_UNARY: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "relu": O.nn.relu,
    "gelu_erf": O.nn.gelu,
    "gelu_tanh": O.nn.gelu_tanh,
    "silu": O.nn.silu,
    "sigmoid": O.sigmoid,
    "tanh": O.tanh,
}


def emit_steps(
    value: relax.Expr,
    steps: Sequence[dict[str, Any]],
    composite: Composite,
    args: Sequence[relax.Expr],
    bb: relax.BlockBuilder,
) -> relax.Expr:
    """Emit epilogue steps as Relax operators; TVM fuses them into one kernel."""
    for step in steps:
        op = step["op"]
        if op in ("bias", "residual"):
            value = O.add(value, args[composite.roles[step["operand"]]])
        elif op == "multiply":
            value = O.multiply(value, args[composite.roles[step["operand"]]])
        elif op == "scale":
            value = O.multiply(value, R.const(step["value"], dtype_of(value)))
        elif op == "cast":
            value = O.astype(value, step["dtype"])
        elif op == "relu_squared":
            value = O.square(bb.emit(O.nn.relu(value)))
        else:
            value = _UNARY[op](value)
        value = bb.emit(value)
    return value
