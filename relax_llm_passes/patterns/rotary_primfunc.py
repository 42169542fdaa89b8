"""Recognise a rotary embedding that a module carries as a PrimFunc, alone or with the split of QKV.

Read by structure: what each output stores decides, names and parameter order play no part. Expected
are loops over (..., rows, heads, depth) and, for each output, stores that are copies of an input or

    out[.., s, h, d] = x[.., s, h + first, d] * cos(a) + x[.., s, h + first, pair(d)] * +-sin(a)

with an angle a(s, d) that does not depend on the head: from position ids or offsets, scaled in any
way. Which depth pairs with which is read element by element, as for graphs (`rotary.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx

from ..kernels.scalar_expr import (
    TensorLoad,
    any_node,
    bound_analyzer,
    buffer_loads,
    call_name,
    depends_on,
    i64,
    rewrite,
    substitute,
)
from ..report import Refusal
from .rotary import Rotary, classify_rotary, rotary_factors

__all__ = ["RotaryKernel", "RotaryOutput", "find_rotary_primfunc"]

KIND = "rotary"


class _No(Exception):
    """No rotary; `near` when it has the sines of one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class RotaryOutput:
    """One output of the PrimFunc.

    Attributes
    ----------
    param : int
        Which parameter it is.
    source : int
        Parameter that it is read from.
    first, count : int or None
        Heads of the source that it holds; None for all of them.
    rotary : Rotary or None
        How it turns; None for a copy.
    """

    param: int
    source: int
    first: int | None
    count: int | None
    rotary: Rotary | None


@dataclass
class RotaryKernel:
    """A PrimFunc that turns some of its outputs.

    Attributes
    ----------
    outputs : list of RotaryOutput
        In the order of the parameters.
    rank : int; head_axis : int
        Of the tensors: axes (..., rows, heads, depth) in any order, depth last.
    angle : expression over axes
        In radians.
    factor : float
        What both tables are multiplied by.
    axes : list of Var
        The loop variables of the axes.
    inputs : list of int
        Parameters that `angle` reads.
    """

    outputs: list[RotaryOutput]
    rank: int
    head_axis: int
    angle: Any
    factor: float
    axes: list[Any]
    inputs: list[int]


@dataclass
class _Store:
    buffer: Any
    indices: list[Any]
    value: Any
    conditions: list[Any]


def _inline(expr: Any) -> Any:
    """Replace every Let by its body with the value in it."""

    def visit(node: Any) -> Any:
        if isinstance(node, tirx.Let):
            return _inline(substitute(node.body, {node.var: node.value}))
        return None

    return rewrite(expr, visit)


def _collect(func: tirx.PrimFunc) -> tuple[list[_Store], dict[Any, Any]]:
    stores: list[_Store] = []
    extents: dict[Any, Any] = {}

    def walk(stmt: Any, conditions: list[Any], values: dict[Any, Any]) -> None:
        if isinstance(stmt, tirx.For):
            if not (isinstance(stmt.min, tirx.IntImm) and int(stmt.min.value) == 0):
                raise _No("a loop does not start at 0")
            extents[stmt.loop_var] = stmt.extent
            walk(stmt.body, conditions, values)
        elif isinstance(stmt, tirx.SeqStmt):
            inner = dict(values)
            for each in stmt:
                if isinstance(each, tirx.Bind):
                    inner[each.var] = substitute(each.value, inner)
                else:
                    walk(each, conditions, inner)
        elif isinstance(stmt, tirx.IfThenElse):
            condition = substitute(stmt.condition, values)
            walk(stmt.then_case, [*conditions, condition], values)
            if stmt.else_case is not None:
                walk(stmt.else_case, [*conditions, tirx.Not(condition)], values)
        elif isinstance(stmt, s_tir.SBlockRealize):
            block = stmt.block
            if block.match_buffers or block.init is not None:
                raise _No("a block with buffers of its own")
            inner = dict(values)
            for iv, value in zip(block.iter_vars, stmt.iter_values, strict=True):
                inner[iv.var] = substitute(value, values)
            held = [] if _is_true(stmt.predicate) else [substitute(stmt.predicate, values)]
            walk(block.body, [*conditions, *held], inner)
        elif isinstance(stmt, tirx.BufferStore):
            indices = [substitute(i, values) for i in stmt.indices]
            value = _inline(substitute(stmt.value, values))
            stores.append(_Store(stmt.buffer, indices, value, conditions))
        else:
            raise _No(f"a {type(stmt).__name__}")

    walk(func.body, [], {})
    return stores, extents


