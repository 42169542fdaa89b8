"""One element of a tensor as a scalar expression of its indices: how recognisers read meaning.

`ElementReader.read(x, [b, h, s, d])` follows layout, index and elementwise operators back to the
tensors they start from and returns, say, `q[b, s, h * 64 + d] * cos[s, d] + ...`. Whether the graph
split, sliced, reshaped or stacked makes no difference to the expression. What cannot be followed
(products, reductions, parameters, unknown operators) is a *leaf*, and is loaded.

All floating-point values are read in float32, whatever the graph's dtype: rounding between
operators that are fused is left out, and nothing overflows at 65504.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import TupleGetItem

from ..dataflow import FunctionView, is_var, op_name
from ..kernels.scalar_expr import (
    as_float32,
    bound_analyzer,
    buffer_loads,
    dtype_of,
    i64,
    is_float,
)

__all__ = [
    "ELEMENTWISE",
    "LAYOUT",
    "ElementReader",
    "Unreadable",
    "broadcast_index",
    "is_biased_product",
    "origin",
    "region_between",
    "reshaped_index",
    "to_bool",
]

_INT_MAX = 2**31 - 1  # "to the end", as slices are imported (INT64_MAX, or INT32_MAX)


class Unreadable(Exception):
    """An element cannot be written as a scalar expression; says at which variable, and why."""

    def __init__(self, reason: str, expr: Any = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.binding = getattr(expr, "name_hint", None) or getattr(expr, "name", "") or ""


def _f32(value: float) -> Any:
    return tirx.FloatImm("float32", value)


def _const_like(value: Any, dtype: str) -> Any:
    if dtype == "bool":
        return tirx.IntImm("bool", int(bool(value)))
    if is_float(dtype):
        return _f32(float(value))
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
    return tirx.NE(expr, _const_like(0, dtype_of(expr)))


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
            return _f32(float(expr.value))
        if have == "bool":
            return tirx.Select(expr, _f32(1.0), _f32(0.0))
        return as_float32(expr)
    if have == dtype:
        return expr
    if isinstance(expr, tirx.IntImm):
        return tirx.IntImm(dtype, int(expr.value))
    if have == "bool":
        return tirx.Select(expr, _const_like(1, dtype), _const_like(0, dtype))
    return tirx.Cast(dtype, expr)


class ElementReader:
    """Reads elements of the tensors of one function.

    Parameters
    ----------
    view : FunctionView
        The function.
    stop : callable
        `stop(var) -> bool`: variables that are leaves even though they could be followed.
    ranges : mapping
        Index variables with their extents, for simplification.

    Attributes
    ----------
    leaves : dict[Var or Constant, tirx.Buffer]
        What the expressions load from, in the order of first use.
    inside : dict[Var, None]
        Variables of the bindings that were followed.
    """

    def __init__(
        self,
        view: FunctionView,
        stop: Callable[[Any], bool] | None = None,
        ranges: dict[Any, Any] | None = None,
    ) -> None:
        self.view = view
        self.stop = stop or (lambda _: False)
        self.analyzer = bound_analyzer(ranges or {})
        self.leaves: dict[Any, Any] = {}
        self.inside: dict[Any, None] = {}
        self._shapes: dict[Any, list[Any] | None] = {}

    # Shapes, also where the importer lost them

    def shape(self, expr: Any) -> list[Any]:
        """Return the sizes of a tensor as int64 expressions.

        Where the type does not say, they are inferred from the operator.

        Raises
        ------
        Unreadable
            When they cannot be found.
        """
        expr = self.view.resolve(expr)
        if expr in self._shapes:
            known = self._shapes[expr]
        else:
            self._shapes[expr] = None  # a cycle cannot be, but a lookup in progress can
            known = self._find_shape(expr)
            self._shapes[expr] = known
        if known is None:
            raise Unreadable("the shape is not known and cannot be inferred", expr)
        return known

    def _find_shape(self, expr: Any) -> list[Any] | None:
        dims = self.view.shape(expr)
        if dims is not None:
            return [i64(dim) for dim in dims]
        call = self.view.call(expr)
        if call is None:
            return None
        name = op_name(call)
        if name == "relax.strided_slice":
            shape = self.shape(call.args[0])
            for axis, begin, end, step in self._slices(call, shape):
                shape[axis] = self._slice_length(begin, end, step)
            return shape
        if name in _BINARY or name == "relax.where":
            return self._broadcast([self.shape(a) for a in call.args])
        if name in _UNARY or name in ("relax.astype", "relax.clip"):
            return self.shape(call.args[0])
        if name == "relax.expand_dims":
            shape = self.shape(call.args[0])
            for axis in sorted(int(a) % (len(shape) + 1) for a in call.attrs.axis):
                shape.insert(axis, i64(1))
            return shape
        if name == "relax.permute_dims":
            shape = self.shape(call.args[0])
            axes = call.attrs.axes or range(len(shape) - 1, -1, -1)
            return [shape[int(a)] for a in axes]
        if name == "relax.squeeze" and call.attrs.axis is not None:
            shape = self.shape(call.args[0])
            gone = {int(a) % len(shape) for a in call.attrs.axis}
            return [dim for i, dim in enumerate(shape) if i not in gone]
        return None

    def _broadcast(self, shapes: list[list[Any]]) -> list[Any]:
        rank = max(len(s) for s in shapes)
        result = []
        for i in range(rank):
            dims = [s[i - rank + len(s)] for s in shapes if i - rank + len(s) >= 0]
            wide = [d for d in dims if not self._is(d, 1)]
            result.append(wide[0] if wide else i64(1))
        return result

    def _is(self, dim: Any, value: int) -> bool:
        return isinstance(dim, tirx.IntImm) and int(dim.value) == value

    def same(self, a: Any, b: Any) -> bool:
        """Tell whether two sizes are provably equal."""
        return bool(self.analyzer.can_prove_equal(a, b))

    # Reading

    def read(self, expr: Any, index: Sequence[Any]) -> Any:
        """Return element `index` of the tensor `expr`."""
        expr = self.view.resolve(expr)
        index = [i64(i) for i in index]
        if not is_var(expr):
            return self._constant(expr, index)
        if not isinstance(expr.ty, relax.TensorType) and tvm.ir.is_prim_expr(expr):
            return expr  # a symbolic size
        if self.stop(expr):
            return self._load(expr, index)
        value = self.view.value(expr)
        if isinstance(value, TupleGetItem):
            return self._field(expr, value, index)
        name = op_name(value)
        handler = _HANDLERS.get(name)
        if handler is None or (name in _NEVER_INLINE):
            return self._load(expr, index)
        self.inside[expr] = None
        return handler(self, value, index, expr)

    def simplify(self, expr: Any) -> Any:
        """Simplify within the ranges of the index variables."""
        return self.analyzer.simplify(expr)

    def _constant(self, expr: Any, index: list[Any]) -> Any:
        array = self.view.constant(expr)
        if array is not None:
            if array.size and (array == array.reshape(-1)[0]).all():
                return _const_like(array.reshape(-1)[0], str(array.dtype))
            return self._load(expr, index)
        number = self.view.scalar(expr)
        if number is not None:
            dtype = self.view.dtype(expr) or ("int64" if isinstance(number, int) else "float32")
            return _const_like(number, dtype)
        if tvm.ir.is_prim_expr(expr):
            return expr
        raise Unreadable(f"cannot read an element of a {type(expr).__name__}", expr)

    def _load(self, expr: Any, index: list[Any]) -> Any:
        if expr not in self.leaves:
            dtype = self.view.dtype(expr)
            if dtype is None:
                raise Unreadable("the dtype is not known", expr)
            dims = self.view.shape(expr)
            if dims is None:
                raise Unreadable("an input whose shape is not known", expr)
            name = getattr(expr, "name", None) or f"constant{len(self.leaves)}"
            self.leaves[expr] = tirx.decl_buffer([i64(d) for d in dims], dtype, name=name)
        bufr = self.leaves[expr]
        if len(index) != len(bufr.shape):
            raise Unreadable(f"read with {len(index)} indices, has {len(bufr.shape)}", expr)
        load = bufr[tuple(self.simplify(i) for i in index)] if index else bufr[()]
        return as_float32(load) if is_float(str(bufr.dtype)) else load

    def _field(self, expr: Any, item: Any, index: list[Any]) -> Any:
        call = self.view.call(item.tuple_value, "relax.split")
        if call is None:
            return self._load(expr, index)
        self.inside[expr] = None
        self.inside[self.view.resolve(item.tuple_value)] = None
        axis = int(call.attrs.axis) % len(index)
        sections = call.attrs.indices_or_sections
        if isinstance(sections, (int, tirx.IntImm)):
            total = self.shape(call.args[0])[axis]
            count = int(sections)
            if not self.same(tirx.floormod(total, i64(count)), i64(0)):
                raise Unreadable(f"split of {total} into {count} parts of unequal size", expr)
            start = tirx.floordiv(total, i64(count)) * item.index
        else:
            start = i64(0) if item.index == 0 else i64(sections[item.index - 1])
        moved = list(index)
        moved[axis] = index[axis] + start
        return self.read(call.args[0], moved)

    def slices(self, call: Any) -> list[tuple[int, Any, Any, int]]:
        """Return (axis, begin, end, step) of a strided_slice with begin and end resolved."""
        return self._slices(call, self.shape(call.args[0]))

    def _slices(self, call: Any, shape: list[Any]) -> list[tuple[int, Any, Any, int]]:
        """Return (axis, begin, end, step) of a strided_slice with begin and end resolved."""

        def values(expr: Any) -> list[Any]:
            found = self.view.resolve(expr)
            if is_var(found):
                found = self.view.value(found)
            fields = getattr(found, "fields", None)
            if fields is None:
                fields = getattr(found, "values", None)
            if fields is None:
                raise Unreadable("a slice with bounds that are not known", call)
            return [self.view.resolve(f) for f in fields]

        axes, begins, ends = (values(a) for a in call.args[1:4])
        steps = values(call.args[4]) if len(call.args) > 4 else [1] * len(axes)
        result = []
        for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
            at = int(getattr(axis, "value", axis)) % len(shape)
            stride = int(getattr(step, "value", step))
            if stride < 1:
                raise Unreadable(f"a slice with step {stride}", call)
            size = shape[at]
            if call.attrs.assume_inbound:
                begin, end = (i64(x) for x in (begin, end))
            else:
                begin, end = self._bound(begin, size), self._bound(end, size)
            result.append((at, begin, end, stride))
        return result

    def _bound(self, bound: Any, size: Any) -> Any:
        """Return a slice bound between 0 and `size`, as Python's slices do it."""
        if isinstance(bound, int):
            bound = i64(bound)
        if isinstance(bound, tirx.IntImm):
            if int(bound.value) >= _INT_MAX:
                return size
            bound = i64(bound)
            if int(bound.value) < 0:
                bound = tirx.Max(size + bound, i64(0))
                return self.simplify(bound)
        else:
            bound = i64(bound)
            if not self.analyzer.can_prove(bound >= i64(0)):
                # A negative symbolic bound counts from the end; both readings stay possible.
                bound = tirx.Select(bound < i64(0), tirx.Max(size + bound, i64(0)), bound)
        return self.simplify(tirx.Min(bound, size))

    def _slice_length(self, begin: Any, end: Any, step: int) -> Any:
        span = tirx.Max(end - begin, i64(0))
        return self.simplify(tirx.floordiv(span + i64(step - 1), i64(step)))


