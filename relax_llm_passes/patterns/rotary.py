"""Find rotary position embeddings by what they compute, element by element.

For each constant depth d an element of a rotary is `x[a(d)] * c[...] +- x[b(d)] * s[...]`, or just
`x[d]` where a partial rotary passes through. Read with `elements.py`, every spelling (split, slices
and negative/concat, stack, reshape into pairs, take, strided slices, tables from anywhere) gives
these terms; which d pairs with which tells half-split from interleaved, and how far it goes.

Refused, with the pairing that was found: anything that is neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from ..dataflow import FunctionView, op_name
from ..kernels.scalar_expr import (
    TensorLoad,
    bound_analyzer,
    buffer_loads,
    call_name,
    depends_on,
    dtype_of,
    rewrite,
    substitute,
)
from ..report import Refusal
from .element_layout import LAYOUT
from .element_regions import is_biased_product
from .element_scalars import Unreadable
from .elements import ElementReader
from .rotary_memo import remembered

__all__ = ["Rotary", "RotaryMatch", "classify_rotary", "find_rotary", "rotary_factors"]

KIND = "rotary"
_MAX_DIM = 512


@dataclass(frozen=True)
class Rotary:
    """How a tensor is rotated.

    Attributes
    ----------
    style : str
        "half" (d pairs with d + rotary_dim/2) or "interleaved" (2i pairs with 2i + 1).
    rotary_dim : int
        Depths that turn; the rest passes through.
    head_dim : int
    """

    style: str
    rotary_dim: int
    head_dim: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for reports."""
        return {"style": self.style, "rotary_dim": self.rotary_dim, "head_dim": self.head_dim}


@dataclass
class RotaryMatch:
    """A rotary in a function: its result, the tensor that is turned, and how."""

    var: Any
    source: Any
    rotary: Rotary
    tables: list[Any]


def _terms(expr: Any, factor: float = 1.0) -> list[tuple[float, list[Any]]] | None:
    """Return a sum as (constant, loads) products, or None when it is no such sum."""
    if isinstance(expr, tirx.Cast):
        return _terms(expr.value, factor)
    if isinstance(expr, (tirx.FloatImm, tirx.IntImm)):
        return [(factor * float(expr.value), [])]
    if isinstance(expr, TensorLoad):
        return [(factor, [expr])]
    if isinstance(expr, (tirx.Add, tirx.Sub)):
        left = _terms(expr.a, factor)
        right = _terms(expr.b, -factor if isinstance(expr, tirx.Sub) else factor)
        return None if left is None or right is None else left + right
    if isinstance(expr, tirx.Mul):
        left, right = _factor(expr.a), _factor(expr.b)
        if left is None or right is None:
            return None
        return [(factor * a * b, x + y) for a, x in left for b, y in right]
    return None


def _factor(expr: Any) -> list[tuple[float, list[Any]]] | None:
    """Return the terms of a factor; any function of one element (bias, clip) counts as it."""
    terms = _terms(expr)
    if terms is None or len(terms) > 1:
        loads = buffer_loads(expr)
        if len(loads) == 1:
            return [(1.0, loads)]
    return terms


def _fold_choices(expr: Any, analyzer: Any) -> Any:
    """Take the branch of every choice whose condition is known."""

    def visit(node: Any) -> Any:
        if isinstance(node, tirx.Select):
            parts = [node.condition, node.true_value, node.false_value]
        elif call_name(node) == "if_then_else":
            parts = list(node.args)
        else:
            return None
        cond = analyzer.simplify(parts[0])
        if isinstance(cond, tirx.IntImm):
            return _fold_choices(parts[1] if int(cond.value) else parts[2], analyzer)
        return None

    return rewrite(expr, visit)


def _at_depth(expr: Any, d: Any, value: int, analyzer: Any) -> list[tuple[float, list[Any]]] | None:
    fixed = _fold_choices(substitute(expr, {d: tirx.IntImm(dtype_of(d), value)}), analyzer)
    loads = buffer_loads(fixed)
    if len(loads) == 1:
        return [(1.0, loads)]  # passes through, perhaps with a bias or a clip
    terms = _terms(fixed)
    return None if terms is None else [t for t in terms if t[0] != 0.0]


def _gap(a: Any, b: Any, analyzer: Any) -> int | None:
    """Return b - a of two loads of one tensor that differ in one index by a constant."""
    differences = []
    for i, j in zip(a.indices, b.indices, strict=True):
        step = analyzer.simplify(j - i)
        if not isinstance(step, tirx.IntImm):
            return None
        if int(step.value):
            differences.append(int(step.value))
    return differences[0] if len(differences) == 1 else None


