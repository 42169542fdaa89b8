"""GEMMs on CUDA through cuBLASLt: what the library can do, and the call.

The executor (cublaslt.cc) is compiled by g++ without NVIDIA's headers and linked into the exported
module; it opens the library at its first call, on the caller's stream, with a workspace that TVM's
memory planner provides. The leading epilogue steps that cuBLASLt computes become part of its call,
the others stay Relax operators. Composites come here when `OffloadCublas` has marked them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tvm
from tvm import relax
from tvm.script import relax as R

from ..lower import Accept, Composite, register_implementation
from ..report import Refusal
from ..targets import attribute
from .gemm_steps import emit_steps, gemm_sizes, result_dims
from .native import compile_object, ffi_include_flags

__all__ = ["MARK", "CublasLt", "LtPlan", "executor_module", "find_library", "plan_cublaslt"]

FUNCTION = "relax_llm_cublaslt_matmul"
MARK = "relax_llm.cublas"  # the function attribute that holds OffloadCublas's options (JSON)

# Bits of the executor's `flags` argument; cublaslt.cc has the same list.
LHS_TRANSPOSED, RHS_TRANSPOSED, BIAS, RESIDUAL, RELU, GELU, TF32 = (1 << i for i in range(7))

# Operand dtype to the result dtypes that the library has for it.
_RESULTS = {
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
    "float32": ("float32",),
    "float64": ("float64",),
    "int8": ("int32",),
    "float8_e4m3fn": ("float16", "bfloat16", "float32"),
    "float8_e5m2": ("float16", "bfloat16", "float32"),
}
_NO_EPILOGUE = ("int8", "float64")


@dataclass(frozen=True)
class LtPlan:
    """How a composite is split between cuBLASLt and Relax operators.

    Attributes
    ----------
    flags : int
        See the executor.
    scale : float
        Factor of the product.
    result : str
        Dtype that cuBLASLt writes.
    bias, residual : str or None
        Roles of the operands it reads.
    rest : tuple of dict
        Steps that stay Relax operators.
    """

    flags: int
    scale: float
    result: str
    bias: str | None
    residual: str | None
    rest: tuple[dict[str, Any], ...]


def find_library() -> Path | None:
    """Return libcublasLt of PyPI's nvidia-cublas (or RELAX_LLM_CUBLASLT), or None."""
    chosen = os.environ.get("RELAX_LLM_CUBLASLT")
    if chosen:
        return Path(chosen)
    spec = importlib.util.find_spec("nvidia")
    for base in (spec.submodule_search_locations or []) if spec else []:
        for folder in ("cu13/lib", "cublas/lib", "cu12/lib"):
            for path in sorted((Path(base) / folder).glob("libcublasLt.so.*"), reverse=True):
                return path
    return None


def executor_module() -> tvm.runtime.Module:
    """Compile the executor (cached) and return it as a module to attach and link statically."""
    here = Path(__file__).parent
    path = find_library()
    defines = {"RELAX_LLM_CUBLASLT_PATH": json.dumps(str(path))} if path else {}
    obj = compile_object(
        here / "cublaslt.cc",
        name="cublaslt",
        flags=ffi_include_flags(),
        defines=defines,
        headers=[here / "cublaslt_abi.h"],
    )
    return tvm.runtime.load_static_library(str(obj), [FUNCTION, "relax_llm_cublaslt_cached_shapes"])


def _arch(target: tvm.target.Target) -> int:
    digits = "".join(c for c in str(attribute(target, "arch", "") or "") if c.isdigit())
    return int(digits) if digits else 0


def _why_not(composite: Composite, target: tvm.target.Target | None) -> str | None:
    attrs = composite.attrs
    if attrs.get("quant"):
        return "packed weights: cuBLASLt has no group-wise dequantisation"
    lhs, rhs = str(composite.ty("lhs").dtype), str(composite.ty("rhs").dtype)
    total = attrs["acc_dtype"]
    if lhs not in _RESULTS or total not in _RESULTS[lhs]:
        return f"cuBLASLt has no {lhs} product with a {total} result"
    sizes = gemm_sizes(composite)
    if 0 in (sizes.m, sizes.n, sizes.k):
        return "a size of 0"
    usual = attrs["rhs_layout"] == "NK" and attrs.get("lhs_layout", "MK") == "MK"
    if lhs == "int8":
        if not usual:
            return "int8: cuBLASLt wants lhs (M, K) and rhs (N, K)"
        if sizes.k is None or sizes.n is None or sizes.k % 4 or sizes.n % 4:
            return f"int8: N={sizes.n} and K={sizes.k} must be multiples of 4"
    if lhs.startswith("float8"):
        if lhs == rhs == "float8_e5m2":
            return "cuBLASLt has no product of two float8_e5m2 operands"
        if not usual:
            return "float8: cuBLASLt wants lhs (M, K) and rhs (N, K)"
        if sizes.k is None or sizes.n is None or sizes.k % 16 or sizes.n % 16:
            return f"float8: N={sizes.n} and K={sizes.k} must be multiples of 16"
        if target is not None and target.kind.name == "cuda" and _arch(target) < 89:
            return f"float8 needs sm_89, the target is sm_{_arch(target)}"
    return None


