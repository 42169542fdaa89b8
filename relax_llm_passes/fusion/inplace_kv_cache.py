"""InplaceKVCache: caches of fixed capacity, written in place, instead of `concat(past, new)`.

before (copies every cache each token)              after, beside it
    main(ids, past_k (B,H,p,D), ..., w)                 main_inplace(ids, cache_k (B,H,M,D), ...,
        k_all = concat((past_k, k_new), axis=2)                      length: R.Shape([p]), w)
        ... k_all (B,H,p+S,D) ...                           full = call_tir_inplace(rows p..p+S-1)
        return logits, k_all, ...                           k_all = full[:, :, :p+S]
                                                            ... k_all ...; return logits, full, ...
                                                        main_create_cache() -> zeros (B,H,M,D), ...
    prefill(ids, w) -> logits, k (B,H,n,D), ...         prefill_inplace(ids, cache_k, .., length, w)

The slice costs nothing where attention is fused: the recogniser reads through it, so the kernel
reads the cache itself up to the length. Without such a kernel it is a copy, as the concat was.
Sizes, positions and masks of the graph are computed from `p` as before; only where `p` comes from
changes. Rows from the length on are never read, so caches can be reused without clearing.

S may be symbolic: then the same function takes a prompt, or the next part of one, at any length.
Where it is one token, the prompt needs a function of its own, that computes keys and values of all
its tokens; see `inplace_prefill.py`. `relax_llm_passes.generation` drives these functions.

Refused, with the reason: caches that something else reads, that are not returned as they are, and
caches of one function that do not share one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import PrimType, Var

from ..cloning import Clone, map_prim, set_type
from ..dataflow import FunctionView, is_var
from ..errors import InputError
from ..kernels.cache_rows import write_rows
from ..kernels.scalar_expr import depends_on, i64
from ..registry import PassRun, register_pass
from ..report import Refusal
from .inplace_prefill import CacheRows, CacheSpec, find_prefill, prefill_function, result_leaves
from .inplace_twin import (
    AXIS_ATTR,
    CACHES_ATTR,
    CREATES_ATTR,
    KIND,
    SOURCE_ATTR,
    build_twin,
    with_bounds,
)

__all__ = ["InplaceKVCache", "InplaceKVCacheOptions"]


@dataclass(frozen=True)
class InplaceKVCacheOptions:
    """Options of InplaceKVCache.

    Attributes
    ----------
    max_length : int
        Rows that each cache holds: prompt and generated tokens together.
    """

    max_length: int = 2048


@dataclass(frozen=True)
class _Append:
    """`out = concat((past, new), axis)`, `past` a parameter and `out` a result."""

    past: Any
    new: Any
    out: Any
    axis: int
    length: Any
    rows: Any


@register_pass("InplaceKVCache", stage="clean", options=InplaceKVCacheOptions, fuses=True)
def InplaceKVCache(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Add functions that keep keys and values in caches of fixed capacity.

    For each function that appends to its caches: `<name>_inplace` takes caches of `max_length`
    rows where `<name>` takes the past ones, and after the last of them `length: R.Shape([p])`, the
    rows in use. It writes the new rows in place and returns what `<name>` does, with the whole
    caches (the arguments themselves) in the place of the longer ones. `<name>_create_cache`
    returns zeroed caches, in that order; where they have other symbolic sizes (the batch), it takes
    those as one `R.Shape`.

    For each other function whose last results are rows of these caches (a prefill):
    `<name>_inplace` takes the caches and the length, which must be 0, behind its inputs.

    The functions themselves stay. At run time, rows that do not fit are a ValueError, raised before
    a cache is written.

    Raises
    ------
    InputError
        For a `max_length` below 1, or a name that is taken.
    """
    capacity = run.options.max_length
    if capacity < 1:
        raise InputError(f"InplaceKVCache.max_length={capacity}: expected at least 1")
    done = {
        str(func.attrs[SOURCE_ATTR])
        for func in mod.functions.values()
        if isinstance(func, relax.Function) and func.attrs and SOURCE_ATTR in func.attrs
    }
    add = _Additions(mod, run)
    rest: list[tuple[FunctionView, Refusal]] = []
    caches: list[CacheSpec] = []
    for gvar, func in mod.functions.items():
        name = gvar.name_hint
        if not _is_entry(func) or name in done or SOURCE_ATTR in (func.attrs or {}):
            continue
        view = FunctionView(mod, gvar)
        found = _find_appends(view)
        if isinstance(found, Refusal):
            rest.append((view, found))
            continue
        limit = _limit(func, found[0])
        if limit is not None and capacity > limit:
            run.record.refuse(
                f"max_length {capacity}, but the graph says that it holds for at most {limit} rows",
                KIND, name, found[0].out.name,
            )  # fmt: skip
            continue
        builder = add.builder(name, f"{name}_inplace", f"{name}_create_cache")
        builder.add_func(_inplace_function(view, found, capacity, builder, name), f"{name}_inplace")
        builder.add_func(_create_function(found, capacity, name), f"{name}_create_cache")
        add.finish(builder, name, len(found))
        caches.append(_spec(view, found, name, capacity))
    for view, reason in rest:
        rows = find_prefill(view, caches)
        if rows is None:
            run.record.refuse(reason)
        elif isinstance(rows, Refusal):
            run.record.refuse(rows)
        else:
            builder = add.builder(view.name, f"{view.name}_inplace")
            twin = prefill_function(view, rows, builder)
            builder.add_func(twin, f"{view.name}_inplace")
            add.finish(builder, view.name, len(rows.leaves))
    return add.module()


