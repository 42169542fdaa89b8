"""Scalars of element expressions: truth, casts, constants of the dtypes that are computed in."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ..kernels.scalar_expr import as_float32, dtype_of, is_float

__all__ = ["Unreadable", "cast", "common", "const_like", "f32", "negate", "to_bool"]


class Unreadable(Exception):
    """An element cannot be written as a scalar expression; says at which variable, and why."""

    def __init__(self, reason: str, expr: Any = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.binding = getattr(expr, "name_hint", None) or getattr(expr, "name", "") or ""


def f32(value: float) -> Any:
    return tirx.FloatImm("float32", value)


def const_like(value: Any, dtype: str) -> Any:
    if dtype == "bool":
        return tirx.IntImm("bool", int(bool(value)))
    if is_float(dtype):
        return f32(float(value))
    return tirx.IntImm(dtype, int(value))


def to_bool(expr: Any) -> Any:
    """Return the truth of a scalar; a choice between constants becomes its condition."""
    if dtype_of(expr) == "bool":
        return expr
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return tirx.IntImm("bool", int(bool(expr.value)))
    if isinstance(expr, tirx.Cast):
        return to_bool(expr.value)
    if isinstance(expr, tirx.Select):
        yes, no = to_bool(expr.true_value), to_bool(expr.false_value)
        if isinstance(yes, tirx.IntImm) and isinstance(no, tirx.IntImm):
            if yes.value == no.value:
                return yes
            return expr.condition if yes.value else negate(expr.condition)
    return tirx.NE(expr, const_like(0, dtype_of(expr)))


def negate(cond: Any) -> Any:
    """Return the opposite of a condition, in its simplest form."""
    opposite = {
        tirx.LT: tirx.GE, tirx.GE: tirx.LT, tirx.GT: tirx.LE,
        tirx.LE: tirx.GT, tirx.EQ: tirx.NE, tirx.NE: tirx.EQ,
    }  # fmt: skip
    if isinstance(cond, tirx.IntImm):
        return tirx.IntImm("bool", 1 - int(cond.value))
    if isinstance(cond, tirx.Not):
        return cond.a
    # For floats not (a < b) is not a >= b when one is NaN.
    if type(cond) in opposite and not is_float(dtype_of(cond.a)):
        return opposite[type(cond)](cond.a, cond.b)
    return tirx.Not(cond)


def cast(expr: Any, dtype: str) -> Any:
    """Return the scalar in `dtype`; every float dtype stands for float32."""
    have = dtype_of(expr)
    if dtype == "bool":
        return to_bool(expr)
    if is_float(dtype):
        if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
            return f32(float(expr.value))
        if have == "bool":
            return tirx.Select(expr, f32(1.0), f32(0.0))
        return as_float32(expr)
    if have == dtype:
        return expr
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(dtype, int(expr.value))
    if have == "bool":
        return tirx.Select(expr, const_like(1, dtype), const_like(0, dtype))
    return tirx.Cast(dtype, expr)


def common(a: Any, b: Any) -> tuple[Any, Any]:
    left, right = dtype_of(a), dtype_of(b)
    if left == right:
        return a, b
    if is_float(left) or is_float(right):
        return cast(a, "float32"), cast(b, "float32")
    wide = "int64" if "int64" in (left, right) else "int32"
    return cast(a, wide), cast(b, wide)
