"""Copies of Relax expressions with variables, constants and symbolic sizes replaced.

TVM's own `copy_with_new_vars` and `bind_symbolic_vars` infer every type again, which stops on
sizes such as the one of `x[:-1]`. Here types are carried over, with their sizes replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Call, GenericConst, PrimType, Tuple, TupleGetItem, TupleType, Var
from tvm.relax import (
    BindingBlock,
    DataflowBlock,
    DataflowVar,
    Expr,
    Function,
    FuncType,
    If,
    MatchCast,
    SeqExpr,
    ShapeExpr,
    ShapeType,
    TensorType,
    VarBinding,
)

from .dataflow import is_var

__all__ = [
    "Clone",
    "definable_symbols",
    "free_name",
    "map_prim",
    "map_type",
    "new_if",
    "new_seq",
    "rename",
    "set_type",
    "with_functions",
]


def with_functions(
    mod: tvm.IRModule, functions: Mapping[tvm.ir.GlobalVar, tvm.ir.BaseFunc]
) -> tvm.IRModule:
    """Return a module of these functions with all else that `mod` has: attributes and devices."""
    return tvm.IRModule(dict(functions.items()), attrs=mod.attrs, global_infos=mod.global_infos)


def set_type(expr: Expr, ty: Any) -> Expr:
    """Give a freshly built expression its type unless it has one, and return it."""
    if expr.ty.is_missing():
        relax.expr._update_type(expr, ty)
    return expr


def new_seq(blocks: list[BindingBlock], body: Expr, ty: Any = None) -> SeqExpr:
    """Build a sequence with its type set: `ty`, or the type of `body`."""
    return set_type(SeqExpr(blocks, body), body.ty if ty is None else ty)  # type: ignore[return-value]


def new_if(cond: Expr, true_branch: Expr, false_branch: Expr, ty: Any) -> If:
    """Build an If with its type set."""
    return set_type(If(cond, true_branch, false_branch), ty)  # type: ignore[return-value]


def definable_symbols(ty: Any) -> list[Var]:
    """Return the symbolic sizes that a value of this type defines when it is matched."""
    if isinstance(ty, PrimType):
        return []
    return list(relax.analysis.definable_tir_vars_in_type(ty))


def map_prim(value: Expr, mapping: Mapping[Var, Expr]) -> Expr:
    """Replace variables in a primitive expression."""
    if is_var(value):
        return mapping.get(value, value)
    if isinstance(value, (tvm.tirx.IntImm, tvm.tirx.FloatImm)):
        return value
    return tvm_ffi.structural_map(value, (Var, lambda var: mapping.get(var, var)), order="post")


def map_type(ty: Any, mapping: Mapping[Var, Expr]) -> Any:
    """Replace the variables (symbolic sizes, shapes held in variables) that a type mentions."""
    if isinstance(ty, TensorType):
        shape = ty.shape
        if shape is None:
            return ty
        if not isinstance(shape, ShapeExpr):
            found = mapping.get(shape, shape)
            return ty if found.same_as(shape) else TensorType(found, ty.dtype, ty.vdevice, ty.ndim)
        old = shape.values[:]
        new = [map_prim(v, mapping) for v in old]
        if all(a.same_as(b) for a, b in zip(old, new, strict=True)):
            return ty
        return TensorType(ShapeExpr(new), ty.dtype, ty.vdevice)
    if isinstance(ty, TupleType):
        old_fields = ty.fields[:]
        fields = [map_type(f, mapping) for f in old_fields]
        if all(a.same_as(b) for a, b in zip(old_fields, fields, strict=True)):
            return ty
        return TupleType(fields)
    if isinstance(ty, ShapeType) and ty.values is not None:
        old = ty.values[:]
        new = [map_prim(v, mapping) for v in old]
        if all(a.same_as(b) for a, b in zip(old, new, strict=True)):
            return ty
        return ShapeType(new)
    if isinstance(ty, FuncType) and ty.params is not None:
        old_params = ty.params[:]
        params = [map_type(p, mapping) for p in old_params]
        ret = map_type(ty.ret, mapping)
        if ret.same_as(ty.ret) and all(
            a.same_as(b) for a, b in zip(old_params, params, strict=True)
        ):
            return ty
        return FuncType(params, ret, ty.purity)
    return ty


class Clone:
    """Copies bindings with new variables, so that the copy can live beside the original.

    Parameters
    ----------
    env : dict
        What stands for a variable or constant of the original. Variables bound by the copied
        bindings are added as they are met.
    symbols : dict
        What stands for a symbolic size. Sizes that a copied match_cast defines and that are not
        in it get a new variable.
    """

    def __init__(self, env: dict[Expr, Expr], symbols: dict[Var, Expr]) -> None:
        self.env = env
        self.symbols = symbols
        self._types: dict[int, tuple[Any, Any]] = {}

    def type(self, ty: Any) -> Any:
        """Return the type in terms of the copy."""
        if not self.symbols:
            return ty
        # Types cannot be dictionary keys; the address can, while the entry keeps the type alive.
        address = ty.__chandle__()
        found = self._types.get(address)
        if found is None:
            found = self._types[address] = (ty, map_type(ty, self.symbols))
        return found[1]

    def define(self, ty: Any) -> None:
        """Make new symbolic sizes for those that `ty` defines, unless they are known."""
        for symbol in definable_symbols(ty):
            if symbol not in self.symbols:
                self.symbols[symbol] = Var(symbol.name, symbol.ty)
                self._types.clear()

    def var(self, var: Var, dataflow: bool | None = None) -> Var:
        """Make the copy of a bound variable and remember it; `dataflow` decides its kind."""
        kind = type(var) if dataflow is None else (DataflowVar if dataflow else Var)
        new = kind(var.name, self.type(var.ty))
        self.env[var] = new
        if isinstance(var.ty, (PrimType, ShapeType)):
            self.symbols[var] = new
            self._types.clear()
        return new

    def expr(self, expr: Expr) -> Expr:
        """Return the copy of an expression; the expression itself where nothing changes."""
        kind = type(expr)
        if is_var(expr):
            found = self.env.get(expr)
            return self.symbols.get(expr, expr) if found is None else found
        if kind is GenericConst:
            return self.env.get(expr, expr)
        if kind is Call:
            op = expr.op if isinstance(expr.op, tvm.ir.Op) else self.expr(expr.op)
            args = [self.expr(a) for a in expr.args[:]]
            ty_args = [self.type(t) for t in expr.ty_args[:]]
            return Call(op, args, expr.attrs, ty_args, expr.span, self.type(expr.ty))
        if kind is Tuple:
            return Tuple([self.expr(f) for f in expr.fields[:]])
        if kind is TupleGetItem:
            return TupleGetItem(self.expr(expr.tuple_value), expr.index)
        if kind is ShapeExpr:
            return ShapeExpr([self.expr(v) for v in expr.values[:]]) if self.symbols else expr
        if kind is If:
            return new_if(
                self.expr(expr.cond),
                self.seq(expr.true_branch),
                self.seq(expr.false_branch),
                self.type(expr.ty),
            )
        if kind is SeqExpr:
            return self.seq(expr)
        if kind is Function:
            return self.function(expr)
        if self.symbols and tvm.ir.is_prim_expr(expr):
            return map_prim(expr, self.symbols)
        return expr

    def binding(self, binding: Any) -> Any:
        """Return the copy of a binding; its variable is new."""
        value = self.expr(binding.value)
        if type(binding) is MatchCast:
            self.define(binding.ty)
            ty = self.type(binding.ty)
            return MatchCast(self.var(binding.var), value, ty, binding.span)
        return VarBinding(self.var(binding.var), value, binding.span)

    def seq(self, seq: SeqExpr) -> SeqExpr:
        """Return the copy of a sequence of blocks."""
        blocks = []
        for block in seq.blocks[:]:
            kind = DataflowBlock if isinstance(block, DataflowBlock) else BindingBlock
            blocks.append(kind([self.binding(b) for b in block.bindings[:]], block.span))
        return new_seq(blocks, self.expr(seq.body), self.type(seq.ty))

    def function(self, func: Function) -> Function:
        """Return the copy of a function defined inside the copied code."""
        for param in func.params[:]:
            self.define(param.ty)
        params = [self.var(p) for p in func.params[:]]
        body = self.seq(func.body)
        return Function(params, body, self.type(func.ret_ty), func.is_pure, func.attrs, func.span)


def rename(var: Var, dataflow: bool, name: str | None = None, ty: Any = None) -> Var:
    """Return a variable like `var`, of the dataflow kind or not."""
    kind = DataflowVar if dataflow else Var
    return kind(name or var.name, var.ty if ty is None else ty, var.span)


def free_name(name: str, taken: set[str]) -> str:
    """Return the name, with a number behind it where it is taken; and take it."""
    made, count = name, 0
    while made in taken:
        count += 1
        made = f"{name}_{count}"
    taken.add(made)
    return made