class _Additions:
    """The module with the functions added so far; each addition is recorded as a match."""

    def __init__(self, mod: tvm.IRModule, run: PassRun) -> None:
        self._mod = mod
        self._result = mod
        self._run = run

    def builder(self, name: str, *wanted: str) -> relax.BlockBuilder:
        """Return a builder to add functions of these names with."""
        taken = {gvar.name_hint for gvar in self._mod.functions}
        for each in wanted:
            if each in taken:
                raise InputError(
                    f"InplaceKVCache would add function {each!r}, which the module has already: "
                    "rename it"
                )
        return relax.BlockBuilder(self._result)

    def finish(self, builder: relax.BlockBuilder, name: str, count: int) -> None:
        """Take over what was added for a function with this many caches."""
        self._result = builder.get()
        self._run.record.match(KIND, count, name)

    def module(self) -> tvm.IRModule:
        """Return the module, with the attributes it had."""
        if self._result is self._mod or not self._mod.attrs:
            return self._result
        return self._result.with_attrs(dict(self._mod.attrs))


def _is_entry(func: Any) -> bool:
    if not isinstance(func, relax.Function) or not isinstance(func.body, relax.SeqExpr):
        return False
    attrs = func.attrs or {}
    return "Composite" not in attrs and "Codegen" not in attrs


def _find_appends(view: FunctionView) -> list[_Append] | Refusal:
    """Return the appends of a function in the order of its parameters, or why there are none."""
    params = list(view.function.params)
    found: list[_Append] = []
    reasons: list[Refusal] = []
    for binding in view.bindings:
        call = view.call(binding.var, "relax.concat")
        if call is None or view.is_alias(binding.var):
            continue
        fields = view.fields(call.args[0])
        if fields is None or len(fields) != 2:
            continue
        past = view.resolve(fields[0])
        if not any(past.same_as(p) for p in params):
            continue
        answer = _append(view, binding.var, past, view.resolve(fields[1]), call)
        if isinstance(answer, Refusal):
            reasons.append(answer)
        elif answer is not None:
            found.append(answer)
    if reasons:  # A half-converted function would take both kinds of caches.
        return reasons[0]
    if not found:
        return Refusal("no parameter that a concat extends by new rows", KIND, view.name)
    first = found[0]
    for other in found[1:]:
        if not other.length.same_as(first.length):
            return _no(
                view, other.out,
                f"caches of different lengths {first.length} and {other.length}; expected one",
            )  # fmt: skip
        if not tvm.sym.Analyzer().can_prove_equal(other.rows, first.rows):
            return _no(
                view, other.out, f"{other.rows} new rows where another cache gets {first.rows}"
            )
    order = {id_: i for i, id_ in enumerate(params)}
    return sorted(found, key=lambda a: order[a.past])


