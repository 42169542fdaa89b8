"""Products of one row by group-quantised weights on CUDA: from the composite to its kernel."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from ..errors import InputError
from ..lower import Accept, Composite, register_implementation
from ..report import Refusal
from .cpu_implementation import emit_product, spec_of
from .cpu_spec import GemmSpec
from .cuda_gemv_quantized import quantized_gemv_kernel, quantized_gemv_name
from .cuda_matmul import STEPS

__all__ = ["CudaQuantizedGemv"]


def _spec(composite: Composite) -> tuple[GemmSpec, list[str]]:
    if not composite.attrs.get("quant"):
        raise InputError("the weights are not packed")
    spec, roles = spec_of(composite, "this kernel has")
    quant = spec.quant
    assert quant is not None
    if spec.m != 1:
        raise InputError("more than one row")
    if spec.k % quant.per_word or quant.group % quant.per_word:
        raise InputError(
            f"K = {spec.k} in groups of {quant.group}, expected whole words of {quant.per_word}"
        )
    for op in spec.epilogue.ops:
        if op.op not in STEPS:
            raise InputError(f"epilogue step {op.op}")
    return spec, roles


@register_implementation("gemm", priority=9)
class CudaQuantizedGemv:
    """Products of one row: packed weights are read once and unpacked in registers."""

    name = "cuda.gemv_quantized"
    kind = "gemm"
    targets = ("cuda",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take products of one row by 4- and 8-bit weights in uint32, of static K."""
        try:
            spec, _ = _spec(composite)
        except InputError as error:
            return Refusal(str(error), composite.kind)
        return Accept(quantized_gemv_name(spec))

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir of the kernel."""
        spec, roles = _spec(composite)
        kernel = quantized_gemv_kernel(spec)
        return emit_product(composite, args, bb, spec, roles, kernel, quantized_gemv_name(spec))
