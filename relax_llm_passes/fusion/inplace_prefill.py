"""The prompt for InplaceKVCache: a function that returns rows of the caches, made to write them.

before                                              after, beside it
    prefill(ids (B,n), w)                               prefill_inplace(ids, cache_k (B,H,M,D), ...,
        ... k (B,H,n,D), v ...                              length: R.Shape([p]), w)
        return logits, k, v, ...                            ... k, v ...
                                                            full = call_tir_inplace(rows p..p+n-1)
                                                            return logits, full, ...

A prefill is known by its results: as many as the decode function has caches, in the same places
counted from the end, of the same shape but for the number of rows. It computes its prompt from
position 0 and reads no cache, so its length must be 0 (it is an argument so that prefill and
decode are called alike).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx
from tvm.ir import PrimType, Var

from ..cloning import Clone, definable_symbols, free_name, set_type
from ..dataflow import FunctionView, is_var, type_vars
from ..kernels.cache_rows import check_room, write_rows
from ..report import Refusal
from ..signature import extent
from .inplace_twin import CACHES_ATTR, KIND, SOURCE_ATTR, build_twin, with_bounds

__all__ = ["CacheRows", "CacheSpec", "find_prefill", "prefill_function", "result_leaves"]


@dataclass(frozen=True)
class CacheRows:
    """One cache among a function's results: where, counted from the end, and of which form."""

    from_end: int
    shape: tuple[Any, ...]
    dtype: str
    axis: int


@dataclass(frozen=True)
class CacheSpec:
    """The caches of a decode function, in the order of its parameters."""

    decode: str
    capacity: int
    rows: list[CacheRows]
    first_param: int


@dataclass(frozen=True)
class PrefillRows:
    """A prefill's results that go to the caches, in the caches' order."""

    spec: CacheSpec
    leaves: list[Any]


def result_leaves(view: FunctionView) -> list[Any]:
    """Return a function's results, tuples flattened, aliases looked through."""
    leaves: list[Any] = []

    def visit(expr: Any) -> None:
        expr = view.resolve(expr)
        fields = view.fields(expr)
        if fields is None:
            leaves.append(expr)
        else:
            for field in fields:
                visit(field)

    visit(view.function.body.body)
    return leaves


def find_prefill(view: FunctionView, specs: Sequence[CacheSpec]) -> PrefillRows | Refusal | None:
    """Return the rows that a function computes for the caches of one of `specs`.

    None when there are no caches; a Refusal that says why the function is no prefill of the first.
    """
    first: Refusal | None = None
    for spec in specs:
        found = _match(view, spec)
        if not isinstance(found, Refusal):
            return found
        first = first or found
    return first


def _match(view: FunctionView, spec: CacheSpec) -> PrefillRows | Refusal:
    def no(reason: str, var: Any = None) -> Refusal:
        text = f"no prefill for the caches of {spec.decode}: {reason}"
        return Refusal(text, KIND, view.name, getattr(var, "name", ""))

    leaves = result_leaves(view)
    if len(leaves) < max(r.from_end for r in spec.rows):
        return no(f"{len(leaves)} results, of which {len(spec.rows)} would be rows of caches")
    params = list(view.function.params)
    found: list[Any] = []
    count: Any = None
    for cache in spec.rows:
        leaf = leaves[-cache.from_end]
        shape = view.shape(leaf)
        wanted = [str(extent(d)) if i != cache.axis else "rows" for i, d in enumerate(cache.shape)]
        known = is_var(leaf) and isinstance(getattr(leaf.ty, "shape", None), relax.ShapeExpr)
        if not known or shape is None or any(leaf.same_as(p) for p in params):
            return no("a result is no computed tensor of known shape", leaf)
        if str(leaf.ty.dtype) != cache.dtype or not _fits(shape, cache):
            return no(
                f"{leaf.name} is {leaf.ty.dtype} ({', '.join(map(str, shape))}), expected "
                f"{cache.dtype} ({', '.join(wanted)})",
                leaf,
            )
        rows = shape[cache.axis]
        if count is None:
            count = rows
        elif str(count) != str(rows):
            return no(f"{rows} rows where another cache gets {count}", leaf)
        if any(leaf.same_as(other) for other in found):
            return no(f"{leaf.name} would go to two caches", leaf)
        found.append(leaf)
    return PrefillRows(spec, found)


