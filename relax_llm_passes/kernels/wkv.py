"""The implementation of the "wkv" composite: the tokens of one recurrence in one kernel.

The contract is that of `patterns.wkv`: which tensors are loaded, and how, is in its attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from ..errors import InputError
from ..lower import Accept, Composite, register_implementation
from ..report import Refusal
from .flat_kernel import Typed, check_sizes, tensor_of
from .group_norm import result_type
from .norm import known_shape
from .norm_program import Tensor
from .wkv_cpu import emit_wkv4_cpu, emit_wkv_cpu
from .wkv_cuda import emit_wkv4_cuda, emit_wkv_cuda
from .wkv_spec import WkvSpec

__all__ = ["LARGEST_HEAD", "WkvTokens", "wkv_spec"]

# Beyond this a thread's share of the state no longer fits its registers.
LARGEST_HEAD = 512
_STATES = {"softmax": ("num", "den", "peak")}


def _product(dims: Sequence[Any]) -> Any:
    total: Any = 1
    for d in dims:
        total = total * d
    return total


def wkv_spec(composite: Composite) -> WkvSpec:
    """Return the kernel's spec.

    Raises
    ------
    InputError
        When the kernels cannot compute the composite; says why.
    """
    attrs = composite.attrs
    form, size, heads = attrs["form"], int(attrs["size"]), int(attrs["heads"])
    tokens = int(attrs["tokens"])
    matrix = form != "softmax"
    if matrix and not 2 <= size <= LARGEST_HEAD:
        raise InputError(f"heads of {size} channels, expected 2 to {LARGEST_HEAD}")
    tensors = [tensor_of(r, composite.ty(r)) for r in composite.roles]
    fields = dict(zip(composite.outputs, list(composite.result_ty.fields), strict=True))
    states = [tensor_of(f"new_{s}", fields[s]) for s in _STATES.get(form, ("state",))]
    batch = _product(states[0].shape[: int(attrs["batch_axes"])])
    out_at = attrs["out_at"]
    if out_at is None:
        one = tensor_of("out", fields["out0"])
        out = Tensor("out", (tokens, *one.shape), one.dtype)
        token = heads * size
        out_at = {"b": token, "t": batch * token, "h": size, "n": 1}
    else:
        out = tensor_of("out", fields["out"])
    check_sizes(tensors, [out, *states])
    return WkvSpec(
        (*tensors, out, *states),
        attrs["operands"],
        out_at,
        batch,
        tokens,
        heads,
        size,
        delta=form == "delta",
        value_major=form == "delta",
    )


def _kernel(spec: WkvSpec, form: str, target: tvm.target.Target) -> tirx.PrimFunc:
    cuda = target.kind.name == "cuda"
    if form == "softmax":
        return emit_wkv4_cuda(spec) if cuda else emit_wkv4_cpu(spec, target)
    return emit_wkv_cuda(spec) if cuda else emit_wkv_cpu(spec, target)


@register_implementation("wkv", priority=10)
class WkvTokens:
    """The tokens of one recurrence; the state is read once and written once."""

    name = "wkv.tokens"
    kind = "wkv"
    targets = ("cuda", "llvm")

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take heads of up to 512 channels in any float dtype."""
        try:
            spec = wkv_spec(composite)
        except InputError as error:
            return Refusal(str(error), composite.kind)
        return Accept("" if spec.single else f"{spec.tokens} tokens")

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir; its results in the composite's order."""
        spec = wkv_spec(composite)
        form = composite.attrs["form"]
        func = _kernel(spec, form, target)
        gvar = bb.add_func(func, {"delta": "wkv7", "softmax": "wkv4"}.get(form, "wkv"))
        operands = [args[composite.roles[role]] for role in composite.roles]
        fields = list(result_type(composite, args).fields)
        types = dict(zip(composite.outputs, fields, strict=True))
        states = list(_STATES.get(form, ("state",)))
        separate = composite.attrs["out_at"] is None
        out_ty = types["out0" if separate else "out"]
        if separate:
            shape = [spec.tokens, *(known_shape(Typed(out_ty)) or [])]
            out_ty = relax.TensorType(shape, str(out_ty.dtype))
        call = relax.call_tir(gvar, operands, [out_ty, *(types[s] for s in states)])
        if composite.outputs == ["out", *states]:
            return call
        both = bb.emit(call)
        items = {s: bb.emit(relax.TupleGetItem(both, i + 1)) for i, s in enumerate(states)}
        items["out"] = bb.emit(relax.TupleGetItem(both, 0))
        for t in range(spec.tokens if separate else 0):
            part = bb.emit(relax.op.strided_slice(items["out"], [0], [t], [t + 1]))
            items[f"out{t}"] = bb.emit(relax.op.squeeze(part, [0]))
        return relax.Tuple([items[name] for name in composite.outputs])
