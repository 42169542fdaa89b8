"""Small tools on scalar TIR expressions: rewriting, questions about them, and a vectorisable exp.

The wheel's Python package has no expression substitution, and kernels here are put together from
expressions over canonical indices (see `attention_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.sym import Analyzer

from ..expressions import VAR_TYPES

__all__ = [
    "TensorLoad",
    "any_node",
    "as_float32",
    "bound_analyzer",
    "buffer_loads",
    "call_name",
    "depends_on",
    "dtype_of",
    "exp_nonpositive",
    "i64",
    "is_float",
    "rewrite",
    "substitute",
    "widened",
]

_BINARY = (
    tirx.Add,
    tirx.Sub,
    tirx.Mul,
    tirx.Div,
    tirx.Mod,
    tirx.FloorDiv,
    tirx.FloorMod,
    tirx.Min,
    tirx.Max,
    tirx.EQ,
    tirx.NE,
    tirx.LT,
    tirx.LE,
    tirx.GT,
    tirx.GE,
    tirx.And,
    tirx.Or,
    tirx.BitwiseAnd,
    tirx.BitwiseOr,
    tirx.BitwiseXor,
    tirx.LShift,
    tirx.RShift,
)
_UNARY = (tirx.Not, tirx.BitwiseNot)


def i64(value: Any) -> Any:
    """Return `value` as an int64 expression (integers become constants, int32 is widened)."""
    if isinstance(value, int):
        return tirx.IntImm("int64", value)
    if isinstance(value, tirx.IntImm):
        return tirx.IntImm("int64", int(value.value))
    return value if dtype_of(value) == "int64" else tirx.Cast("int64", value)


def widened(expr: Any) -> Any:
    """Return an integer expression with its arithmetic in int64, so that it can be simplified.

    Equal to `expr` unless that overflows: positions and lengths do not.
    """
    if isinstance(expr, (tirx.Add, tirx.Sub, tirx.Mul)):
        return type(expr)(widened(expr.a), widened(expr.b))
    if isinstance(expr, tirx.Cast) and "int" in dtype_of(expr.value):
        return widened(expr.value)
    return i64(expr)


def dtype_of(expr: Any) -> str:
    """Return the dtype of a scalar expression."""
    return str(expr.ty.dtype)


def call_name(expr: Any) -> str:
    """Return the name of the operator that a call expression calls ("tanh"), else ""."""
    if not isinstance(expr, tvm.ir.Call):
        return ""
    return str(getattr(expr.op, "name", "")).rsplit(".", 1)[-1]


def is_float(dtype: str) -> bool:
    """Tell whether a dtype is a floating-point one."""
    return "float" in dtype


def as_float32(expr: Any) -> Any:
    """Return the expression in float32: the dtype in which attention kernels compute."""
    return expr if dtype_of(expr) == "float32" else tirx.Cast("float32", expr)


# The fields that hold a node's children. TVM's classes answer isinstance slowly, and these walks
# are most of a recogniser's time: each class is asked once.
_FIELDS: dict[type, tuple[str, ...]] = {}


def _fields(expr: Any) -> tuple[str, ...]:
    found = _FIELDS.get(type(expr))
    if found is None:
        if isinstance(expr, _BINARY):
            found = ("a", "b")
        elif isinstance(expr, _UNARY):
            found = ("a",)
        elif isinstance(expr, tirx.Cast):
            found = ("value",)
        elif isinstance(expr, tirx.Select):
            found = ("condition", "true_value", "false_value")
        elif isinstance(expr, TensorLoad):
            found = ("indices",)
        elif isinstance(expr, tirx.Let):
            found = ("value", "body")
        elif isinstance(expr, tvm.ir.Call):
            found = ("args",)
        else:
            found = ()
        _FIELDS[type(expr)] = found
    return found


def _children(expr: Any) -> list[Any]:
    fields = _fields(expr)
    if fields == ("indices",) or fields == ("args",):
        return getattr(expr, fields[0])[:]
    return [getattr(expr, name) for name in fields]


def _rebuild(expr: Any, children: list[Any]) -> Any:
    fields = _fields(expr)
    if fields == ("value",):
        return tirx.Cast(dtype_of(expr), children[0])
    if fields == ("indices",):
        return tirx.BufferLoad(expr.source, children)
    if fields == ("value", "body"):
        return tirx.Let(expr.var, *children)
    if fields == ("args",):
        return tirx.call_intrin(dtype_of(expr), expr.op, *children)
    return type(expr)(*children)


def rewrite(expr: Any, replace: Callable[[Any], Any | None]) -> Any:
    """Return `expr` with every node for which `replace` gives something replaced, top down."""
    memo: dict[Any, Any] = {}

    def visit(node: Any) -> Any:
        if isinstance(node, (tirx.IntImm, tirx.FloatImm)):
            # Not remembered: constants of other dtypes are equal as keys.
            fresh = replace(node)
            return node if fresh is None else fresh
        if node in memo:
            return memo[node]
        new = replace(node)
        if new is None:
            old = _children(node)
            parts = [visit(c) for c in old]
            same = all(a is b or a.same_as(b) for a, b in zip(old, parts, strict=True))
            new = node if same else _rebuild(node, parts)
        memo[node] = new
        return new

    return visit(expr)


def substitute(expr: Any, values: Mapping[Any, Any]) -> Any:
    """Return `expr` with variables replaced (keys are `tirx.Var`, values are expressions)."""
    if not values:
        return expr
    return rewrite(expr, lambda n: values.get(n) if type(n) in VAR_TYPES else None)


def any_node(expr: Any, test: Callable[[Any], bool]) -> bool:
    """Tell whether `test` holds for `expr` or for any expression inside it."""
    stack, seen = [expr], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if test(node):
            return True
        stack.extend(_children(node))
    return False


def depends_on(expr: Any, *variables: Any) -> bool:
    """Tell whether any of the variables occurs in `expr`."""
    return any_node(expr, lambda n: type(n) in VAR_TYPES and any(n.same_as(v) for v in variables))


def buffer_loads(expr: Any) -> list[Any]:
    """Return the buffer loads in `expr`, outermost first, each once."""
    found: list[Any] = []

    def note(node: Any) -> bool:
        if _fields(node) == ("indices",):
            found.append(node)
        return False

    any_node(expr, note)
    return found


def bound_analyzer(ranges: Mapping[Any, Any]) -> Analyzer:
    """Return an analyzer that knows `0 <= var < extent` for each variable of `ranges`."""
    analyzer = Analyzer()
    for var, extent in ranges.items():
        analyzer.bind(var, tvm.ir.Range(i64(0), i64(extent)))
    return analyzer


# exp(r) on |r| <= ln(2)/2 as 1 + r + r^2 p(r): Cephes' single-precision coefficients.
_EXP_POLY = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # 10 bits: n * _LN2_HIGH is exact for |n| <= 2^13
_LN2_LOW = -2.12194440e-4
_UNDERFLOW = -87.0


def exp_nonpositive(x: Any) -> Any:
    """Return exp(x) for float32 x <= 0 as plain arithmetic, which LLVM vectorises.

    Accurate to 1e-7 relative; 0 below -87 (where float32 is nearly subnormal) and at -inf; NaN
    stays NaN. `llvm.exp` on a vector becomes one libm call for each lane.
    """

    def const(value: float) -> Any:
        return tirx.FloatImm("float32", value)

    argument = tirx.Var("x", "float32")
    clamped = tirx.Var("clamped", "float32")
    n = tirx.Var("n", "float32")
    r = tirx.Var("r", "float32")
    p = const(_EXP_POLY[0])
    for c in _EXP_POLY[1:]:
        p = p * r + const(c)
    mantissa = p * r * r + r + const(1.0)
    bits = tirx.shift_left(
        tirx.Cast("int32", n) + tirx.IntImm("int32", 127), tirx.IntImm("int32", 23)
    )
    scale = tirx.call_intrin("float32", "tirx.reinterpret", bits)
    value = tirx.Select(argument < const(_UNDERFLOW), const(0.0), mantissa * scale)
    value = tirx.Let(r, clamped - n * const(_LN2_HIGH) - n * const(_LN2_LOW), value)
    value = tirx.Let(n, tirx.floor(clamped * const(_LOG2_E) + const(0.5)), value)
    # Max(const, x) keeps a NaN in x, Max(x, const) would not.
    value = tirx.Let(clamped, tirx.Max(const(_UNDERFLOW), argument), value)
    return tirx.Let(argument, x, value)
