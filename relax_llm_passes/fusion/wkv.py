"""FuseWkv: each token's step of RWKV-5, 6 or 7 becomes one kernel.

Before: outer product, bonus, sum, product with r, decay, sum (six kernels that each pass over the
state). After: `(out, state') = composite_wkv(r, k, v, w, u, state)`, one kernel that reads the
state once and writes it once.

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
    """Outline each step of a wkv recurrence."""
    return outline_found(mod, run, KIND, find_wkv)