@remembered
def classify_rotary(
    expr: Any, d: Any, size: int, heads: Sequence[Any], ranges: dict[Any, Any]
) -> tuple[Rotary, Any, list[Any]] | str:
    """Return (rotary, turned buffer, table buffers), or what is wrong with it.

    Parameters
    ----------
    expr : float32 expression over d and other index variables
    d, size : the depth variable and its extent
    heads : sequence of Var
        Variables on which the turned tensor depends and the tables do not.
    ranges : mapping
        Index variables with their extents.
    """
    analyzer = bound_analyzer(ranges)
    rows: dict[int, Any] = {}

    def at(depth: int) -> list[tuple[float, list[Any]]] | None:
        if depth not in rows:
            rows[depth] = _at_depth(expr, d, depth, analyzer)
        return rows[depth]

    first = at(0)
    if first is None or len(first) != 2 or any(len(loads) != 2 for _, loads in first):
        return "not a sum of two products of a tensor and a table"
    source = _turned(first, heads)
    if source is None:
        return "the turned tensor cannot be told from the tables"
    pairs: dict[int, int] = {}
    tables: dict[Any, Any] = {}
    for depth in range(size):
        terms = at(depth)
        if terms is None:
            return f"depth {depth} is no sum of products"
        mine = [[x for x in loads if x.source.same_as(source)] for _, loads in terms]
        others = [[x for x in loads if not x.source.same_as(source)] for _, loads in terms]
        if len(terms) == 1 and len(mine[0]) == 1 and not others[0]:
            continue  # passes through
        if len(terms) != 2 or any(len(m) != 1 for m in mine) or any(len(o) != 1 for o in others):
            return f"depth {depth} is no rotation of two elements"
        gap = _gap(mine[0][0], mine[1][0], analyzer)
        if not gap:
            return f"depth {depth} is a sum of two products, of no two depths of one tensor"
        pairs[depth] = abs(gap)
        for other in others:
            tables[other[0].source] = None
    return _style(at, size, source, pairs, list(tables), analyzer)


def _turned(terms: list[tuple[float, list[Any]]], heads: Sequence[Any]) -> Any:
    """Return the buffer of the turned tensor: in both products, or with an axis tables lack."""
    one, other = terms[0][1]
    in_both = [x for x in (one, other) if any(x.source.same_as(y.source) for y in terms[1][1])]
    if len(in_both) == 1:
        return in_both[0].source

    def wider(a: Any, b: Any) -> bool:
        return any(depends_on(a, v) and not depends_on(b, v) for v in heads)

    if wider(one, other) == wider(other, one):
        return None
    return one.source if wider(one, other) else other.source


def _style(
    at: Callable[[int], Any],
    size: int,
    source: Any,
    pairs: dict[int, int],
    tables: list[Any],
    analyzer: Any,
) -> tuple[Rotary, Any, list[Any]] | str:
    rotary_dim = len(pairs)
    if not rotary_dim or sorted(pairs) != list(range(rotary_dim)) or rotary_dim % 2:
        return f"{rotary_dim} depths turn, and they are no even prefix"
    half = rotary_dim // 2
    gaps = [pairs[i] for i in range(rotary_dim)]
    for style in ("half", "interleaved"):
        want = half if style == "half" else 1
        if all(g == want for g in gaps) and _signs(at, rotary_dim, style, source, analyzer):
            return Rotary(style, rotary_dim, size), source, tables
    return f"pairs depth 0 with depth {gaps[0]} of {rotary_dim}, in an order that is no rotary"


def _signs(at: Callable[[int], Any], width: int, style: str, source: Any, analyzer: Any) -> bool:
    """Check that each pair (x, y) becomes (x c - y s, y c + x s): one minus, in the first."""
    half = width // 2
    seen = {depth: _pair_at(at(depth), source, analyzer) for depth in range(width)}
    for depth in range(width):
        second = depth >= half if style == "half" else depth % 2 == 1
        partner = depth + (half if style == "half" else 1) * (-1 if second else 1)
        mine, theirs = seen[depth], seen[partner]
        if mine is None or theirs is None or set(mine) != set(theirs):
            return False
        if any(value < 0 for value in mine.values()) == second:
            return False
        if sum(value < 0 for value in (*mine.values(), *theirs.values())) != 1:
            return False
    return True


def _pair_at(terms: Any, source: Any, analyzer: Any) -> dict[str, float] | None:
    """Return the factors of the two elements that one depth mixes, by their place."""
    if terms is None or len(terms) != 2:
        return None
    found = {}
    for factor, loads in terms:
        mine = [x for x in loads if x.source.same_as(source)]
        if len(mine) != 1:
            return None
        found[str([analyzer.simplify(i) for i in mine[0].indices])] = factor
    return found if len(found) == 2 else None


