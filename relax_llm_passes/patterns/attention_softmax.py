"""Read the softmax of an attention: the scores it sees, a guard or a sink around it.

From the product with the values back to the first product: 0 for rows without keys (a safe
softmax), one more column of logits that is sliced off again (an attention sink), a maximum that is
subtracted for safety, and whatever is done to the scores, as one scalar expression.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx

from ..dataflow import FunctionView, is_var, op_name
from ..kernels.scalar_expr import (
    TensorLoad,
    buffer_loads,
    depends_on,
    dtype_of,
    i64,
    rewrite,
)
from .element_scalars import Unreadable
from .elements import ElementReader

__all__ = ["SoftmaxRows", "fail"]


def fail(reason: str, expr: Any = None) -> Unreadable:
    """Return the exception for an attention that is refused at `expr`."""
    return Unreadable(reason, expr)


class SoftmaxRows:
    """Reads the rows of one softmax.

    Parameters
    ----------
    view, reader
        The function; its elements, with the ranges of the index variables.
    s, t, x : tirx.Var
        Query and key position, and what stands for the first product.
    T : expression
        Keys.

    Attributes
    ----------
    score : float32 expression over x, s, t and the batch
    qk : Var; qk_index : list
        The first product, and its element for (batch, s, t).
    sink : float32 expression over the batch, or None
    zero_if_masked : bool
        Rows whose scores are all -inf give 0.
    guard_region : dict[Var, None]
        Bindings of the guard.
    """

    def __init__(
        self, view: FunctionView, reader: ElementReader, s: Any, t: Any, x: Any, T: Any
    ) -> None:
        self.view: Any = view
        self.reader = reader
        self.s, self.t, self.x, self.T = s, t, x, T
        self.zero_if_masked = False
        self.sink: Any = None
        self.guard_region: dict[Any, None] = {}

    def read(self, softmax: Any, left: Any, index: list[Any]) -> None:
        """Read the scores; `left` is the second product's operand, `index` its element."""
        found = self._through_guard(softmax, left, index)
        self._scores(softmax, found)

    def _through_guard(self, softmax: Any, left: Any, index: list[Any]) -> list[Any]:
        """Return the softmax's index for (batch, s, t); notes a guard for rows without keys."""
        reader = self.reader
        reader.stop = lambda var: var.same_as(softmax)
        value = reader.read(left, index)
        guard, masked = None, False
        if isinstance(value, tirx.Select):
            guard = value.condition
            if _is_zero(value.true_value):
                value, masked = value.false_value, True
            elif _is_zero(value.false_value):
                value, masked = value.true_value, False
            else:
                raise fail("the softmax is mixed with something else before the product", left)
        load = value.value if isinstance(value, tirx.Cast) else value
        buffer = reader.leaves.get(softmax)
        if not isinstance(load, TensorLoad) or not load.source.same_as(buffer):
            raise fail("the softmax is changed before the product with the values", left)
        found = list(load.indices)
        if not isinstance(reader.simplify(found[-1] - self.t), tirx.IntImm):
            raise fail("the product does not run over the softmax's axis", left)
        if any(depends_on(i, self.t) for i in found[:-1]):
            raise fail("softmax rows depend on the key", left)
        if guard is not None:
            self._check_guard(guard, masked, softmax, found)
        return found

    def _check_guard(self, guard: Any, zero_when: bool, softmax: Any, index: list[Any]) -> None:
        """Check that a guard is: 0 for the rows whose scores are all -inf, and only for those."""
        reader, view = self.reader, self.view
        loads = buffer_loads(guard)
        if len(loads) != 1:
            raise fail("a condition on the softmax that is not understood", softmax)
        leaf = next(v for v, b in reader.leaves.items() if b.same_as(loads[0].source))
        call = view.call(leaf, "relax.max", "relax.min", "relax.sum")
        scores = view.resolve(view.call(softmax).args[0])
        ndim = len(reader.shape(scores))
        if call is None or [int(a) % ndim for a in call.attrs.axis or []] != [ndim - 1]:
            raise fail("a condition on the softmax that is no reduction of its scores", softmax)
        if not all(a.same_as(b) or reader.same(a, b) for a, b in
                   zip(list(loads[0].indices)[: ndim - 1], index[:-1], strict=True)):  # fmt: skip
            raise fail("a condition on another row of scores", softmax)
        inner = ElementReader(view, lambda var: var.same_as(scores))
        where = [
            i64(0) if reader.is_size(dim, 1) else tirx.Var(f"i{i}", "int64")
            for i, dim in enumerate(reader.shape(scores))
        ]
        flag = inner.read(call.args[0], where)
        at = buffer_loads(flag)
        if len(at) != 1 or not all(
            reader.same(a, b) for a, b in zip(at[0].indices, where, strict=True)
        ):
            raise fail("a condition on the softmax that is not elementwise in its scores", softmax)

        def flag_for(score: float) -> float:
            def put(node: Any) -> Any:
                if isinstance(node, tirx.Cast) and isinstance(node.value, TensorLoad):
                    return tirx.FloatImm("float32", score)
                if isinstance(node, TensorLoad):
                    return tirx.FloatImm("float32", score)
                return None

            return _evaluate(rewrite(flag, put))

        low, high = flag_for(-math.inf), flag_for(0.0)
        combine: dict[str, Any] = {
            "relax.max": max,
            "relax.min": min,
            "relax.sum": lambda a, b: a + b,
        }
        both = combine[op_name(call)](low, high)
        none_left = low * (3 if op_name(call) == "relax.sum" else 1)

        def guard_for(value: float) -> bool:
            def put(node: Any) -> Any:
                if isinstance(node, TensorLoad):
                    return _number_like(value, dtype_of(node))
                return None

            return bool(_evaluate(rewrite(guard, put)))

        if (
            guard_for(none_left) != zero_when
            or guard_for(both) == zero_when
            or (guard_for(high) == zero_when)
        ):
            raise fail("a condition on the softmax that is not 'every score is -inf'", softmax)
        self.zero_if_masked = True
        self.guard_region[leaf] = None
        self.guard_region.update(inner.inside)

    # the scores, down to the first product

    def _scores(self, softmax: Any, index: list[Any]) -> None:
        reader, view = self.reader, self.view
        scores = view.resolve(view.call(softmax).args[0])
        reader.stop = lambda var: view.call(var, "relax.matmul") is not None
        value, shift = self._without_shift(reader.read(scores, index))
        self._find_product(value, scores)
        shape = reader.shape(self.qk)
        if not reader.same(shape[-1], self.T):
            raise fail(f"{_size(shape[-1])} scores for {_size(self.T)} values", scores)
        self._extra_column(scores, index, shift)
        buffer = reader.leaves[self.qk]

        def put(node: Any) -> Any:
            inner = node.value if isinstance(node, tirx.Cast) else node
            if isinstance(inner, TensorLoad) and inner.source.same_as(buffer):
                return self.x
            return None

        self.score = rewrite(value, put)

    def _without_shift(self, value: Any) -> tuple[Any, Any]:
        """Return (scores, shift): what is subtracted from a whole row changes no weight."""
        if not isinstance(value, tirx.Sub) or depends_on(value.b, self.t):
            return value, None
        names = {b: v for v, b in self.reader.leaves.items()}
        loads = buffer_loads(value.b)
        leaves = [names.get(load.source) for load in loads]
        # Usually the row's maximum, whatever operator gave it. A parameter is kept: its value says
        # something (a mask of whole rows).
        if len(loads) != 1 or not is_var(leaves[0]) or self.view.index(leaves[0]) < 0:
            return value, None
        return value.a, value.b

    def _extra_column(self, scores: Any, index: list[Any], shift: Any) -> None:
        """Read the logit that a row of scores has beside those of the keys, if there is one."""
        reader = self.reader
        width = reader.shape(scores)[-1]
        before = int(reader.simplify(index[-1] - self.t).value)
        extra = reader.simplify(width - self.T)
        if isinstance(extra, tirx.IntImm) and int(extra.value) == before == 0:
            return
        if not isinstance(extra, tirx.IntImm) or int(extra.value) != 1 or before not in (0, 1):
            raise fail(f"softmax over {_size(width)} scores, {_size(self.T)} values", scores)
        place = i64(0) if before else i64(self.T)
        value, other = self._without_shift(reader.read(scores, [*index[:-1], place]))
        if (shift is None) != (other is None) or (
            shift is not None and not reader.same(shift, other)
        ):
            raise fail("the extra logit is shifted by something else than the scores", scores)
        names = {b: v for v, b in reader.leaves.items()}
        leaves = [names.get(load.source) for load in buffer_loads(value)]
        if any(v is not None and v.same_as(self.qk) for v in leaves):
            raise fail("the extra logit comes from the product of queries and keys", scores)
        if depends_on(value, self.s):
            raise fail("the extra logit differs between the queries", scores)
        self.sink = value

    def _find_product(self, value: Any, scores: Any) -> None:
        reader, view = self.reader, self.view
        names = {b: v for v, b in reader.leaves.items()}
        found: dict[Any, list[Any]] = {}
        for load in buffer_loads(value):
            leaf = names.get(load.source)
            if leaf is not None and is_var(leaf) and view.call(leaf, "relax.matmul") is not None:
                if depends_on(load, self.t):
                    found.setdefault(leaf, []).append(list(load.indices))
        if not found:
            raise fail("the scores are no product of queries and keys", scores)
        if len(found) > 1:
            raise fail("the scores come from more than one product", scores)
        ((self.qk, places),) = found.items()
        where = places[0]
        for other in places[1:]:
            if not all(reader.same(a, b) for a, b in zip(where, other, strict=True)):
                raise fail("the scores mix elements of the product", scores)
        if not reader.same(where[-1], self.t) or any(depends_on(i, self.t) for i in where[:-1]):
            raise fail("the product's last axis is not the softmax's", scores)
        self.qk_index = where


