"""FuseRowReductions: norms and softmaxes that a graph spells out become one kernel each.

Before: `m = mean(x * x, -1); y = x * rsqrt(m + eps) * w` (two kernels or more, which read x twice).
After: `y = composite_row_reduction(x, w)`, one kernel that reads every row once.

Spellings and refusals are those of `patterns.row_reduction`. It comes after the products, whose
epilogues it would otherwise take.
"""

from __future__ import annotations

import tvm

from ..patterns.row_reduction import KIND, RowMatch, find_row_reductions, region_of
from ..registry import PassRun, register_pass
from .group_norm_gate import outline_found

__all__ = ["FuseRowReductions"]


@register_pass("FuseRowReductions", stage="fuse")
def FuseRowReductions(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Outline each reduction over the last axis with the arithmetic around it."""

    def find(view: object) -> list[object]:
        found = find_row_reductions(view)  # type: ignore[arg-type]
        return [region_of(m) if isinstance(m, RowMatch) else m for m in found]

    return outline_found(mod, run, KIND, find)
