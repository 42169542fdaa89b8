"""FuseWkv: the tokens of a recurrence of RWKV-4, 5, 6 or 7 become one kernel.

Before: for every token an outer product, bonus, sum, product with r, decay, sum (six kernels that
each pass over the state), slices of r, k, v, w before and writes of slices behind.
After: `(out, state') = composite_wkv(r, k, v, w, u, state)`, one kernel for all tokens that reads
the state once and writes it once.

Spellings and refusals are those of `patterns.wkv`.
"""

from __future__ import annotations

import tvm

from ..patterns.wkv import KIND, find_wkv
from ..registry import PassRun, register_pass
from .group_norm_gate import outline_found

__all__ = ["FuseWkv"]


@register_pass("FuseWkv", stage="fuse")
def FuseWkv(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Outline the tokens of each wkv recurrence."""
    return outline_found(mod, run, KIND, find_wkv)