# Handlers: (reader, call, index, var) -> scalar


def broadcast_index(reader: ElementReader, operand: Any, index: list[Any], out: Any) -> list[Any]:
    shape = reader.shape(operand)
    offset = len(index) - len(shape)
    target = None
    result = []
    for i, dim in enumerate(shape):
        if reader._is(dim, 1):
            result.append(i64(0))
            continue
        if target is None:
            target = reader.shape(out)
        if not reader.same(dim, target[offset + i]):
            raise Unreadable(
                f"axis {i} has size {dim} where the result has {target[offset + i]}: "
                "broadcast or not is not known",
                operand,
            )
        result.append(index[offset + i])
    return result


def _elementwise(reader: ElementReader, call: Any, index: list[Any], var: Any) -> list[Any]:
    values = []
    for arg in call.args:
        resolved = reader.view.resolve(arg)
        if not isinstance(getattr(resolved, "ty", None), relax.TensorType):
            values.append(reader.read(resolved, []))  # a plain number (PrimValue)
            continue
        values.append(reader.read(arg, broadcast_index(reader, arg, index, var)))
    return values


def _common(a: Any, b: Any) -> tuple[Any, Any]:
    left, right = dtype_of(a), dtype_of(b)
    if left == right:
        return a, b
    if is_float(left) or is_float(right):
        return cast(a, "float32"), cast(b, "float32")
    wide = "int64" if "int64" in (left, right) else "int32"
    return cast(a, wide), cast(b, wide)


