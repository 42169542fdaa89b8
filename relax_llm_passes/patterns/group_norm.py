"""Recognise group_norm together with what surrounds it: casts, views, gates, RWKV-7's bonus.

The composite's contract::

    kind "group_norm", one output "out"
    roles  data, weight, bias, then epi0, epi1, ... in the order in which the steps name them
    attrs  before   steps between `data` and the norm, after   steps behind it:
             {"op": "cast", "dtype": d}       {"op": "scale" | "shift", "value": x}
             {"op": "unary", "fn": silu | sigmoid | tanh | relu | gelu | gelu_tanh}
             {"op": multiply | add | subtract | divide, "operand": role, "fns": [...],
              "per": "element" | "channel", "reverse": bool}
             {"op": "bonus", "summed": [[role, per], ...], "value": role}
           A bonus adds value * sum over the group of the product of `summed`.

Views (reshape, expand_dims, squeeze) are looked through where they keep the row-major order, which
they always do. `fns` are applied to the operand first ("silu", "cast:float16").

Refused, with the reason: unknown shapes; a norm whose value is read elsewhere ends its chain there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import relax

from ..dataflow import FunctionView
from ..outline import Region
from ..report import Refusal
from .shapes import same_dims, static

__all__ = ["KIND", "UNARY", "VIEWS", "find_group_norm", "strip_views"]

KIND = "group_norm"
VIEWS = ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.flatten")
UNARY = {
    "relax.nn.silu": "silu",
    "relax.sigmoid": "sigmoid",
    "relax.tanh": "tanh",
    "relax.nn.relu": "relu",
    "relax.nn.gelu": "gelu",
    "relax.nn.gelu_tanh": "gelu_tanh",
}
BINARY = {
    "relax.multiply": "multiply",
    "relax.add": "add",
    "relax.subtract": "subtract",
    "relax.divide": "divide",
}
FLOATS = ("float16", "bfloat16", "float32")


def is_view(view: FunctionView, expr: relax.Expr) -> bool:
    """Whether a value is another value in another shape, in the same row-major order."""
    if view.call(expr, *VIEWS) is not None:
        return True
    call = view.call(expr, "relax.broadcast_to")
    if call is None:
        return False
    a, b = view.shape(call.args[0]), view.shape(expr)
    # Leading ones may be added; the values are the same.
    return a is not None and b is not None and same_dims(_trim(a), _trim(b))


def _trim(shape: Any) -> list[Any]:
    out = list(shape)
    while out and static(out[0]) == 1:
        out.pop(0)
    return out


def strip_views(
    view: FunctionView, expr: relax.Expr, alone: bool = True
) -> tuple[relax.Expr, list[relax.Var]]:
    """Follow views back from `expr`; returns the root and the variables passed on the way.

    With `alone`, a view that others read as well ends the walk.
    """
    passed: list[relax.Var] = []
    cur = view.resolve(expr)
    while is_view(view, cur):
        if alone and (len(view.users(cur)) != 1 or view.is_output(cur) or view.index(cur) < 0):
            break
        passed.append(cur)
        cur = view.resolve(view.value(cur).args[0])
    return cur, passed


@dataclass
class _Match:
    norm: relax.Var
    data: relax.Expr
    weight: relax.Expr
    bias: relax.Expr
    result: relax.Var
    members: list[relax.Var] = field(default_factory=list)
    before: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    operands: dict[str, relax.Expr] = field(default_factory=dict)

    def operand(self, expr: relax.Expr) -> str:
        for name, known in self.operands.items():
            if known.same_as(expr):
                return name
        name = f"epi{len(self.operands)}"
        self.operands[name] = expr
        return name


class _Finder:
    def __init__(self, view: FunctionView) -> None:
        self.view = view
        self.taken: set[relax.Var] = set()

    def only_use(self, var: relax.Expr) -> Any:
        """Return the binding of the only reader of a value that stays inside, or None."""
        if self.view.is_output(var):
            return None
        users = self.view.users(var)
        return users[0] if len(users) == 1 else None

    def private(self, var: relax.Expr) -> bool:
        return self.view.index(var) >= 0 and self.only_use(var) is not None

    def match(self, norm: relax.Var) -> _Match | Refusal:
        view = self.view
        call: Any = view.call(norm)
        shapes = [view.shape(a) for a in call.args]
        where = (KIND, view.name, norm.name)
        if any(s is None for s in shapes):
            return Refusal("the shape of an operand is unknown", *where)
        if view.dtype(norm) not in FLOATS:
            return Refusal(f"computes in {view.dtype(norm)}, expected a float", *where)
        found = _Match(
            norm, call.args[0], view.resolve(call.args[1]), view.resolve(call.args[2]), norm
        )
        found.members.append(norm)
        self.backward(found)
        self.forward(found)
        return found

    def backward(self, found: _Match) -> None:
        view = self.view
        cur = view.resolve(found.data)
        while view.index(cur) >= 0 and self.private(cur) and cur not in self.taken:
            if is_view(view, cur):
                found.members.append(cur)
                cur = view.resolve(view.value(cur).args[0])
                continue
            call = view.call(cur)
            if call is None:
                break
            step: dict[str, Any] | None = None
            if call.op.name == "relax.astype" and view.dtype(call.args[0]) in FLOATS:
                step = {"op": "cast", "dtype": view.dtype(cur)}
            elif call.op.name in ("relax.multiply", "relax.divide"):
                value = view.scalar(call.args[1])
                if value is not None and value != 0:
                    step = {
                        "op": "scale",
                        "value": float(value) if call.op.name == "relax.multiply" else 1 / value,
                    }
                    if view.dtype(cur) != "float32":
                        step = None  # the product would have been rounded
            if step is None:
                break
            found.before.insert(0, step)
            found.members.append(cur)
            cur = view.resolve(call.args[0])
        found.data = cur

    def forward(self, found: _Match) -> None:
        cur: relax.Expr = found.norm
        while True:
            nxt = self.step(found, cur)
            if nxt is None:
                break
            cur = nxt
        # The product behind takes its rows as they were: then what follows it is its epilogue.
        while found.members[-1].same_as(cur) and is_view(self.view, cur) and self.is_operand(cur):
            found.members.pop()
            cur = self.view.resolve(self.view.value(cur).args[0])
        found.result = cur

    def is_operand(self, var: relax.Expr) -> bool:
        """Tell whether products' left operands are all that a value is used for."""
        view = self.view
        users = view.users(var)
        return not view.is_output(var) and all(
            (call := view.call(u.var, "relax.matmul")) is not None
            and view.resolve(call.args[0]).same_as(var)
            for u in users
        )

    def step(self, found: _Match, cur: relax.Expr) -> relax.Var | None:
        """Absorb what reads `cur`, or return None where the chain ends."""
        view = self.view
        if view.is_output(cur):
            return None
        users = view.users(cur)
        if len(users) == 2:
            return self.self_gate(found, cur, users)
        if len(users) != 1:
            return None
        var = users[0].var
        if view.index(var) < 0 or var in self.taken:
            return None
        if is_view(view, var):
            if view.shape(var) is None:
                return None
            found.members.append(var)
            return var
        call = view.call(var)
        if call is None or view.dtype(var) not in FLOATS or view.shape(var) is None:
            return None
        name = call.op.name
        if name == "relax.astype":
            found.after.append({"op": "cast", "dtype": view.dtype(var)})
        elif name in UNARY:
            found.after.append({"op": "unary", "fn": UNARY[name]})
        elif name in BINARY:
            step = self.binary(found, cur, var, call)
            if step is None:
                return None
            found.after.append(step)
        else:
            return None
        found.members.append(var)
        return var

    def self_gate(self, found: _Match, cur: relax.Expr, users: list[Any]) -> relax.Var | None:
        """x * sigmoid(x), as importers spell silu."""
        view = self.view
        for first, second in (users, users[::-1]):
            gate, product = view.call(first.var), view.call(second.var)
            if gate is None or gate.op.name != "relax.sigmoid":
                continue
            if product is None or product.op.name != "relax.multiply":
                continue
            reads = [view.resolve(a) for a in product.args]
            if any(r.same_as(first.var) for r in reads) and any(r.same_as(cur) for r in reads):
                if not self.private(first.var):
                    return None
                found.after.append({"op": "unary", "fn": "silu"})
                found.members += [first.var, second.var]
                return second.var
        return None

    def binary(
        self, found: _Match, cur: relax.Expr, var: relax.Var, call: Any
    ) -> dict[str, Any] | None:
        view = self.view
        op = BINARY[call.op.name]
        reverse = view.resolve(call.args[1]).same_as(cur)
        other = view.resolve(call.args[0] if reverse else call.args[1])
        if other.same_as(cur):
            return None
        if not same_dims(view.shape(var) or (), view.shape(cur) or ()):
            return None  # the operand widens the result
        value = view.scalar(other)
        if value is not None:
            if op == "multiply":
                return {"op": "scale", "value": float(value)}
            if op == "divide" and not reverse and value != 0:
                return {"op": "divide_by", "value": float(value)}
            if op == "add":
                return {"op": "shift", "value": float(value)}
            if op == "subtract" and not reverse:
                return {"op": "shift", "value": -float(value)}
            return None
        if view.dtype(other) not in FLOATS:
            return None
        if op == "add":
            bonus = self.bonus(found, other)
            if bonus is not None:
                return bonus
        per = self.per(found, other, cur)
        if per is None:
            return None
        fns: list[str] = []
        if per == "element":
            other = self.operand_chain(found, other, fns)
        role = found.operand(other)
        return {"op": op, "operand": role, "fns": fns, "per": per, "reverse": reverse}

    def per(self, found: _Match, other: relax.Expr, like: relax.Expr) -> str | None:
        """How an operand is spread over the norm's elements: one each, or one per channel."""
        view = self.view
        a, b = view.shape(other), view.shape(like)
        if a is None or b is None:
            return None
        if same_dims(_trim(a), _trim(b)):
            return "element"
        call: Any = view.call(found.norm)
        shape = view.shape(call.args[0]) or ()
        channel = int(call.attrs.channel_axis) % len(shape)
        if channel != len(shape) - 1:
            return None
        trimmed = _trim(a)
        tail = list(b)[len(b) - len(trimmed) :]
        if not trimmed or len(trimmed) > len(b) or not same_dims(trimmed, tail):
            return None
        count = 1
        for d in trimmed:
            size = static(d)
            if size is None:
                return None
            count *= size
        return "channel" if count == static(shape[-1]) else None

    def operand_chain(self, found: _Match, expr: relax.Expr, fns: list[str]) -> relax.Expr:
        """Absorb views, casts and activations that only this operand goes through."""
        view = self.view
        cur = expr
        pending: list[str] = []
        while True:
            var = view.resolve(cur)
            if not self.private(var) or var in self.taken or var in found.members:
                break
            call = view.call(var)
            if call is None:
                break
            name = call.op.name
            source = view.resolve(call.args[0]) if call.args else None
            if is_view(view, var):
                pass
            elif name == "relax.astype" and view.dtype(source) in FLOATS:
                pending.insert(0, f"cast:{view.dtype(var)}")
            elif name in UNARY:
                pending.insert(0, UNARY[name])
            elif name == "relax.multiply":
                silu = self.spelled_silu(var, call)
                if silu is None:
                    break
                source, gate = silu
                pending.insert(0, "silu")
                found.members.append(gate)
            else:
                break
            if view.shape(source) is None:
                break
            found.members.append(var)
            cur = source
        fns += pending
        return view.resolve(cur)

    def spelled_silu(self, var: relax.Expr, call: Any) -> tuple[relax.Expr, relax.Var] | None:
        view = self.view
        a, b = (view.resolve(x) for x in call.args)
        for x, gate in ((a, b), (b, a)):
            sig = view.call(gate, "relax.sigmoid")
            if sig is not None and view.resolve(sig.args[0]).same_as(x) and self.private(gate):
                return x, gate
        return None

    def bonus(self, found: _Match, expr: relax.Expr) -> dict[str, Any] | None:
        """RWKV-7: sum(r * k * r_k over the head) * v, reshaped to the norm's result."""
        view = self.view
        members: list[relax.Var] = []
        root, passed = strip_views(view, expr)
        members += passed
        product = view.call(root, "relax.multiply")
        if product is None or not self.private(root):
            return None
        members.append(root)
        call: Any = view.call(found.norm)
        groups = int(call.attrs.num_groups)
        shape = view.shape(call.args[0]) or ()
        axes = list(call.attrs.axes or [])
        channel = int(call.attrs.channel_axis) % len(shape)
        channels = static(shape[-1]) if channel == len(shape) - 1 and not axes else None
        if channels is None:
            return None
        for total, value in (product.args, product.args[::-1]):
            summed, passed = strip_views(view, total)
            reduce = view.call(summed, "relax.sum")
            if reduce is None or not self.private(summed):
                continue
            source = view.resolve(reduce.args[0])
            dims = view.shape(source)
            wanted = [int(a) % len(dims or [1]) for a in (reduce.attrs.axis or [])]
            if dims is None or wanted != [len(dims) - 1]:
                continue
            if static(dims[-1]) != channels // groups:
                continue
            out_dims = view.shape(root)
            # (..., groups, 1) * (..., groups, size): one sum for each group.
            if not bool(reduce.attrs.keepdims) or not same_dims(out_dims or (), dims):
                continue
            inner = [*members, *passed, summed]
            factors = self.factors(found, source, inner)
            value_root, value_views = strip_views(view, value)
            if factors is None or not same_dims(_trim(view.shape(value) or ()), _trim(dims)):
                continue
            found.members += [v for v in inner + value_views if v not in found.members]
            return {
                "op": "bonus",
                "summed": [[found.operand(e), per] for e, per in factors],
                "value": found.operand(value_root),
            }
        return None

    def factors(
        self, found: _Match, expr: relax.Expr, members: list[relax.Var]
    ) -> list[tuple[relax.Expr, str]] | None:
        """Flatten a product of elements or channels; its private intermediates join the region."""
        view = self.view
        root, passed = strip_views(view, expr)
        product = view.call(root, "relax.multiply")
        if product is None or not self.private(root) or view.dtype(root) != "float32":
            return [(root, "element")] if view.dtype(root) in FLOATS else None
        members += [*passed, root]
        out: list[tuple[relax.Expr, str]] = []
        for arg in product.args:
            arg = view.resolve(arg)
            per = self.per(found, arg, root)
            if per is None:
                return None
            inner = view.call(strip_views(view, arg)[0], "relax.multiply")
            if per == "element" and inner is not None:
                more = self.factors(found, arg, members)
                if more is None:
                    return None
                out += more
            else:
                out.append((arg, per))
        return out if len(out) <= 4 else None


