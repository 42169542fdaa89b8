"""group_norm with its gate as one kernel: the implementation of the "group_norm" composite.

One read of each input, one write: mean and variance from registers, then weight, bias, RWKV-7's
bonus, activations, gates and casts in the order of the graph (see `patterns.group_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from ..errors import InputError
from ..lower import Accept, Composite, register_implementation
from ..report import Refusal
from .flat_kernel import Typed, tensor_of
from .norm import build, known_shape, too_large
from .norm_math import Functions, functions_for
from .norm_ops import Extra, NormSpec, group_domain, norm_program
from .norm_program import Tensor, row_major

__all__ = ["GroupNormGate", "gated_program", "result_type"]


def _variables(expr: Any) -> list[Any]:
    found: list[Any] = []
    if isinstance(expr, tirx.Var):
        return [expr]
    for name in ("a", "b", "value", "condition", "true_value", "false_value"):
        part = getattr(expr, name, None)
        if part is not None and not isinstance(part, (int, float, str)):
            found += _variables(part)
    return found


def result_type(composite: Composite, args: Sequence[relax.Expr]) -> Any:
    """Return the composite's result type in the sizes of the call's arguments."""
    values: dict[Any, Any] = {}
    for param, arg in zip(composite.func.params, args, strict=True):
        for mine, given in zip(known_shape(param) or [], known_shape(arg) or [], strict=True):
            if isinstance(mine, tirx.Var) and mine not in values:
                values[mine] = tirx.const(given, "int64") if isinstance(given, int) else given
    if not values:
        return composite.result_ty
    return composite.func.bind_symbolic_vars(values).ret_ty


def norm_call(composite: Composite) -> relax.Call:
    """Return the group_norm call inside a composite."""
    calls: list[relax.Call] = []

    def visit(e: relax.Expr) -> None:
        if isinstance(e, relax.Call) and getattr(e.op, "name", "") == "relax.nn.group_norm":
            calls.append(e)

    relax.analysis.post_order_visit(composite.func, visit)
    if len(calls) != 1:
        raise InputError(f"{len(calls)} group_norm calls in the composite, expected 1")
    return calls[0]


def _unary(fn: str, x: Any, f: Functions) -> Any:
    one = tirx.const(1, "float32")
    if fn.startswith("cast:"):
        return _round(x, fn[5:])
    if fn == "silu":
        return f.silu(x)
    if fn == "sigmoid":
        return f.sigmoid(x)
    if fn == "tanh":
        # 1 - 2 / (1 + exp(2x)): exact at both ends, where exp overflows or vanishes.
        two = tirx.const(2, "float32")
        return one - two / (one + f.exp(x * two))
    if fn == "relu":
        return tirx.max(x, tirx.const(0, "float32"))
    if fn == "gelu":
        half, root = tirx.const(0.5, "float32"), tirx.const(0.7071067811865476, "float32")
        return x * half * (one + tirx.erf(x * root))
    if fn == "gelu_tanh":
        inner = tirx.const(1.5957691216057308, "float32") * (
            x + tirx.const(0.044715, "float32") * x * x * x
        )
        return x * f.sigmoid(inner)
    raise InputError(f"unknown activation {fn!r}")


def _round(x: Any, dtype: str) -> Any:
    return x if dtype == "float32" else tirx.Cast("float32", tirx.Cast(dtype, x))


def _simple(step: dict[str, Any], f: Functions) -> Callable[[Any], Any]:
    op = step["op"]
    if op == "cast":
        return lambda x: _round(x, step["dtype"])
    if op == "scale":
        return lambda x: x * tirx.const(step["value"], "float32")
    if op == "divide_by":
        return lambda x: x / tirx.const(step["value"], "float32")
    if op == "shift":
        return lambda x: x + tirx.const(step["value"], "float32")
    if op == "unary":
        return lambda x: _unary(step["fn"], x, f)
    raise InputError(f"unknown step {op!r}")


def _bonus(at: int) -> Any:
    """RWKV-7's bonus: the normalised value plus a sum times an extra input."""
    return lambda y, late, total: y + total * late[at]


def _on_value(fn: Any) -> Any:
    """A step that reads the value alone."""
    return lambda y, late, total: fn(y)


