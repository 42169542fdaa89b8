"""Composite functions back to the bindings they hold."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar, PrimType, Tuple, TupleGetItem, TupleType, Var
from tvm.relax import (
    Binding,
    BindingBlock,
    DataflowBlock,
    Expr,
    Function,
    If,
    MatchCast,
    SeqExpr,
    ShapeExpr,
    ShapeType,
    TensorType,
    VarBinding,
)

from .cloning import Clone, new_if, new_seq
from .composites import COMPOSITE_PREFIX, ORDER, ROUND, SYMBOLS
from .dataflow import FunctionView, is_var
from .rewriting import (
    Draft,
    draft_scope,
    paused_gc,
    replace_functions,
    with_body,
    write_function,
)

__all__ = ["composite_kind", "inline"]


def composite_kind(func: Any) -> str | None:
    """Return the kind of a composite function of this package ("gemm"), or None."""
    if not isinstance(func, Function) or not func.attrs:
        return None
    name = func.attrs.get("Composite", None)
    if name is None or not str(name).startswith(COMPOSITE_PREFIX):
        return None
    return str(name)[len(COMPOSITE_PREFIX) :]


@paused_gc()
def inline(mod: tvm.IRModule, kinds: Collection[str] | None = None) -> tvm.IRModule:
    """Put the bodies of composite functions back where they are called.

    Functions in which something is inlined come out canonical (as after CanonicalizeBindings
    without the operators that change nothing). With `kinds=None` and a module that `outline` made
    and nothing else changed, the result is structurally equal to the canonical input, the order
    of bindings included.

    Parameters
    ----------
    mod : tvm.IRModule
        The module; it is not changed.
    kinds : collection of str, optional
        The kinds to inline; by default all. Composite functions that nothing calls any more are
        removed.
    """
    found: dict[GlobalVar, Function] = {}
    for gvar, func in mod.functions.items():
        kind = composite_kind(func)
        if kind is not None and (kinds is None or kind in kinds):
            found[gvar] = func
    if not found:
        return _without_notes(mod) if kinds is None else mod
    rounds: dict[int, dict[GlobalVar, Function]] = {}
    noted = kinds is None and any(_notes(f) for f in mod.functions.values())
    # A size that leaves a composite is matched in its caller as `outline` wrote it. A later round
    # may have taken parts of that away: it has to be undone before.
    if noted or any(SYMBOLS in func.attrs for func in found.values()):
        for gvar, func in found.items():
            rounds.setdefault(int(func.attrs.get(ROUND, 0)), {})[gvar] = func
    else:
        rounds[0] = found
    for number in sorted(rounds, reverse=True):
        mod = _inline_round(mod, set(rounds[number]), number if noted else 0)
    return _without_notes(mod)


def _without_notes(mod: tvm.IRModule) -> tvm.IRModule:
    """Drop what `outline` left on callers: after inlining it tells nothing any more."""
    changed = {}
    for gvar, func in mod.functions.items():
        if isinstance(func, Function) and func.attrs and ORDER in func.attrs:
            changed[gvar] = func.without_attr(ORDER)
    return replace_functions(mod, changed, {}, set()) if changed else mod


def _notes(func: Any) -> list[dict[str, Any]]:
    if not isinstance(func, Function) or not func.attrs or ORDER not in func.attrs:
        return []
    return json.loads(str(func.attrs[ORDER]))


def _inline_round(mod: tvm.IRModule, gvars: set[GlobalVar], number: int) -> tvm.IRModule:
    expander = _Expander({gv: mod[gv] for gv in gvars})
    expanded: dict[GlobalVar, Function] = {}
    for gvar, func in mod.functions.items():
        if isinstance(func, Function) and isinstance(func.body, SeqExpr):
            body = expander.body(gvar) if gvar in gvars else expander.seq(func.body)
            if not body.same_as(func.body):
                expanded[gvar] = with_body(func, body)
    if expanded:
        mod = replace_functions(mod, expanded, {}, set())
        changed = {}
        for gvar in expanded:
            draft = draft_scope(FunctionView(mod, gvar))
            for note in _notes(mod[gvar]):
                if note["round"] == number:
                    _restore(draft, note)
            draft.changed = True
            changed[gvar] = write_function(draft)
        mod = replace_functions(mod, changed, {}, set())
    used = set()
    for gvar, func in mod.functions.items():
        if isinstance(func, Function) and gvar not in gvars:
            used.update(relax.analysis.all_global_vars(func))
    pending = list(used & gvars)
    while pending:
        for gvar in relax.analysis.all_global_vars(mod[pending.pop()]):
            if gvar in gvars and gvar not in used:
                used.add(gvar)
                pending.append(gvar)
    gone = {gv for gv in gvars if gv not in used and "global_symbol" not in mod[gv].attrs}
    return replace_functions(mod, {}, {}, gone)


class _Expander:
    """Replaces calls by the callee's bindings. The result still has aliases to be dropped."""

    def __init__(self, functions: dict[GlobalVar, Function]) -> None:
        self.functions = functions
        self._bodies: dict[GlobalVar, SeqExpr] = {}
        self._open: set[GlobalVar] = set()

    def body(self, gvar: GlobalVar) -> SeqExpr:
        """Return the body of a composite in which calls of other composites are replaced."""
        if gvar not in self._bodies:
            self._open.add(gvar)
            self._bodies[gvar] = self.seq(self.functions[gvar].body)
            self._open.discard(gvar)
        return self._bodies[gvar]

    def seq(self, seq: SeqExpr) -> SeqExpr:
        matched: dict[Var, list[Var]] | None = None
        blocks: list[BindingBlock] = []
        changed = False
        for block in seq.blocks[:]:
            old = block.bindings[:]
            new: list[Binding] = []
            touched = False
            for binding in old:
                value = binding.value
                kind = type(value)
                callee = value.op if kind is Call and type(value.op) is GlobalVar else None
                if callee is not None and callee in self.functions and callee not in self._open:
                    if matched is None:
                        matched = _matched_sizes(seq)
                    self._splice(callee, binding, matched.get(binding.var), new)
                    touched = True
                elif kind is If or kind is Function:
                    inner = self._nested(value)
                    touched = touched or not inner.same_as(value)
                    new.append(binding if inner.same_as(value) else VarBinding(binding.var, inner))
                else:
                    new.append(binding)
            changed = changed or touched
            make = DataflowBlock if isinstance(block, DataflowBlock) else BindingBlock
            blocks.append(make(new, block.span) if touched else block)
        return new_seq(blocks, seq.body, seq.ty) if changed else seq

    def _nested(self, value: Expr) -> Expr:
        if type(value) is Function:
            body = self.seq(value.body)
            return value if body.same_as(value.body) else with_body(value, body)
        then, other = self.seq(value.true_branch), self.seq(value.false_branch)
        if then.same_as(value.true_branch) and other.same_as(value.false_branch):
            return value
        return new_if(value.cond, then, other, value.ty)

    def _splice(
        self, callee: GlobalVar, binding: Binding, sizes: list[Var] | None, new: list[Binding]
    ) -> None:
        func = self.functions[callee]
        clone = Clone({}, {})
        args = binding.value.args[:]
        for param, arg in zip(func.params[:], args, strict=True):
            _unify(param.ty, arg, clone.symbols)
            clone.env[param] = arg
            if isinstance(param.ty, (PrimType, ShapeType)) and tvm.ir.is_prim_expr(arg):
                clone.symbols[param] = arg
        for param, arg in zip(func.params[:], args, strict=True):
            missing = (
                [
                    s
                    for s in relax.analysis.definable_tir_vars_in_type(param.ty)
                    if s not in clone.symbols
                ]
                if not isinstance(param.ty, PrimType)
                else []
            )
            if missing:  # the argument's type became vaguer: its sizes are found at run time
                clone.define(param.ty)
                ty = clone.type(param.ty)
                var = Var(param.name, ty)
                new.append(MatchCast(var, arg, ty))
                clone.env[param] = var
        body = self.body(callee)
        if sizes is not None and type(body.body) is Tuple:
            last = body.body.fields[len(body.body.fields) - 1]
            if type(last) is ShapeExpr and len(last.values) == len(sizes):
                clone.symbols.update(zip(last.values[:], sizes, strict=True))
        for block in body.blocks[:]:
            new.extend(clone.binding(b) for b in block.bindings[:])
        result = clone.expr(body.body)
        if type(binding) is MatchCast:
            new.append(MatchCast(binding.var, result, binding.ty, binding.span))
        else:
            new.append(VarBinding(binding.var, result, binding.span))


