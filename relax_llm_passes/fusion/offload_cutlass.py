"""OffloadCutlass: products go to CUTLASS kernels, compiled for the products that the module has.

Marks "gemm" composites and attaches the compiled instances; `LowerComposites` then emits the calls.
Used when the library is named before the target ("cutlass, cuda -arch=sm_80") or the pass is added.

Where it is no gain: single rows (`min_rows`), which a GEMV kernel reads at full bandwidth. Each new
instance costs nvcc tens of seconds, once per machine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import tvm

from ..errors import UnsupportedError
from ..kernels import cublaslt
from ..kernels.cutlass import MARK, CutlassPlan, marked_plan, plan_cutlass, target_arch
from ..kernels.cutlass_build import build
from ..kernels.cutlass_source import CutlassSpec
from ..libraries import Library, register_library
from ..lower import composites
from ..registry import PassRun, register_pass
from ..rewriting import replace_functions

__all__ = ["OffloadCutlass", "OffloadCutlassOptions"]


@dataclass(frozen=True)
class OffloadCutlassOptions:
    """Options of OffloadCutlass.

    Attributes
    ----------
    min_rows : int
        Products known to have fewer rows stay with GEMV kernels.
    tf32 : bool
        Compute fp32 products on tensor cores, which rounds the operands to 10 bits of mantissa.
    """

    min_rows: int = 2
    tf32: bool = False


@register_pass("OffloadCutlass", stage="optional", options=OffloadCutlassOptions, fuses=True)
def OffloadCutlass(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Compile CUTLASS kernels for the module's GEMM composites, mark these, attach the kernels."""
    options = run.options
    plans: dict[str, CutlassSpec] = {}
    for name, composite in composites(mod).items():
        if composite.kind != "gemm" or MARK in composite.func.attrs:
            continue
        if cublaslt.MARK in composite.func.attrs:
            run.record.refuse("cuBLASLt has it already", "gemm", name)
            continue
        plan = plan_cutlass(composite, run.target, options.min_rows, options.tf32)
        if isinstance(plan, CutlassPlan):
            plans[name] = plan.spec
        else:
            run.record.refuse(plan.reason, "gemm", name)
    if not plans:
        return mod
    try:
        built = build(list(dict.fromkeys(plans.values())), target_arch(run.target))
    except UnsupportedError as error:
        run.record.note(f"CUTLASS is not used: {error}. Other kernels are used instead")
        return mod
    objects = {}
    names = {gv.name_hint: gv for gv in mod.get_global_vars()}
    changed = {}
    text = json.dumps(asdict(options))
    for name, spec in plans.items():
        answer = built[spec]
        if isinstance(answer, Exception):
            run.record.refuse(f"{answer}".splitlines()[0], "gemm", name)
            continue
        changed[names[name]] = mod[names[name]].with_attr(MARK, text)
        objects[spec.symbol] = answer
        run.record.match("gemm", 1, name)
    if not changed:
        return mod
    result = replace_functions(mod, changed, {}, set())
    attached = list(mod.attrs["external_mods"]) if _has_modules(mod) else []
    known = _attached_symbols(mod, run.target)
    for symbol, path in objects.items():
        if symbol not in known:
            attached.append(tvm.runtime.load_static_library(str(path), [symbol]))
    run.record.note(f"{len(objects)} CUTLASS kernels for {len(changed)} products")
    return result.with_attr("external_mods", attached)


def _has_modules(mod: tvm.IRModule) -> bool:
    return bool(mod.attrs) and "external_mods" in mod.attrs


def _attached_symbols(mod: tvm.IRModule, target: tvm.target.Target | None) -> set[str]:
    """Return the functions of instances that an earlier run has attached."""
    plans = [marked_plan(c, target) for c in composites(mod).values() if c.kind == "gemm"]
    return {plan.spec.symbol for plan in plans if isinstance(plan, CutlassPlan)}


register_library(
    Library(
        "cutlass",
        ("cuda",),
        passes=("OffloadCutlass",),
        summary="matrix products by CUTLASS, compiled with nvcc (pip install nvidia-cutlass)",
    )
)
