"""Counts over a module: bindings, operators."""

from __future__ import annotations

from collections import Counter
from typing import Any


def _bindings(mod: Any) -> Any:
    from tvm import relax

    for function in mod.functions.values():
        if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
            for block in function.body.blocks:
                yield from block.bindings


def count_bindings(mod: Any) -> int:
    """Bindings of all Relax functions."""
    return sum(1 for _ in _bindings(mod))


def uses(mod: Any) -> dict[str, int]:
    """How often each operator, PrimFunc, packed function and alias (``var = var``) occurs."""
    import tvm
    from tvm import relax

    found: Counter[str] = Counter()
    for binding in _bindings(mod):
        value = getattr(binding, "value", None)
        if isinstance(binding, relax.MatchCast):
            found["match_cast"] += 1
        elif isinstance(value, relax.Var):
            found["alias"] += 1
        elif isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            name = value.op.name.removeprefix("relax.")
            if name.startswith("call_"):
                name = f"{name}:{getattr(value.args[0], 'name_hint', '') or value.args[0]}"
            found[name] += 1
        else:
            found[type(value).__name__] += 1
    return dict(sorted(found.items()))
