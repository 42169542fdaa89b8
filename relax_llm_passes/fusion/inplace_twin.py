"""The copy of a function that InplaceKVCache adds: bindings copied, caches among the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax

from ..cloning import Clone, new_seq, set_type
from ..dataflow import FunctionView

__all__ = [
    "AXIS_ATTR",
    "CACHES_ATTR",
    "CREATES_ATTR",
    "KIND",
    "SOURCE_ATTR",
    "build_twin",
    "with_bounds",
]

KIND = "inplace_kv_cache"
# On an added function: the function it was made of.
SOURCE_ATTR = "relax_llm.inplace_of"
# On an added function that takes caches: their places among the parameters.
CACHES_ATTR = "relax_llm.caches"
# On a function that makes caches: how many, and the axis on which the first one's rows are.
CREATES_ATTR = "relax_llm.creates_caches"
AXIS_ATTR = "relax_llm.cache_axis"


def build_twin(
    view: FunctionView,
    clone: Clone,
    params: list[Any],
    full: dict[Any, Any],
    replace: Callable[[Any, bool], list[Any] | None],
    tail: Callable[[], list[Any]] = list,
    head: Callable[[], list[Any]] = list,
) -> relax.Function:
    """Copy a function's bindings and build its result anew.

    Parameters
    ----------
    view : FunctionView
        The function.
    clone : Clone
        Knows what stands for the parameters.
    params : list
        Of the copy.
    full : dict
        From a result to the cache that is returned in its place; `replace` and `tail` fill it.
    replace : callable
        Given a binding, and whether its block is not the last: the bindings that stand for it, or
        None to copy it.
    tail : callable
        The bindings that follow all others.
    head : callable
        The bindings that come first.
    """
    func = view.function
    leaves = set(view.result_vars())
    final = len(func.body.blocks) - 1
    blocks: list[list[Any]] = []
    for place, block in enumerate(func.body.blocks):
        bindings: list[Any] = head() if place == 0 else []
        for binding in block.bindings:
            instead = replace(binding, place != final)
            if instead is not None:
                bindings += instead
            elif binding.var.same_as(func.body.body):
                continue  # the result, which is built anew
            elif place != final and binding.var in leaves:
                bindings.append(_visible(clone, binding))
            else:
                bindings.append(clone.binding(binding))
        blocks.append(bindings)
    blocks[final] += tail()
    result = _result(view, clone, full)
    gv = relax.Var("gv", result.ty)
    blocks[final].append(relax.VarBinding(gv, result))
    kinds = [type(b) for b in func.body.blocks]
    body = new_seq([kind(b) for kind, b in zip(kinds, blocks, strict=True)], gv)
    return relax.Function(params, body, result.ty, func.is_pure, func.attrs)


def _visible(clone: Clone, binding: Any) -> Any:
    """Copy a binding so that its variable is seen behind its dataflow block."""
    value = clone.expr(binding.value)
    if isinstance(binding, relax.MatchCast):
        clone.define(binding.ty)
        ty = clone.type(binding.ty)
        return relax.MatchCast(clone.var(binding.var, False), value, ty)
    return relax.VarBinding(clone.var(binding.var, False), value)


def _result(view: FunctionView, clone: Clone, full: dict[Any, Any]) -> Any:
    """Return the function's result with the whole caches in the place of the longer ones."""

    def build(expr: Any) -> Any:
        expr = view.resolve(expr)
        if expr in full:
            return full[expr]
        fields = view.fields(expr)
        if fields is None:
            return clone.expr(expr)
        made = [build(f) for f in fields]
        return set_type(relax.Tuple(made), relax.TupleType([f.ty for f in made]))

    return build(view.function.body.body)


def with_bounds(
    made: relax.Function, attrs: Mapping[str, Any], upper: Mapping[str, int], free: set[str]
) -> relax.Function:
    """Add upper bounds of sizes to those a function has; drop the lower bounds of `free` sizes."""
    known = dict(attrs["tir_var_upper_bound"]) if "tir_var_upper_bound" in attrs else {}
    known = {str(k): int(v) for k, v in known.items()}
    for name, value in upper.items():
        known[name] = value
    if known:
        made = made.with_attr("tir_var_upper_bound", known)
    if "tir_var_lower_bound" in attrs:
        lower = {k: v for k, v in dict(attrs["tir_var_lower_bound"]).items() if str(k) not in free}
        made = made.with_attr("tir_var_lower_bound", lower)
    return made
