"""Loop nests of a PrimFunc as equations: what each block computes, over which axes, how reduced.

One loop nest with one block becomes one `Nest`. `reduction` puts them together; whatever does not
fit is declined with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad
from tvm_ffi import structural_equal

from .scalar_expr import substitute

__all__ = ["Nest", "Unreadable", "is_one", "read_nests"]


class Unreadable(Exception):
    """The PrimFunc is no row program; says why."""


@dataclass
class Nest:
    """One loop nest: `buffers[i][indices] = values[i]`, reduced when `combine` is set."""

    iters: list[Any]  # tirx.Var, spatial first in the order of the block
    extents: dict[Any, Any]
    reduce: list[Any]
    buffers: list[Any]
    indices: list[Any]
    values: list[Any]
    combine: tuple[str, ...] = ()


def is_one(extent: Any) -> bool:
    """Whether an extent is known to be 1."""
    return isinstance(extent, tirx.IntImm) and int(extent.value) == 1


def read_nests(func: tirx.PrimFunc) -> list[Nest]:
    """Return the loop nests of a PrimFunc in order; raises Unreadable."""
    body = func.body
    if not isinstance(body, s_tir.SBlockRealize):
        raise Unreadable("the body is no block")
    root = body.block
    if root.iter_vars or root.match_buffers or root.init is not None:
        raise Unreadable("the root block has iteration variables")
    inner = root.body
    nests = list(inner) if isinstance(inner, tirx.SeqStmt) else [inner]
    return [_parse_nest(n) for n in nests]


def _parse_nest(stmt: Any) -> Nest:
    loops: dict[Any, Any] = {}
    while isinstance(stmt, tirx.For):
        if stmt.kind != tirx.ForKind.SERIAL or stmt.thread_binding is not None:
            raise Unreadable("a loop is scheduled already")
        if not (isinstance(stmt.min, tirx.IntImm) and int(stmt.min.value) == 0):
            raise Unreadable("a loop does not start at 0")
        loops[stmt.loop_var] = stmt.extent
        stmt = stmt.body
    if not isinstance(stmt, s_tir.SBlockRealize):
        raise Unreadable("a loop nest without a single block")
    if not (isinstance(stmt.predicate, tirx.IntImm) and int(stmt.predicate.value) == 1):
        raise Unreadable("a block has a predicate")
    block = stmt.block
    if block.alloc_buffers or block.match_buffers:
        raise Unreadable("a nested block")
    iters, reduce, extents = [], [], {}
    for iv, value in zip(block.iter_vars, stmt.iter_values, strict=True):
        whole = (
            isinstance(value, tirx.Var)
            and value in loops
            and structural_equal(loops[value], iv.dom.extent)
        ) or (is_one(iv.dom.extent) and isinstance(value, tirx.IntImm))
        if not whole:
            raise Unreadable("a block's axis is no whole loop")
        extents[iv.var] = iv.dom.extent
        kind = int(iv.iter_type)
        if kind == int(tirx.IterVar.CommReduce):
            reduce.append(iv.var)
        elif kind == int(tirx.IterVar.DataPar):
            iters.append(iv.var)
        else:
            raise Unreadable("an axis is neither spatial nor reduced")
    stores: list[Any] = []
    lets: dict[Any, Any] = {}
    stmts = list(block.body) if isinstance(block.body, tirx.SeqStmt) else [block.body]
    for s in stmts:
        if isinstance(s, tirx.Bind):
            lets[s.var] = substitute(s.value, lets) if lets else s.value
        elif isinstance(s, tirx.BufferStore):
            stores.append(s)
        else:
            raise Unreadable(f"a {type(s).__name__} in a block")
    values = [substitute(s.value, lets) if lets else s.value for s in stores]
    found = Nest(
        iters,
        extents,
        reduce,
        [s.buffer for s in stores],
        [list(s.indices) for s in stores],
        values,
    )
    if block.init is None:
        if reduce or len(stores) != 1:
            raise Unreadable("a reduction without an initial value")
        return found
    if not reduce:
        raise Unreadable("an initial value without a reduced axis")
    init = list(block.init) if isinstance(block.init, tirx.SeqStmt) else [block.init]
    if len(init) != len(stores):
        raise Unreadable("as many initial values as results are expected")
    combine = []
    for k, (store, start) in enumerate(zip(stores, init, strict=True)):
        if not isinstance(start, tirx.BufferStore) or not start.buffer.same_as(store.buffer):
            raise Unreadable("initial values in another order than results")
        op, value = _combiner(store, values[k])
        if not _neutral(op, start.value):
            raise Unreadable(f"a {op} that does not start at its neutral element")
        combine.append(op)
        values[k] = value
    found.combine = tuple(combine)
    return found


def _combiner(store: Any, value: Any) -> tuple[str, Any]:
    """Split `buf[i] (+|*|max|min) x` into the operation and x."""
    ops = {tirx.Add: "sum", tirx.Mul: "prod", tirx.Max: "max", tirx.Min: "min"}
    op = ops.get(type(value))
    if op is None:
        raise Unreadable("a reduction other than sum, product, maximum and minimum")
    for own, other in ((value.a, value.b), (value.b, value.a)):
        if (
            isinstance(own, TensorLoad)
            and own.source.same_as(store.buffer)
            and all(structural_equal(a, b) for a, b in zip(own.indices, store.indices, strict=True))
        ):
            return op, other
    raise Unreadable("a reduction that does not continue its own result")


def _neutral(op: str, value: Any) -> bool:
    if isinstance(value, Call) and op in ("max", "min"):
        name = getattr(value.op, "name", "")
        return name.endswith(("min_value", "infinity"))
    if not isinstance(value, (tirx.FloatImm, tirx.IntImm)):
        if isinstance(value, tirx.Cast):
            return _neutral(op, value.value)
        return False
    x = float(value.value)
    if op == "sum":
        return x == 0
    if op == "prod":
        return x == 1
    # The lowest value of the dtype, or an infinity.
    return x <= -65504 if op == "max" else x >= 65504
