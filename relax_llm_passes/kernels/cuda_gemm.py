"""Products on CUDA without a library: from a "gemm" composite to the kernel that computes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, te, tirx

from ..errors import InputError
from ..lower import Accept, Composite, register_implementation
from ..patterns.shapes import dims, dtype_of, is_one, same_dim, same_dims, static
from ..report import Refusal
from ..targets import attribute
from .cuda_gemv import gemv_kernel
from .cuda_matmul import STEPS, MmaSpec, mma_kernel
from .gemm_steps import emit_steps, gemm_sizes, result_dims

__all__ = ["CudaGemv", "CudaMma", "CudaTransposed", "product_spec"]

_HALVES = ("float16", "bfloat16")
_FLOATS = (*_HALVES, "float32")
MIN_ROWS = 2  # one row: a GEMV kernel reads the weight once and needs no tiles


def product_spec(
    composite: Composite, dtypes: Sequence[str], where: str, one_row: bool
) -> tuple[MmaSpec, list[str]]:
    """Return the kernel's spec and the roles of its arguments, in order.

    Parameters
    ----------
    composite : Composite
        The product.
    dtypes : sequence of str
        What its operands may be.
    where : str
        Who takes those, for messages.
    one_row : bool
        Whether it must have one row and no batch, or else more than one row.

    Raises
    ------
    InputError
        When the kernel cannot compute the composite; says why.
    """
    attrs = composite.attrs
    if attrs.get("quant"):
        raise InputError("packed weights")
    if attrs.get("lhs_layout", "MK") != "MK":
        raise InputError("the left operand is transposed")
    dtype, out_dtype = str(composite.ty("lhs").dtype), str(attrs["out_dtype"])
    if dtype not in dtypes:
        raise InputError(f"{dtype} operands; {where} {', '.join(dtypes)}")
    if out_dtype not in _FLOATS:
        raise InputError(f"a result in {out_dtype}")
    sizes = gemm_sizes(composite)
    if not sizes.n or not sizes.k:
        raise InputError("N or K is symbolic or 0")
    if one_row and (sizes.m != 1 or sizes.batched):
        raise InputError("more than one row")
    if one_row:
        pass
    elif sizes.m is not None and sizes.m < MIN_ROWS and not sizes.batched:
        raise InputError(f"{sizes.m} row(s): left to GEMV")
    elif sizes.m == 1 and sizes.batched:
        raise InputError("one row a matrix: left to GEMV")
    known: list[Any] = []

    def name(dim: Any) -> int | str:
        size = static(dim)
        if size is not None:
            return size
        for i, seen in enumerate(known):
            if same_dim(seen, dim):
                return f"d{i}"
        known.append(dim)
        return f"d{len(known) - 1}"

    def shape(role: str) -> list[Any]:
        found = dims(composite.func.params[composite.roles[role]])
        if found is None:
            raise InputError(f"{role}: its shape is not known")
        return found

    lhs, rhs = shape("lhs"), shape("rhs")
    if sizes.batched:
        lhs_batched = not all(is_one(d) for d in lhs[:-2])
        if lhs_batched and not same_dims(lhs[:-2], rhs[:-2]):
            raise InputError("batches that differ")
        if not lhs_batched and len(lhs) != 2:
            raise InputError("one left matrix with batch axes of 1")
        batch, lead = rhs[:-2], lhs[-2:-1]
    else:
        if len(rhs) != 2:
            raise InputError("a right operand with batch axes of 1")
        lhs_batched, batch, lead = True, [], lhs[:-1]
    n_axis = -2 if attrs["rhs_layout"] == "NK" else -1
    out = dims(composite.func.body.body)
    if out is None or not same_dims(out, [*batch, *lead, rhs[n_axis]]):
        raise InputError("the result's axes are not those of the operands")
    roles, steps = ["lhs", "rhs"], []
    for step in attrs["epilogue"]:
        if step["op"] not in STEPS:
            raise InputError(f"epilogue step {step['op']}")
        role = step.get("operand", "")
        kind = dtype_of(composite.func.params[composite.roles[role]]) if role else ""
        if role and kind not in _FLOATS:
            raise InputError(f"epilogue operand in {kind}")
        steps.append((step["op"], role, kind, float(step.get("value", 1.0))))
        if role and role not in roles:
            roles.append(role)
    spec = MmaSpec(
        tuple(name(d) for d in batch),
        tuple(name(d) for d in lead),
        sizes.n,
        sizes.k,
        str(attrs["rhs_layout"]),
        dtype,
        out_dtype,
        tuple(steps),
        lhs_batched,
    )
    return spec, roles


def _emit(
    composite: Composite,
    args: Sequence[relax.Expr],
    bb: relax.BlockBuilder,
    spec: MmaSpec,
    roles: list[str],
    kernel: Any,
) -> relax.Expr:
    gvar = bb.add_func(kernel, spec.key())
    operands = [args[composite.roles[role]] for role in roles]
    biases = {s["operand"] for s in composite.attrs["epilogue"] if s["op"] == "bias"}
    for i, role in enumerate(roles):
        if role in biases and operands[i].ty.ndim != 1:
            operands[i] = bb.emit(relax.op.reshape(operands[i], (spec.n,)))
    shape = result_dims(composite, args)
    if not spec.batch:
        shape = [*list(args[composite.roles["lhs"]].ty.shape.values)[:-1], spec.n]
    return relax.call_tir(gvar, operands, relax.TensorType(shape, spec.out_dtype))


@register_implementation("gemm", priority=10)
class CudaMma:
    """fp16 and bf16 products on tensor cores (sm_80 and newer), without a library."""

    name = "cuda.mma"
    kind = "gemm"
    targets = ("cuda",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take fp16 and bf16 products with static N and K and more than one row."""
        digits = "".join(c for c in str(attribute(target, "arch", "") or "") if c.isdigit())
        if not digits or int(digits) < 80:
            return Refusal(f"sm_{digits or '?'}: mma.m16n8k16 needs sm_80", composite.kind)
        try:
            spec, _ = self._spec(composite)
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
        spec, roles = self._spec(composite)
        return _emit(composite, args, bb, spec, roles, mma_kernel(spec))

    @staticmethod
    def _spec(composite: Composite) -> tuple[MmaSpec, list[str]]:
        return product_spec(composite, _HALVES, "tensor cores take", one_row=False)


