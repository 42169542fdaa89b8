"""A numpy interpreter for the small Relax programs that the fuzzer makes.

It executes bindings in the order they are written, and raises on a variable that is read before
it is bound, on a size that does not match, and on an operator it does not know. Calls with side
effects are noted in `effects`, in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, GlobalVar, Op, PrimType, Tuple, TupleGetItem, TupleType, Var
from tvm.relax import (
    ExternFunc,
    Function,
    If,
    MatchCast,
    SeqExpr,
    ShapeExpr,
    ShapeType,
    TensorType,
)


def _softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


class Interpreter:
    """Runs functions of one module."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        self.effects: list[np.ndarray] = []

    def run(self, name: str, args: list[Any]) -> Any:
        """Call a function by name; tensors are numpy arrays, tuples and shapes Python tuples."""
        return self._call(self.mod[name], args, {})

    def _call(self, func: Function, args: list[Any], outer: dict[Var, Any]) -> Any:
        env = dict(outer)
        params = func.params[:]
        if len(params) != len(args):
            raise ValueError(f"{len(args)} arguments for {len(params)} parameters")
        for param, arg in zip(params, args, strict=True):
            env[param] = arg
            self._match(param.ty, arg, env, define_only=True)
        for param, arg in zip(params, args, strict=True):
            self._match(param.ty, arg, env)
        return self._seq(func.body, env)

    def _seq(self, seq: SeqExpr, env: dict[Var, Any]) -> Any:
        for block in seq.blocks[:]:
            for binding in block.bindings[:]:
                value = self._expr(binding.value, env)
                if type(binding) is MatchCast:
                    self._match(binding.ty, value, env)
                env[binding.var] = value
                self._check(binding.var.ty, value, env)
        return self._expr(seq.body, env)

    def _check(self, ty: Any, value: Any, env: dict[Var, Any]) -> None:
        """Check a value against the static type of its variable."""
        if isinstance(ty, TensorType) and isinstance(ty.shape, ShapeExpr):
            sizes = tuple(int(self._prim(v, env)) for v in ty.shape.values[:])
            if sizes != value.shape:
                raise ValueError(f"a value of shape {value.shape} has type {ty}")

    def _match(self, ty: Any, value: Any, env: dict[Var, Any], define_only: bool = False) -> None:
        if isinstance(ty, TensorType) and isinstance(ty.shape, ShapeExpr):
            self._match_sizes(ty.shape.values[:], value.shape, env, define_only)
        elif isinstance(ty, ShapeType) and ty.values is not None:
            self._match_sizes(ty.values[:], value, env, define_only)
        elif isinstance(ty, TupleType):
            for field, item in zip(ty.fields[:], value, strict=True):
                self._match(field, item, env, define_only)

    def _match_sizes(self, dims: list, sizes: Any, env: dict[Var, Any], define_only: bool) -> None:
        if len(dims) != len(sizes):
            raise ValueError(f"match: {len(sizes)} sizes for {len(dims)}")
        for dim, size in zip(dims, sizes, strict=True):
            if isinstance(dim, Var) and dim not in env:
                env[dim] = int(size)
        if not define_only:
            for dim, size in zip(dims, sizes, strict=True):
                if self._prim(dim, env) != size:
                    raise ValueError(f"match: {dim} is {self._prim(dim, env)}, found {size}")

    def _prim(self, expr: Any, env: dict[Var, Any]) -> Any:
        if isinstance(expr, (tvm.tirx.IntImm, tvm.tirx.FloatImm)):
            return expr.value
        if isinstance(expr, Var):
            return env[expr]
        if hasattr(expr, "a") and hasattr(expr, "b"):
            a, b = self._prim(expr.a, env), self._prim(expr.b, env)
            name = type(expr).__name__
            return {"Add": a + b, "Sub": a - b, "Mul": a * b, "Min": min(a, b), "Max": max(a, b)}[
                name
            ]
        raise NotImplementedError(f"primitive {type(expr).__name__}")

    def _expr(self, expr: Any, env: dict[Var, Any]) -> Any:
        if isinstance(expr, Var):
            return env[expr]
        if isinstance(expr, GenericConst):
            return expr.value.numpy()
        if isinstance(expr, Tuple):
            return tuple(self._expr(f, env) for f in expr.fields[:])
        if isinstance(expr, TupleGetItem):
            return self._expr(expr.tuple_value, env)[expr.index]
        if isinstance(expr, ShapeExpr):
            return tuple(int(self._prim(v, env)) for v in expr.values[:])
        if isinstance(expr, If):
            branch = expr.true_branch if bool(self._expr(expr.cond, env)) else expr.false_branch
            return self._seq(branch, dict(env))
        if isinstance(expr, Function):
            return lambda *args: self._call(expr, list(args), env)
        if isinstance(expr, Call):
            return self._op(expr, env)
        if isinstance(expr.ty, PrimType):
            return self._prim(expr, env)
        raise NotImplementedError(type(expr).__name__)

    def _op(self, call: Call, env: dict[Var, Any]) -> Any:
        op = call.op
        args = call.args[:]
        if isinstance(op, GlobalVar):
            return self._call(self.mod[op], [self._expr(a, env) for a in args], {})
        if isinstance(op, ExternFunc):
            values = [self._expr(a, env) for a in args]
            self.effects.append(np.array(values[0]))
            return values[0] + np.float32(1)
        if not isinstance(op, Op):
            return self._expr(op, env)(*[self._expr(a, env) for a in args])
        a = [self._expr(x, env) for x in args]
        name, at = op.name.removeprefix("relax."), call.attrs
        simple = {
            "add": np.add,
            "subtract": np.subtract,
            "multiply": np.multiply,
            "maximum": np.maximum,
            "matmul": np.matmul,
            "negative": np.negative,
            "tanh": np.tanh,
            "exp": np.exp,
            "nn.relu": lambda x: np.maximum(x, 0),
            "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        }
        if name in simple:
            return simple[name](*a).astype(a[0].dtype)
        if name == "reshape":
            return a[0].reshape(a[1])
        if name == "broadcast_to":
            return np.broadcast_to(a[0], a[1])
        if name == "permute_dims":
            return a[0].transpose(None if at.axes is None else [int(i) for i in at.axes])
        if name == "astype":
            return a[0].astype(call.ty.dtype.dtype)
        if name == "concat":
            return np.concatenate(a[0], axis=int(at.axis))
        if name == "split":
            ends = at.indices_or_sections
            sections = int(ends) if isinstance(ends, int | tvm.tirx.IntImm) else [*map(int, ends)]
            return tuple(np.split(a[0], sections, axis=int(at.axis)))
        if name in ("ones", "zeros"):
            return np.full(a[0], 1 if name == "ones" else 0, dtype=call.ty.dtype.dtype)
        if name == "nn.softmax":
            return _softmax(a[0], int(at.axis))
        if name == "shape_of":
            return tuple(a[0].shape)
        raise NotImplementedError(op.name)


def equal(left: Any, right: Any) -> bool:
    """Whether two results are the same, bit by bit."""
    if isinstance(left, tuple):
        return (
            isinstance(right, tuple)
            and len(left) == len(right)
            and all(equal(a, b) for a, b in zip(left, right, strict=True))
        )
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and np.array_equal(left, right, equal_nan=True)
    return bool(left == right)


__all__ = ["Interpreter", "equal", "relax"]
