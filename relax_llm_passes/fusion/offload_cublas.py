"""OffloadCublas: products go to cuBLASLt, where it can compute them.

Marks "gemm" composites and attaches the executor; `LowerComposites` then emits the calls. Used
when the library is named before the target ("cublas, cuda -arch=sm_90") or the pass is added.

Where it is no gain: single rows (`min_rows`), which a GEMV kernel reads at full bandwidth.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import tvm

from ..errors import InputError
from ..kernels.cublaslt import MARK, LtPlan, executor_module, find_library, plan_cublaslt
from ..libraries import Library, register_library
from ..lower import composites
from ..registry import PassRun, register_pass
from ..rewriting import replace_functions

__all__ = ["OffloadCublas", "OffloadCublasOptions"]


@dataclass(frozen=True)
class OffloadCublasOptions:
    """Options of OffloadCublas.

    Attributes
    ----------
    min_rows : int
        Products known to have fewer rows stay with GEMV kernels.
    tf32 : bool
        Compute fp32 products on tensor cores, which rounds the operands to 10 bits of mantissa.
    workspace_bytes : int
        Scratch memory per call, planned with the model's other memory and shared between calls.
        32 MiB is what NVIDIA recommends for sm_90; smaller ones lose split-K algorithms.
    assume_installed : bool
        Offload although the library is not found on this machine (compiling for another one).
    """

    min_rows: int = 2
    tf32: bool = False
    workspace_bytes: int = 32 << 20
    assume_installed: bool = False


@register_pass("OffloadCublas", stage="optional", options=OffloadCublasOptions, fuses=True)
def OffloadCublas(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Mark GEMM composites for cuBLASLt and attach its executor."""
    options = run.options
    if find_library() is None and not options.assume_installed:
        run.record.note(
            "cuBLASLt was not found; install it with `pip install nvidia-cublas`, set "
            "RELAX_LLM_CUBLASLT to the library's path, or set assume_installed to compile for "
            "another machine. TVM's own kernels are used instead"
        )
        return mod
    text = json.dumps(asdict(options))
    changed = {}
    present = False
    names = {gv.name_hint: gv for gv in mod.get_global_vars()}
    for name, composite in composites(mod).items():
        if composite.kind != "gemm":
            continue
        if MARK in composite.func.attrs:
            present = True
            continue
        plan = plan_cublaslt(composite, run.target, options.min_rows, options.tf32)
        if isinstance(plan, LtPlan):
            changed[names[name]] = composite.func.with_attr(MARK, text)
            run.record.match("gemm", 1, name)
        else:
            run.record.refuse(plan.reason, "gemm", name)
    if not changed:
        return mod
    result = replace_functions(mod, changed, {}, set())
    if present:
        return result
    try:
        executor = executor_module()
    except InputError as error:
        run.record.note(f"cuBLASLt is not used: {error}")
        return mod
    attached = (
        list(mod.attrs["external_mods"]) if mod.attrs and "external_mods" in mod.attrs else []
    )
    return result.with_attr("external_mods", [*attached, executor])


register_library(
    Library(
        "cublas",
        ("cuda",),
        passes=("OffloadCublas",),
        summary="matrix products by NVIDIA's cuBLASLt (pip install nvidia-cublas)",
    )
)