def _matched_sizes(seq: SeqExpr) -> dict[Var, list[Var]]:
    """Return, for variables `t` with `s = t[k]; match_cast(s, Shape([m, ...]))`, the sizes m."""
    field_of: dict[Var, Var] = {}
    found: dict[Var, list[Var]] = {}
    for block in seq.blocks[:]:
        for binding in block.bindings[:]:
            value = binding.value
            if type(value) is TupleGetItem and is_var(value.tuple_value):
                field_of[binding.var] = value.tuple_value
            elif type(binding) is MatchCast and is_var(value) and value in field_of:
                ty = binding.ty
                if isinstance(ty, ShapeType) and ty.values is not None:
                    values = ty.values[:]
                    if all(is_var(v) for v in values):
                        found.setdefault(field_of[value], values)
    return found


def _unify(ty: Any, arg: Expr, symbols: dict[Var, Expr]) -> None:
    """Learn from an argument what the symbolic sizes in a parameter's type stand for."""
    if isinstance(ty, ShapeType) and type(arg) is ShapeExpr:
        _unify_dims(ty.values, arg.values, symbols)
    else:
        _unify_types(ty, arg.ty, symbols)


def _unify_types(ty: Any, arg: Any, symbols: dict[Var, Expr]) -> None:
    if isinstance(ty, TensorType) and isinstance(arg, TensorType):
        if isinstance(ty.shape, ShapeExpr) and isinstance(arg.shape, ShapeExpr):
            _unify_dims(ty.shape.values, arg.shape.values, symbols)
    elif isinstance(ty, ShapeType) and isinstance(arg, ShapeType):
        _unify_dims(ty.values, arg.values, symbols)
    elif isinstance(ty, TupleType) and isinstance(arg, TupleType):
        for a, b in zip(ty.fields[:], arg.fields[:], strict=False):
            _unify_types(a, b, symbols)