def _no(view: FunctionView, var: Any, reason: str) -> Refusal:
    return Refusal(reason, KIND, view.name, getattr(var, "name", ""))


def _append(view: FunctionView, out: Any, past: Any, new: Any, call: Any) -> Any:
    """Return the append of one concat, None when it is no cache, or a Refusal."""
    shape, rows, whole = view.shape(past), view.shape(new), view.shape(out)
    if shape is None or rows is None or whole is None:
        return _no(view, out, f"the shape of {past.name} or of the new rows is not known")
    axis = (0 if call.attrs.axis is None else int(call.attrs.axis)) % len(shape)
    length = shape[axis]
    if not isinstance(length, tirx.Var):
        return None  # a constant number of rows: not a cache that grows
    if any(_mentions(dim, length) for i, dim in enumerate(shape) if i != axis):
        return _no(view, out, f"the length {length} is the size of another axis too")
    readers = view.users(past)
    if len(readers) != 1 or not readers[0].var.same_as(out) or view.is_output(past):
        return _no(view, out, f"{past.name} is also read outside of its append")
    if not is_var(new) or not isinstance(new.ty, relax.TensorType):
        return _no(view, out, "the new rows are no variable")
    if str(new.ty.dtype) != str(past.ty.dtype):
        return _no(view, out, f"rows of {new.ty.dtype} appended to a cache of {past.ty.dtype}")
    if not view.is_output(out):
        return _no(view, out, f"{past.name} extended by new rows is not returned")
    return _Append(past, new, out, axis, length, rows[axis])


def _limit(func: relax.Function, append: _Append) -> int | None:
    """Return how many rows the graph allows (tables of positions end somewhere), or None."""
    bounds = (func.attrs or {}).get("tir_var_upper_bound", None)
    if bounds is None or append.length.name not in bounds:
        return None
    rows = append.rows
    known = isinstance(rows, (int, tirx.IntImm))
    return int(bounds[append.length.name]) + (int(rows) if known else 0)


def _mentions(dim: Any, var: Any) -> bool:
    return depends_on(i64(dim), var)


def _spec(view: FunctionView, appends: list[_Append], name: str, capacity: int) -> CacheSpec:
    """Return which results of a function are its caches, and their shapes."""
    leaves = result_leaves(view)
    rows = [
        CacheRows(
            from_end=len(leaves) - next(i for i, v in enumerate(leaves) if v.same_as(a.out)),
            shape=tuple(a.past.ty.shape.values),
            dtype=str(a.past.ty.dtype),
            axis=a.axis,
        )
        for a in appends
    ]
    first = min(i for i, p in enumerate(view.function.params) if p.same_as(appends[0].past))
    return CacheSpec(name, capacity, rows, first)


def _full_shape(append: _Append, capacity: int) -> list[Any]:
    shape = list(append.past.ty.shape.values)
    shape[append.axis] = tirx.IntImm("int64", capacity)
    return shape