def _size(dim: Any) -> str:
    return str(int(dim.value) if isinstance(dim, tirx.IntImm) else dim)


def _is_zero(expr: Any) -> bool:
    return isinstance(expr, (tirx.FloatImm, tirx.IntImm)) and float(expr.value) == 0.0


def _number_like(value: float, dtype: str) -> Any:
    if "float" in dtype:
        return tirx.FloatImm(dtype, value)
    return tirx.IntImm(dtype, int(value))


def _evaluate(expr: Any) -> float:
    """Return the value of an expression of constants only."""
    if isinstance(expr, (tirx.IntImm, tirx.FloatImm)):
        return expr.value
    if isinstance(expr, tirx.Cast):
        return _evaluate(expr.value)
    if isinstance(expr, tirx.Not):
        return not _evaluate(expr.a)
    if isinstance(expr, tirx.Select):
        branch = expr.true_value if _evaluate(expr.condition) else expr.false_value
        return _evaluate(branch)
    operators: dict[Any, Any] = {
        tirx.EQ: lambda a, b: a == b, tirx.NE: lambda a, b: a != b,
        tirx.LT: lambda a, b: a < b, tirx.LE: lambda a, b: a <= b,
        tirx.GT: lambda a, b: a > b, tirx.GE: lambda a, b: a >= b,
        tirx.And: lambda a, b: a and b, tirx.Or: lambda a, b: a or b,
        tirx.Add: lambda a, b: a + b, tirx.Sub: lambda a, b: a - b,
        tirx.Mul: lambda a, b: a * b,
    }  # fmt: skip
    if type(expr) in operators:
        return operators[type(expr)](_evaluate(expr.a), _evaluate(expr.b))
    raise fail("a condition on the softmax that is not understood")
