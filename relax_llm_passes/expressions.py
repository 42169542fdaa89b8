"""What Relax expressions read, and their static sizes and types; no context needed."""

from __future__ import annotations

from typing import Any, TypeAlias

import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, GlobalVar, Op, Tuple, TupleGetItem
from tvm.relax import (
    DataflowVar,
    Expr,
    Function,
    If,
    MatchCast,
    SeqExpr,
    ShapeExpr,
    TensorType,
    Var,
)

__all__ = ["Dim", "dtype_of", "is_var", "op_name", "shape_of", "type_vars", "used_vars"]

Dim: TypeAlias = "int | Expr"

VAR_TYPES = (Var, DataflowVar)
IMMEDIATES = (tvm.tirx.IntImm, tvm.tirx.FloatImm, tvm.ir.StringImm)


def is_var(expr: Any) -> bool:
    """Whether `expr` is a local variable (dataflow or not); faster than isinstance."""
    return type(expr) in VAR_TYPES


def op_name(expr: Any) -> str:
    """Return the operator's name ("relax.add") of a call to a built-in operator, else ""."""
    if type(expr) is Call and isinstance(expr.op, Op):
        return expr.op.name
    return ""


def _dim(value: Expr) -> Dim:
    return int(value.value) if isinstance(value, tvm.tirx.IntImm) else value


def shape_of(expr: Expr) -> tuple[Dim, ...] | None:
    """Return the sizes of a tensor expression, or None where they are not known.

    A size known at compile time is an int; a symbolic one is a TVM primitive expression. Compare
    symbolic sizes with `tvm.arith.Analyzer().can_prove_equal`.
    """
    ty = expr.ty
    if not isinstance(ty, TensorType) or not isinstance(ty.shape, ShapeExpr):
        return None
    return tuple(_dim(v) for v in ty.shape.values[:])


def dtype_of(expr: Expr) -> str | None:
    """Return the element type ("float16") of a tensor or of a scalar, or None if not known."""
    ty = expr.ty
    if isinstance(ty, TensorType):
        return None if ty.dtype is None else str(ty.dtype.dtype)
    if isinstance(ty, tvm.ir.PrimType):
        return str(ty.dtype)
    return None


def used_vars(expr: Expr) -> list[Var]:
    """Return the variables that `expr` reads, each once, in order; symbolic sizes are among them.

    For an If or a function the variables bound inside are left out. Types of variables are not
    looked at; types that are part of a call (`ty_args`) are.
    """
    found: dict[Var, None] = {}
    collect(expr, found)
    return list(found)


def collect(expr: Any, found: dict[Var, None]) -> None:
    kind = type(expr)
    if kind in VAR_TYPES:
        found[expr] = None
    elif kind is Call:
        op = expr.op
        if type(op) is not Op and type(op) is not GlobalVar:
            collect(op, found)
        # A slice copies an FFI array in one go; iterating one costs several times as much.
        for arg in expr.args[:]:
            if type(arg) in VAR_TYPES:
                found[arg] = None
            else:
                collect(arg, found)
        for ty in expr.ty_args[:]:
            collect_type(ty, found)
    elif kind is Tuple:
        for field in expr.fields[:]:
            collect(field, found)
    elif kind is TupleGetItem:
        collect(expr.tuple_value, found)
    elif kind is ShapeExpr:
        for value in expr.values[:]:
            collect(value, found)
    elif kind is If:
        collect(expr.cond, found)
        collect(expr.true_branch, found)
        collect(expr.false_branch, found)
    elif kind is SeqExpr:
        _collect_seq(expr, (), found)
    elif kind is Function:
        _collect_seq(expr.body, expr.params, found)
    elif kind is GenericConst or kind is GlobalVar or kind in IMMEDIATES:
        return
    elif isinstance(expr, relax.ExternFunc):
        return
    elif tvm.ir.is_prim_expr(expr):
        for var in relax.analysis.used_vars(expr):
            found[var] = None


def collect_type(ty: Any, found: dict[Var, None]) -> None:
    for var in type_vars(ty):
        found[var] = None


def type_vars(ty: Any) -> list[Var]:
    """Return the variables that a type mentions: symbolic sizes, and shapes held in variables."""
    if type(ty) is TensorType:
        shape = ty.shape
        if shape is None:
            return []
        if type(shape) in VAR_TYPES:
            return [shape]
        if all(type(v) is tvm.tirx.IntImm for v in shape.values[:]):
            return []
    elif isinstance(ty, tvm.ir.TupleType):
        return list(dict.fromkeys(v for field in ty.fields[:] for v in type_vars(field)))
    elif isinstance(ty, relax.FuncType):
        if ty.params is None:
            return []
        params = tvm.ir.TupleType(ty.params)
        bound = set(relax.analysis.definable_tir_vars_in_type(params))
        whole = tvm.ir.TupleType([*ty.params[:], ty.ret])
        return [v for v in type_vars(whole) if v not in bound]
    elif not isinstance(ty, relax.ShapeType):
        return []
    return list(relax.analysis.tir_vars_in_type(ty))


def _collect_seq(seq: SeqExpr, params: Any, found: dict[Var, None]) -> None:
    inner: dict[Var, None] = {}
    bound: set[Var] = set(params)
    for param in params:
        bound.update(relax.analysis.definable_tir_vars_in_type(param.ty))
    for block in seq.blocks[:]:
        for binding in block.bindings[:]:
            bound.add(binding.var)
            collect(binding.value, inner)
            if type(binding) is MatchCast:
                collect_type(binding.ty, inner)
                bound.update(relax.analysis.definable_tir_vars_in_type(binding.ty))
            else:
                collect_type(binding.var.ty, inner)
    collect(seq.body, inner)
    for var in inner:
        if var not in bound:
            found[var] = None