def rotary_factors(expr: Any, d: Any, depth: int, source: Any) -> dict[Any, tuple[float, Any]]:
    """Return, by table buffer, the factor and the turned element that meet at one depth."""
    terms = _at_depth(expr, d, depth, bound_analyzer({}))
    found = {}
    for factor, loads in terms or []:
        mine = [x for x in loads if x.source.same_as(source)]
        others = [x for x in loads if not x.source.same_as(source)]
        if len(mine) == 1 and len(others) == 1:
            found[others[0].source] = (factor, mine[0])
    return found


_MAKES = ("relax.add", "relax.subtract", "relax.concat", "relax.reshape", "relax.stack")


def find_rotary(view: FunctionView) -> list[RotaryMatch | Refusal]:
    """Return every rotary of a scope over its last axis, each as far down as it is one."""
    found: list[RotaryMatch | Refusal] = []
    taken: dict[Any, None] = {}
    for binding in reversed(view.bindings):
        var = binding.var
        if op_name(binding.value) not in _MAKES or var in taken:
            continue
        if not _could_rotate(view, var) or _is_view_of_rotary(view, var):
            continue
        match = match_rotary(view, var)
        if match is not None:
            found.append(match)
            taken.update(_cone(view, var))
    found.reverse()
    return found


def _could_rotate(view: FunctionView, expr: Any) -> bool:
    """Tell cheaply whether reading a binding element by element can be worth it."""
    expr = _source(view, expr)
    call = view.call(expr, "relax.add", "relax.subtract", "relax.concat", "relax.stack")
    if call is None:
        return False
    if op_name(call) in ("relax.add", "relax.subtract"):
        return all(view.call(_source(view, a), "relax.multiply") is not None for a in call.args)
    fields = view.fields(call.args[0]) or []
    return any(
        op_name(view.value(_source(view, f))) in ("relax.add", "relax.subtract")
        and _could_rotate(view, f)
        for f in fields
    )


def _source(view: FunctionView, expr: Any) -> Any:
    """Look through layout changes and casts."""
    expr = view.resolve(expr)
    while True:
        call = view.call(expr, "relax.astype", *LAYOUT)
        if call is None:
            return expr
        expr = view.resolve(call.args[0])


def _is_view_of_rotary(view: FunctionView, var: Any) -> bool:
    """Tell whether `var` only rearranges a rotary (an expanded head, say) that counts itself."""
    if op_name(view.value(var)) != "relax.reshape":
        return False
    source = var
    while True:
        call = view.call(source, *LAYOUT)
        if call is None:
            inner = match_rotary(view, source)
            if not isinstance(inner, RotaryMatch):
                return False
            # Pairs on an axis of their own turn by themselves; what joins them is the rotary.
            own = match_rotary(view, var)
            wider = isinstance(own, RotaryMatch) and own.rotary.head_dim > inner.rotary.head_dim
            return not wider
        source = view.resolve(call.args[0])


def _cone(view: FunctionView, var: Any) -> dict[Any, None]:
    reader = ElementReader(view)
    try:
        shape = reader.shape(var)
        reader.read(var, [tirx.Var(f"i{n}", "int64") for n in range(len(shape))])
    except Unreadable:
        return {var: None}
    return dict(reader.inside)


def match_rotary(view: FunctionView, var: Any) -> RotaryMatch | Refusal | None:
    """Return the rotary that `var` is, a Refusal for a near miss, or None for anything else."""
    shape = view.shape(var)
    if shape is None or len(shape) < 2 or not isinstance(shape[-1], int):
        return None
    size = shape[-1]
    if size % 2 or size > _MAX_DIM or "float" not in (view.dtype(var) or ""):
        return None
    index = [tirx.Var(f"i{n}", "int64") for n in range(len(shape))]
    ranges = dict(zip(index, shape, strict=True))
    reader = ElementReader(view, lambda v: is_biased_product(view, v), ranges)
    try:
        expr = reader.read(var, index)
    except Unreadable:
        return None
    loads = buffer_loads(expr)
    if len({str(x.source.name) for x in loads}) < 2 or dtype_of(expr) != "float32":
        return None
    names = {b: v for v, b in reader.leaves.items()}
    answer = classify_rotary(expr, index[-1], size, index[:-1], ranges)
    if isinstance(answer, str):
        trigonometric = any(
            view.call(names[x.source], "relax.cos", "relax.sin") is not None
            for x in loads
            if x.source in names
        )
        if trigonometric and op_name(view.value(var)) in ("relax.add", "relax.subtract"):
            return Refusal(answer, KIND, view.name, getattr(var, "name", ""))
        return None
    rotary, source, tables = answer
    return RotaryMatch(var, names[source], rotary, [names[t] for t in tables])
