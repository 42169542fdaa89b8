"""Regions: what recognisers return, and which of them can be outlined together.

The rule, applied in every scope by itself:

1. Each region is checked alone: its bindings exist, are in one scope, have no side effects; its
   roles are inputs; what leaves it is declared in `outputs` (when that is given).
2. The regions are taken in order of priority (higher first), then of work absorbed (more bindings
   first), then of position (earlier first), then of the order in which they were given.
3. A region is accepted if it shares no binding with an accepted one, and if the graph in which
   every accepted region is a single node has no cycle. Otherwise it is refused with the reason.

A region is never refused because a value leaks out of it, only because a value that leaves it
comes back, which makes any order of execution impossible.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import relax
from tvm.ir import Call, GenericConst, GlobalVar, Op, PrimType, Var
from tvm.relax import Expr, FuncType, If, MatchCast, ShapeType

from .cloning import definable_symbols
from .convexity import Contraction
from .dataflow import FunctionView, is_var
from .report import Refusal
from .rewriting import row_reads

__all__ = ["Chosen", "Region", "is_pure", "select"]


@dataclass(eq=False)
class Region:
    """Bindings that belong together, and what they mean.

    Attributes
    ----------
    kind : str
        What it is: "gemm", "attention", ... The composite's name is "relax_llm." + kind.
    bindings : collection of Var
        The variables whose bindings make the region, all in one scope. Aliases need not be named.
    roles : dict of str to Expr
        Inputs by role: variables from outside the region, or constants. A constant with a role is
        passed as an argument; other constants stay inside.
    outputs : dict of str to Var, optional
        Names for the values that leave, in order. None: everything that leaves, in program order.
    attrs : dict
        Static facts for implementations; must convert to JSON.
    priority : int
        Regions of higher priority are taken first where they overlap or exclude each other.
    name : str
        Base of the new function's name; the kind if empty.
    codegen : str
        Name of an external code generator ("cublas"). When given, the region takes the form that
        upstream's `RunCodegen` reads: a function with attribute `Codegen` that calls a local
        function with attribute `Composite`.
    composite : str
        The value of `Composite` where it is not "relax_llm." + kind ("cublas.matmul_bias").
    """

    kind: str
    bindings: Collection[Var]
    roles: dict[str, Expr] = field(default_factory=dict)
    outputs: dict[str, Var] | None = None
    attrs: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    name: str = ""
    codegen: str = ""
    composite: str = ""


@dataclass
class Chosen:
    """An accepted region of one scope.

    Attributes
    ----------
    region : Region
        The region itself.
    rows : list of int
        Positions of its bindings in the scope, in program order; aliases are not among them.
    outputs : dict of str to Var
        The values that leave, by name.
    defined : list of Var
        Symbolic sizes that a match_cast inside defines.
    symbols : list of Var
        Those of them that the outside needs.
    """

    region: Region
    rows: list[int]
    outputs: dict[str, Var]
    defined: list[Var]
    symbols: list[Var]


_PURE: dict[str, bool] = {}
_CALL_TIR_INPLACE = Op.get("relax.call_tir_inplace")


def _op_is_pure(op: Op) -> bool:
    name = op.name
    if name not in _PURE:
        # In-place operators count as pure in dataflow blocks, yet they change an argument.
        _PURE[name] = bool(op.get_attr("FPurity")) and "inplace" not in name
    return _PURE[name]


def is_pure(view: FunctionView, row: int) -> bool:
    """Whether a binding may be moved: it has no side effect and changes no argument in place."""
    value = view.bindings[row].value
    kind = type(value)
    if kind is Call:
        op = value.op
        if type(op) is Op:
            return _op_is_pure(op)
        if view.in_dataflow(row):
            return True
        ty = view.resolve(op).ty if isinstance(op, (Var, GlobalVar)) else op.ty
        return isinstance(ty, FuncType) and ty.purity
    if kind is If:
        return not relax.analysis.contains_impure_call(value)
    return True


def updates_own_argument(view: FunctionView, row: int) -> bool:
    """Whether a binding changes parameters of the function in place that nothing else reads.

    Then whoever needs the change reads the result, and nobody sees the time at which it happens.
    Only parameters: another tensor may share its memory with what it is a reshape of.
    """
    value = view.bindings[row].value
    if type(value) is not Call or value.op != _CALL_TIR_INPLACE or view.parent is not None:
        return False
    fields = view.fields(value.args[1])
    if fields is None:
        return False
    for index in value.attrs.inplace_indices:
        if int(index) < 0:
            continue
        var = fields[int(index)]
        known = any(var.same_as(param) for param in view.params)
        if not known or len(view.users(var)) != 1 or view.is_output(var):
            return False
        if sum(var.same_as(field) for field in fields) != 1:
            return False
    return True


class Scope:
    """The dependences between the bindings of a scope, aliases left out."""

    def __init__(self, view: FunctionView) -> None:
        self.view = view
        self.rows: list[int] = []
        self.node: dict[int, int] = {}
        self.reads: list[dict[Var, None]] = []
        self.impure: set[int] = set()
        self.defines: dict[int, list[Var]] = {}
        self._definer: dict[Var, int] = {}
        succ: list[list[int]] = []
        typed = any(
            type(b) is MatchCast or isinstance(b.var.ty, (PrimType, ShapeType))
            for b in view.bindings
        )
        known = _symbols_around(view) if typed else set()
        barrier = -1
        since: list[int] = []
        for row, binding in enumerate(view.bindings):
            var = binding.var
            if view.is_alias(var) or view.is_unread_tuple(var):
                continue
            node = len(self.rows)
            self.node[row] = node
            self.rows.append(row)
            succ.append([])
            reads = row_reads(view, row, typed)
            sources = {self._definer.get(v, -1) for v in reads}
            pure = is_pure(view, row)
            if not pure:
                self.impure.add(node)
            # Reads order an update of an argument that nothing else reads: it is no barrier.
            free = pure or updates_own_argument(view, row)
            if not free:
                sources.update(since)
                since = []
            if barrier >= 0:
                sources.add(barrier)
            for source in sources:
                if source >= 0 and source != node:
                    succ[source].append(node)
            if free:
                since.append(node)
            else:
                barrier = node
            self._definer[var] = node
            if type(binding) is MatchCast:
                new = [s for s in definable_symbols(binding.ty) if s not in known]
                known.update(new)
                self.defines[node] = new
                for symbol in new:
                    self._definer[symbol] = node
                    reads.pop(symbol, None)
            self.reads.append(reads)
        self.users: dict[Var, list[int]] = {}
        for node, reads in enumerate(self.reads):
            for var in reads:
                self.users.setdefault(var, []).append(node)
        self.result = set(view.result_vars())
        self.order = Contraction(succ)

    def name(self, node: int) -> str:
        return self.view.bindings[self.rows[node]].var.name


def _symbols_around(view: FunctionView) -> set[Var]:
    """Return the symbolic sizes known where a scope starts."""
    known: set[Var] = set()
    scope: FunctionView | None = view
    while scope is not None:
        for param in scope.params:
            known.update(definable_symbols(param.ty))
            if isinstance(param.ty, PrimType):
                known.add(param)
        if scope.parent is not None and scope.owner is not None:
            for binding in scope.parent.bindings[: scope.parent.position(scope.owner.var)]:
                if type(binding) is MatchCast:
                    known.update(definable_symbols(binding.ty))
        scope = scope.parent
    return known


@dataclass
class _Candidate:
    region: Region
    nodes: set[int]
    rank: tuple[int, int, int, int]
    outputs: dict[str, Var] = field(default_factory=dict)
    symbols: list[Var] = field(default_factory=list)


class _Selection:
    def __init__(self, view: FunctionView) -> None:
        self.scope = Scope(view)
        self.view = view

    def refuse(self, region: Region, reason: str, var: Any = None) -> Refusal:
        name = var.name if is_var(var) else ""
        return Refusal(reason, region.kind, self.view.name, name)

    def candidate(self, region: Region, number: int) -> _Candidate | Refusal:
        scope, view = self.scope, self.view
        first = next(iter(region.bindings), None)
        nodes: set[int] = set()
        for var in region.bindings:
            found = view.resolve(var)
            row = view.position(found) if is_var(found) else -1
            node = scope.node.get(row, -1)
            if node >= 0:
                nodes.add(node)
        if not nodes:
            return self.refuse(region, "no operator is left in it once aliases are gone", first)
        for node in sorted(nodes):
            if node in scope.impure:
                return self.refuse(
                    region, "it has a binding with side effects, which cannot move", first
                )
        refusal = self._check_roles(region, nodes)
        if refusal is not None:
            return refusal
        rank = (-region.priority, -len(nodes), min(nodes), number)
        candidate = _Candidate(region, nodes, rank)
        refusal = self._check_outputs(candidate)  # a Refusal is falsy, hence no `or`
        return candidate if refusal is None else refusal

    def _check_roles(self, region: Region, nodes: set[int]) -> Refusal | None:
        scope, view = self.scope, self.view
        read: set[Var] = set()
        for node in nodes:
            read.update(scope.reads[node])
        for role, expr in region.roles.items():
            found = view.resolve(expr)
            if not is_var(found):
                if isinstance(found, GenericConst):
                    continue
                return self.refuse(
                    region,
                    f"role {role!r} is a {type(found).__name__}; expected a variable or a constant",
                )
            if scope.node.get(view.position(found), -1) in nodes:
                return self.refuse(region, f"role {role!r} is computed inside the region", found)
            if found not in read:
                return self.refuse(region, f"role {role!r} is not read by the region", found)
        for var in read:
            inside = scope.node.get(view.position(var), -1) in nodes
            if not inside and isinstance(var.ty, FuncType):
                return self.refuse(region, "it calls a local function from outside", var)
        return None

    def _check_outputs(self, candidate: _Candidate) -> Refusal | None:
        scope, view, region = self.scope, self.view, candidate.region
        nodes = candidate.nodes
        leaving: list[Var] = []
        for node in sorted(nodes):
            var = view.bindings[scope.rows[node]].var
            users = scope.users.get(var, ())
            if var in scope.result or any(u not in nodes for u in users):
                leaving.append(var)
                if isinstance(var.ty, FuncType):
                    return self.refuse(region, "a local function leaves it", var)
        named: dict[str, Var] = {}
        for name, var in (region.outputs or {}).items():
            found = view.resolve(var)
            if not is_var(found) or scope.node.get(view.position(found), -1) not in nodes:
                return self.refuse(region, f"output {name!r} is not computed in the region", var)
            named[name] = found
        declared = set(named.values())
        rest = [v for v in leaving if v not in declared]
        if region.outputs is not None and rest:
            return self.refuse(
                region, f"{rest[0].name} is read outside, and is not one of the outputs", rest[0]
            )
        if not leaving and not named:
            var = view.bindings[scope.rows[min(nodes)]].var
            return self.refuse(region, "nothing reads what it computes", var)
        for i, var in enumerate(rest):
            named["out" if len(rest) == 1 and not declared else f"out{i}"] = var
        candidate.outputs = named
        candidate.symbols = self._leaving_symbols(candidate)
        return None

    def _leaving_symbols(self, candidate: _Candidate) -> list[Var]:
        """Return the sizes that a match_cast inside defines and that the outside needs."""
        scope = self.scope
        found = []
        outputs = set(candidate.outputs.values())
        for node in sorted(candidate.nodes):
            for symbol in scope.defines.get(node, ()):
                users = scope.users.get(symbol, ())
                typed = any(
                    symbol in relax.analysis.tir_vars_in_type(v.ty)
                    for v in outputs
                    if not isinstance(v.ty, PrimType)
                )
                if typed or symbol in scope.result or any(u not in candidate.nodes for u in users):
                    found.append(symbol)
        return found


def select(
    view: FunctionView, regions: Sequence[tuple[int, Region]]
) -> tuple[list[Chosen], list[list[int]], list[Refusal]]:
    """Choose the regions of one scope that are outlined.

    Parameters
    ----------
    view : FunctionView
        The scope.
    regions : sequence of (int, Region)
        The regions with their numbers, which decide last.

    Returns
    -------
    chosen : list of Chosen
        The accepted regions.
    order : list of list of int
        Rows of the scope in the new order; the rows of an accepted region are together.
    refusals : list of Refusal
        One for each region that was not accepted.
    """
    selection = _Selection(view)
    scope = selection.scope
    refusals: list[Refusal] = []
    candidates: list[_Candidate] = []
    for number, region in regions:
        found = selection.candidate(region, number)
        if isinstance(found, Refusal):
            refusals.append(found)
        else:
            candidates.append(found)
    owner: dict[int, _Candidate] = {}
    chosen: list[Chosen] = []
    for candidate in sorted(candidates, key=lambda c: c.rank):
        taken = [n for n in sorted(candidate.nodes) if n in owner]
        first = view.bindings[scope.rows[min(candidate.nodes)]].var
        if taken:
            other = owner[taken[0]].region.kind
            refusals.append(
                selection.refuse(
                    candidate.region,
                    f"{scope.name(taken[0])} belongs to a {other} that comes first "
                    "(higher priority, more bindings, or earlier)",
                    first,
                )
            )
            continue
        path = scope.order.contract(candidate.nodes)
        if path is not None:
            text = " -> ".join(scope.name(n) for n in path)
            refusals.append(
                selection.refuse(
                    candidate.region,
                    f"a value leaves it and comes back ({text}), so no order of execution is left",
                    first,
                )
            )
            continue
        owner.update(dict.fromkeys(candidate.nodes, candidate))
        rows = [scope.rows[n] for n in sorted(candidate.nodes)]
        defined = [s for n in sorted(candidate.nodes) for s in scope.defines.get(n, ())]
        chosen.append(Chosen(candidate.region, rows, candidate.outputs, defined, candidate.symbols))
    order = [[scope.rows[n] for n in group] for group in scope.order.order()]
    return chosen, order, refusals
