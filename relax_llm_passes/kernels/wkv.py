"""The implementation of the "wkv" composite: one token of RWKV-5, 6 or 7 in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from ..errors import InputError
from ..lower import Accept, Composite, register_implementation
from ..report import Refusal
from .group_norm import result_type
from .norm import FLOATS, known_shape, too_large
from .norm_program import Tensor
from .wkv_cpu import emit_wkv_cpu
from .wkv_cuda import emit_wkv_cuda
from .wkv_spec import ROLES_BONUS, ROLES_DELTA, WkvSpec

__all__ = ["LARGEST_HEAD", "WkvToken", "wkv_spec"]

# Beyond this a thread's share of the state no longer fits its registers.
LARGEST_HEAD = 512


def _tensor(name: str, ty: Any) -> Tensor:
    shape = known_shape(_Typed(ty))
    if shape is None:
        raise InputError(f"the shape of {name} is unknown")
    if str(ty.dtype) not in FLOATS[:3]:
        raise InputError(f"{name} is {ty.dtype}, expected float16, bfloat16 or float32")
    return Tensor(name, tuple(shape), str(ty.dtype))


class _Typed:
    def __init__(self, ty: Any) -> None:
        self.ty = ty


def wkv_spec(composite: Composite) -> WkvSpec:
    """Return the kernel's spec.

    Raises
    ------
    InputError
        When the kernels cannot compute the composite; says why.
    """
    attrs = composite.attrs
    delta = attrs["form"] == "delta"
    roles = ROLES_DELTA if delta else ROLES_BONUS
    size, heads = int(attrs["size"]), int(attrs["heads"])
    if not 2 <= size <= LARGEST_HEAD:
        raise InputError(f"heads of {size} channels, expected 2 to {LARGEST_HEAD}")
    tensors = [_tensor(r, composite.ty(r)) for r in roles]
    fields = list(composite.result_ty.fields)
    results = dict(zip(composite.outputs, fields, strict=True))
    tensors.append(_tensor("out", results["out"]))
    tensors.append(_tensor("new_state", results["state"]))
    if too_large([t.shape for t in tensors]):
        raise InputError("a tensor is empty or beyond 2**31 elements")
    lead = list(tensors[roles.index("state")].shape[:-2])
    count = 1
    while lead and count < heads:
        d = lead.pop()
        if not isinstance(d, int):
            raise InputError("the head axis is symbolic")
        count *= d
    if count != heads:
        raise InputError(f"{heads} heads do not fit the state's axes")
    batch: Any = 1
    for d in lead:
        batch = batch * d
    bound = {d for t in tensors[: len(roles)] for d in t.shape if isinstance(d, tirx.Var)}
    if any(not isinstance(d, int) and d not in bound for t in tensors for d in t.shape):
        raise InputError("a size is an expression")
    return WkvSpec(
        tuple(tensors),
        batch,
        1,
        heads,
        size,
        delta=delta,
        value_major=bool(attrs["value_major"]),
        decay_per_token=bool(attrs["decay_per_token"]),
    )


@register_implementation("wkv", priority=10)
class WkvToken:
    """One token of the recurrence; the state is read once and written once."""

    name = "wkv.token"
    kind = "wkv"
    targets = ("cuda", "llvm")

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take heads of up to 512 channels in any float dtype."""
        try:
            wkv_spec(composite)
        except InputError as error:
            return Refusal(str(error), composite.kind)
        return Accept()

    def emit(
        self,
        composite: Composite,
        args: Sequence[relax.Expr],
        bb: relax.BlockBuilder,
        target: tvm.target.Target,
    ) -> relax.Expr:
        """Emit one call_tir with two results, in the composite's order."""
        spec = wkv_spec(composite)
        cuda = target.kind.name == "cuda"
        func = emit_wkv_cuda(spec) if cuda else emit_wkv_cpu(spec, target)
        gvar = bb.add_func(func, "wkv7" if spec.delta else "wkv")
        operands = [args[composite.roles[role]] for role in spec.roles]
        fields = list(result_type(composite, args).fields)
        types = dict(zip(composite.outputs, fields, strict=True))
        call = relax.call_tir(gvar, operands, [types["out"], types["state"]])
        if composite.outputs == ["out", "state"]:
            return call
        both = bb.emit(call)
        return relax.Tuple([bb.emit(relax.TupleGetItem(both, i)) for i in (1, 0)])