class _Gate:
    """Reads the composite once; `program` and `roles` describe the kernel."""

    def __init__(self, composite: Composite, functions: Functions) -> None:
        self.composite, self.functions = composite, functions
        call = norm_call(composite)
        shape = known_shape(call.args[0])
        if shape is None:
            raise InputError("the norm's shape is unknown")
        self.shape = shape
        attrs = call.attrs
        if not (bool(attrs.center) and bool(attrs.scale)):
            raise InputError("center=False or scale=False")
        rank = len(shape)
        channel = int(attrs.channel_axis) % rank
        self.channel = channel
        self.groups = int(attrs.num_groups)
        axes = [int(a) % rank for a in attrs.axes]
        if not isinstance(shape[channel], int) or shape[channel] % self.groups or channel in axes:
            raise InputError(f"{shape[channel]} channels in {self.groups} groups")
        self.tensors = {r: tensor_of(r, composite.ty(r)) for r in composite.roles}
        bound = {d for t in self.tensors.values() for d in t.shape if isinstance(d, tirx.Var)}
        result = composite.result_ty
        out_shape = known_shape(Typed(result))
        if out_shape is None:
            raise InputError("the result's shape is unknown")
        for d in [*shape, *out_shape, *(x for t in self.tensors.values() for x in t.shape)]:
            if any(v not in bound for v in _variables(d)):
                raise InputError(f"size {d} follows from no operand's own size")
        self.out = Tensor("y", tuple(out_shape), str(result.dtype))
        if too_large([shape]):
            raise InputError("empty, or beyond 2**31 elements")
        self.axes = group_domain(shape, channel, axes, self.groups)
        self.element = self._spread(row_major(shape))
        per_channel = [0] * rank
        per_channel[channel] = 1
        self.channel_strides = self._spread(per_channel)
        self.epsilon = float(attrs.epsilon)

    def _spread(self, strides: Sequence[Any]) -> tuple[Any, ...]:
        out: list[Any] = []
        for i, s in enumerate(strides):
            if i == self.channel:
                out += [s * (self.shape[i] // self.groups), s]
            else:
                out.append(s)
        return tuple(out)

    def extra(self, role: str, per: str) -> Extra:
        strides = self.element if per == "element" else self.channel_strides
        return Extra(self.tensors[role], strides)

    def program(self) -> Any:
        f, attrs = self.functions, self.composite.attrs
        before = [_simple(s, f) for s in attrs["before"]]
        extras: list[Extra] = []
        bonus: list[Extra] = []
        steps: list[Callable[[Any, list[Any], Any], Any]] = []
        for step in attrs["after"]:
            if step["op"] == "bonus":
                if bonus:
                    raise InputError("two bonus terms")
                bonus = [self.extra(r, per) for r, per in step["summed"]]
                at = len(extras)
                extras.append(self.extra(step["value"], "element"))
                steps.append(_bonus(at))
            elif "operand" in step:
                at = len(extras)
                extras.append(self.extra(step["operand"], step["per"]))
                steps.append(self._binary(step, at))
            else:
                fn = _simple(step, f)
                steps.append(_on_value(fn))

        def apply_before(x: Any) -> Any:
            for fn in before:
                x = fn(x)
            return x

        def epilogue(y: Any, late: list[Any], total: Any) -> Any:
            for fn in steps:
                y = fn(y, late, total)
            return y

        spec = NormSpec(
            self.axes,
            self.extra("data", "element"),
            Extra(self.out, self.element),
            self.epsilon,
            weight=self.extra("weight", "channel"),
            bias=self.extra("bias", "channel"),
            extras=extras,
            epilogue=epilogue,
            before=apply_before if before else None,
            bonus=bonus,
            name="group_norm_gate",
        )
        return norm_program(spec)

    def _binary(self, step: dict[str, Any], at: int) -> Callable[[Any, list[Any], Any], Any]:
        op, reverse = step["op"], step["reverse"]

        def run(y: Any, late: list[Any], total: Any) -> Any:
            x = late[at]
            for fn in step["fns"]:
                x = _unary(fn, x, self.functions)
            a, b = (x, y) if reverse else (y, x)
            if op == "multiply":
                return a * b
            if op == "add":
                return a + b
            return a - b if op == "subtract" else a / b

        return run


def gated_program(composite: Composite, target: tvm.target.Target) -> tuple[Any, list[str]]:
    """Return the row program of a composite and the roles of its parameters, in order.

    Raises
    ------
    InputError
        When it cannot be computed in one kernel; says why.
    """
    program = _Gate(composite, functions_for(target)).program()
    return program, [t.name for t in program.tensors[:-1]]


@register_implementation("group_norm", priority=10)
class GroupNormGate:
    """group_norm and what surrounds it, in one kernel."""

    name = "group_norm.gate"
    kind = "group_norm"
    targets = ("cuda", "llvm")

    def accepts(self, composite: Composite, target: tvm.target.Target) -> Accept | Refusal:
        """Take float tensors of any layout whose sizes follow from the operands'."""
        try:
            gated_program(composite, target)
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
        """Emit one call_tir."""
        program, roles = gated_program(composite, target)
        func = build(program, target)
        gvar = bb.add_func(func, program.name)
        operands = [args[composite.roles[role]] for role in roles]
        return relax.call_tir(gvar, operands, result_type(composite, args))