def _is_true(expr: Any) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr.value) == 1


def find_rotary_primfunc(func: tirx.PrimFunc, name: str = "") -> RotaryKernel | Refusal | None:
    """Return what a PrimFunc turns, a Refusal for a near miss, or None for anything else."""
    params = list(func.params)
    try:
        stores, extents = _collect(func)
        if not any(any_node(s.value, _is_sine) for s in stores):
            return None
    except (_No, AttributeError, TypeError, ValueError):
        return None  # statements that no rotary has
    try:
        return _read(params, stores, extents)
    except _No as no:
        return Refusal(no.reason, KIND, name)


def _is_sine(node: Any) -> bool:
    return call_name(node) in ("cos", "sin")


def _read(params: list[Any], stores: list[_Store], extents: dict[Any, Any]) -> RotaryKernel:
    def number(buffer: Any) -> int:
        for i, param in enumerate(params):
            if param.same_as(buffer):
                return i
        raise _No("a buffer that is no parameter")

    axes = _axes(stores, extents)
    angles: list[Any] = []
    factors: list[float] = []
    outputs = []
    head = None
    for store in stores:
        axis, first, count = _slice(store, axes, extents)
        if axis is not None:
            if head is not None and head != axis:
                raise _No("outputs are cut along different axes")
            head = axis
        outputs.append((store, first, count))
    if head is None:
        head = len(axes) - 2
    found = []
    for store, first, count in outputs:
        rotary, source = _turned(store, axes, head, extents, angles, factors)
        found.append(RotaryOutput(number(store.buffer), number(source), first, count, rotary))
    if len({o.param for o in found}) != len(found):
        raise _No("an output is stored twice")
    if not angles:
        raise _No("no output turns")
    if len({round(f, 12) for f in factors}) != 1:
        raise _No("tables of different size in one function")
    angle = angles[0]
    if not all(tvm_ffi.structural_equal(a, angle) for a in angles):
        raise _No("more than one angle")
    if depends_on(angle, axes[head]):
        raise _No("the angle depends on the head")
    inputs = sorted({number(load.source) for load in buffer_loads(angle)})
    found.sort(key=lambda o: o.param)
    return RotaryKernel(found, len(axes), head, angle, factors[0], axes, inputs)


def _axes(stores: Sequence[_Store], extents: dict[Any, Any]) -> list[Any]:
    """Return the loop variable of each axis of the outputs."""
    axes = None
    for store in stores:
        mine = []
        for index in store.indices:
            names = [v for v in extents if depends_on(index, v)]
            if len(names) != 1:
                raise _No("an output index that is not one loop and an offset")
            mine.append(names[0])
        if axes is not None and not all(a.same_as(b) for a, b in zip(axes, mine, strict=True)):
            raise _No("outputs with different layouts")
        axes = mine
    if axes is None or len(axes) < 2 or len(set(axes)) != len(axes):
        raise _No("outputs with fewer than two axes")
    return axes


