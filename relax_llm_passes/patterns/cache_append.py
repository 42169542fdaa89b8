"""Find how a cache takes new rows, and where they go: concat, slice update, scatter, selection.

Spellings: `concat(past, new)`; `concat(past[:p], new, past[p + n:])`; `slice_scatter`;
`scatter_elements`, `scatter_nd` and `index_put` whose positions run on by one from row to row;
`where(arange == p, new, past)`. The position may be a size or come from memory, and may differ
between the rows of a batch. Refused: positions that do not run on, rows that are added up
(`reduction="add"`), updates of a part of the other axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx

from ..dataflow import FunctionView, op_name
from ..kernels.scalar_expr import depends_on, i64, substitute, widened
from .element_layout import broadcast_index
from .element_scalars import Unreadable, to_bool
from .elements import ElementReader

__all__ = ["APPENDS", "CacheAppend", "appended_rows", "read_append", "read_appended"]

APPENDS = (
    "relax.concat",
    "relax.scatter_elements",
    "relax.scatter_nd",
    "relax.slice_scatter",
    "relax.index_put",
    "relax.where",
)


@dataclass
class CacheAppend:
    """New rows in a cache.

    Attributes
    ----------
    past, new : relax.Expr
        The cache that came in, the new rows.
    axis : int
        Axis of the rows.
    past_index : list of expressions
        Where the element at the index that was asked for is in `past`.
    new_index : list of expressions
        Where it is in `new`, the row counted from the first new one.
    start, rows : int64 expressions
        Where the new rows begin, how many they are.
    grows : bool
        The cache ends behind them.
    """

    past: Any
    new: Any
    axis: int
    past_index: list[Any]
    new_index: list[Any]
    start: Any
    rows: Any
    grows: bool


def read_append(reader: ElementReader, var: Any, index: Sequence[Any]) -> CacheAppend | None:
    """Return the append that `var` is, read at `index`, or None.

    Parameters
    ----------
    reader : ElementReader
        Knows the ranges of the variables in `index`. Positions from memory become its leaves.
    var : Var
        The cache that comes out.
    index : sequence
        An element of it; the row is a variable of its own.
    """
    call = reader.view.call(var, *APPENDS)
    if call is None:
        return None
    inside = dict(reader.inside)
    found = None
    try:
        found = _READERS[op_name(call)](reader, call, list(index), var)
    except Unreadable:
        pass
    if found is None or not _row_is_free(found, index):
        reader.inside = inside
        return None
    return found


def _row_is_free(found: CacheAppend, index: Sequence[Any]) -> bool:
    row = index[found.axis]
    if not isinstance(row, tirx.Var):
        return False
    others = [x for i, x in enumerate(index) if i != found.axis]
    return not depends_on(found.start, row) and not any(depends_on(x, row) for x in others)


def _update(
    reader: ElementReader,
    past: Any,
    new: Any,
    axis: int,
    index: list[Any],
    start: Any,
    grows: bool = False,
) -> CacheAppend:
    rows = reader.shape(new)[axis]
    return CacheAppend(past, new, axis, index, list(index), reader.simplify(start), rows, grows)


def _concat(reader: ElementReader, call: Any, index: list[Any], var: Any) -> CacheAppend | None:
    parts = reader.view.fields(call.args[0])
    if parts is None or len(parts) not in (2, 3):
        return None
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(index)
    start = reader.shape(parts[0])[axis]
    if len(parts) == 2:
        return _update(reader, parts[0], parts[1], axis, index, start, grows=True)
    # Pieces of one tensor around the new rows, each where it was.
    behind = reader.simplify(start + reader.shape(parts[1])[axis])
    moved = list(index)
    moved[axis] = index[axis] - behind
    before, after = (_slice_of(reader, p, i) for p, i in ((parts[0], index), (parts[2], moved)))
    if before is None or after is None or not before[0].same_as(after[0]):
        return None
    here = all(
        reader.same(x, y) for got in (before[1], after[1]) for x, y in zip(got, index, strict=True)
    )
    whole = reader.same(reader.shape(before[0])[axis], reader.shape(var)[axis])
    return _update(reader, before[0], parts[1], axis, index, start) if here and whole else None


def _slice_of(reader: ElementReader, expr: Any, index: list[Any]) -> tuple[Any, list[Any]] | None:
    """Return (tensor, index) of the element of it that `expr`, a slice, has at `index`."""
    call = reader.view.call(expr, "relax.strided_slice")
    if call is None:
        return None
    moved = list(index)
    for axis, begin, _, step in reader.slices(call):
        moved[axis] = begin + index[axis] * i64(step)
    reader.inside[reader.view.resolve(expr)] = None
    return reader.view.resolve(call.args[0]), moved


def _slice_scatter(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    past, new, start, _, step = call.args
    if reader.view.scalar(step) != 1:
        return None
    axis = int(call.attrs.axis) % len(index)
    if not _same_but(reader, new, past, axis):
        return None
    return _update(reader, past, new, axis, index, widened(reader.read(start, [])))


def _same_but(reader: ElementReader, a: Any, b: Any, axis: int) -> bool:
    """Tell whether two tensors have the same sizes, but for one axis."""
    left, right = reader.shape(a), reader.shape(b)
    return len(left) == len(right) and all(
        reader.same(x, y) for i, (x, y) in enumerate(zip(left, right, strict=True)) if i != axis
    )


def _first(reader: ElementReader, position: Any, row: Any, rows: Any) -> Any:
    """Return the position of row 0 when positions run on by one, else None."""
    at_zero = reader.simplify(substitute(position, {row: i64(0)}))
    if reader.same(rows, i64(1)):
        return at_zero
    return at_zero if reader.same(position, at_zero + row) else None


def _scatter_elements(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    past, positions, new = call.args
    if str(call.attrs.reduction) != "update":
        return None
    axis = int(call.attrs.axis) % len(index)
    if not _same_but(reader, new, past, axis):
        return None
    row = _row(reader, reader.shape(new)[axis])
    at = list(index)
    at[axis] = row
    start = _first(reader, widened(reader.read(positions, at)), row, reader.shape(new)[axis])
    return None if start is None else _update(reader, past, new, axis, index, start)


def _row(reader: ElementReader, rows: Any) -> Any:
    row = tirx.Var("row", "int64")
    reader.analyzer.bind(row, tvm.ir.Range(i64(0), rows))
    return row


def _scatter_nd(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    past, positions, new = call.args
    if str(call.attrs.reduction) != "update":
        return None
    shape = reader.shape(positions)
    if not isinstance(shape[-1], tirx.IntImm) or int(shape[-1].value) != len(shape) - 1:
        return None

    def component(axis: int, at: list[Any]) -> Any:
        return reader.read(positions, [*at, i64(axis)])

    return _joint(reader, past, new, index, len(shape) - 1, component)


def _index_put(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    past, positions, new = call.args
    tensors = reader.view.fields(positions)
    if tensors is None or bool(call.attrs.accumulate) or len(tensors) != len(index):
        return None

    def component(axis: int, at: list[Any]) -> Any:
        return reader.read(tensors[axis], broadcast_index(reader, tensors[axis], at, new))

    return _joint(reader, past, new, index, len(tensors), component)


def _joint(
    reader: ElementReader, past: Any, new: Any, index: list[Any], count: int, component: Any
) -> CacheAppend | None:
    """Return the update whose first `count` axes are placed together: all stay but one."""
    shape = reader.shape(new)
    if len(shape) != len(index):
        return None
    for axis in range(count):
        if not isinstance(index[axis], tirx.Var) or not _same_but(reader, new, past, axis):
            continue
        row = _row(reader, shape[axis])
        at = [*index[:count]]
        at[axis] = row
        if not all(
            reader.same(widened(component(i, at)), at[i]) for i in range(count) if i != axis
        ):
            continue
        start = _first(reader, widened(component(axis, at)), row, shape[axis])
        if start is not None:
            return _update(reader, past, new, axis, index, start)
    return None


def _where(reader: ElementReader, call: Any, index: list[Any], var: Any) -> CacheAppend | None:
    cond, new, past = call.args
    chosen = to_bool(reader.read(cond, broadcast_index(reader, cond, index, var)))
    if isinstance(chosen, tirx.NE):
        chosen, new, past = tirx.EQ(chosen.a, chosen.b), past, new
    if not isinstance(chosen, tirx.EQ):
        return None
    shape = reader.shape(past)
    if len(shape) != len(index) or not _same_but(reader, past, var, -1):
        return None
    for axis, row in enumerate(index):
        if not isinstance(row, tirx.Var) or not depends_on(chosen, row):
            continue
        if len(reader.shape(new)) != len(index) or not _same_but(reader, new, past, axis):
            continue
        for one, other in ((chosen.a, chosen.b), (chosen.b, chosen.a)):
            alone = reader.simplify(widened(one) - row)
            single = reader.same(reader.shape(new)[axis], i64(1))
            if single and not depends_on(alone, row) and not depends_on(other, row):
                return _update(reader, past, new, axis, index, widened(other) - alone)
    return None


_READERS = {
    "relax.concat": _concat,
    "relax.scatter_elements": _scatter_elements,
    "relax.scatter_nd": _scatter_nd,
    "relax.slice_scatter": _slice_scatter,
    "relax.index_put": _index_put,
    "relax.where": _where,
}


def appended_rows(view: FunctionView, var: Any) -> tuple[Any, Any] | None:
    """Return (past, new rows) when `var` is a cache with new rows, else None."""
    if view.call(var, *APPENDS) is None:
        return None
    reader = ElementReader(view)
    try:
        index = _index_of(reader, var)
    except Unreadable:
        return None
    found = read_append(reader, var, index)
    return None if found is None else (found.past, found.new)


def _index_of(reader: ElementReader, var: Any) -> list[Any]:
    index = []
    for n, dim in enumerate(reader.shape(var)):
        index.append(tirx.Var(f"i{n}", "int64"))
        reader.analyzer.bind(index[-1], tvm.ir.Range(i64(0), i64(dim)))
    return index


def read_appended(reader: ElementReader, var: Any, index: Sequence[Any]) -> Any:
    """Return element `index` of a cache with new rows: one of them, or what was there before."""
    found = read_append(reader, var, index)
    if found is None or found.grows:
        return reader.read(var, list(index))
    reader.inside[reader.view.resolve(var)] = None
    row = index[found.axis]
    at = list(found.new_index)
    at[found.axis] = row - found.start
    fresh = tirx.And(row >= found.start, row < found.start + found.rows)
    # Lazy: the branch not taken would read out of bounds.
    return tirx.if_then_else(
        fresh, reader.read(found.new, at), reader.read(found.past, found.past_index)
    )