def _binary(make: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def handle(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
        a, b = _common(*_elementwise(reader, call, index, var))
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
        return integer(*_common(a, b))

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


def _float_unary(make: Callable[[Any], Any]) -> Callable[..., Any]:
    return _unary(lambda x: make(cast(x, "float32")))


_BINARY: dict[str, Callable[..., Any]] = {
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

_UNARY: dict[str, Callable[..., Any]] = {
    "relax.negative": _unary(lambda x: -x),
    "relax.abs": _unary(lambda x: tirx.Max(x, -x)),
    "relax.exp": _float_unary(tirx.exp),
    "relax.tanh": _float_unary(tirx.tanh),
    "relax.sqrt": _float_unary(tirx.sqrt),
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
    return tirx.Select(cond, *_common(yes, no))


def _clip(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    value = reader.read(call.args[0], index)
    for bound, make in zip(call.args[1:], (tirx.Max, tirx.Min), strict=True):
        limit = cast(reader.read(bound, []), dtype_of(value))
        # The limit first: a NaN in the value stays.
        value = make(limit, value)
    return value


def _permute(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    axes = call.attrs.axes
    order = range(len(index) - 1, -1, -1) if axes is None else [int(a) % len(index) for a in axes]
    moved: list[Any] = [None] * len(index)
    for place, axis in enumerate(order):
        moved[axis] = index[place]
    return reader.read(call.args[0], moved)


def linear_index(index: Sequence[Any], shape: Sequence[Any]) -> Any:
    """Return the row-major position of `index` in `shape`."""
    flat: Any = i64(0)
    for i, dim in zip(index, shape, strict=True):
        flat = flat * dim + i
    return flat


def unravel(flat: Any, shape: Sequence[Any], simplify: Callable[[Any], Any]) -> list[Any]:
    """Return the index in `shape` of a row-major position."""
    result: list[Any] = []
    for axis in range(len(shape) - 1, -1, -1):
        if isinstance(shape[axis], tirx.IntImm) and int(shape[axis].value) == 1:
            result.append(i64(0))
            continue
        rest_is_one = all(isinstance(d, tirx.IntImm) and int(d.value) == 1 for d in shape[:axis])
        result.append(simplify(flat if rest_is_one else tirx.floormod(flat, shape[axis])))
        flat = simplify(tirx.floordiv(flat, shape[axis]))
    result.reverse()
    return result


def reshaped_index(
    index: list[Any], new: list[Any], old: list[Any], reader: ElementReader
) -> list[Any]:
    """Return where element `index` of a tensor of shape `new` was when its shape was `old`.

    Axes that are the same on both sides are kept as they are, so that only the part that changed
    is divided.
    """
    lead = 0
    while lead < min(len(new), len(old)) and reader.same(new[lead], old[lead]):
        lead += 1
    tail = 0
    limit = min(len(new), len(old)) - lead
    while tail < limit and reader.same(new[len(new) - 1 - tail], old[len(old) - 1 - tail]):
        tail += 1
    middle = unravel(
        reader.simplify(linear_index(index[lead : len(new) - tail], new[lead : len(new) - tail])),
        old[lead : len(old) - tail],
        reader.simplify,
    )
    return [*index[:lead], *middle, *index[len(new) - tail :]]


def _reshape(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    source = call.args[0]
    moved = reshaped_index(index, reader.shape(var), reader.shape(source), reader)
    return reader.read(source, moved)


def _expand_dims(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    rank = len(index)
    gone = {int(a) % rank for a in call.attrs.axis}
    return reader.read(call.args[0], [v for i, v in enumerate(index) if i not in gone])


def _squeeze(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    shape = reader.shape(call.args[0])
    if call.attrs.axis is None:
        gone = {i for i, dim in enumerate(shape) if reader._is(dim, 1)}
    else:
        gone = {int(a) % len(shape) for a in call.attrs.axis}
    rest = iter(index)
    return reader.read(
        call.args[0], [i64(0) if i in gone else next(rest) for i in range(len(shape))]
    )


def _broadcast_to(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    return reader.read(call.args[0], broadcast_index(reader, call.args[0], index, var))


def _strided_slice(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    shape = reader.shape(call.args[0])
    moved = list(index)
    for axis, begin, _, step in reader._slices(call, shape):
        moved[axis] = reader.simplify(begin + index[axis] * i64(step))
    return reader.read(call.args[0], moved)


def _concat_parts(reader: ElementReader, call: Any) -> list[Any]:
    fields = reader.view.fields(call.args[0])
    if fields is None:
        raise Unreadable("concat of a tuple that is not built in sight", call)
    return fields


def _concat(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    parts = _concat_parts(reader, call)
    axis = 0 if call.attrs.axis is None else int(call.attrs.axis) % len(index)
    starts, start = [], i64(0)
    for part in parts:
        starts.append(start)
        start = reader.simplify(start + reader.shape(part)[axis])
    at = reader.simplify(index[axis])

    def branch(i: int) -> Any:
        moved = list(index)
        moved[axis] = reader.simplify(at - starts[i])
        return reader.read(parts[i], moved)

    last = len(parts) - 1
    for i in range(last):  # an index whose place is known reads one part only
        if reader.analyzer.can_prove(at < starts[i + 1]) and reader.analyzer.can_prove(
            at >= starts[i]
        ):
            return branch(i)
    if reader.analyzer.can_prove(at >= starts[last]):
        return branch(last)
    value = branch(last)
    for i in range(last - 1, -1, -1):
        # Lazy: the branch not taken would read out of bounds.
        value = tirx.if_then_else(at < starts[i + 1], *_common(branch(i), value))
    return value


def _stack(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    parts = _concat_parts(reader, call)
    axis = int(call.attrs.axis or 0) % len(index)
    at = reader.simplify(index[axis])
    rest = [v for i, v in enumerate(index) if i != axis]
    if isinstance(at, tirx.IntImm):
        return reader.read(parts[int(at.value)], rest)
    value = reader.read(parts[-1], rest)
    for i in range(len(parts) - 2, -1, -1):
        value = tirx.Select(at < i64(i + 1), *_common(reader.read(parts[i], rest), value))
    return value


def _take(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    source, picks = call.args[0], call.args[1]
    if call.attrs.axis is None:
        raise Unreadable("take without an axis", var)
    shape = reader.shape(source)
    axis = int(call.attrs.axis) % len(shape)
    if isinstance(getattr(reader.view.resolve(picks), "ty", None), relax.TensorType):
        rank = len(reader.shape(picks))
    else:
        rank = 0
    where = reader.read(picks, index[axis : axis + rank])
    if isinstance(where, tirx.IntImm):
        if not 0 <= int(where.value) or not (reader.analyzer.can_prove(i64(where) < shape[axis])):
            raise Unreadable(f"take at {where} of an axis of size {shape[axis]}", var)
    elif buffer_loads(where):
        # Gathered rows (a rotary's tables at position ids) are read as they are, not looked up anew
        # for every element.
        reader.inside.pop(var, None)
        return reader._load(var, index)
    return reader.read(source, [*index[:axis], i64(where), *index[axis + rank :]])


def _repeat(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    if call.attrs.axis is None:
        raise Unreadable("repeat without an axis", var)
    axis = int(call.attrs.axis) % len(index)
    moved = list(index)
    moved[axis] = reader.simplify(tirx.floordiv(index[axis], i64(int(call.attrs.repeats))))
    return reader.read(call.args[0], moved)


def _tile(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    shape = reader.shape(call.args[0])
    moved = index[len(index) - len(shape) :]
    moved = [
        i64(0) if reader._is(dim, 1) else reader.simplify(tirx.floormod(i, dim))
        for i, dim in zip(moved, shape, strict=True)
    ]
    return reader.read(call.args[0], moved)


def _arange(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    dtype = reader.view.dtype(var) or "int64"
    start, step = (reader.read(call.args[i], []) for i in (0, 2))
    if is_float(dtype):
        return cast(start, "float32") + cast(index[0], "float32") * cast(step, "float32")
    return cast(i64(start) + index[0] * i64(step), dtype)


def _full(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
    value = reader.read(call.args[1], [])
    return cast(value, reader.view.dtype(var) or dtype_of(value))


def _fill(value: int) -> Callable[..., Any]:
    def handle(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
        return _const_like(value, reader.view.dtype(var) or "float32")

    return handle


def _triangle(lower: bool) -> Callable[..., Any]:
    def handle(reader: ElementReader, call: Any, index: list[Any], var: Any) -> Any:
        value = reader.read(call.args[0], index)
        k = i64(reader.read(call.args[1], []))
        row, col = index[-2], index[-1]
        keep = col - row <= k if lower else col - row >= k
        return tirx.Select(keep, value, _const_like(0, dtype_of(value)))

    return handle


LAYOUT: dict[str, Callable[..., Any]] = {
    "relax.permute_dims": _permute,
    "relax.reshape": _reshape,
    "relax.flatten": _reshape,
    "relax.expand_dims": _expand_dims,
    "relax.squeeze": _squeeze,
    "relax.broadcast_to": _broadcast_to,
    "relax.strided_slice": _strided_slice,
    "relax.take": _take,
    "relax.repeat": _repeat,
    "relax.tile": _tile,
}

_CREATE: dict[str, Callable[..., Any]] = {
    "relax.arange": _arange,
    "relax.full": _full,
    "relax.full_like": _full,
    "relax.zeros": _fill(0),
    "relax.zeros_like": _fill(0),
    "relax.ones": _fill(1),
    "relax.ones_like": _fill(1),
}

ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **_BINARY,
    **_UNARY,
    "relax.astype": _astype,
    "relax.where": _where,
    "relax.clip": _clip,
    "relax.tril": _triangle(True),
    "relax.triu": _triangle(False),
}

_HANDLERS: dict[str, Callable[..., Any]] = {
    **LAYOUT,
    **_CREATE,
    **ELEMENTWISE,
    "relax.concat": _concat,
    "relax.stack": _stack,
}


def is_biased_product(view: FunctionView, var: Any) -> bool:
    """Tell whether `var` adds a parameter to a product: a GEMM's epilogue, read as one tensor."""
    call = view.call(var, "relax.add")
    if call is None:
        return False
    sides = [view.resolve(a) for a in call.args]
    products = [view.call(origin(view, a), "relax.matmul") is not None for a in sides]
    others = [a for a, product in zip(sides, products, strict=True) if not product]
    return len(others) == 1 and (not is_var(others[0]) or view.index(others[0]) < 0)


def region_between(view: FunctionView, outputs: Sequence[Any], leaves: Sequence[Any]) -> dict:
    """Return the variables of every binding between the leaves and the outputs."""
    stops = {leaf: None for leaf in leaves if is_var(leaf)}
    found: dict[Any, None] = {}
    pending = list(outputs)
    while pending:
        var = view.resolve(pending.pop())
        if not is_var(var) or var in stops or var in found or view.index(var) < 0:
            continue
        found[var] = None
        for read in view.reads(view.index(var)):
            resolved = view.resolve(read)
            if not is_var(resolved):
                continue
            if isinstance(getattr(resolved, "ty", None), relax.TensorType):
                pending.append(resolved)
            else:
                fields = view.fields(resolved)
                pending.extend(fields if fields is not None else [resolved])
    return found


def origin(view: FunctionView, expr: Any) -> Any:
    """Look through layout changes."""
    expr = view.resolve(expr)
    while True:
        call = view.call(expr, *LAYOUT)
        if call is None:
            return expr
        expr = view.resolve(call.args[0])


# Tables of these are small and used by every layer and head: loaded, not computed for each element.
_NEVER_INLINE = frozenset({"relax.cos", "relax.sin", "relax.sigmoid"})
