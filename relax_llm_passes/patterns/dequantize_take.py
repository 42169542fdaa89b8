"""Recognise rows looked up in a table that is unpacked whole before: quantised embeddings.

    table = call_tir(dequantize, (packed, scale)); rows = take(table, ids, axis=0)

The composite's contract::

    kind "dequantize_take"; roles "packed" (V, words), "scale" (V, groups), "ids" (any shape);
    output "out" (ids' shape, columns)
    attrs  bits, group, max_int, packed_dtype, scale_dtype as of `patterns.dequantize`; mode, what
           `take` does with an index outside of the table: "fast" (undefined) or "clip"
"""

from __future__ import annotations

from tvm import relax

from ..dataflow import FunctionView
from ..outline import Region
from ..report import Refusal
from .dequantize import find_dequantize

__all__ = ["KIND", "find_dequantize_take"]

KIND = "dequantize_take"


def find_dequantize_take(view: FunctionView) -> list[Region | Refusal]:
    """Return a region for each lookup in a table that nothing else reads."""
    found: list[Region | Refusal] = []
    for binding in view.bindings:
        value = getattr(binding, "value", None)
        if not isinstance(value, relax.Call) or getattr(value.op, "name", "") != "relax.take":
            continue
        found += _region(view, binding.var, value)
    return found


def _region(view: FunctionView, var: relax.Var, take: relax.Call) -> list[Region | Refusal]:
    table = view.resolve(take.args[0])
    if not isinstance(table, relax.Var) or view.index(table) < 0:
        return []
    packed = find_dequantize(view, table, transposed=True)
    if packed is None:
        return []
    if isinstance(packed, Refusal):
        return [Refusal(packed.reason, KIND, view.name, str(var.name))]

    def refuse(reason: str) -> list[Region | Refusal]:
        return [Refusal(reason, KIND, view.name, str(var.name))]

    axis, mode = take.attrs.axis, str(take.attrs.mode)
    if axis is None or int(axis) != 0:
        return refuse(f"take along axis {axis} of a dequantised table, expected rows (axis 0)")
    if mode not in ("fast", "clip"):
        return refuse(f"take of mode {mode!r}, expected 'fast' or 'clip'")
    if view.is_output(table) or len(view.users(table)) != 1:
        return refuse("the dequantised table is read by others too, so that it is made anyway")
    roles = {"packed": packed.packed, "scale": packed.scale, "ids": view.resolve(take.args[1])}
    attrs = {key: value for key, value in packed.attrs.items() if key != "layout"}
    return [Region(KIND, [table, var], roles, {"out": var}, {**attrs, "mode": mode})]
