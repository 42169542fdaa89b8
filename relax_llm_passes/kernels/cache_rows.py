"""PrimFuncs that write new rows into a cache of fixed capacity, in place.

    cache[.., length + i, ..] = rows[.., i, ..]        i < number of rows

It checks that the rows fit before it writes any: what reads the cache afterwards relies on it.
`check_room` makes that check alone, for functions where others would fail first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import renew_defs
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .scalar_expr import i64

__all__ = ["check_room", "write_rows"]

_FULL = "InplaceKVCache: the cache is full: length and new rows exceed max_length"
_NOT_EMPTY = (
    "InplaceKVCache: this prefill computes its prompt from position 0 and reads no cache: "
    "its length must be 0"
)


def write_rows(
    cache: Sequence[Any], rows: Sequence[Any], axis: int, dtype: str, only_first: bool = False
) -> Any:
    """Return a PrimFunc that writes `rows` into `cache` from row `length` on.

    Parameters of the PrimFunc: cache (in and out), rows, length (int64). It raises a ValueError
    where the rows do not fit, before it writes.

    Parameters
    ----------
    cache, rows : sequence of PrimExpr or int
        Their shapes, which differ on `axis` only.
    axis : int
        Where rows are counted.
    dtype : str
        Element type of both.
    only_first : bool
        Refuse a length other than 0.
    """
    size = _own_sizes()
    to = tirx.decl_buffer([size(d) for d in cache], dtype, name="cache")
    source = tirx.decl_buffer([size(d) for d in rows], dtype, name="rows")
    length = tirx.Var("length", "int64")
    capacity = to.shape[axis]
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("write_rows")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8})
        T.arg("cache", to)
        T.arg("rows", source)
        T.arg("length", length)
        _assert_room(length, source.shape[axis], capacity, only_first)
        with T.grid(*source.shape) as loops, T.sblock("write_rows"):
            index = [
                T.axis.spatial(extent, loop)
                for extent, loop in zip(source.shape, loops, strict=True)
            ]
            place = [i + length if a == axis else i for a, i in enumerate(index)]
            T.reads(source[tuple(index)])
            T.writes(to[tuple(place)])
            T.buffer_store(to, source[tuple(index)], place)
    # Private: a module may hold several, for caches of different shapes.
    return renew_defs(builder.get()).without_attr("global_symbol")


def check_room(cache: Sequence[Any], axis: int, dtype: str, only_first: bool = False) -> Any:
    """Return a PrimFunc that only checks that new rows fit into `cache`.

    Parameters of the PrimFunc: cache (which it does not touch), number of new rows, length (both
    int64). It raises a ValueError where they do not fit. Storage is planned for as many rows as
    may fit: called first, it speaks before an allocation fails.

    Parameters
    ----------
    cache : sequence of PrimExpr or int
        Its shape.
    axis : int
        Where rows are counted.
    dtype : str
        Element type.
    only_first : bool
        Refuse a length other than 0.
    """
    size = _own_sizes()
    to = tirx.decl_buffer([size(d) for d in cache], dtype, name="cache")
    count, length = tirx.Var("count", "int64"), tirx.Var("length", "int64")
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name("check_room")
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": 1})
        T.arg("cache", to)
        T.arg("count", count)
        T.arg("length", length)
        _assert_room(length, count, to.shape[axis], only_first)
        T.evaluate(0)
    return renew_defs(builder.get()).without_attr("global_symbol")


def _own_sizes() -> Callable[[Any], Any]:
    """Return what gives a PrimFunc sizes of its own: one serves every layer of the same shapes."""
    own: dict[Any, Any] = {}

    def size(dim: Any) -> Any:
        if isinstance(dim, tirx.IntImm):
            return dim
        for known, var in own.items():
            if tvm.sym.Analyzer().can_prove_equal(known, dim):
                return var
        own[dim] = tirx.Var(f"n{len(own)}", "int64")
        return own[dim]

    return size


def _assert_room(length: Any, count: Any, capacity: Any, only_first: bool) -> None:
    if only_first:
        with T.Assert(length == i64(0), _NOT_EMPTY, "ValueError"):
            pass
    # Before any row is written or read: the attention would go on behind the cache.
    fits = length + count <= capacity
    with T.Assert(tirx.And(length >= i64(0), fits), _FULL, "ValueError"):
        pass
