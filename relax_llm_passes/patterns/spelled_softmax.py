"""Find softmaxes that a graph spells out: `exp(x - max(x)) / sum(exp(x - max(x)))`.

The maximum has to be taken off: without it the graph overflows where a softmax does not. Sums and
maxima keep their axis, or get it back by a reshape or expand_dims. Only those are meant that a
product takes as its left operand, as in an attention: others fuse with what is around them
(`row_reduction.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..dataflow import FunctionView, op_name
from .shapes import dims, dtype_of, is_one, same_dims

__all__ = ["SpelledSoftmax", "find_spelled_softmax"]


# What may lie between the softmax and the product.
_LAYOUT = (
    "relax.astype",
    "relax.broadcast_to",
    "relax.expand_dims",
    "relax.permute_dims",
    "relax.reshape",
    "relax.squeeze",
    "relax.where",
)


@dataclass(frozen=True)
class SpelledSoftmax:
    """A quotient that is a softmax.

    Attributes
    ----------
    out : Var
        The quotient.
    x : Expr
        What the softmax is taken of.
    axis : int
        Counted from the end.
    """

    out: Any
    x: Any
    axis: int


def find_spelled_softmax(view: FunctionView) -> list[SpelledSoftmax]:
    """Return the softmaxes of a scope in program order."""
    found = []
    for binding in view.bindings:
        if op_name(binding.value) == "relax.divide":
            match = _match(view, binding)
            if match is not None and _meets_product(view, binding.var):
                found.append(match)
    return found


def _match(view: FunctionView, binding: Any) -> SpelledSoftmax | None:
    above, below = binding.value.args
    exponential = view.call(above, "relax.exp")
    if exponential is None:
        return None
    total = _reduced(view, below, "relax.sum")
    if total is None or not _same(view, total[0], above):
        return None
    difference = view.call(exponential.args[0], "relax.subtract")
    if difference is None:
        return None
    x, highest = difference.args
    top = _reduced(view, highest, "relax.max")
    if top is None or top[1] != total[1] or not _same(view, top[0], x):
        return None
    shape, out = dims(x), dims(binding.var)
    same = shape is not None and out is not None and same_dims(shape, out)
    if not same or "float" not in str(dtype_of(x)) or dtype_of(x) != dtype_of(binding.var):
        return None
    return SpelledSoftmax(binding.var, view.resolve(x), total[1])


def _meets_product(view: FunctionView, var: Any) -> bool:
    frontier, seen = [var], {var}
    while frontier:
        at = frontier.pop()
        for user in view.users(at):
            name = op_name(user.value)
            if name == "relax.matmul" and _same(view, user.value.args[0], at):
                return True
            if name in _LAYOUT and user.var not in seen:
                seen.add(user.var)
                frontier.append(user.var)
    return False


def _same(view: FunctionView, a: Any, b: Any) -> bool:
    return bool(view.resolve(a).same_as(view.resolve(b)))


def _reduced(view: FunctionView, expr: Any, name: str) -> tuple[Any, int] | None:
    """Return (what is reduced, axis from the end) of a reduction over one axis that is kept."""
    call = view.call(expr)
    kept = None
    if call is not None and op_name(call) in ("relax.expand_dims", "relax.reshape"):
        kept = dims(expr)
        call = view.call(call.args[0])
    if call is None or op_name(call) != name or call.attrs.axis is None:
        return None
    axes, shape = [int(a) for a in call.attrs.axis], dims(call.args[0])
    if len(axes) != 1 or shape is None:
        return None
    axis = axes[0] - len(shape) if axes[0] >= 0 else axes[0]
    if kept is None:
        return (call.args[0], axis) if call.attrs.keepdims else None
    want = list(shape)
    ones = len(kept) == len(shape) and is_one(kept[axis])
    if not ones:
        return None
    del want[axis], kept[axis]
    return (call.args[0], axis) if same_dims(want, kept) else None