def find_group_norm(view: FunctionView, gated: bool = True) -> list[Region | Refusal]:
    """Find every group_norm of a scope with its surroundings.

    Parameters
    ----------
    view : FunctionView
        The scope to search.
    gated : bool
        Only those that something besides views joins; a lone norm is left to LegalizeNorms.

    Returns
    -------
    list of Region or Refusal
        In program order.
    """
    finder = _Finder(view)
    out: list[Region | Refusal] = []
    for binding in view.bindings:
        if view.call(binding.var, "relax.nn.group_norm") is None:
            continue
        if not view.resolve(binding.var).same_as(binding.var):
            continue
        found = finder.match(binding.var)
        if isinstance(found, Refusal):
            out.append(found)
            continue
        if gated and not (found.before or found.after):
            out.append(
                Refusal(
                    "nothing that can be fused reads the norm alone",
                    KIND,
                    view.name,
                    binding.var.name,
                )
            )
            continue
        members = list(dict.fromkeys(found.members))
        finder.taken.update(members)
        out.append(
            Region(
                kind=KIND,
                bindings=members,
                roles={
                    "data": found.data,
                    "weight": found.weight,
                    "bias": found.bias,
                    **found.operands,
                },
                outputs={"out": found.result},
                attrs={"before": found.before, "after": found.after},
            )
        )
    return out
