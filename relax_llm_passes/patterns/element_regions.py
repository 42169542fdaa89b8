"""Which bindings lie between values, and where a value came from before its layout changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from ..dataflow import FunctionView, is_var
from .element_layout import LAYOUT

__all__ = ["is_biased_product", "origin", "region_between"]


def is_biased_product(view: FunctionView, var: Any) -> bool:
    """Tell whether `var` adds a parameter to a product: a GEMM's epilogue, read as one tensor."""
    call = view.call(var, "relax.add")
    if call is None:
        return False
    sides = [view.resolve(a) for a in call.args]
    products = [view.call(origin(view, a), "relax.matmul") is not None for a in sides]
    others = [a for a, product in zip(sides, products, strict=True) if not product]
    return len(others) == 1 and (not is_var(others[0]) or view.index(others[0]) < 0)


def region_between(view: FunctionView, outputs: Sequence[Any], leaves: Sequence[Any]) -> dict:
    """Return the variables of every binding between the leaves and the outputs."""
    stops = {leaf: None for leaf in leaves if is_var(leaf)}
    found: dict[Any, None] = {}
    pending = list(outputs)
    while pending:
        var = view.resolve(pending.pop())
        if not is_var(var) or var in stops or var in found or view.index(var) < 0:
            continue
        found[var] = None
        for read in view.reads(view.index(var)):
            resolved = view.resolve(read)
            if not is_var(resolved):
                continue
            if isinstance(getattr(resolved, "ty", None), relax.TensorType):
                pending.append(resolved)
            else:
                fields = view.fields(resolved)
                pending.extend(fields if fields is not None else [resolved])
    return found


def origin(view: FunctionView, expr: Any) -> Any:
    """Look through layout changes."""
    expr = view.resolve(expr)
    while True:
        call = view.call(expr, *LAYOUT)
        if call is None:
            return expr
        expr = view.resolve(call.args[0])