def _slice(
    store: _Store, axes: list[Any], extents: dict[Any, Any]
) -> tuple[int | None, int | None, int | None]:
    """Return (axis, first, count) of the part of the loops that a store covers."""
    analyzer = bound_analyzer({})
    found: tuple[int | None, int | None, int | None] = (None, None, None)
    for axis, (index, var) in enumerate(zip(store.indices, axes, strict=True)):
        offset = analyzer.simplify(var - index)
        if not isinstance(offset, tirx.IntImm):
            raise _No("an output index that is not one loop and an offset")
        conditions = [c for c in store.conditions if depends_on(c, var)]
        if not conditions and int(offset.value) == 0:
            continue
        extent = extents[var]
        if not isinstance(extent, tirx.IntImm):
            raise _No("a condition on an axis of unknown size")
        inside = [
            n
            for n in range(int(extent.value))
            if all(_holds(c, var, n, analyzer) for c in conditions)
        ]
        if not inside or inside != list(range(inside[0], inside[-1] + 1)):
            raise _No("an output holds heads that are not in a row")
        if int(offset.value) != inside[0] or found[0] is not None:
            raise _No("an output that does not begin at its first head")
        found = (axis, inside[0], len(inside))
    known = sum(1 for c in store.conditions if any(depends_on(c, v) for v in axes))
    if known != len(store.conditions):
        raise _No("a condition on something else than the loops")
    return found


def _holds(condition: Any, var: Any, value: int, analyzer: Any) -> bool:
    fixed = substitute(condition, {var: tirx.IntImm(str(var.ty.dtype), value)})
    answer = analyzer.simplify(fixed)
    if not isinstance(answer, tirx.IntImm):
        raise _No("a condition that depends on more than one loop")
    return bool(int(answer.value))


def _turned(
    store: _Store,
    axes: list[Any],
    head: int,
    extents: dict[Any, Any],
    angles: list[Any],
    factors: list[float],
) -> tuple[Rotary | None, Any]:
    value, depth = store.value, axes[-1]
    loads = buffer_loads(value)
    if not any_node(value, _is_sine):
        inner = value.value if isinstance(value, tirx.Cast) else value
        if len(loads) != 1 or not isinstance(inner, TensorLoad) or not _in_place(inner, axes):
            raise _No("an output that is neither a copy nor a rotation")
        return None, inner.source
    tables = {n: tirx.decl_buffer([i64(1)], "float32", name=n) for n in ("cos", "sin")}

    def table(node: Any) -> Any:
        if not _is_sine(node):
            return None
        angles.append(node.args[0])
        return tables[call_name(node)][i64(0)]

    plain = rewrite(value, table)
    extent = extents[depth]
    if not isinstance(extent, tirx.IntImm) or int(extent.value) % 2:
        raise _No(f"a head of {extent} elements")
    size = int(extent.value)
    answer = classify_rotary(plain, depth, size, [axes[head]], {})
    if isinstance(answer, str):
        raise _No(answer)
    rotary, source, used = answer
    if not {t for t in used} <= set(tables.values()):
        raise _No("turned by something else than a cosine and a sine")
    for number in range(rotary.rotary_dim):
        by_table = rotary_factors(plain, depth, number, source)
        cos, sin = by_table.get(tables["cos"]), by_table.get(tables["sin"])
        if cos is None or sin is None or abs(sin[0]) != cos[0]:
            raise _No("an element is not turned as x * cos +- y * sin")
        if not _same_place(cos[1], axes, number):
            raise _No("the cosine meets another element than the output's own")
        factors.append(cos[0])
    return rotary, source


def _same_place(load: Any, axes: list[Any], number: int) -> bool:
    """Tell whether the element that meets the cosine is the output's own."""
    analyzer = bound_analyzer({})
    wanted = [*axes[:-1], i64(number)]
    return all(
        isinstance(gap, tirx.IntImm) and int(gap.value) == 0
        for gap in (analyzer.simplify(i64(a) - i64(b)) for a, b in zip(load.indices, wanted,
                                                                      strict=True))
    )  # fmt: skip


def _in_place(load: Any, axes: list[Any]) -> bool:
    return len(load.indices) == len(axes) and all(
        isinstance(i, tirx.Var) and i.same_as(a) for i, a in zip(load.indices, axes, strict=True)
    )
