"""Products of two activations on llvm targets: from a "gemm" composite to a batched kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from ..errors import InputError
from ..lower import Accept, Composite, register_implementation
from ..patterns.shapes import is_one, same_dim, same_dims
from ..report import Refusal
from .cpu_batched import BatchSpec, batched_kernel
from .cpu_epilogue import Epilogue
from .cpu_implementation import Names, static_shape

__all__ = ["CpuBatched", "batch_spec_of"]

_FLOATS = ("float32", "float16", "bfloat16")


def batch_spec_of(composite: Composite) -> tuple[BatchSpec, list[str]]:
    """Return the kernel's spec and the roles of its arguments, in order.

    Raises
    ------
    InputError
        When the kernel cannot compute the composite; says why.
    """
    attrs = composite.attrs
    if attrs.get("quant"):
        raise InputError("the right operand is quantised")
    lhs, rhs, out = composite.ty("lhs"), composite.ty("rhs"), composite.result_ty
    left, right = static_shape(lhs, "lhs"), static_shape(rhs, "rhs")
    shape = static_shape(out, "out")
    if len(left) < 2 or len(right) < 2 or len(shape) != max(len(left), len(right)):
        raise InputError(f"operands of {len(left)} and {len(right)} axes")
    names = Names()
    batch, (m, n) = shape[:-2], shape[-2:]
    sides = []
    for what, found in (("lhs", left[:-2]), ("rhs", right[:-2])):
        if len(found) == len(batch) and same_dims(found, batch):
            sides.append(True)
        elif len(found) == len(batch) and all(is_one(d) for d in found):
            sides.append(False)
        else:
            raise InputError(f"batch axes {tuple(found)} of the {what}, expected {tuple(batch)}")
    lhs_layout, rhs_layout = str(attrs.get("lhs_layout", "MK")), str(attrs["rhs_layout"])
    rows, k = left[-2:] if lhs_layout == "MK" else left[:-3:-1]
    columns = right[-1] if rhs_layout == "KN" else right[-2]
    if not same_dim(rows, m) or not same_dim(columns, n):
        raise InputError(f"rows {rows} and columns {columns} of a result of {m} x {n}")
    if is_one(k):
        raise InputError("sums of one term: no product, but an element-wise one")
    steps = attrs.get("epilogue") or []
    dtypes: dict[str, str] = {}
    for step in steps:
        role = step.get("operand")
        if not role:
            continue
        dtypes[role] = str(composite.ty(role).dtype)
        operand = static_shape(composite.ty(role), role)
        expected = [n] if step["op"] == "bias" else shape
        if not same_dims(operand, expected):
            raise InputError(f"{step['op']} operand {tuple(operand)}, expected {tuple(expected)}")
    for what, dtype in (("lhs", lhs.dtype), ("rhs", rhs.dtype), ("sum", attrs["acc_dtype"])):
        if str(dtype) not in _FLOATS:
            raise InputError(f"{what} in {dtype}; CPU kernels have {', '.join(_FLOATS)}")
    spec = BatchSpec(
        tuple(names(d) for d in batch),
        names(m),
        names(n),
        names(k),
        lhs_batch=sides[0],
        rhs_batch=sides[1],
        lhs_layout=lhs_layout,
        rhs_layout=rhs_layout,
        lhs_dtype=str(lhs.dtype),
        rhs_dtype=str(rhs.dtype),
        out_dtype=str(out.dtype),
        epilogue=Epilogue.parse(steps, dtypes),
    )
    return spec, ["lhs", "rhs", *dict.fromkeys(dtypes)]


@register_implementation("gemm", priority=5)
class CpuBatched:
    """Batches of small products of two activations: attention that is not fused, chunks."""

    name = "cpu.batched"
    kind = "gemm"
    targets = ("llvm",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take products of float tensors with equal batch axes, of any static or symbolic size."""
        try:
            spec, _ = batch_spec_of(composite)
            batched_kernel(spec, target)
        except InputError as error:
            return Refusal(str(error), composite.kind)
        return Accept(spec.key())

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir of the kernel."""
        spec, roles = batch_spec_of(composite)
        gvar = bb.add_func(batched_kernel(spec, target).without_attr("global_symbol"), spec.key())
        operands: list[Any] = [args[composite.roles[role]] for role in roles]
        # In the sizes of the call, not in those of the composite's own variables.
        left, right = (list(a.ty.shape.values) for a in operands[:2])
        batch = left[:-2] if spec.lhs_batch else right[:-2]
        rows = left[-2] if spec.lhs_layout == "MK" else left[-1]
        columns = right[-1] if spec.rhs_layout == "KN" else right[-2]
        out = relax.TensorType([*batch, rows, columns], spec.out_dtype)
        return relax.call_tir(gvar, operands, out)
