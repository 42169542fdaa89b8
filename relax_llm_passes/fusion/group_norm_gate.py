"""FuseGroupNormGate: group_norm with its casts, gate, bonus or activation becomes one kernel.

Before: `g = silu(gate); n = group_norm(x, w, b, 32); y = n * g` (three kernels, or two).
After: `y = composite_group_norm(x, w, b, gate)`, lowered to one kernel that reads each once.

Spellings, roles and refusals are those of `patterns.group_norm`. No gain where the norm is read by
several others at once: its value has to be written anyway.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ..outline import outline
from ..patterns.group_norm import KIND, find_group_norm
from ..registry import PassRun, register_pass
from ..report import Refusal
from ..shared_views import view_of

__all__ = ["FuseGroupNormGate"]


@register_pass("FuseGroupNormGate", stage="fuse")
def FuseGroupNormGate(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Outline each group_norm with what surrounds it."""
    return outline_found(mod, run, KIND, find_group_norm)


def outline_found(mod: tvm.IRModule, run: PassRun, kind: str, find: object) -> tvm.IRModule:
    """Outline what `find(view)` returns, function by function, and record it."""
    work = []
    for gvar, func in mod.functions.items():
        if not isinstance(func, relax.Function) or not isinstance(func.body, relax.SeqExpr):
            continue
        if func.attrs and "Composite" in func.attrs:
            continue
        regions = []
        for item in find(view_of(mod, gvar)):  # type: ignore[operator]
            if isinstance(item, Refusal):
                run.record.refuse(item)
            else:
                regions.append(item)
        if regions:
            work.append((gvar, regions))
    for gvar, regions in work:
        mod, refusals = outline(mod, gvar, regions)
        for refusal in refusals:
            run.record.refuse(refusal)
        done = len(regions) - len(refusals)
        if done > 0:
            run.record.match(kind, done, gvar.name_hint)
    return mod
