"""FuseRotaryAttention: rotary, cache append and attention become one kernel.

Before: `k = concat(past, rotate(k)); p = softmax(rotate(q) k^T * scale + mask); o = p v`.
After: `o, k_cache, v_cache = composite_attention(qkv, cos, sin, past_k, past_v)`, lowered to one
kernel for decode; for prefill the kernel starts at the rotated keys and values.

Spellings and refusals are those of `patterns.attention`. Masks and tables that layers share are
copied into each composite, so that its kernel computes them from positions. No gain where the
scores are needed by something else; those are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from ..cloning import with_functions
from ..dataflow import FunctionView
from ..outline import Region, outline
from ..patterns.attention import KIND, AttentionMatch, find_attention
from ..registry import PassRun, register_pass
from ..report import Refusal
from ..shared_views import view_of
from .separate_regions import separate_regions

__all__ = ["FuseAttention", "FuseAttentionOptions", "FuseRotaryAttention"]


@dataclass(frozen=True)
class FuseAttentionOptions:
    """Options of FuseRotaryAttention.

    Attributes
    ----------
    append : bool
        Take the cache append and the rotary of the new keys into a decode kernel.
    """

    append: bool = True


@dataclass(frozen=True)
class FuseAttentionOnlyOptions:
    """FuseAttention has no options."""


@register_pass("FuseRotaryAttention", stage="fuse", options=FuseAttentionOptions)
def FuseRotaryAttention(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Outline each attention with its rotary embedding and, for decode, its cache append."""
    return _fuse(mod, run, run.options.append)


@register_pass("FuseAttention", stage="optional", options=FuseAttentionOnlyOptions)
def FuseAttention(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Outline each attention without its cache append."""
    return _fuse(mod, run, False)


def _functions(mod: tvm.IRModule) -> list[tvm.ir.GlobalVar]:
    return [
        gvar
        for gvar, func in mod.functions.items()
        if isinstance(func, relax.Function)
        and isinstance(func.body, relax.SeqExpr)
        and not (func.attrs and ("Composite" in func.attrs or "Codegen" in func.attrs))
    ]


def _fuse(mod: tvm.IRModule, run: PassRun, append: bool) -> tvm.IRModule:
    for gvar in _functions(mod):
        view = view_of(mod, gvar)
        found = find_attention(view, append)
        matches = [m for m in found if isinstance(m, AttentionMatch)]
        for item in found:
            if isinstance(item, Refusal):
                run.record.refuse(item)
        if not matches:
            continue
        func = separate_regions(view, [(m.region, [m.out, *m.caches]) for m in matches])
        if func is not view.function:
            mod = with_functions(mod, mod.functions)
            mod.update_func(gvar, func)
            view = FunctionView(mod, gvar)
            matches = [m for m in find_attention(view, append) if isinstance(m, AttentionMatch)]
        regions = [attention_region(m) for m in matches]
        mod, refusals = outline(mod, gvar, regions)
        for refusal in refusals:
            run.record.refuse(refusal)
        # What was refused still stands in the function.
        kept = {_name(b.var) for block in mod[gvar].body.blocks for b in block.bindings}
        for match in matches:
            if refusals and _name(match.softmax) in kept:
                continue
            _record(run, match, gvar.name_hint)
    return mod


def _name(var: Any) -> str:
    return getattr(var, "name", "") or getattr(var, "name_hint", "")


def _record(run: PassRun, match: AttentionMatch, function: str) -> None:
    where = _name(match.out)
    run.record.match(KIND, 1, function, where)
    for part in ("rotary", "split", "append"):
        if match.facts.get(part):
            run.record.match(part, 1, function, where)


def attention_region(match: AttentionMatch) -> Region:
    """Return the region of an attention: roles are named after what reads them."""
    roles: dict[str, Any] = {}
    for leaf, name in zip(match.leaves, match.facts["roles"], strict=True):
        if isinstance(getattr(leaf, "ty", None), relax.TensorType) and _is_var(leaf):
            roles[name] = leaf
    outputs = {"out": match.out}
    if match.caches:
        outputs["key_cache"], outputs["value_cache"] = match.caches
    attrs = {k: v for k, v in match.facts.items() if k != "roles"}
    return Region(kind=KIND, bindings=list(match.region), roles=roles, outputs=outputs, attrs=attrs)


def _is_var(expr: Any) -> bool:
    return isinstance(expr, (relax.Var, relax.DataflowVar))
