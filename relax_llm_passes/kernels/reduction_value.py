"""The expressions of a PrimFunc in the accumulator type, over register values and row scalars.

Also where the numbers are repaired: a mean that is subtracted from what it is the mean of becomes
two subtractions (of a rounded mean, then of the rest), and E[x*x] - E[x]**2 becomes the variance of
the second pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.ir import Call, TensorLoad
from tvm_ffi import structural_equal

from .linear_index import polynomial
from .norm_ops import count_of
from .norm_program import RowProgram, Stage
from .scalar_expr import rewrite

__all__ = ["Lowerer"]

_ARITH = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max)
_COMPARE = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)
_LOGIC = (tirx.And, tirx.Or)
_CALLS = (
    "tanh",
    "log",
    "log2",
    "log1p",
    "pow",
    "fabs",
    "erf",
    "exp2",
    "floor",
    "ceil",
    "cos",
    "sin",
)


def _all_of(lowered: list[Any]) -> Any:
    """The stage's values, all from the same element."""
    return lambda v, s: [f(v, [], s) for f in lowered]


class Lowerer:
    """Lowers the values of one PrimFunc; see `reduction.read_program`."""

    def __init__(self, reader: Any, kept: list[Any], late: list[Any], row: Any) -> None:
        self.reader, self.kept, self.late, self.row = reader, kept, late, row
        self.functions = reader.functions
        self.acc = "float32"
        self.position: dict[Any, int] = {}  # row scalar -> index in the program's scalars
        self.rules: list[Callable[[Any], Any | None]] = []
        self.slots: dict[Any, tuple[bool, int]] = {}

    def unreadable(self, reason: str) -> Exception:
        from .reduction_nest import Unreadable

        return Unreadable(reason)

    # Stages

    def stages(self, stages: list[tuple[Any, ...]], program: RowProgram) -> list[Stage]:
        """Return the program's stages."""
        self.count = count_of(program.length, self.acc)
        self.length = program.length
        out: list[Stage] = []
        index = 0
        k = 0
        while k < len(stages):
            combine, values, buffers, kind = stages[k]
            if kind == "moments":
                out += self._moments(values[0], index, buffers[0], buffers[1], None)
                self._maybe_split(stages, k, program, values[0])
                index += 3
                k += 1
                continue
            if k + 1 < len(stages) and self._is_two_pass(stages[k], stages[k + 1]):
                out += self._moments(values[0], index, buffers[0], None, stages[k + 1][2][0])
                self._maybe_split(stages, k + 1, program, values[0])
                index += 3
                k += 2
                continue
            for j, b in enumerate(buffers):
                self.position[self.reader._scalar(b)] = index + j
            lowered = [self.value(v) for v in values]
            out.append(
                Stage(
                    tuple(combine),
                    _all_of(lowered),
                    lambda r, s: list(r),
                )
            )
            index += len(buffers)
            k += 1
        return out

    def _maybe_split(self, stages: list[Any], k: int, program: RowProgram, x: Any) -> None:
        """A program that is nothing but moments of one tensor can be split over blocks."""
        while isinstance(x, tirx.Cast):
            x = x.value
        only = len(stages) == k + 1 and len(self.kept) == 1 and len(self.position) == 3
        if only and isinstance(x, TensorLoad):
            program.moments = True

    def _is_two_pass(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
        if tuple(first[0]) != ("sum",) or tuple(second[0]) != ("sum",):
            return False
        value = second[1][0]
        if isinstance(value, Call) and getattr(value.op, "name", "") == "tirx.pow":
            base, exponent = value.args
            if float(getattr(exponent, "value", 0)) != 2.0:
                return False
            value = tirx.Mul(base, base)
        if not isinstance(value, tirx.Mul) or not structural_equal(value.a, value.b):
            return False
        diff = value.a
        return (
            isinstance(diff, tirx.Sub)
            and bool(structural_equal(diff.a, first[1][0]))
            and self._is_mean(diff.b, self.reader._scalar(first[2][0]))
        )

    def _is_mean(self, expr: Any, total: Any) -> bool:
        """Whether `expr` is total / length."""
        if isinstance(expr, tirx.Div):
            return expr.a.same_as(total) and self._is_length(expr.b)
        if isinstance(expr, tirx.Mul):
            for a, b in ((expr.a, expr.b), (expr.b, expr.a)):
                if (
                    a.same_as(total)
                    and isinstance(b, tirx.FloatImm)
                    and isinstance(self.length, int)
                ):
                    return abs(float(b.value) * self.length - 1) < 1e-6
        return False

    def _is_length(self, expr: Any) -> bool:
        """Whether a float expression is the row's length: a constant, or a product of sizes."""
        names = self.reader.names
        want = polynomial(self.length, names, {})
        got = self._whole(expr, names)
        return want is not None and got is not None and (got + (-want)).terms == {}

    def _whole(self, expr: Any, names: list[Any]) -> Any:
        if isinstance(expr, (tirx.FloatImm, tirx.IntImm)):
            value = float(expr.value)
            return polynomial(int(value), names, {}) if value == int(value) else None
        if isinstance(expr, tirx.Cast):
            inner = expr.value
            if "int" in str(inner.ty.dtype):
                return polynomial(inner, names, {})
            return self._whole(inner, names)
        if isinstance(expr, tirx.Mul):
            a, b = self._whole(expr.a, names), self._whole(expr.b, names)
            return None if a is None or b is None else a * b
        return None

    def _moments(
        self, x: Any, index: int, total: Any, squares: Any, deviations: Any
    ) -> list[Stage]:
        """Two stages for mean and variance; later uses of the sums are rewritten."""
        rough, rest, var = (tirx.Var(n, "float32") for n in ("rough", "rest", "variance"))
        s1 = self.reader._scalar(total)
        for j, v in enumerate((rough, rest, var)):
            self.position[v] = index + j
        count = self.count

        def rule(e: Any) -> Any | None:
            if isinstance(e, tirx.Sub):
                if squares is not None and self._is_variance(e, s1, self.reader._scalar(squares)):
                    return var
                if self._is_mean(e.b, s1):
                    return (self._to_acc(e.a) - rough) - rest
            if isinstance(e, tirx.Var):
                if e.same_as(s1):
                    return (rough + rest) * count
                if squares is not None and e.same_as(self.reader._scalar(squares)):
                    mean = rough + rest
                    return (var + mean * mean) * count
                if deviations is not None and e.same_as(self.reader._scalar(deviations)):
                    return var * count
            return None

        lowered = self.value(x)
        self.rules.append(rule)
        zero = tirx.const(0, self.acc)

        def second(v: list[Any], s: list[Any]) -> list[Any]:
            d = lowered(v, [], s) - s[index]
            return [d, d * d]

        return [
            Stage(("sum",), lambda v, s: [lowered(v, [], s)], lambda r, s: [r[0] / count]),
            Stage(
                ("sum", "sum"),
                second,
                lambda r, s: [
                    r[0] / count,
                    tirx.max((r[1] - r[0] * (r[0] / count)) / count, zero),
                ],
            ),
        ]

    def _to_acc(self, expr: Any) -> Any:
        """The operand of a rewritten subtraction, marked so that types agree until lowering."""
        return expr if str(expr.ty.dtype) == self.acc else tirx.Cast(self.acc, expr)

    def _is_variance(self, e: Any, s1: Any, s2: Any) -> bool:
        if not self._is_mean(e.a, s2) or not isinstance(e.b, tirx.Mul):
            return False
        return self._is_mean(e.b.a, s1) and self._is_mean(e.b.b, s1)

    # Values

    def result(self, expr: Any, per_row: bool) -> Callable[..., Any]:
        """Return the store's value: (vals, late, scalars), or (scalars) for one value per row."""
        lowered = self.value(expr)
        if per_row:
            return lambda scalars: lowered([], [], scalars)
        return lowered

    def value(self, expr: Any) -> Callable[[list[Any], list[Any], list[Any]], Any]:
        """Return a function of kept values, late values and scalars that builds `expr`."""

        def apply(e: Any) -> Any | None:
            for rule in self.rules:
                new = rule(e)
                if new is not None:
                    return rewrite(new, apply) if not isinstance(e, tirx.Var) else new
            return None

        expr = rewrite(expr, apply) if self.rules else expr
        self._check(expr)

        def build(vals: list[Any], late: list[Any], scalars: list[Any]) -> Any:
            return self._build(expr, vals, late, scalars)

        return build

    def _slot(self, load: Any) -> tuple[bool, int]:
        if load not in self.slots:
            from .reduction import _equal_strides

            strides = self.reader.strides(load.source, load.indices)
            for where, is_kept in ((self.kept, True), (self.late, False)):
                for i, (src, s) in enumerate(where):
                    if src.same_as(load.source) and _equal_strides(s, strides):
                        self.slots[load] = (is_kept, i)
                        return self.slots[load]
            raise self.unreadable("an access that was not planned")
        return self.slots[load]

    def _check(self, expr: Any) -> None:
        """Raise for what `_build` has no form of, before anything is emitted."""
        if isinstance(expr, TensorLoad):
            if str(expr.ty.dtype) not in ("float16", "bfloat16", "float32"):
                raise self.unreadable(f"a tensor of {expr.ty.dtype}")
            self._slot(expr)
            return
        if isinstance(expr, (*_ARITH, *_COMPARE, *_LOGIC)):
            self._check(expr.a)
            self._check(expr.b)
            return
        if isinstance(expr, tirx.Not):
            self._check(expr.a)
            return
        if isinstance(expr, tirx.Cast):
            if "float" not in str(expr.ty.dtype):
                raise self.unreadable(f"a cast to {expr.ty.dtype}")
            self._check(expr.value)
            return
        if isinstance(expr, tirx.Select):
            for e in (expr.condition, expr.true_value, expr.false_value):
                self._check(e)
            return
        if isinstance(expr, Call):
            name = getattr(expr.op, "name", "").rsplit(".", 1)[-1]
            if name not in ("exp", "sqrt", "rsqrt", "sigmoid", "if_then_else", *_CALLS):
                raise self.unreadable(f"a call of {name or 'a function'}")
            for e in expr.args:
                self._check(e)
            return
        if isinstance(expr, (tirx.FloatImm, tirx.IntImm)):
            return
        if isinstance(expr, tirx.Var):
            if expr in self.position:
                return
            if "int" in str(expr.ty.dtype) and expr not in self.row.extents:
                return  # a size
        raise self.unreadable(f"an expression of kind {type(expr).__name__}")

    def _build(self, e: Any, vals: list[Any], late: list[Any], scalars: list[Any]) -> Any:
        def go(x: Any) -> Any:
            return self._build(x, vals, late, scalars)

        if isinstance(e, TensorLoad):
            is_kept, i = self._slot(e)
            return vals[i] if is_kept else late[i]
        if isinstance(e, tirx.Var):
            if e in self.position:
                return scalars[self.position[e]]
            return tirx.Cast(self.acc, e)
        if isinstance(e, (tirx.FloatImm, tirx.IntImm)):
            if str(e.ty.dtype) == "bool":
                return e
            return tirx.const(float(e.value), self.acc)
        if isinstance(e, (*_ARITH, *_COMPARE, *_LOGIC)):
            return type(e)(go(e.a), go(e.b))
        if isinstance(e, tirx.Not):
            return tirx.Not(go(e.a))
        if isinstance(e, tirx.Cast):
            inner = go(e.value)
            return inner if str(inner.ty.dtype) == self.acc else tirx.Cast(self.acc, inner)
        if isinstance(e, tirx.Select):
            return tirx.Select(go(e.condition), go(e.true_value), go(e.false_value))
        name = e.op.name.rsplit(".", 1)[-1]
        args = [go(a) for a in e.args]
        if name == "exp":
            return self.functions.exp(args[0])
        if name == "sigmoid":
            return self.functions.sigmoid(args[0])
        if name == "rsqrt":
            return tirx.const(1, self.acc) / tirx.sqrt(args[0])
        if name == "if_then_else":
            return tirx.Select(*args)
        if name == "pow" and isinstance(e.args[1], tirx.FloatImm) and float(e.args[1].value) == 2.0:
            return args[0] * args[0]
        return tirx.call_intrin(self.acc, e.op, *args)