@register_implementation("gemm", priority=9)
class CudaGemv:
    """Products of one row: each weight is read once, sums in fp32."""

    name = "cuda.gemv"
    kind = "gemm"
    targets = ("cuda",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take products of one row with static N and K."""
        try:
            spec, _ = self._spec(composite)
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
        spec, roles = self._spec(composite)
        return _emit(composite, args, bb, spec, roles, gemv_kernel(spec))

    @staticmethod
    def _spec(composite: Composite) -> tuple[MmaSpec, list[str]]:
        spec, roles = product_spec(composite, _FLOATS, "this kernel takes", one_row=True)
        return replace(spec, prefix="gemv"), roles


@register_implementation("gemm", priority=-10)
class CudaTransposed:
    """Products of transposed weights that no kernel here takes: by TVM, without a copy of them."""

    name = "cuda.transposed"
    kind = "gemm"
    targets = ("cuda",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take plain products with weights (..., N, K)."""
        attrs = composite.attrs
        if attrs.get("quant"):
            return Refusal("packed weights", composite.kind)
        if attrs.get("lhs_layout", "MK") != "MK" or attrs["rhs_layout"] != "NK":
            return Refusal("the weights are not transposed", composite.kind)
        lhs = dims(composite.func.params[composite.roles["lhs"]])
        if lhs is None or len(lhs) < 2:
            return Refusal("a vector on the left", composite.kind)
        # One row is reduced across threads, and TVM's lowering of that is wrong for some sizes.
        if gemm_sizes(composite).m == 1:
            return Refusal("one row", composite.kind)
        return Accept()

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit the product, for TVM to schedule, and its epilogue as operators."""
        lhs, rhs = (args[composite.roles[r]] for r in ("lhs", "rhs"))
        acc = str(composite.attrs["acc_dtype"])

        def product(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            k = te.reduce_axis((0, a.shape[-1]), "k")
            lead, other = list(a.shape[:-2]), list(b.shape[:-2])
            if len(other) > len(lead) or (other and all(is_one(d) for d in lead)):
                lead = other
            shape = [*lead, a.shape[-2], b.shape[-2]]

            def batch(tensor: te.Tensor, i: Any) -> list[Any]:
                axes = tensor.shape[:-2]
                at = i[len(lead) - len(axes) : len(lead)]
                return [tirx.const(0, "int64") if is_one(d) else j
                        for d, j in zip(axes, at, strict=True)]  # fmt: skip

            def value(*i: Any) -> Any:
                x, w = a(*batch(a, i), i[-2], k), b(*batch(b, i), i[-1], k)
                return te.sum(x.astype(acc) * w.astype(acc), axis=k)

            return te.compute(shape, value, name="NT_matmul")

        result = bb.emit_te(product, lhs, rhs, primfunc_name_hint="NT_matmul")
        return emit_steps(result, composite.attrs["epilogue"], composite, args, bb)
