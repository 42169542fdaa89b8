"""FuseSplitRotary: split, rotary and cache append of one layer become one kernel.

Before: `q, k, v = split(qkv); q = rotate(q); k = concat(past, rotate(k)); v = concat(past_v, v)`.
After: `q, k_cache, v_cache = composite_split_rotary(qkv, cos, sin, past, past_v)`.

Spellings and refusals are those of `patterns.rotary`. Runs after FuseRotaryAttention, which takes
the rotary of the queries (and, for decode, everything) into its own kernel.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from ..cloning import with_functions
from ..dataflow import FunctionView, is_var
from ..outline import Region, outline
from ..patterns.split_qkv import KIND, SplitRotaryMatch, find_split_rotary
from ..registry import PassRun, register_pass
from ..report import Refusal
from ..shared_views import view_of
from .separate_regions import separate_regions

__all__ = ["FuseSplitRotary"]


@register_pass("FuseSplitRotary", stage="fuse")
def FuseSplitRotary(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Outline the rotaries of each layer with their split and append."""
    for gvar, func in list(mod.functions.items()):
        if not isinstance(func, relax.Function) or not isinstance(func.body, relax.SeqExpr):
            continue
        if func.attrs and ("Composite" in func.attrs or "Codegen" in func.attrs):
            continue
        mod = _fuse(mod, mod.get_global_var(gvar.name_hint), run)
    return mod


def _fuse(mod: tvm.IRModule, gvar: tvm.ir.GlobalVar, run: PassRun) -> tvm.IRModule:
    view = view_of(mod, gvar)
    found = find_split_rotary(view)
    for item in found:
        if isinstance(item, Refusal):
            run.record.refuse(item)
    matches = [m for m in found if isinstance(m, SplitRotaryMatch)]
    if not matches:
        return mod
    func = separate_regions(view, [(m.region, m.outputs) for m in matches])
    if func is not view.function:
        mod = with_functions(mod, mod.functions)
        mod.update_func(gvar, func)
        view = FunctionView(mod, gvar)
        matches = [m for m in find_split_rotary(view) if isinstance(m, SplitRotaryMatch)]
    mod, refusals = outline(mod, gvar, [_region(m) for m in matches])
    for refusal in refusals:
        run.record.refuse(refusal)
    if len(refusals) < len(matches):
        run.record.match(KIND, len(matches) - len(refusals), gvar.name_hint)
    return mod


def _region(match: SplitRotaryMatch) -> Region:
    roles: dict[str, Any] = {}
    for number, leaf in enumerate(match.leaves):
        if is_var(leaf):
            roles[f"input{number}"] = leaf
    outputs = {f"out{n}": var for n, var in enumerate(match.outputs)}
    return Region(
        kind=KIND, bindings=list(match.region), roles=roles, outputs=outputs, attrs=match.facts
    )
