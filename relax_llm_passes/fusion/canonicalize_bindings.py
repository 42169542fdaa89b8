"""CanonicalizeBindings: one name for each value.

before                                   after
    m = R.matmul(x, w)                       m = R.matmul(x, w)
    m2 = m                                   gv = R.add(m, x)
    t = (m2, x); a = t[0]; b = t[1]          R.output(gv)
    gv = R.add(a, R.reshape(b, same shape))

Looked through: `var = var` (to parameters, constants and outputs, across dataflow blocks, into If
branches and local functions), tuples that are built and taken apart again, match_cast to the type
the value has, and operators that return their argument: reshape, broadcast_to, permute_dims,
astype, flatten, squeeze, expand_dims that change nothing.

Kept: a match_cast that checks something or defines a symbolic size, used or not; the names of
outputs (`gv = lv` leaves `gv`); every operator that computes. Functions in which there is nothing
to do are returned as they are, and a second run changes nothing.

Never a loss: no operator is added, moved or duplicated.
"""

from __future__ import annotations

from collections import Counter

import tvm
from tvm import relax
from tvm.ir import Call
from tvm.relax import Function, SeqExpr, TensorType

from ..dataflow import FunctionView, op_name
from ..registry import PassRun, register_pass
from ..rewriting import draft_scope, paused_gc, replace_functions, write_function

__all__ = ["CanonicalizeBindings", "canonicalize", "noop_operator"]

# Operators that return their first argument's elements in order, so that the same shape and dtype
# mean the same value.
_KEEP_ORDER = {
    "relax.reshape": "reshape",
    "relax.broadcast_to": "broadcast_to",
    "relax.flatten": "reshape",
    "relax.squeeze": "reshape",
    "relax.expand_dims": "reshape",
}


def _same_tensor_type(new: TensorType, old: TensorType) -> bool:
    if new.dtype is None or old.dtype is None or new.dtype != old.dtype:
        return False
    if new.shape is None or old.shape is None or new.ndim != old.ndim:
        return False
    if new.vdevice is not None and new.vdevice != old.vdevice:
        return False
    check = relax.analysis.type_base_check(new, old)
    return check == relax.analysis.BaseCheckResult.PASS


def noop_operator(view: FunctionView, call: Call) -> str | None:
    """Return what a call that changes nothing is ("reshape", "permute_dims", ...), or None."""
    name = op_name(call)
    if name not in _KEEP_ORDER and name not in ("relax.permute_dims", "relax.astype"):
        return None
    old, new = view.resolve(call.args[0]).ty, call.ty
    if not isinstance(old, TensorType) or not isinstance(new, TensorType):
        return None
    if name == "relax.permute_dims":
        axes = call.attrs.axes
        if old.ndim < 0:
            return None
        if axes is None:
            return "permute_dims" if old.ndim <= 1 else None
        identity = all(int(a) % old.ndim == i for i, a in enumerate(axes))
        return "permute_dims" if identity else None
    if name == "relax.astype":
        same = old.dtype is not None and old.dtype == new.dtype
        return "astype" if same else None
    return _KEEP_ORDER[name] if _same_tensor_type(new, old) else None


def count_removed(view: FunctionView, counts: Counter[str]) -> None:
    """Add to `counts` what canonicalization removes from a scope and the scopes inside it."""
    for scope in view.scopes():
        for binding in scope.bindings:
            kind = scope.alias_kind(binding.var)
            if kind:
                counts[kind] += 1
            elif scope.is_unread_tuple(binding.var):
                counts["tuple"] += 1


@paused_gc()
def canonicalize(mod: tvm.IRModule, counts: Counter[str] | None = None) -> tvm.IRModule:
    """Return `mod` with one name for each value in every Relax function.

    Parameters
    ----------
    mod : tvm.IRModule
        The module; it is not changed.
    counts : Counter, optional
        Where the number of bindings removed is added, by kind: "variable", "constant", "tuple",
        "match_cast", "reshape", "broadcast_to", "permute_dims", "astype".
    """
    changed: dict[tvm.ir.GlobalVar, Function] = {}
    for gvar, func in mod.functions.items():
        if not isinstance(func, Function) or not isinstance(func.body, SeqExpr):
            continue
        view = FunctionView(mod, gvar, noop_operator)
        new = write_function(draft_scope(view))
        if new.same_as(func):
            continue
        changed[gvar] = new
        if counts is not None:
            count_removed(view, counts)
    return replace_functions(mod, changed, {}, set()) if changed else mod


@register_pass("CanonicalizeBindings", stage="clean")
def CanonicalizeBindings(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Give each value one name: no var-to-var, tuple round trips, no-op casts and reshapes."""
    counts: Counter[str] = Counter()
    result = canonicalize(mod, counts)
    for kind, n in sorted(counts.items()):
        run.record.match(kind, n)
    return result