def _unify_dims(dims: Any, values: Any, symbols: dict[Var, Expr]) -> None:
    if dims is None or values is None or len(dims) != len(values):
        return
    for dim, value in zip(dims[:], values[:], strict=True):
        if is_var(dim):
            symbols.setdefault(dim, value)


def _restore(draft: Draft, note: dict[str, Any]) -> None:
    """Put the items of a draft, and of those inside it, in the order that a note tells.

    A draft that other passes have changed since is left in the order it has.
    """
    if "order" in note and len(note["order"]) == len(draft.items):
        position = dict(zip(note["order"], range(len(draft.items)), strict=True))
        items = [draft.items[position[i]] for i in range(len(draft.items))]
        if _is_legal(items):
            start = 0
            for number, (_, size) in enumerate(note["blocks"]):
                for item in items[start : start + size]:
                    item.block = number
                start += size
            draft.dataflow = [bool(flag) for flag, _ in note["blocks"]]
            draft.items = items
    for key, inner in note.get("inner", {}).items():
        number, k = (int(part) for part in key.split("."))
        if number < len(draft.items):
            children = draft.children.get(draft.items[number].rows[0], [])
            if k < len(children):
                _restore(children[k], inner)


def _is_legal(items: list[Any]) -> bool:
    made = {var: i for i, item in enumerate(items) for var in item.outputs}
    return all(made.get(var, -1) < i for i, item in enumerate(items) for var in item.reads)
