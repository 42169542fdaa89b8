"""ReplaceWkvKernels: a module's own wkv PrimFunc becomes this package's kernel.

Before: `R.call_tir(cls.wkv5, (r, k, v, w, u, state), ...)` with a PrimFunc bound to threads that
keeps the state in global memory. After: the same call of a PrimFunc with the same parameters, whose
state stays in registers (CUDA) or in cache (CPU, where the original does not compile).

What is recognised and refused is said in `patterns.wkv_primfunc`.
"""

from __future__ import annotations

import tvm
from tvm import tirx

from ..cloning import with_functions
from ..kernels.wkv import LARGEST_HEAD
from ..kernels.wkv_cpu import emit_wkv_cpu
from ..kernels.wkv_cuda import emit_wkv_cuda
from ..patterns.wkv_primfunc import find_wkv_primfunc
from ..registry import PassRun, register_pass
from ..report import Refusal

__all__ = ["ReplaceWkvKernels"]


@register_pass("ReplaceWkvKernels", stage="lower", fuses=False)
def ReplaceWkvKernels(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Replace PrimFuncs that compute the recurrence of RWKV-5 or 6."""
    target = run.target
    if target is None or target.kind.name not in ("cuda", "llvm"):
        run.record.note("no cuda or llvm target: nothing was replaced")
        return mod
    new = {}
    for gvar, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc) or func.attrs.get("relax_llm.kernel", None):
            continue
        spec = find_wkv_primfunc(func, gvar.name_hint)
        if spec is None:
            continue
        if isinstance(spec, Refusal):
            run.record.refuse(spec)
            continue
        if not 2 <= spec.size <= LARGEST_HEAD:
            run.record.refuse(f"heads of {spec.size} channels", "wkv", gvar.name_hint)
            continue
        cuda = target.kind.name == "cuda"
        kernel = emit_wkv_cuda(spec) if cuda else emit_wkv_cpu(spec, target)
        for key, value in func.attrs.items():
            if key in ("global_symbol", "target"):
                kernel = kernel.with_attr(key, value)
        new[gvar] = kernel.with_attr("relax_llm.kernel", "wkv")
        run.record.match("wkv", 1, gvar.name_hint)
    if not new:
        return mod
    result = with_functions(mod, mod.functions)
    for gvar, kernel in new.items():
        result.update_func(gvar, kernel)
    return result
