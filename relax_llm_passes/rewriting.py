"""Writes a scope again: aliases replaced, bindings reordered, groups of them put elsewhere.

`write_function` is the only code that rebuilds functions for canonicalization, outlining and
inlining. It keeps types as they are (nothing is inferred again), keeps names, and makes of each
variable the kind its uses ask for: a DataflowVar inside a dataflow block, a Var where something
outside the block reads it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GenericConst, PrimType, Tuple, TupleGetItem, Var
from tvm.relax import (
    Binding,
    BindingBlock,
    DataflowBlock,
    DataflowVar,
    Expr,
    Function,
    If,
    MatchCast,
    SeqExpr,
    ShapeExpr,
    ShapeType,
    VarBinding,
)

from .cloning import map_prim, map_type, new_if, new_seq, rename, with_functions
from .dataflow import FunctionView, is_var, type_vars

__all__ = ["Draft", "Item", "draft_scope", "paused_gc", "write_function"]


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Keep Python's cycle collector from running while a function is rebuilt.

    Rebuilding makes tens of thousands of short-lived wrappers without cycles; each full collection
    that they set off walks every object of the process, which costs more than the rewrite.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass
class Item:
    """One step of a scope: a binding, or several that something else will stand for.

    Attributes
    ----------
    rows : list of int
        Positions in `view.bindings`, in program order.
    block : int
        The block the item goes to.
    replace : callable, optional
        Given the rewritten bindings of the rows, the writer and whether the place is in a
        dataflow block, returns the bindings that take their place.
        Without it the rows are written as they are.
    outputs : list of Var
        The variables of the rows that are visible outside the item.
    reads : dict
        The resolved variables that the item reads from outside (keys, in order).
    """

    rows: list[int]
    block: int
    replace: Callable[[list[Binding], Writer, bool], list[Binding]] | None = None
    outputs: list[Var] = field(default_factory=list)
    reads: dict[Var, None] = field(default_factory=dict)


@dataclass
class Draft:
    """What a scope will be: its items in order, and the drafts of the scopes inside it."""

    view: FunctionView
    items: list[Item]
    dataflow: list[bool]
    children: dict[int, list[Draft]]
    changed: bool


def row_reads(view: FunctionView, row: int, with_types: bool) -> dict[Var, None]:
    """Return the resolved variables that a binding reads; sizes in its type if asked for."""
    found: dict[Var, None] = {}
    for var in view.reads(row):
        resolved = view.resolve(var)
        if is_var(resolved):
            found[resolved] = None
    if with_types:
        for var in type_vars(view.bindings[row].var.ty):
            found[view.resolve(var)] = None
    return found


def draft_scope(view: FunctionView) -> Draft:
    """Return the draft that only drops aliases and tuples that are just taken apart again."""
    items = []
    dropped = False
    for row, binding in enumerate(view.bindings):
        if view.is_alias(binding.var) or view.is_unread_tuple(binding.var):
            dropped = True
            continue
        reads = row_reads(view, row, False)
        items.append(Item([row], view.block(row), None, [binding.var], reads))
    children: dict[int, list[Draft]] = {}
    for child in view.children:
        assert child.owner is not None
        children.setdefault(view.position(child.owner.var), []).append(draft_scope(child))
    flags = [isinstance(b, DataflowBlock) for b in view.seq.blocks[:]]
    changed = dropped or any(c.changed for cs in children.values() for c in cs)
    return Draft(view, items, flags, children, changed)


class Writer:
    """Writes drafts. `env` says what stands for a resolved variable in the new code."""

    def __init__(self) -> None:
        self.env: dict[Var, Expr] = {}
        self._type_env: dict[Var, Expr] = {}

    # Expressions

    def expr(self, view: FunctionView, expr: Expr) -> Expr:
        """Return `expr` with variables replaced; `expr` itself where nothing changes."""
        kind = type(expr)
        if is_var(expr):
            found = view.resolve(expr)
            if is_var(found):
                return self.env.get(found, found)
            return found if type(found) is GenericConst else self.expr(view, found)
        if kind is Call:
            old = expr.args[:]
            args = [self.expr(view, a) for a in old]
            op = expr.op if type(expr.op) is tvm.ir.Op else self.expr(view, expr.op)
            ty_args = expr.ty_args
            if self._type_env:
                ty_args = [map_type(t, self._type_env) for t in ty_args[:]]
            elif op.same_as(expr.op) and all(a.same_as(b) for a, b in zip(old, args, strict=True)):
                return expr
            return Call(op, args, expr.attrs, ty_args, expr.span, self.type(expr.ty))
        if kind is Tuple:
            old = expr.fields[:]
            fields = [self.expr(view, f) for f in old]
            if all(a.same_as(b) for a, b in zip(old, fields, strict=True)):
                return expr
            return Tuple(fields)
        if kind is TupleGetItem:
            found = view.resolve(expr)
            if type(found) is not TupleGetItem:
                return self.expr(view, found)
            whole = self.expr(view, expr.tuple_value)
            return expr if whole.same_as(expr.tuple_value) else TupleGetItem(whole, expr.index)
        if kind is ShapeExpr:
            old = expr.values[:]
            values = [self.expr(view, v) for v in old]
            if all(a.same_as(b) for a, b in zip(old, values, strict=True)):
                return expr
            return ShapeExpr(values)
        if self._type_env and tvm.ir.is_prim_expr(expr):
            return map_prim(expr, self._type_env)
        return expr

    def type(self, ty: Any) -> Any:
        """Return the type with renamed variables replaced."""
        return map_type(ty, self._type_env) if self._type_env else ty

    def rename(self, var: Var, new: Expr) -> None:
        """From here on, `new` stands for `var`."""
        self.env[var] = new
        if isinstance(var.ty, (PrimType, ShapeType)):
            self._type_env[var] = new

    def value(self, draft: Draft, row: int) -> Expr:
        """Return the rewritten value of a binding, nested scopes included."""
        value = draft.view.bindings[row].value
        if type(value) is If:
            then, other = (self.seq(d) for d in draft.children[row])
            cond = self.expr(draft.view, value.cond)
            if (
                cond.same_as(value.cond)
                and then.same_as(value.true_branch)
                and other.same_as(value.false_branch)
            ):
                return value
            return new_if(cond, then, other, self.type(value.ty))
        if type(value) is Function:
            body = self.seq(draft.children[row][0])
            return value if body.same_as(value.body) else with_body(value, body)
        return self.expr(draft.view, value)

    def binding(self, draft: Draft, row: int) -> Binding:
        """Return the rewritten binding, its variable unchanged unless its type changes."""
        old = draft.view.bindings[row]
        value = self.value(draft, row)
        var = old.var
        if self._type_env:
            ty = self.type(var.ty)
            if not ty.same_as(var.ty):
                var = rename(var, type(var) is DataflowVar, ty=ty)
                self.rename(old.var, var)
        if var.same_as(old.var) and value.same_as(old.value):
            return old
        if type(old) is MatchCast:
            return MatchCast(var, value, self.type(old.ty), old.span)
        return VarBinding(var, value, old.span)

    # Scopes

    def seq(self, draft: Draft) -> SeqExpr:
        """Write one scope."""
        view = draft.view
        blocks = _blocks(draft)
        leaving = _leaving(draft, blocks)
        names = _Names(view, leaving)
        changed = draft.changed
        written: list[tuple[bool, list[Binding]]] = []
        for dataflow, items in blocks:
            bindings: list[Binding] = []
            for item in items:
                rewritten = [self.binding(draft, row) for row in item.rows]
                if item.replace is not None:
                    rewritten = item.replace(rewritten, self, dataflow)
                for new in rewritten:
                    kept = self._fit(new, dataflow, item, leaving, names)
                    changed = changed or not kept.same_as(new) or len(item.rows) != 1
                    bindings.append(kept)
                if len(item.rows) == 1:
                    old = view.bindings[item.rows[0]]
                    changed = changed or len(rewritten) != 1 or not rewritten[0].same_as(old)
            written.append((dataflow, bindings))
        body = self.expr(view, view.seq.body)
        if not changed and body.same_as(view.seq.body):
            return view.seq
        new_blocks = [(DataflowBlock if df else BindingBlock)(bs) for df, bs in written if bs]
        return new_seq(new_blocks, body, self.type(view.seq.ty))

    def _fit(
        self,
        binding: Binding,
        dataflow: bool,
        item: Item,
        leaving: set[Var],
        names: _Names,
    ) -> Binding:
        """Make the bound variable of the kind that its place and its uses ask for."""
        var = binding.var
        inner = dataflow and var not in leaving
        if inner and type(var) is not DataflowVar and isinstance(var.ty, (PrimType, ShapeType)):
            inner = var not in names.in_types()  # where a DataflowVar may not stand
        name = names.outer.get(var) if not inner and type(var) is DataflowVar else None
        if inner == (type(var) is DataflowVar) and name is None:
            return binding
        new = rename(var, inner, name)
        self.rename(var, new)
        if type(binding) is MatchCast:
            return MatchCast(new, binding.value, binding.ty, binding.span)
        return VarBinding(new, binding.value, binding.span)


def with_body(func: Function, body: SeqExpr) -> Function:
    """Return the function with another body, everything else kept."""
    return Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)


def _needs_plain_block(view: FunctionView, item: Item) -> bool:
    """Whether a binding cannot be in a dataflow block: control flow, local functions."""
    if item.replace is not None:
        return False
    return any(type(view.bindings[row].value) in (If, Function) for row in item.rows)


def _blocks(draft: Draft) -> list[tuple[bool, list[Item]]]:
    blocks: list[tuple[bool, list[Item]]] = []
    current = None
    for item in draft.items:
        dataflow = draft.dataflow[item.block]
        if dataflow and not draft.view.in_dataflow(item.rows[-1]):
            dataflow = not _needs_plain_block(draft.view, item)
        if current != (item.block, dataflow):
            current = (item.block, dataflow)
            blocks.append((dataflow, []))
        blocks[-1][1].append(item)
    return blocks


def _leaving(draft: Draft, blocks: list[tuple[bool, list[Item]]]) -> set[Var]:
    """Return the variables that something outside their block reads."""
    home: dict[Var, int] = {}
    leaving: set[Var] = set()
    for number, (_, items) in enumerate(blocks):
        for item in items:
            for var in item.outputs:
                home[var] = number
            for var in item.reads:
                if home.get(var, number) != number:
                    leaving.add(var)
    for var in draft.view.result_vars():
        leaving.add(var)
    return leaving


class _Names:
    """What is needed to choose kinds and names of a scope's variables."""

    def __init__(self, view: FunctionView, leaving: set[Var]) -> None:
        self.view = view
        self.outer = self._outer_names(leaving)
        self._in_types: set[Var] | None = None

    def _outer_names(self, leaving: set[Var]) -> dict[Var, str]:
        """Return the user's name for values with a Var only as an alias: `gv = lv` in a block."""
        names: dict[Var, str] = {}
        for binding in self.view.bindings:
            var = binding.var
            if type(var) is DataflowVar or not self.view.is_alias(var):
                continue
            target = self.view.resolve(var)
            if is_var(target) and target in leaving:
                names.setdefault(target, var.name)
        return names

    def in_types(self) -> set[Var]:
        """Return the variables that stand in types of this scope and of those inside it."""
        if self._in_types is None:
            self._in_types = {
                var
                for scope in self.view.scopes()
                for binding in scope.bindings
                for var in type_vars(binding.var.ty)
            }
        return self._in_types


def write_function(draft: Draft) -> Function:
    """Return the function whose outermost scope `draft` is, written again."""
    func = draft.view.function
    body = Writer().seq(draft)
    return func if body.same_as(func.body) else with_body(func, body)


def replace_functions(
    mod: tvm.IRModule, changed: dict[Any, Function], added: dict[Any, Function], removed: set[Any]
) -> tvm.IRModule:
    """Return a module with functions changed, added and removed; attributes are kept."""
    functions = {gv: changed.get(gv, f) for gv, f in mod.functions.items() if gv not in removed}
    functions.update(added)
    return with_functions(mod, functions)


def set_function_type(gvar: Any, func: Function) -> None:
    """Give a new GlobalVar the type of its function."""
    relax.expr._update_type(gvar, func.ty)
