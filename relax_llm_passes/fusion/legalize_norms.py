"""LegalizeNorms: norms and softmax become this package's kernels instead of TVM's.

Before: `y = R.nn.group_norm(x, g, b, 32, ...)`. After: `y = R.call_tir(group_norm, (x, g, b))`,
one scheduled PrimFunc: statistics in float32 in two passes, any layout and dynamic size, bfloat16
included. What cannot be described (an unknown shape, integer data) stays for LegalizeOps and is
refused with the reason. Plain reductions are left to TVM's operator fusion unless asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from ..kernels.norm import NORMS, REDUCTIONS, lower_call
from ..registry import PassRun, register_pass
from ..report import Refusal

__all__ = ["LegalizeNorms", "LegalizeNormsOptions"]


@dataclass(frozen=True)
class LegalizeNormsOptions:
    """Options of LegalizeNorms.

    Attributes
    ----------
    reductions : bool
        Also lower sum, mean, max, min, prod, variance and std. Off by default: left alone, TVM
        fuses element-wise neighbours into them first.
    """

    reductions: bool = False


@relax.expr_functor.mutator
class _Lower(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, run: PassRun, target: tvm.target.Target) -> None:
        super().__init__(mod)
        self.run = run
        self.target = target
        self.function = ""
        self.names = {tvm.ir.Op.get(n) for n in NORMS}
        if run.options.reductions:
            self.names |= {tvm.ir.Op.get(n) for n in REDUCTIONS}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if not isinstance(call.op, tvm.ir.Op) or call.op not in self.names:
            return call
        new = lower_call(self.builder_, call, self.target, self.run.options.reductions)
        if isinstance(new, Refusal):
            self.run.record.refuse(Refusal(new.reason, "norm", self.function))
            return call
        self.run.record.match(call.op.name.rsplit(".", 1)[1], 1, self.function)
        return new


def _uses(func: relax.Function, names: set[str]) -> bool:
    found = False

    def visit(e: relax.Expr) -> None:
        nonlocal found
        if isinstance(e, relax.Call) and isinstance(e.op, tvm.ir.Op) and e.op.name in names:
            found = True

    relax.analysis.post_order_visit(func, visit)
    return found


@register_pass("LegalizeNorms", stage="lower", options=LegalizeNormsOptions)
def LegalizeNorms(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Lower norms and softmax to this package's own kernels."""
    target = run.target
    if target is None or target.kind.name not in ("cuda", "llvm"):
        run.record.note("no cuda or llvm target: nothing was lowered")
        return mod
    names = set(NORMS) | (set(REDUCTIONS) if run.options.reductions else set())
    todo = [
        (gv, f)
        for gv, f in mod.functions.items()
        if isinstance(f, relax.Function) and _uses(f, names)
    ]
    if not todo:
        return mod
    lower = _Lower(mod, run, target)
    for gv, func in todo:
        lower.function = gv.name_hint
        new = lower.visit_expr(func)
        lower.builder_.update_func(gv, new)
    return lower.builder_.get()
