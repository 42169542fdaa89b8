"""Builds the function that holds an outlined region, and the call that takes its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Call, GlobalVar, PrimType, Tuple, TupleGetItem, TupleType, Var
from tvm.relax import (
    Binding,
    BindingBlock,
    DataflowBlock,
    DataflowVar,
    Expr,
    Function,
    If,
    MatchCast,
    ShapeExpr,
    ShapeType,
    VarBinding,
)

from .cloning import Clone, new_seq
from .dataflow import FunctionView, is_var, type_vars, used_vars
from .regions import Chosen
from .rewriting import Writer, set_function_type

__all__ = [
    "ATTRS",
    "COMPOSITE_PREFIX",
    "ORDER",
    "OUTPUTS",
    "ROLES",
    "ROUND",
    "SYMBOLS",
    "CompositeBuilder",
]

COMPOSITE_PREFIX = "relax_llm."
ROLES = "relax_llm.roles"
OUTPUTS = "relax_llm.outputs"
ATTRS = "relax_llm.attrs"
ROUND = "relax_llm.round"  # which call of outline() made the function, counted from 1
SYMBOLS = "relax_llm.symbols"  # how many symbolic sizes the last result holds
ORDER = "relax_llm.order"  # on the caller: how inline() finds the original order again


def _is_symbol(var: Var) -> bool:
    return isinstance(var.ty, PrimType) and str(var.ty.dtype) == "int64"


@dataclass
class CompositeBuilder:
    """Makes one composite function for each region, with names that nothing else has.

    Attributes
    ----------
    taken : set of str
        Names in use; new ones are added.
    round : int
        Written to each function, so that `inline` undoes outlining in reverse.
    added : dict
        The functions made so far.
    """

    taken: set[str]
    round: int
    added: dict[GlobalVar, Function] = field(default_factory=dict)
    _numbers: dict[str, int] = field(default_factory=dict)

    def replacer(
        self, view: FunctionView, chosen: Chosen
    ) -> Callable[[list[Binding], Writer, bool], list[Binding]]:
        """Return the callback for `rewriting.Item.replace`."""

        def replace(bindings: list[Binding], writer: Writer, dataflow: bool) -> list[Binding]:
            return self._outline(view, chosen, bindings, writer, dataflow)

        return replace

    def name(self, base: str) -> str:
        """Return `base`, or `base_1`, `base_2`, ...: the first that is free."""
        base = "".join(c if c.isalnum() or c == "_" else "_" for c in base) or "composite"
        if base[0].isdigit():
            base = "_" + base
        found, n = base, self._numbers.get(base, 0)
        while found in self.taken:
            n += 1
            found = f"{base}_{n}"
        self._numbers[base] = n
        self.taken.add(found)
        return found

    def _outline(
        self,
        view: FunctionView,
        chosen: Chosen,
        bindings: list[Binding],
        writer: Writer,
        dataflow: bool,
    ) -> list[Binding]:
        region = chosen.region
        roles = {
            role: view.resolve(e) if not is_var(e) else writer.expr(view, e)
            for role, e in region.roles.items()
        }
        inputs, symbols = _inputs(bindings, roles.values(), set(chosen.defined))
        clone = Clone({}, {})
        for expr in inputs:
            clone.define(expr.ty)
        for expr in inputs:
            symbols.update(dict.fromkeys(type_vars(expr.ty)))
        free = [s for s in symbols if s not in clone.symbols]
        for symbol in free:
            clone.symbols[symbol] = Var(symbol.name, symbol.ty)
        params = []
        names = {id(e): role for role, e in reversed(roles.items())}
        for expr in inputs:
            name = expr.name if is_var(expr) else names[id(expr)]
            param = Var(name, clone.type(expr.ty))
            clone.env[expr] = param
            if isinstance(expr.ty, (PrimType, ShapeType)):
                clone.symbols[expr] = param
            params.append(param)
        args: list[Expr] = list(inputs)
        if free:
            params.append(Var("sizes", ShapeType([clone.symbols[s] for s in free])))
            args.append(ShapeExpr(free))

        body, results = _copy_body(clone, bindings, chosen)
        known = {s: s for p in params for s in _defined_by(p)}
        ret_ty = _result_type([r.ty for r in results])
        if chosen.defined:
            ret_ty = relax.analysis.erase_to_well_defined(ret_ty, known)
        result = results[0] if len(results) == 1 else Tuple(results)
        kind = BindingBlock if any(type(b.value) in (If, Function) for b in body) else DataflowBlock
        index = {role: inputs.index(e) for role, e in roles.items()}
        func = Function(params, new_seq([kind(body)], result), ret_ty, True)
        gvar = self._add(chosen, func, index)

        outer = {s: s for e in inputs for s in type_vars(e.ty)} | {s: s for s in free}
        call_ty = _result_type([v.ty for v in chosen.outputs.values()])
        if chosen.symbols:
            call_ty = _result_type(
                [*(v.ty for v in chosen.outputs.values()), ShapeType(chosen.symbols)]
            )
        call_ty = writer.type(call_ty)
        if chosen.defined:
            call_ty = relax.analysis.erase_to_well_defined(call_ty, outer)
        call = Call(gvar, args, None, None, None, call_ty)
        own = {b.var: b.var for b in bindings}
        outputs = [own[v] if v in own else writer.env[v] for v in chosen.outputs.values()]
        return _bind_results(call, outputs, chosen, region.kind, dataflow)

    def _add(self, chosen: Chosen, func: Function, roles: dict[str, int]) -> GlobalVar:
        region = chosen.region
        composite = region.composite or COMPOSITE_PREFIX + region.kind
        attrs: dict[str, Any] = {
            "Composite": composite,
            ROLES: json.dumps(roles),
            OUTPUTS: json.dumps(list(chosen.outputs)),
            ATTRS: json.dumps(region.attrs),
            ROUND: self.round,
        }
        if chosen.symbols:
            attrs[SYMBOLS] = len(chosen.symbols)
        gvar = GlobalVar(self.name(region.name or region.kind))
        func = func.with_attrs(attrs)
        if region.codegen:
            func = _wrap_for_codegen(func, gvar.name_hint, region.codegen)
        set_function_type(gvar, func)
        self.added[gvar] = func
        return gvar


def _inputs(
    bindings: list[Binding], roles: Any, defined: set[Var]
) -> tuple[list[Expr], dict[Var, None]]:
    """Return the parameters' arguments (roles first) and the symbolic sizes that are read."""
    inner = {b.var for b in bindings}
    inputs: dict[Expr, None] = {}
    symbols: dict[Var, None] = {}
    for expr in roles:
        inputs[expr] = None
    for binding in bindings:
        reads = dict.fromkeys(used_vars(binding.value))
        reads.update(dict.fromkeys(type_vars(binding.var.ty)))
        if type(binding) is MatchCast:
            reads.update(dict.fromkeys(type_vars(binding.ty)))
        for var in reads:
            if var in inner or var in defined or var in inputs:
                continue
            if _is_symbol(var):
                symbols[var] = None
            else:
                inputs[var] = None
    return list(inputs), symbols