def _inplace_function(
    view: FunctionView, appends: list[_Append], capacity: int, builder: Any, name: str
) -> relax.Function:
    """Return the function on caches of fixed capacity; its PrimFuncs go to `builder`."""
    func = view.function
    old_length = appends[0].length
    length = Var(old_length.name, PrimType("int64"))
    clone = Clone({}, {old_length: length})
    pasts = {a.past: a for a in appends}
    params: list[Any] = []
    caches: dict[Any, Any] = {}
    last = max(i for i, p in enumerate(func.params) if p in pasts)
    for i, param in enumerate(func.params):
        clone.define(param.ty)
        append = pasts.get(param)
        if append is None:
            params.append(clone.var(param))
        else:
            shape = [clone.expr(d) for d in _full_shape(append, capacity)]
            caches[param] = relax.Var(param.name, relax.TensorType(shape, param.ty.dtype))
            params.append(caches[param])
        if i == last:
            params.append(relax.Var("length", relax.ShapeType([length])))
    outs = {a.out: a for a in appends}
    full: dict[Any, Any] = {}

    def replace(binding: Any, leaves_block: bool) -> list[Any] | None:
        append = outs.get(binding.var)
        if append is not None:
            return _write_and_view(append, clone, caches, length, builder, full, leaves_block)
        # Another name of a past cache.
        return [] if view.resolve(binding.var) in pasts else None

    made = build_twin(view, clone, params, full, replace)
    made = made.with_attr("global_symbol", f"{name}_inplace").with_attr(SOURCE_ATTR, name)
    held = [caches[a.past] for a in appends]
    places = [next(i for i, p in enumerate(params) if p.same_as(c)) for c in held]
    made = made.with_attr(CACHES_ATTR, places)
    rows = appends[0].rows
    fixed = isinstance(rows, (int, tirx.IntImm))
    limit = max(capacity - int(rows), 0) if fixed else capacity
    # A cache may be empty, whatever lengths the graph was traced with.
    made = with_bounds(made, func.attrs or {}, {str(length.name): limit}, {str(length.name)})
    attrs = func.attrs or {}
    if "num_input" in attrs and last < int(attrs["num_input"]):
        made = made.with_attr("num_input", int(attrs["num_input"]) + 1)
    return made


def _write_and_view(
    append: _Append,
    clone: Clone,
    caches: dict[Any, Any],
    length: Any,
    builder: Any,
    full: dict[Any, Any],
    leaves_block: bool,
) -> list[Any]:
    """Return the bindings that write the new rows and view the rows in use."""
    cache, rows = caches[append.past], clone.expr(append.new)
    ty = cache.ty
    prim = write_rows(ty.shape.values, rows.ty.shape.values, append.axis, str(ty.dtype))
    gvar = builder.add_func(prim, "write_rows")
    kind = relax.DataflowVar if isinstance(append.out, relax.DataflowVar) else relax.Var
    name = append.out.name
    full[append.out] = (relax.Var if leaves_block else kind)(f"{name}_cache", ty)
    write = relax.op.call_tir_inplace(gvar, relax.Tuple([cache, rows, length]), 0, ty)
    end = length + clone.expr(append.rows)
    view = relax.op.strided_slice(full[append.out], [append.axis], [0], [end], assume_inbound=True)
    set_type(view, clone.type(append.out.ty))
    return [
        relax.VarBinding(full[append.out], set_type(write, ty)),
        relax.VarBinding(clone.var(append.out), view),
    ]


def _create_function(appends: list[_Append], capacity: int, name: str) -> relax.Function:
    """Return the function that makes zeroed caches, in the order of the parameters."""
    symbols: dict[Any, Any] = {}
    for append in appends:
        for i, dim in enumerate(append.past.ty.shape.values):
            if i != append.axis and isinstance(dim, tirx.Var) and dim not in symbols:
                symbols[dim] = Var(dim.name, dim.ty)
    params = [relax.Var("sizes", relax.ShapeType(list(symbols.values())))] if symbols else []
    builder = relax.BlockBuilder()
    with builder.function("create_cache", params):
        with builder.dataflow():
            made = []
            for append in appends:
                shape = [map_prim(d, symbols) for d in _full_shape(append, capacity)]
                zeros = relax.op.zeros(relax.ShapeExpr(shape), str(append.past.ty.dtype))
                made.append(builder.emit(zeros))
            gv = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(gv)
    func = builder.get()["create_cache"]
    func = func.with_attr("global_symbol", f"{name}_create_cache").with_attr(SOURCE_ATTR, name)
    return func.with_attr(CREATES_ATTR, len(appends)).with_attr(AXIS_ATTR, appends[0].axis)
