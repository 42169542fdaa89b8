"""Products on llvm targets: from a "gemm" composite to a call of a CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from ..errors import InputError
from ..lower import Accept, Composite, register_implementation
from ..patterns.shapes import same_dim, same_dims
from ..report import Refusal
from .cpu_epilogue import Epilogue
from .cpu_gemm import gemm_kernel
from .cpu_spec import GemmSpec, QuantSpec

__all__ = ["CpuGemm", "Names", "emit_product", "spec_of", "static_shape"]

_FLOATS = ("float32", "float16", "bfloat16")


def static_shape(ty: Any, what: str) -> list[Any]:
    shape = getattr(ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        raise InputError(f"{what}: its shape is not known")
    return list(shape.values)


class Names:
    """Names for symbolic sizes: equal expressions get one name."""

    def __init__(self) -> None:
        self.known: list[Any] = []

    def __call__(self, dim: Any) -> int | str:
        if isinstance(dim, tvm.tirx.IntImm):
            return int(dim.value)
        for i, seen in enumerate(self.known):
            if same_dim(seen, dim):
                return f"d{i}"
        self.known.append(dim)
        return f"d{len(self.known) - 1}"


def _quant(attrs: dict[str, Any], who: str) -> QuantSpec:
    bits, group = int(attrs["bits"]), int(attrs["group"])
    packed = str(attrs.get("packed_dtype", "uint32"))
    if bits not in (4, 8) or packed != "uint32":
        raise InputError(f"{bits}-bit weights in {packed}; {who} 4 and 8 in uint32")
    if group < 16 or group & (group - 1):
        raise InputError(f"groups of {group}; {who} powers of two from 16 on")
    scale = str(attrs.get("scale_dtype", "float16"))
    if scale not in _FLOATS:
        raise InputError(f"scales in {scale}, expected one of {_FLOATS}")
    rounding = int(attrs.get("activation_bits", 0))
    return QuantSpec(bits, group, int(attrs["max_int"]), scale, rounding)


def spec_of(composite: Composite, who: str = "CPU kernels have") -> tuple[GemmSpec, list[str]]:
    """Return the kernel's spec and the roles of its arguments, in order.

    Parameters
    ----------
    composite : Composite
        The product.
    who : str
        Whose limits a message tells.

    Raises
    ------
    InputError
        When kernels of such a spec cannot compute the composite; says why.
    """
    attrs = composite.attrs
    if attrs.get("lhs_layout", "MK") != "MK":
        raise InputError("the left operand is transposed")
    lhs = composite.ty("lhs")
    lhs_shape = static_shape(lhs, "lhs")
    quant = _quant(attrs["quant"], who) if attrs.get("quant") else None
    layout = str(attrs["rhs_layout"])
    names = Names()
    k_size = names(lhs_shape[-1])
    if not isinstance(k_size, int):
        raise InputError("the length of the sums (K) is symbolic")
    if quant is not None:
        roles = ["lhs", "rhs_packed", "rhs_scale"]
        packed = static_shape(composite.ty("rhs_packed"), "rhs_packed")
        scale = static_shape(composite.ty("rhs_scale"), "rhs_scale")
        along = 1 if layout == "NK" else 0
        n_dim, rhs_dtype = packed[1 - along], "uint32"
        words, groups = -(-k_size // quant.per_word), -(-k_size // quant.group)
        expected = [n_dim, n_dim]
        if not same_dims([packed[along], scale[along]], [words, groups]) or not same_dims(
            [packed[1 - along], scale[1 - along]], expected
        ):
            raise InputError(
                f"packed {tuple(packed)} and scales {tuple(scale)}, expected "
                f"{words} words and {groups} scales along K for each of {n_dim} columns"
            )
    else:
        roles = ["lhs", "rhs"]
        rhs = composite.ty("rhs")
        rhs_shape = static_shape(rhs, "rhs")
        if len(rhs_shape) != 2:
            raise InputError("the right operand has batch axes, it is no weight")
        n_dim, k_dim = rhs_shape if layout == "NK" else rhs_shape[::-1]
        if not same_dim(k_dim, lhs_shape[-1]):
            raise InputError(f"lhs has K={k_size}, rhs has K={k_dim}")
        rhs_dtype = str(rhs.dtype)
    n = names(n_dim)
    out = composite.result_ty
    out_shape = static_shape(out, "out")
    if not same_dims(out_shape[:-1], lhs_shape[:-1]):
        raise InputError("the result's leading axes are not those of the left operand")
    steps = attrs.get("epilogue") or []
    dtypes = {}
    for step in steps:
        role = step.get("operand")
        if not role:
            continue
        dtypes[role] = str(composite.ty(role).dtype)
        shape = static_shape(composite.ty(role), role)
        if step["op"] == "bias":
            if not same_dim(shape[-1], n_dim) or not all(same_dim(d, 1) for d in shape[:-1]):
                raise InputError(f"bias {tuple(shape)}, expected ({n},)")
        elif not same_dims(shape, out_shape):
            raise InputError(f"{step['op']} operand {tuple(shape)}, expected {tuple(out_shape)}")
    epilogue = Epilogue.parse(steps, dtypes)
    lead = tuple(names(d) for d in lhs_shape[:-1])
    spec = GemmSpec(
        lead, n, k_size, layout, str(lhs.dtype), rhs_dtype, str(out.dtype), epilogue, quant
    )
    for role in dtypes:
        if role not in roles:
            roles.append(role)
    for what, dtype in (("lhs", lhs.dtype), ("out", out.dtype), ("sum", attrs["acc_dtype"])):
        if str(dtype) not in _FLOATS:
            raise InputError(f"{what} in {dtype}; {who} {', '.join(_FLOATS)}")
    if quant is None and rhs_dtype not in _FLOATS:
        raise InputError(f"rhs in {rhs_dtype}; {who} {', '.join(_FLOATS)}")
    if (isinstance(n, int) and n < 1) or k_size < 1:
        raise InputError(f"N={n}, K={k_size}: nothing to multiply")
    return spec, roles


def emit_product(
    composite: Composite,
    args: Sequence[relax.Expr],
    bb: relax.BlockBuilder,
    spec: GemmSpec,
    roles: Sequence[str],
    kernel: tvm.tirx.PrimFunc,
    name: str = "",
) -> relax.Expr:
    """Emit one call_tir of a kernel made for the spec, with its operands in the roles' order."""
    gvar = bb.add_func(kernel.without_attr("global_symbol"), name or spec.key())
    operands = [args[composite.roles[role]] for role in roles]
    weight = operands[1].ty.shape.values
    # In the sizes of the call, not in those of the composite's own variables.
    columns = weight[0 if spec.layout == "NK" else 1]
    biases = {s["operand"] for s in composite.attrs["epilogue"] if s["op"] == "bias"}
    for i, role in enumerate(roles):
        if role in biases and operands[i].ty.ndim != 1:  # (1, N) is N values too
            operands[i] = bb.emit(relax.op.reshape(operands[i], (columns,)))
    leading = list(args[composite.roles["lhs"]].ty.shape.values)[:-1]
    out = relax.TensorType([*leading, columns], spec.out_dtype)
    return relax.call_tir(gvar, operands, out)


@register_implementation("gemm", priority=10)
class CpuGemm:
    """Products by weights: matrix-vector, skinny and matrix products in one kernel."""

    name = "cpu.gemm"
    kind = "gemm"
    targets = ("llvm",)

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take products of float tensors by weights without batch axes, of static K."""
        try:
            spec, _ = spec_of(composite)
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
        spec, roles = spec_of(composite)
        return emit_product(composite, args, bb, spec, roles, gemm_kernel(spec, target))
