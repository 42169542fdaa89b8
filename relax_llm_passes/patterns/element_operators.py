"""Elementwise operators on one element: (reader, call, index, var) -> scalar."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import relax, tirx

from ..kernels.scalar_expr import dtype_of, i64, is_float
from .element_layout import broadcast_index
from .element_scalars import Unreadable, cast, common, const_like, negate, to_bool

if TYPE_CHECKING:
    from .elements import ElementReader

__all__ = ["BINARY", "ELEMENTWISE", "UNARY", "float_unary"]


def _elementwise(reader: ElementReader, call: Any, index: list[Any], var: Any) -> list[Any]:
    values = []
    for arg in call.args:
        resolved = reader.view.resolve(arg)
        if not isinstance(getattr(resolved, "ty", None), relax.TensorType):
            values.append(reader.read(resolved, []))  # a plain number (PrimValue)
            continue
        values.append(reader.read(arg, broadcast_index(reader, arg, index, var)))
    return values


def _binary(make: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def handle(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
        a, b = common(*_elementwise(reader, call, index, var))
        return make(a, b)

    return handle


def _logical(make: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def handle(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
        a, b = (to_bool(v) for v in _elementwise(reader, call, index, var))
        for one, other in ((a, b), (b, a)):
            if isinstance(one, tirx.IntImm):
                if make is tirx.And:
                    return other if one.value else one
                return one if one.value else other
        return make(a, b)

    return handle


def _bitwise(logical: Any, integer: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def handle(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
        a, b = _elementwise(reader, call, index, var)
        if dtype_of(a) == "bool" and dtype_of(b) == "bool":
            return logical(a, b)
        return integer(*common(a, b))

    return handle


def _divide(a: Any, b: Any) -> Any:
    # relax.divide of integers is true division only where the importer cast first.
    return tirx.Div(a, b) if is_float(dtype_of(a)) else tirx.floordiv(a, b)


def _power(a: Any, b: Any) -> Any:
    if isinstance(b, (tirx.FloatImm, tirx.IntImm)) and float(b.value) == 2.0:
        return a * a
    return tirx.call_intrin("float32", "tirx.pow", cast(a, "float32"), cast(b, "float32"))


def _unary(make: Callable[[Any], Any]) -> Callable[..., Any]:
    def handle(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
        return make(*_elementwise(reader, call, index, var))

    return handle


def float_unary(make: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return the handler of a function of one float."""
    return _unary(lambda x: make(cast(x, "float32")))


BINARY: dict[str, Callable[..., Any]] = {
    "relax.add": _binary(lambda a, b: a + b),
    "relax.subtract": _binary(lambda a, b: a - b),
    "relax.multiply": _binary(lambda a, b: a * b),
    "relax.divide": _binary(_divide),
    "relax.floor_divide": _binary(tirx.floordiv),
    "relax.floor_mod": _binary(tirx.floormod),
    "relax.power": _binary(_power),
    "relax.maximum": _binary(tirx.Max),
    "relax.minimum": _binary(tirx.Min),
    "relax.equal": _binary(tirx.EQ),
    "relax.not_equal": _binary(tirx.NE),
    "relax.less": _binary(tirx.LT),
    "relax.less_equal": _binary(tirx.LE),
    "relax.greater": _binary(tirx.GT),
    "relax.greater_equal": _binary(tirx.GE),
    "relax.logical_and": _logical(tirx.And),
    "relax.logical_or": _logical(tirx.Or),
    "relax.bitwise_and": _bitwise(tirx.And, tirx.BitwiseAnd),
    "relax.bitwise_or": _bitwise(tirx.Or, tirx.BitwiseOr),
}

UNARY: dict[str, Callable[..., Any]] = {
    "relax.negative": _unary(lambda x: -x),
    "relax.abs": _unary(lambda x: tirx.Max(x, -x)),
    "relax.exp": float_unary(tirx.exp),
    "relax.tanh": float_unary(tirx.tanh),
    "relax.sqrt": float_unary(tirx.sqrt),
    "relax.logical_not": _unary(lambda x: negate(to_bool(x))),
    "relax.bitwise_not": _unary(
        lambda x: negate(x) if dtype_of(x) == "bool" else tirx.BitwiseNot(x)
    ),
}


def _astype(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    dtype = reader.view.dtype(var)
    if dtype is None:
        raise Unreadable("the dtype is not known", var)
    return cast(reader.read(call.args[0], index), dtype)


def _where(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    cond, yes, no = _elementwise(reader, call, index, var)
    cond = to_bool(cond)
    if isinstance(cond, tirx.IntImm):
        return yes if cond.value else no
    return tirx.Select(cond, *common(yes, no))


def _clip(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    value = reader.read(call.args[0], index)
    for bound, make in zip(call.args[1:], (tirx.Max, tirx.Min), strict=True):
        limit = cast(reader.read(bound, []), dtype_of(value))
        # The limit first: a NaN in the value stays.
        value = make(limit, value)
    return value


def _triangle(lower: bool) -> Callable[..., Any]:
    def handle(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
        value = reader.read(call.args[0], index)
        k = i64(reader.read(call.args[1], []))
        row, col = index[-2], index[-1]
        keep = col - row <= k if lower else col - row >= k
        return tirx.Select(keep, value, const_like(0, dtype_of(value)))

    return handle


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **BINARY,
    **UNARY,
    "relax.astype": _astype,
    "relax.where": _where,
    "relax.clip": _clip,
    "relax.tril": _triangle(True),
    "relax.triu": _triangle(False),
}
