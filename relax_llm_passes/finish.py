"""The stages that TVM does well itself: legalisation, operator fusion, memory planning.

`FoldConstant` is left out on purpose: it compiles one function per constant expression and takes
nine tenths of upstream's pipeline time, and models keep their weights as inputs.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx

from .cloning import with_functions
from .registry import PassRun, register_pass

__all__ = ["dispatch_passes", "finalize_passes", "fuse_passes", "unsafe_here"]


@register_pass("SealKernels", stage="lower", fuses=False)
def SealKernels(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Mark kernels that come with a schedule as opaque, so that FuseOps leaves them whole."""
    updated = {}
    for gvar, func in mod.functions.items():
        if not isinstance(func, tirx.PrimFunc) or not func.attrs:
            continue
        if func.attrs.get("tirx.is_scheduled", False) and "op_pattern" not in func.attrs:
            updated[gvar] = func.with_attr("op_pattern", 8)  # OpPatternKind::kOpaque
    if not updated:
        return mod
    run.record.match("kernel", len(updated))
    result = with_functions(mod, mod.functions)
    for gvar, func in updated.items():
        result.update_func(gvar, func)
    return result


def dispatch_passes() -> list[tvm.transform.Pass]:
    """Sampling and sorting to TVM's own kernels."""
    return [relax.backend.DispatchSampling(), relax.backend.DispatchSortScan()]


def fuse_passes() -> list[tvm.transform.Pass]:
    """Operators to TIR, and element-wise neighbours into one kernel."""
    return [
        relax.transform.LegalizeOps(),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
    ]


def unsafe_here(name: str, mod: tvm.IRModule) -> str | None:
    """Return why one of TVM's finishing passes must not run on this module, or None.

    StaticPlanBlockMemory of TVM 0.27 shares storage between the branches of an If, but allocates
    it in the first only: taking the second crashes the process.
    """
    if name != "StaticPlanBlockMemory":
        return None
    for gvar, func in mod.functions.items():
        if isinstance(func, relax.Function) and _has_if(func):
            return f"left out: {gvar.name_hint} has an If, whose branches it lets share memory"
    return None


def _has_if(func: relax.Function) -> bool:
    body = func.body
    return isinstance(body, relax.SeqExpr) and any(
        isinstance(b, relax.VarBinding)
        and (
            isinstance(b.value, relax.If)
            or (isinstance(b.value, relax.Function) and _has_if(b.value))
        )
        for block in body.blocks
        for b in block.bindings
    )


def finalize_passes(target: tvm.target.Target) -> list[tvm.transform.Pass]:
    """Lowering to what the virtual machine runs."""
    cuda_graph = [relax.transform.RewriteCUDAGraph()] if target.kind.name == "cuda" else []
    return [
        relax.transform.RewriteDataflowReshape(),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
        *cuda_graph,
        relax.transform.LowerAllocTensor(),
        relax.transform.KillAfterLastUse(),
        relax.transform.LowerRuntimeBuiltin(),
        relax.transform.ComputePrimValue(),
        relax.transform.VMShapeLower(),
        relax.transform.AttachGlobalSymbol(),
    ]
