"""KeepEffects: a packed call whose result nobody reads still happens.

TVM's FuseTIR removes every unused `call_pure_packed`. People use that form for calls with a side
effect (a cache update, a probe), which TVM's own CPU pipeline, without fusion, keeps. Such calls
become `call_packed` outside of dataflow blocks, which dead-code elimination respects.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from .cloning import with_functions
from .registry import PassRun, register_pass

__all__ = ["KeepEffects"]

_PURE_PACKED = tvm.ir.Op.get("relax.call_pure_packed")


def _unused_calls(func: relax.Function) -> set[Any]:
    """Return the variables that hold results of pure packed calls and that nothing reads."""
    if not isinstance(func.body, relax.SeqExpr):
        return set()
    bindings = [b for block in func.body.blocks for b in block.bindings]
    calls = {
        b.var
        for b in bindings
        if isinstance(b, relax.VarBinding)
        and isinstance(b.value, relax.Call)
        and b.value.op == _PURE_PACKED
    }
    if not calls:
        return calls

    def visit(expr: Any) -> None:
        if isinstance(expr, relax.Var):
            calls.discard(expr)

    for binding in bindings:
        relax.analysis.post_order_visit(binding.value, visit)
    relax.analysis.post_order_visit(func.body.body, visit)
    return calls


def _with_effects(func: relax.Function, names: set[str]) -> relax.Function:
    """Return `func` (without dataflow blocks) with the named pure packed calls made impure."""
    blocks = []
    for block in func.body.blocks:
        bindings = []
        for binding in block.bindings:
            value = binding.value
            if binding.var.name in names and getattr(value, "op", None) == _PURE_PACKED:
                target, *arguments = value.args
                call = relax.Call(target, arguments, value.attrs, value.ty_args, value.span)
                binding = relax.VarBinding(binding.var, call)
            bindings.append(binding)
        blocks.append(relax.BindingBlock(bindings))
    body = relax.SeqExpr(blocks, func.body.body)
    # The function stays pure for its callers: the caller of call_pure_packed vouched for it.
    return relax.Function(
        func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span
    ).with_attr("relax.force_pure", True)


@register_pass("KeepEffects", stage="lower", fuses=False)
def KeepEffects(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Turn unused `call_pure_packed` into `call_packed`, so that fusion does not remove them.

    Before, in a dataflow block: `b = call_pure_packed("probe", a)`, b unused. After: the block
    ends, `b = call_packed("probe", a)`, and another block begins.
    """
    unused = {}
    for gvar, func in mod.functions.items():
        calls = _unused_calls(func) if isinstance(func, relax.Function) else set()
        if calls:
            unused[gvar] = {v.name for v in calls}
            run.record.match("call_pure_packed", len(calls), gvar.name_hint)
    if not unused:
        return mod
    plain = relax.transform.ToNonDataflow()(mod)
    changed = with_functions(
        mod, {g: _with_effects(plain[g], names) for g, names in unused.items()}
    )
    changed = relax.transform.ConvertToDataflow(min_size=1)(changed)
    result = with_functions(mod, mod.functions)
    for gvar in unused:
        result.update_func(gvar, changed[gvar.name_hint])
    return result