def _defined_by(param: Var) -> list[Var]:
    if isinstance(param.ty, PrimType):
        return [param]
    return list(relax.analysis.definable_tir_vars_in_type(param.ty))


def _result_type(types: list[Any]) -> Any:
    return types[0] if len(types) == 1 else TupleType(types)


def _copy_body(
    clone: Clone, bindings: list[Binding], chosen: Chosen
) -> tuple[list[Binding], list[Expr]]:
    leaving = set(chosen.outputs.values())
    plain = any(type(b.value) in (If, Function) for b in bindings)
    body: list[Binding] = []
    for binding in bindings:
        value = clone.expr(binding.value)
        inner = not plain and binding.var not in leaving
        if type(binding) is MatchCast:
            clone.define(binding.ty)
            ty = clone.type(binding.ty)
            body.append(MatchCast(clone.var(binding.var, inner), value, ty, binding.span))
        else:
            body.append(VarBinding(clone.var(binding.var, inner), value, binding.span))
    results = [clone.env[v] for v in chosen.outputs.values()]
    if chosen.symbols:
        results.append(ShapeExpr([clone.symbols[s] for s in chosen.symbols]))
    return body, results


def _bind_results(
    call: Call, outputs: list[Var], chosen: Chosen, kind: str, dataflow: bool
) -> list[Binding]:
    """Bind the call's results to the variables that the region's bindings had."""
    make = DataflowVar if dataflow else Var
    if len(outputs) == 1 and not chosen.symbols:
        return [VarBinding(outputs[0], call)]
    whole = make(kind, call.ty)
    found: list[Binding] = [VarBinding(whole, call)]
    # A value with two output names is bound once.
    places = {v: i for i, v in reversed(list(enumerate(outputs)))}
    first = [(i, v) for i, v in enumerate(outputs) if places[v] == i]
    if not chosen.symbols:
        return found + [VarBinding(v, TupleGetItem(whole, i)) for i, v in first]
    # The sizes come first: the types of the other results are in terms of them.
    sizes = TupleGetItem(whole, len(outputs))
    held = make("sizes", sizes.ty)
    found.append(VarBinding(held, sizes))
    matched = ShapeType(chosen.symbols)
    found.append(MatchCast(make("sizes", matched), held, matched))
    for i, var in first:
        item = TupleGetItem(whole, i)
        raw = make(var.name, item.ty)
        found += [VarBinding(raw, item), MatchCast(var, raw, var.ty)]
    return found


def _wrap_for_codegen(func: Function, name: str, codegen: str) -> Function:
    """Return the form `RunCodegen` reads: `Codegen` outside, `Composite` on a local function."""
    clone = Clone({}, {})
    for param in func.params[:]:
        clone.define(param.ty)
    params = [clone.var(p) for p in func.params[:]]
    # The local function keeps its own parameters and shares the symbolic sizes around it.
    inner = Clone({}, dict(clone.symbols)).function(func)
    local = Var("local_func", inner.ty)
    result = Var("output", inner.ret_ty)
    call = Call(local, params, None, None, None, inner.ret_ty)
    block = BindingBlock([VarBinding(local, inner), VarBinding(result, call)])
    attrs = tvm.ir.make_node("ir.DictAttrs", Codegen=codegen, global_symbol=name)
    return Function(params, new_seq([block], result), inner.ret_ty, True, attrs)
