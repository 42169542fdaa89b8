"""Recognise a reduction over the last axis with the arithmetic around it: norms as spelled.

    m = mean(power(x, 2), axis=-1, keepdims=True)         RMS norm
    y = x * rsqrt(m + eps) * w

Layer norm, L2 norm, a softmax of exponentials and sums are found alike: no spelling is named here.
From a reduction on, everything elementwise that its value reaches is taken, further reductions of
the same rows among it, up to the last point behind which a single tensor is all that others read.
Before it joins what nothing else reads. Elements are read as scalar expressions (`elements`), and
the kernel computes those: in float32, rounding once.

Refused, with the reason: a value inside that others read too, rows that are not walked one by one,
anything that is no arithmetic. A reduction with nothing around it is left to TVM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx

from ..dataflow import FunctionView, is_var, op_name
from ..kernels.scalar_expr import any_node, buffer_loads, call_name, i64, rewrite
from ..outline import Region
from ..report import Refusal
from .absorb import absorb
from .alike import alike, follow, path_between
from .element_operators import ELEMENTWISE, float_unary
from .element_scalars import Unreadable
from .elements import ElementReader
from .shapes import is_one, same_dims

__all__ = ["KIND", "RowMatch", "RowStage", "find_row_reductions", "region_of"]

KIND = "row_reduction"
REDUCTIONS = {"relax.sum": "sum", "relax.mean": "mean", "relax.max": "max", "relax.min": "min"}
_MOST_FORMS = 8  # kinds of norms that a graph's layers take turns in
_FLOATS = ("float16", "bfloat16", "float32")
# What is followed here beside what every reader follows.
_MORE = {
    "relax.rsqrt": float_unary(lambda x: tirx.FloatImm("float32", 1.0) / tirx.sqrt(x)),
    "relax.square": float_unary(lambda x: x * x),
}
_VIEWS = ("relax.expand_dims", "relax.reshape", "relax.squeeze", "relax.broadcast_to")
_CALLS = ("exp", "tanh", "sqrt", "pow")
_NODES = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min, tirx.Cast, tirx.Select,
    tirx.IntImm, tirx.FloatImm, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE,
)  # fmt: skip


@dataclass
class RowStage:
    """One reduction: "sum", "mean", "max" or "min" of an expression over the row."""

    combine: str
    value: Any


@dataclass
class RowMatch:
    """What a kernel has to compute for every row.

    Attributes
    ----------
    rows, column : list of Var, Var
        Index variables of the leading axes and of the reduced one.
    shape : list
        Their extents.
    stages : list of RowStage
        In order; the value of stage i stands as the variable `results[i]` in what follows.
    results : list of Var
        See `stages`.
    value : expression
        An element of the result, over `rows`, `column` and `results`.
    per_row : bool
        The result has one element for each row.
    leaves : dict
        What is loaded: the tensor and the buffer that stands for it in expressions.
    out : Var
        The result.
    region : dict[Var, None]
        Variables of the bindings that belong to it.
    """

    rows: list[Any]
    column: Any
    shape: list[Any]
    stages: list[RowStage]
    results: list[Any]
    value: Any
    per_row: bool
    leaves: dict[Any, Any]
    out: Any
    region: dict[Any, None]


def find_row_reductions(view: FunctionView) -> list[RowMatch | Refusal]:
    """Find the reductions of a scope with what can be computed around them, in program order."""
    found: list[RowMatch | Refusal] = []
    taken: set[Any] = set()
    forms: list[tuple[Any, RowMatch]] = []  # with the first reduction of each
    for binding in view.bindings:
        var = binding.var
        if op_name(binding.value) not in REDUCTIONS or var in taken or view.is_alias(var):
            continue
        again = next((m for f in forms if (m := _again(view, *f, var, taken)) is not None), None)
        if again is not None:
            taken.update(again.region)
            found.append(again)
            continue
        try:
            match = _Finder(view, taken).match(var)
        except Unreadable as why:
            found.append(Refusal(why.reason, KIND, view.name, why.binding or var.name))
            continue
        if match is not None:
            taken.update(match.region)
            found.append(match)
            forms = [(var, match), *forms[: _MOST_FORMS - 1]]
    return found


def _again(
    view: FunctionView, first: Any, form: RowMatch, var: Any, taken: set[Any]
) -> RowMatch | None:
    """Return the match around the reduction `var` where it differs from `form` in names only."""
    out = follow(view, path_between(view, first, form.out, form.region), var)
    mapped = None if out is None else alike(view, form.region, [form.out], [out])
    if mapped is None or not mapped[first].same_as(var):
        return None
    region = {mapped[v]: None for v in form.region}
    if any(v in taken for v in region):
        return None
    # What else reads a value inside decides where the region ends.
    for old, new in mapped.items():
        if old in form.region and len(view.users(old)) != len(view.users(new)):
            return None
    leaves = {mapped.get(v, v): b for v, b in form.leaves.items()}
    return replace(form, leaves=leaves, out=out, region=region)


def region_of(match: RowMatch) -> Region:
    """Return the match as a region to outline."""
    roles = {f"x{i}": leaf for i, leaf in enumerate(match.leaves) if is_var(leaf)}
    kinds = "_".join(s.combine for s in match.stages)
    return Region(
        kind=KIND,
        bindings=list(match.region),
        roles=roles,
        outputs={"out": match.out},
        attrs={"stages": len(match.stages), "per_row": match.per_row},
        name=f"row_{kinds}",
    )


class _Finder:
    def __init__(self, view: FunctionView, taken: set[Any]) -> None:
        self.view = view
        self.taken = taken

    def match(self, first: Any) -> RowMatch | None:
        view = self.view
        domain = self.domain_of(first)
        if domain is None:
            return None
        self.domain = domain
        core, out = self.grow(first)
        if out is None:
            return None
        members = absorb(view, core, self.joins)
        if len(members) < 2:
            return None
        return self.read(out, members, [v for v in core if op_name(view.value(v)) in REDUCTIONS])

    def domain_of(self, var: Any) -> list[Any] | None:
        """Return the shape of what `var` reduces over its last axis, or None."""
        view = self.view
        call: Any = view.call(var)
        shape = view.shape(call.args[0])
        if shape is None or len(shape) < 1 or view.dtype(var) not in _FLOATS:
            return None
        if view.dtype(call.args[0]) not in _FLOATS or is_one(shape[-1]):
            return None
        axes = call.attrs.axis
        if axes is None or [int(a) % len(shape) for a in axes] != [len(shape) - 1]:
            return None
        return list(shape)

    def size(self, var: Any) -> str:
        """Return "row", "element" or "" for what a value has one of."""
        shape = self.view.shape(var)
        if shape is None or self.view.dtype(var) not in _FLOATS:
            return ""
        if same_dims(shape, self.domain):
            return "element"
        rows = self.domain[:-1]
        if same_dims(shape, rows) or same_dims(shape, [*rows, 1]):
            return "row"
        return ""

    def takes(self, var: Any) -> bool:
        """Tell whether a reader of a value inside can join."""
        view = self.view
        if view.index(var) < 0 or var in self.taken or not self.size(var):
            return False
        name = op_name(view.value(var))
        if name in REDUCTIONS:
            domain = self.domain_of(var)
            return domain is not None and same_dims(domain, self.domain)
        if name in _VIEWS:
            return self.size(var) == "row" or name == "relax.broadcast_to"
        return name in ELEMENTWISE or name in _MORE

    def joins(self, var: Any) -> bool:
        """Tell whether a value before the region that only the region reads can join."""
        view = self.view
        if var in self.taken or view.dtype(var) not in _FLOATS or view.shape(var) is None:
            return False
        name = op_name(view.value(var))
        return name in ELEMENTWISE or name in _MORE or name in _VIEWS

    def grow(self, first: Any) -> tuple[list[Any], Any]:
        """Follow the values that depend on `first`; return those up to the best end, and it."""
        view = self.view
        inside: dict[Any, None] = {first: None}
        best: tuple[int, Any] | None = None
        while True:
            open_ends = [v for v in inside if self.is_open(v, inside)]
            if len(open_ends) == 1 and (best is None or self.size(open_ends[0]) == "element"):
                best = (len(inside), open_ends[0])
            waiting = [
                u.var for v in inside for u in view.users(v) if view.resolve(u.var) not in inside
            ]
            if not waiting:
                break
            following = min(waiting, key=view.position)
            if not self.takes(following):
                break
            inside[following] = None
        if best is None:
            return [], None
        count, out = best
        return list(inside)[:count], out

    def is_open(self, var: Any, inside: dict[Any, None]) -> bool:
        view = self.view
        return view.is_output(var) or any(
            view.resolve(u.var) not in inside for u in view.users(var)
        )

    # Expressions

    def read(self, out: Any, members: dict[Any, None], reductions: Sequence[Any]) -> RowMatch:
        view = self.view
        rows = [tirx.Var(f"l{i}", "int64") for i in range(len(self.domain) - 1)]
        column = tirx.Var("n", "int64")
        ranges = dict(zip([*rows, column], map(i64, self.domain), strict=True))
        reader = ElementReader(
            view, lambda v: v not in members or v in reductions, ranges, more=_MORE
        )
        stages: list[RowStage] = []
        results: list[Any] = []
        for var in reductions:
            call: Any = view.call(var)
            value = reader.read(call.args[0], [*rows, column])
            stages.append(RowStage(REDUCTIONS[op_name(call)], value))
            results.append(tirx.Var(f"stat{len(results)}", "float32"))
        per_row = self.size(out) == "row"
        rank = len(view.shape(out) or ())
        index = [*rows, column] if not per_row else [*rows, i64(0)][:rank]
        value = reader.read(out, index)
        known = dict(zip(reductions, results, strict=True))
        replaced = [self.with_results(reader, e, known, rows) for e in
                    (*(s.value for s in stages), value)]  # fmt: skip
        for stage, expr in zip(stages, replaced, strict=False):
            stage.value = expr
        leaves = {v: b for v, b in reader.leaves.items() if v not in known}
        match = RowMatch(
            rows, column, self.domain, stages, results, replaced[-1], per_row, leaves, out, members
        )
        self.check(match)
        return match

    def with_results(self, reader: Any, expr: Any, known: dict[Any, Any], rows: list[Any]) -> Any:
        """Replace loads of the reductions' values by variables."""
        buffers = [(reader.leaves[v], r) for v, r in known.items() if v in reader.leaves]

        def replace(node: Any) -> Any:
            if not hasattr(node, "indices"):
                return None
            for buffer, result in buffers:
                if not node.source.same_as(buffer):
                    continue
                for at, row in zip(node.indices, rows, strict=False):
                    one = reader.is_size(reader.simplify(at), 0)
                    if not (at.same_as(row) or one or reader.same(at, row)):
                        raise Unreadable("a row reads the reduction of another row", None)
                return result
            return None

        return rewrite(expr, replace)

    def check(self, match: RowMatch) -> None:
        scalar = tirx.Var("element", "float32")

        def without_loads(node: Any) -> Any:
            return scalar if hasattr(node, "indices") else None

        for leaf in match.leaves:
            if is_var(leaf) and self.view.dtype(leaf) not in _FLOATS:
                raise Unreadable(f"it reads {self.view.dtype(leaf)}", leaf)
        for expr in (*(s.value for s in match.stages), match.value):
            for load in buffer_loads(expr):
                if any(buffer_loads(at) for at in load.indices):
                    raise Unreadable("a position is read from memory", None)
            if any_node(rewrite(expr, without_loads), _is_other):
                raise Unreadable("something that is no plain arithmetic", match.out)


def _is_other(node: Any) -> bool:
    if isinstance(node, (*_NODES, tirx.Var)):
        return False
    return call_name(node) not in _CALLS