def _fits(shape: Sequence[Any], cache: CacheRows) -> bool:
    if len(shape) != len(cache.shape):
        return False
    for i, (mine, its) in enumerate(zip(shape, cache.shape, strict=True)):
        if i == cache.axis:
            continue
        fixed = [int(d) if isinstance(d, (int, tirx.IntImm)) else None for d in (mine, its)]
        if fixed[0] != fixed[1]:
            return False
    return True


def prefill_function(view: FunctionView, rows: PrefillRows, builder: Any) -> relax.Function:
    """Return the function that writes its rows to the caches; its PrimFuncs go to `builder`."""
    func, spec, name = view.function, rows.spec, view.name
    attrs = func.attrs or {}
    names = {str(p.name) for p in func.params}
    length = Var(free_name("past", _symbols(func)), PrimType("int64"))
    clone = Clone({}, {})
    params: list[Any] = []
    for param in func.params:
        clone.define(param.ty)
        params.append(clone.var(param))
    caches = []
    for i, (cache, leaf) in enumerate(zip(spec.rows, rows.leaves, strict=True)):
        shape = [clone.expr(d) for d in leaf.ty.shape.values]
        shape[cache.axis] = tirx.IntImm("int64", spec.capacity)
        ty = relax.TensorType(shape, leaf.ty.dtype)
        caches.append(relax.Var(free_name(f"cache_{i}", names), ty))
    # Behind the inputs, before the weights.
    at = int(attrs["num_input"]) if "num_input" in attrs else min(spec.first_param, len(params))
    shape_of = relax.Var(free_name("length", names), relax.ShapeType([length]))
    params[at:at] = [*caches, shape_of]
    full: dict[Any, Any] = {}
    count = rows.leaves[0].ty.shape.values[spec.rows[0].axis]
    # A number of rows that a match_cast inside finds is not known at the start.
    known_sizes = {v for p in func.params for v in definable_symbols(p.ty)}
    early = all(v in known_sizes for v in type_vars(rows.leaves[0].ty))
    first = relax.Var(f"{caches[0].name}_checked", caches[0].ty) if early else caches[0]

    def head() -> list[Any]:
        if not early:
            return []
        cache, to = spec.rows[0], caches[0]
        prim = check_room(to.ty.shape.values, cache.axis, cache.dtype, only_first=True)
        args = relax.Tuple([to, clone.expr(count), length])
        gvar = builder.add_func(prim, "check_room")
        check = relax.op.call_tir_inplace(gvar, args, 0, to.ty)
        return [relax.VarBinding(first, set_type(check, to.ty))]

    def tail() -> list[Any]:
        bindings = []
        held = [first, *caches[1:]]
        for cache, to, leaf in zip(spec.rows, held, rows.leaves, strict=True):
            source = clone.expr(leaf)
            prim = write_rows(
                to.ty.shape.values, source.ty.shape.values, cache.axis, cache.dtype, only_first=True
            )
            gvar = builder.add_func(prim, "write_first_rows")
            write = relax.op.call_tir_inplace(gvar, relax.Tuple([to, source, length]), 0, to.ty)
            full[leaf] = relax.Var(f"{leaf.name}_cache", to.ty)
            bindings.append(relax.VarBinding(full[leaf], set_type(write, to.ty)))
        return bindings

    made = build_twin(view, clone, params, full, lambda _binding, _leaves: None, tail, head)
    made = made.with_attr("global_symbol", f"{name}_inplace").with_attr(SOURCE_ATTR, name)
    made = made.with_attr(CACHES_ATTR, list(range(at, at + len(caches))))
    upper: dict[str, int] = {}
    if isinstance(count, tirx.Var):
        known = dict(attrs["tir_var_upper_bound"]) if "tir_var_upper_bound" in attrs else {}
        upper[count.name] = min(int(known.get(count.name, spec.capacity)), spec.capacity)
    made = with_bounds(made, attrs, upper, set())
    if "num_input" in attrs:
        made = made.with_attr("num_input", int(attrs["num_input"]) + len(caches) + 1)
    return made


def _symbols(func: relax.Function) -> set[str]:
    return {str(v.name) for v in relax.analysis.defined_symbolic_vars(func)}
