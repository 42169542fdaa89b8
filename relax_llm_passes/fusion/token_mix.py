"""FuseTokenMix: the blends of a token with the one before it become one kernel.

Before: `xk = x * mk + s * (1 - mk)`, and the same for v, r, g (or `x + (s - x) * m`): a kernel
each, behind a concat that shifts x.
After: `xk, xv, xr, xg = composite_token_mix(x, state, mk, mv, mr, mg)`: one kernel, one read of x.

Spellings and refusals are those of `patterns.token_mix`. No gain where there is one blend alone.
"""

from __future__ import annotations

import tvm

from ..patterns.token_mix import KIND, find_token_mix
from ..registry import PassRun, register_pass
from .group_norm_gate import outline_found

__all__ = ["FuseTokenMix"]


@register_pass("FuseTokenMix", stage="fuse")
def FuseTokenMix(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Outline the blends of each token with the one before it."""
    return outline_found(mod, run, KIND, find_token_mix)