def plan_cublaslt(
    composite: Composite,
    target: tvm.target.Target | None = None,
    min_rows: int = 2,
    tf32: bool = False,
) -> LtPlan | Refusal:
    """Return which steps cuBLASLt takes, or why it cannot compute the product.

    Parameters
    ----------
    composite : Composite
        Of kind "gemm".
    target : Target, optional
        For the architecture (float8).
    min_rows : int
        Products known to have fewer rows are refused: with one row a GEMV kernel reads the weight
        once at full bandwidth and launches no split-K reduction.
    tf32 : bool
        Let fp32 products round their operands to 10 bits of mantissa.
    """
    reason = _why_not(composite, target)
    sizes = None if reason else gemm_sizes(composite)
    if sizes is not None and not sizes.batched and sizes.m is not None and sizes.m < min_rows:
        reason = f"{sizes.m} row(s), fewer than min_rows={min_rows}: left to GEMV"
    if reason is not None:
        return Refusal(reason, composite.kind)
    attrs = composite.attrs
    dtype, result = str(composite.ty("lhs").dtype), str(attrs["acc_dtype"])
    flags = (LHS_TRANSPOSED if attrs.get("lhs_layout") == "KM" else 0) | (
        RHS_TRANSPOSED if attrs["rhs_layout"] == "NK" else 0
    )
    if tf32 and dtype == "float32":
        flags |= TF32
    scale, operands = 1.0, {"bias": None, "residual": None}
    steps = list(attrs["epilogue"])
    if dtype in _NO_EPILOGUE:
        return LtPlan(flags, scale, result, None, None, tuple(steps))
    taken = 0
    for step in steps:
        op = step["op"]
        fresh = not any(operands.values())
        if op == "scale" and fresh:
            scale *= float(step["value"])
        elif op == "cast" and fresh and step["dtype"] in _RESULTS[dtype]:
            result = step["dtype"]
        elif op in operands and operands[op] is None:
            operands[op] = step["operand"]
            flags |= BIAS if op == "bias" else RESIDUAL
        elif op == "relu":
            flags |= RELU
            taken += 1
            break
        elif op == "gelu_tanh" and result != "float32":
            # The library's error is not documented; two bytes of result hide any that is sane.
            flags |= GELU
            taken += 1
            break
        else:
            break
        taken += 1
    return LtPlan(
        flags, scale, result, operands["bias"], operands["residual"], tuple(steps[taken:])
    )


@register_implementation("gemm", priority=20)
class CublasLt:
    """Products by cuBLASLt, where `OffloadCublas` asked for it."""

    name = "cublas.lt"
    kind = "gemm"
    targets = ("cuda",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take what `OffloadCublas` has marked."""
        options = _options(composite)
        if options is None:
            return Refusal("not asked for (target 'cublas, cuda', or the pass OffloadCublas)")
        plan = plan_cublaslt(composite, target, options["min_rows"], options["tf32"])
        return Accept() if isinstance(plan, LtPlan) else plan

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit the call of the executor, and the steps it does not compute."""
        options = _options(composite) or {"min_rows": 2, "tf32": False, "workspace_bytes": 0}
        plan = plan_cublaslt(composite, target, options["min_rows"], options["tf32"])
        assert isinstance(plan, LtPlan), "accepts() said so"
        lhs, rhs = args[composite.roles["lhs"]], args[composite.roles["rhs"]]
        operands = [args[composite.roles[r]] if r else lhs for r in (plan.bias, plan.residual)]
        shape = result_dims(composite, args)
        both = bb.emit(
            R.call_dps_packed(
                FUNCTION,
                [lhs, rhs, *operands, R.prim_value(plan.flags), _double(plan.scale)],
                [
                    R.Tensor(shape, plan.result),
                    R.Tensor([max(1, int(options["workspace_bytes"]))], "uint8"),
                ],
            )
        )
        value = bb.emit(relax.TupleGetItem(both, 0))
        return emit_steps(value, plan.rest, composite, args, bb)


def _double(value: float) -> relax.Expr:
    return R.prim_value(tvm.tirx.FloatImm("float64", value))


def _options(composite: Composite) -> dict[str, Any] | None:
    text = composite.func.attrs.get(MARK, None)
    return None if text is None else json.loads(str(text))
