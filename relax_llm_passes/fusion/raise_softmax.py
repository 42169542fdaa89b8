"""RaiseSoftmax: softmaxes that a graph spells out become `R.nn.softmax`.

before                                    after
    m = max(x, axis, keepdims=True)           y = nn.softmax(x, axis)
    e = exp(x - m)
    y = e / sum(e, axis, keepdims=True)

So an attention around one is found like any other. The numbers are the same, but for half types:
there the operators round exponentials and sums, and softmax kernels compute in float32.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from ..cloning import with_functions
from ..dataflow import FunctionView
from ..patterns.spelled_softmax import SpelledSoftmax, find_spelled_softmax
from ..registry import PassRun, register_pass

__all__ = ["RaiseSoftmax"]


@relax.expr_functor.mutator
class _Mutator(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, found: dict[Any, SpelledSoftmax]) -> None:
        super().__init__(mod)
        self.found = found

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        match = self.found.get(call)
        if match is None:
            return super().visit_call_(call)
        return relax.op.nn.softmax(self.visit_expr(match.x), axis=match.axis)


@register_pass("RaiseSoftmax", stage="raise")
def RaiseSoftmax(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Write softmaxes made of max, exp, sum and divide as `R.nn.softmax`."""
    changed = {}
    for gvar, func in mod.functions.items():
        if not isinstance(func, relax.Function) or not isinstance(func.body, relax.SeqExpr):
            continue
        view = FunctionView(mod, gvar)
        found = {view.value(m.out): m for m in find_spelled_softmax(view)}
        if not found:
            continue
        run.record.match("softmax", len(found), gvar.name_hint)
        new = _Mutator(mod, found).visit_expr(func)
        changed[gvar] = relax.analysis.remove_all_unused(new)
    if not changed:
        return mod
    return with_functions(mod, {g: changed.get(g, f) for g, f in mod.functions.items()})
