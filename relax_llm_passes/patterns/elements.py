"""One element of a tensor as a scalar expression of its indices: how recognisers read meaning.

`ElementReader.read(x, [b, h, s, d])` follows layout, index and elementwise operators back to the
tensors they start from and returns, say, `q[b, s, h * 64 + d] * cos[s, d] + ...`. Whether the graph
split, sliced, reshaped or stacked makes no difference to the expression. What cannot be followed
(products, reductions, parameters, unknown operators) is a *leaf*, and is loaded.

All floating-point values are read in float32, whatever the graph's dtype: rounding between
operators that are fused is left out, and nothing overflows at 65504.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import TupleGetItem

from ..dataflow import FunctionView, is_var, op_name
from ..kernels.scalar_expr import as_float32, bound_analyzer, i64, is_float
from .element_layout import CREATE, JOIN, LAYOUT
from .element_operators import BINARY, ELEMENTWISE, UNARY
from .element_scalars import Unreadable, const_like

__all__ = ["ElementReader"]

_INT_MAX = 2**31 - 1  # "to the end", as slices are imported (INT64_MAX, or INT32_MAX)

_HANDLERS: dict[str, Callable[..., Any]] = {**LAYOUT, **CREATE, **ELEMENTWISE, **JOIN}

# Tables of these are small and used by every layer and head: loaded, not computed for each element.
_NEVER_INLINE = frozenset({"relax.cos", "relax.sin", "relax.sigmoid"})


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
    more : mapping
        Handlers of operators that are leaves otherwise.

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
        more: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self.view = view
        self.more = more or {}
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
        if name in BINARY or name == "relax.where":
            return self._broadcast([self.shape(a) for a in call.args])
        if name in UNARY or name in ("relax.astype", "relax.clip"):
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
            wide = [d for d in dims if not self.is_size(d, 1)]
            result.append(wide[0] if wide else i64(1))
        return result

    def is_size(self, dim: Any, value: int) -> bool:
        """Tell whether a size is this number."""
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
            return self.load(expr, index)
        value = self.view.value(expr)
        source = self.view.asserted(expr)
        if source is not None:
            self.inside[expr] = None
            return self.read(source, index)
        if isinstance(value, TupleGetItem):
            return self._field(expr, value, index)
        name = op_name(value)
        handler = self.more.get(name) or _HANDLERS.get(name)
        if handler is None or (name in _NEVER_INLINE):
            return self.load(expr, index)
        self.inside[expr] = None
        return handler(self, value, index, expr)

    def simplify(self, expr: Any) -> Any:
        """Simplify within the ranges of the index variables."""
        return self.analyzer.simplify(expr)

    def _constant(self, expr: Any, index: list[Any]) -> Any:
        array = self.view.constant(expr)
        if array is not None:
            if array.size and (array == array.reshape(-1)[0]).all():
                return const_like(array.reshape(-1)[0], str(array.dtype))
            return self.load(expr, index)
        number = self.view.scalar(expr)
        if number is not None:
            dtype = self.view.dtype(expr) or ("int64" if isinstance(number, int) else "float32")
            return const_like(number, dtype)
        if tvm.ir.is_prim_expr(expr):
            return expr
        raise Unreadable(f"cannot read an element of a {type(expr).__name__}", expr)

    def load(self, expr: Any, index: list[Any]) -> Any:
        """Return element `index` of a leaf, which `expr` becomes."""
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
            return self.load(expr, index)
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
