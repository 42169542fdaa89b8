"""FuseDequantizeTake: a lookup in a quantised table unpacks the rows it looks up.

Before: `table = dequantize(packed, scale); rows = take(table, ids)`, which unpacks the whole
vocabulary for every token.
After: `rows = composite_dequantize_take(packed, scale, ids)`, one kernel that reads these rows.

Formats and refusals are those of `patterns.dequantize_take`.
"""

from __future__ import annotations

import tvm

from ..patterns.dequantize_take import KIND, find_dequantize_take
from ..registry import PassRun, register_pass
from .group_norm_gate import outline_found

__all__ = ["FuseDequantizeTake"]


@register_pass("FuseDequantizeTake", stage="fuse")
def FuseDequantizeTake(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Outline each lookup in a dequantised table."""
    return outline_found(mod, run, KIND, find_dequantize_take)
