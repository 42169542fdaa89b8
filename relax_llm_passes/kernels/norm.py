"""relax.nn norms, softmax and reductions as this package's own kernels, on CUDA and on the CPU.

`lower_call` turns one call into a `call_tir`; the pass LegalizeNorms applies it to a module. TVM's
own lowering of group_norm and instance_norm takes the variance as E[x*x] - E[x]**2, that of
bfloat16 fails or races, and its schedules leave most threads idle; none of that is repaired by a
schedule, so the computation itself is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from ..report import Refusal
from ..structural_memo import StructuralMemo
from .flat_kernel import known_shape, too_large
from .norm_cpu import emit_cpu, plan_cpu
from .norm_cuda import emit_cuda
from .norm_cuda_plan import plan_cuda
from .norm_math import functions_for
from .norm_ops import (
    Extra,
    NormSpec,
    axis_domain,
    group_domain,
    norm_program,
    reduction_program,
    softmax_program,
)
from .norm_program import RowProgram, Tensor, freshen, row_major

__all__ = [
    "FLOATS",
    "NORMS",
    "REDUCTIONS",
    "build",
    "known_shape",
    "lower_call",
    "norm_spec",
    "too_large",
]

FLOATS = ("float16", "bfloat16", "float32", "float64")
NORMS = (
    "relax.nn.layer_norm",
    "relax.nn.rms_norm",
    "relax.nn.group_norm",
    "relax.nn.instance_norm",
    "relax.nn.softmax",
    "relax.nn.log_softmax",
)
_BUILT = StructuralMemo()
REDUCTIONS = {f"relax.{k}": k for k in ("sum", "mean", "max", "min", "prod", "variance", "std")}


def dtype_of(expr: relax.Expr) -> str:
    """Return the element type of a tensor-typed expression ("" when unknown)."""
    dtype = getattr(expr.ty, "dtype", None)
    return "" if dtype is None else str(dtype)


def build(prog: RowProgram, target: tvm.target.Target) -> tirx.PrimFunc:
    """Return the scheduled PrimFunc of a row program for the target."""
    if target.kind.name == "cuda":
        return emit_cuda(prog, plan_cuda(prog, target))
    return emit_cpu(prog, plan_cpu(prog, target))


def _axes(values: Any, rank: int) -> list[int]:
    if values is None:
        return list(range(rank))
    if isinstance(values, int):
        values = [values]
    return [int(a) + rank if int(a) < 0 else int(a) for a in values]


def norm_spec(call: relax.Call) -> tuple[NormSpec, list[relax.Expr]] | Refusal:
    """Describe a layer_norm, rms_norm, group_norm or instance_norm call.

    Returns the specification (tensors with the PrimFunc's own size variables) and the arguments in
    the order of the PrimFunc's parameters, or why the call cannot be described.
    """
    op = call.op.name
    args = list(call.args)
    shapes = [known_shape(a) for a in args]
    dtypes = [dtype_of(a) for a in args]
    if any(s is None for s in shapes):
        return Refusal(f"{op}: the shape of an operand is unknown", "norm")
    if any(d not in FLOATS for d in dtypes):
        return Refusal(f"{op}: operands are {', '.join(dtypes)}; expected floats", "norm")
    if too_large([s for s in shapes if s is not None]):
        return Refusal(f"{op}: an operand is empty or beyond 2**31 elements", "norm")
    fresh = freshen([s for s in shapes if s is not None])
    shape, rank = fresh[0], len(fresh[0])
    attrs = call.attrs
    axes = _axes(attrs.axes, rank)
    if op != "relax.nn.rms_norm" and not (bool(attrs.center) and bool(attrs.scale)):
        # TVM multiplies and adds even so; leave the choice of meaning to it.
        return Refusal(f"{op}: center=False or scale=False", "norm")
    affine_axes = axes
    if op in ("relax.nn.group_norm", "relax.nn.instance_norm"):
        channel = _axes(attrs.channel_axis, rank)[0]
        affine_axes = [channel]
        if op == "relax.nn.group_norm":
            groups = int(attrs.num_groups)
            size = shape[channel]
            if not isinstance(size, int) or groups <= 0 or size % groups or channel in axes:
                return Refusal(f"{op}: {size} channels in {groups} groups", "norm")
            domain = group_domain(shape, channel, axes, groups)
        else:
            if channel in axes:
                return Refusal(f"{op}: the channel axis is reduced", "norm")
            domain = axis_domain(shape, axes)
    else:
        domain = axis_domain(shape, axes)
    if not any(a.reduced for a in domain):
        return Refusal(f"{op}: no axis is reduced", "norm")
    want = tuple(shape[a] for a in affine_axes)
    if any(not _same_shape(want, s) for s in fresh[1:]):
        return Refusal(f"{op}: weights of shape {fresh[1:]} where {want} is expected", "norm")
    grouped = channel if op == "relax.nn.group_norm" else None

    def spread(strides: Sequence[Any]) -> tuple[Any, ...]:
        """Strides per axis of the tensor to strides per axis of the domain."""
        out: list[Any] = []
        for i, s in enumerate(strides):
            if i == grouped:
                out += [s * (shape[i] // int(attrs.num_groups)), s]
            else:
                out.append(s)
        return tuple(out)

    whole = spread(row_major(shape))
    affine = [0] * rank
    for a, s in zip(affine_axes, row_major(want), strict=True):
        affine[a] = s
    names = ["x", "weight", "bias"]
    extras = [
        Extra(Tensor(n, s, d), whole if n == "x" else spread(affine))
        for n, s, d in zip(names, fresh, dtypes, strict=False)
    ]
    spec = NormSpec(
        domain,
        extras[0],
        Extra(Tensor("y", shape, dtypes[0]), whole),
        float(attrs.epsilon),
        weight=extras[1],
        bias=extras[2] if len(extras) > 2 else None,
        center=op != "relax.nn.rms_norm",
        name=op.rsplit(".", 1)[1],
    )
    return spec, args


def _same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        x == y
        if isinstance(x, int) and isinstance(y, int)
        else x is y or x.same_as(y)
        if not isinstance(x, int) and not isinstance(y, int)
        else False
        for x, y in zip(a, b, strict=True)
    )


def program_of(
    call: relax.Call, target: tvm.target.Target, reductions: bool = True
) -> tuple[RowProgram, list[relax.Expr]] | Refusal:
    """Return the row program of a norm, softmax or reduction call and its arguments."""
    op = call.op.name
    if op in NORMS[:4]:
        found = norm_spec(call)
        if isinstance(found, Refusal):
            return found
        return norm_program(found[0]), found[1]
    x = call.args[0]
    shape, dtype = known_shape(x), dtype_of(x)
    if shape is None or dtype not in FLOATS:
        return Refusal(f"{op}: shape unknown or element type {dtype or 'unknown'}", "norm")
    if not shape or too_large([shape]):
        return Refusal(f"{op}: a scalar, empty or beyond 2**31 elements", "norm")
    own = freshen([shape])[0]
    if op in NORMS:
        axis = _axes(call.attrs.axis, len(own))[0]
        log = op.endswith("log_softmax")
        return softmax_program(own, axis, dtype, functions_for(target), log), [x]
    if reductions and op in REDUCTIONS:
        if known_shape(call) is None or dtype_of(call) != dtype:
            return Refusal(f"{op}: the result's type differs from the operand's", "norm")
        axes = _axes(call.attrs.axis, len(own))
        if not axes:
            return Refusal(f"{op}: no axis is reduced", "norm")
        keep = bool(call.attrs.keepdims)
        return reduction_program(REDUCTIONS[op], own, axes, keep, dtype), [x]
    return Refusal(f"{op} is no norm or reduction", "norm")


def lower_call(
    bb: relax.BlockBuilder, call: relax.Call, target: tvm.target.Target, reductions: bool = True
) -> relax.Expr | Refusal:
    """Return the `call_tir` that replaces a norm, softmax or reduction, or why there is none.

    Parameters
    ----------
    bb : relax.BlockBuilder
        Receives the PrimFunc (equal ones are shared).
    call : relax.Call
        One of `NORMS`, or with `reductions` one of `REDUCTIONS`.
    target : Target
        Of kind "cuda" or "llvm".
    """
    found = program_of(call, target, reductions)
    if isinstance(found, Refusal):
        return found
    prog, args = found
    types = [a.ty for a in call.args]
    question, func = _BUILT.get([call.op, call.attrs, *types, call.ty, str(target)])
    if func is None:
        func = build(prog, target)
        _BUILT.put(question, func)
    return relax.call_tir(bb.add_func(func, prog.name), list(args), call.ty)


def call_program(
    bb: relax.BlockBuilder,
    prog: RowProgram,
    args: Sequence[relax.Expr],
    out_ty: Any,
    target: tvm.target.Target,
) -> relax.Expr:
    """Add the PrimFunc of `prog` to the module and return the call of it."""
    func = build(prog, target)
    gvar = bb.add_func(func, prog.name)
    return relax.call_tir(gvar, list(args), out_ty)
