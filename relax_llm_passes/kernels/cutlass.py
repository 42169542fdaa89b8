"""GEMMs on CUDA through CUTLASS: what is instantiated for a composite, and the call.

An instance is compiled by nvcc from PyPI's headers when the model is compiled (`OffloadCutlass`
does that and marks the composites), cached, and linked into the exported module. The whole epilogue
is computed in it, in fp32, and rounded once.

The kernels are those of sm_80: cp.async and mma.sync. They are compiled for the target's own
architecture and run on all newer ones, on sm_90 without its wgmma instructions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.script import relax as R

from ..lower import Accept, Composite, register_implementation
from ..report import Refusal
from ..targets import attribute
from .cutlass_source import BINARY, BYTES, UNARY, CutlassSpec, EpilogueStep
from .gemm_steps import GemmSizes, gemm_sizes, result_dims

__all__ = ["MARK", "Cutlass", "CutlassPlan", "marked_plan", "plan_cutlass", "target_arch"]

MARK = "relax_llm.cutlass"  # the function attribute that holds OffloadCutlass's options (JSON)

_FLOATS = ("float16", "bfloat16", "float32")
_MANY_BLOCKS = 108  # multiprocessors of an A100; an H100 has 132


@dataclass(frozen=True)
class CutlassPlan:
    """An instance for a composite.

    Attributes
    ----------
    spec : CutlassSpec
        What is compiled.
    operands : tuple of str
        Roles of the epilogue's operands, in the order of the function's arguments.
    """

    spec: CutlassSpec
    operands: tuple[str, ...]


def target_arch(target: tvm.target.Target | None) -> str:
    """Return the target's architecture ("sm_80"), "" where it names none."""
    return str(attribute(target, "arch", "") or "") if target is not None else ""


def _elements(size: int, dtype: str) -> int:
    """Return the largest power of two that divides `size`, up to 16 bytes."""
    most = 16 // BYTES[dtype]
    return next(n for n in (8, 4, 2, 1) if n <= most and size % n == 0)


def _why_not(composite: Composite, sizes: GemmSizes, arch: str, min_rows: int, tf32: bool) -> str:
    attrs = composite.attrs
    dtype = str(composite.ty("lhs").dtype)
    digits = "".join(c for c in arch if c.isdigit())
    if not digits or int(digits) < 80:
        return f"{arch or 'no architecture'}: these kernels need sm_80"
    if dtype not in _FLOATS:
        return f"{dtype} operands; instances are made for {', '.join(_FLOATS)}"
    if dtype == "float32" and not tf32:
        return "fp32 operands run on tensor cores as tf32 only (10 bits of mantissa): option tf32"
    if attrs["out_dtype"] not in _FLOATS:
        return f"a result in {attrs['out_dtype']}"
    if not sizes.n or not sizes.k:
        return "N or K is symbolic or 0"
    if not sizes.batched and sizes.m is not None and sizes.m < min_rows:
        return f"{sizes.m} row(s), fewer than min_rows={min_rows}: left to GEMV"
    if sizes.m == 0:
        return "a size of 0"
    if attrs.get("lhs_layout") == "KM" and sizes.m is None:
        return "a transposed left operand with a symbolic number of rows: its alignment is unknown"
    for step in attrs["epilogue"]:
        if step["op"] not in (*UNARY, *BINARY, "scale", "cast"):
            return f"epilogue step {step['op']}"
        if "operand" in step and str(composite.ty(step["operand"]).dtype) not in _FLOATS:
            return f"an epilogue operand in {composite.ty(step['operand']).dtype}"
    return ""


def _tiles(sizes: GemmSizes) -> tuple[str, ...]:
    if sizes.m is None or sizes.batched:
        return ("128x128", "64x64")
    assert sizes.n is not None
    blocks = -(-sizes.m // 128) * -(-sizes.n // 128)
    return ("128x128",) if blocks >= _MANY_BLOCKS else ("64x64",)


def plan_cutlass(
    composite: Composite,
    target: tvm.target.Target | None,
    min_rows: int = 2,
    tf32: bool = False,
) -> CutlassPlan | Refusal:
    """Return what to instantiate for a "gemm" composite, or why CUTLASS cannot compute it.

    Parameters
    ----------
    composite : Composite
        Of kind "gemm".
    target : Target or None
        For the architecture.
    min_rows : int
        Products known to have fewer rows are refused.
    tf32 : bool
        Let fp32 products round their operands to 10 bits of mantissa.
    """
    attrs = composite.attrs
    if attrs.get("quant"):
        return Refusal("packed weights: these instances do not dequantise", composite.kind)
    sizes = gemm_sizes(composite)
    reason = _why_not(composite, sizes, target_arch(target), min_rows, tf32)
    if reason:
        return Refusal(reason, composite.kind)
    assert sizes.n is not None and sizes.k is not None
    dtype, out_dtype = str(composite.ty("lhs").dtype), str(attrs["out_dtype"])
    lhs_layout, rhs_layout = attrs.get("lhs_layout", "MK"), attrs["rhs_layout"]
    along_lhs = sizes.k if lhs_layout == "MK" else sizes.m
    along_rhs = sizes.k if rhs_layout == "NK" else sizes.n
    assert along_lhs is not None
    for name, size in (("left", along_lhs), ("right", along_rhs)):
        if _elements(size, dtype) * BYTES[dtype] < 4:
            return Refusal(
                f"the {name} operand's rows have {size} elements of {dtype}: cp.async copies at "
                "least 4 bytes at a time",
                composite.kind,
            )
    steps, operands = [], []
    for step in attrs["epilogue"]:
        if step["op"] in BINARY:
            operands.append(str(step["operand"]))
            steps.append(EpilogueStep(step["op"], str(composite.ty(step["operand"]).dtype)))
        elif step["op"] == "scale":
            steps.append(EpilogueStep("scale", value=float(step["value"])))
        elif step["op"] != "cast":  # a cast between floats: the sums stay in fp32 to the end
            steps.append(EpilogueStep(step["op"]))
    spec = CutlassSpec(
        dtype,
        out_dtype,
        lhs_layout,
        rhs_layout,
        _elements(along_lhs, dtype),
        _elements(along_rhs, dtype),
        _elements(sizes.n, out_dtype),
        tuple(steps),
        _tiles(sizes),
    )
    return CutlassPlan(spec, tuple(operands))


@register_implementation("gemm", priority=19)
class Cutlass:
    """Products by CUTLASS, where `OffloadCutlass` has compiled an instance."""

    name = "cutlass.gemm"
    kind = "gemm"
    targets = ("cuda",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take what `OffloadCutlass` has marked."""
        plan = marked_plan(composite, target)
        return Accept(plan.spec.symbol) if isinstance(plan, CutlassPlan) else plan

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit the call of the instance."""
        plan = marked_plan(composite, target)
        assert isinstance(plan, CutlassPlan), "accepts() said so"
        roles = ["lhs", "rhs", *plan.operands]
        operands = [args[composite.roles[role]] for role in roles]
        shape = result_dims(composite, args)
        return R.call_dps_packed(plan.spec.symbol, operands, R.Tensor(shape, plan.spec.out_dtype))


def marked_plan(composite: Composite, target: tvm.target.Target | None) -> CutlassPlan | Refusal:
    """Return the plan of a composite that `OffloadCutlass` has marked, with its options."""
    text: Any = composite.func.attrs.get(MARK, None)
    if text is None:
        return Refusal("not asked for (target 'cutlass, cuda', or the pass OffloadCutlass)")
    options = json.loads(str(text))
    return plan_cutlass(composite, target, options["min_rows"], options["tf32"])
