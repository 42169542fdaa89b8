"""ExpandAttention: `R.nn.attention` as products and a softmax, right for every case it allows.

before                                       after
    o = R.nn.attention(q, k, v, ...)             s = matmul(q', k'^T) * scale (+ bias), masked
                                                 o = matmul(softmax(s), v'), axes put back

TVM 0.27's own lowering pairs heads wrongly when there are fewer K/V heads than query heads, masks
with zeros before the row maximum (NaN where a bias makes every allowed score very negative), and
stops on key lengths such as `past + 1`. Here K/V heads are repeated, masked scores are the lowest
float, and scores and softmax are float32. The attention recogniser then reads this form like any
other. Refused: windows without a causal mask, and shapes of unknown rank.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, tirx

from ..registry import PassRun, register_pass
from ..report import PassRecord, Refusal

__all__ = ["ExpandAttention"]

_OPS = {tvm.ir.Op.get(n) for n in ("relax.nn.attention", "relax.nn.attention_bias")}
_LOWEST = -3.4028234663852886e38


def _shape(expr: relax.Expr) -> list[Any] | None:
    shape = getattr(expr.ty, "shape", None)
    values = getattr(shape, "values", None)
    return list(values) if values is not None and len(values) == 4 else None


def _refusal(call: relax.Call) -> str | None:
    for name, arg in zip(("query", "key", "value"), call.args, strict=False):
        if _shape(arg) is None:
            return f"{name} has type {arg.ty}; expected four known extents (B, S, H, D)"
    if call.attrs.window_size is not None and call.attrs.causal_mask is None:
        return "a window without a causal mask; expected causal_mask with window_size"
    heads, kv_heads = _shape(call.args[0])[2], _shape(call.args[1])[2]  # type: ignore[index]
    if not (isinstance(heads, tirx.IntImm) and isinstance(kv_heads, tirx.IntImm)):
        return f"head counts {heads} and {kv_heads}; expected numbers"
    if int(heads) % int(kv_heads):
        return f"{int(heads)} query heads over {int(kv_heads)} K/V heads; expected a multiple"
    return None


class _Expander:
    def __init__(self, bb: relax.BlockBuilder) -> None:
        self.bb = bb

    def emit(self, expr: relax.Expr) -> relax.Var:
        return self.bb.emit(expr)

    def heads_first(self, x_BSHD: relax.Expr, heads: int) -> relax.Var:
        """(B, T, K, D) to (B, H, T, D), each K/V head repeated for its group of query heads."""
        x = self.emit(relax.op.permute_dims(x_BSHD, [0, 2, 1, 3]))
        batch, kv_heads, length, size = x.ty.shape.values
        group = heads // int(kv_heads)
        if group == 1:
            return x
        x = self.emit(relax.op.expand_dims(x, [2]))
        wide = relax.ShapeExpr([batch, kv_heads, group, length, size])
        x = self.emit(relax.op.broadcast_to(x, wide))
        return self.emit(relax.op.reshape(x, relax.ShapeExpr([batch, heads, length, size])))

    def visible(self, call: relax.Call, queries: Any, keys: Any) -> relax.Var | None:
        """Boolean (S, T): may query i see key j?"""
        if call.attrs.causal_mask is None:
            return None
        offset = keys - queries if str(call.attrs.causal_mask) == "BottomRight" else 0
        row = self.emit(relax.op.arange(offset, queries + offset, 1, "int64"))
        row = self.emit(relax.op.expand_dims(row, [1]))
        column = self.emit(relax.op.expand_dims(self._range(keys), [0]))
        seen = self.emit(relax.op.less_equal(column, row))
        if call.attrs.window_size is not None:
            window = relax.const(int(call.attrs.window_size), "int64")
            near = self.emit(relax.op.greater(column, self.emit(relax.op.subtract(row, window))))
            seen = self.emit(relax.op.logical_and(seen, near))
        return seen

    def _range(self, extent: Any) -> relax.Var:
        return self.emit(relax.op.arange(0, extent, 1, "int64"))

    def expand(self, call: relax.Call) -> relax.Expr:
        query, key, value = call.args[:3]
        _, queries, heads, size = _shape(query)  # type: ignore[misc]
        keys = _shape(key)[1]  # type: ignore[index]
        dtype = str(query.ty.dtype)
        q = self.heads_first(query, int(heads))
        k = self.heads_first(key, int(heads))
        v = self.heads_first(value, int(heads))
        k = self.emit(relax.op.permute_dims(k, [0, 1, 3, 2]))
        scores = self.emit(relax.op.matmul(q, k, out_dtype="float32"))
        scale = call.attrs.scale
        factor = float(scale.value) if scale is not None else 1.0 / math.sqrt(int(size))
        scores = self.emit(relax.op.multiply(scores, relax.const(factor, "float32")))
        if len(call.args) > 3:
            bias = call.args[3]
            if str(bias.ty.dtype) != "float32":
                bias = self.emit(relax.op.astype(bias, "float32"))
            scores = self.emit(relax.op.add(scores, bias))
        seen = self.visible(call, queries, keys)
        if seen is not None:
            lowest = relax.const(_LOWEST, "float32")
            scores = self.emit(relax.op.where(seen, scores, lowest))
        weights = self.emit(relax.op.nn.softmax(scores, axis=-1))
        if dtype != "float32":
            weights = self.emit(relax.op.astype(weights, dtype))
        out = self.emit(relax.op.matmul(weights, v))
        return relax.op.permute_dims(out, [0, 2, 1, 3])


@relax.expr_functor.mutator
class _Mutator(relax.PyExprMutator):
    def __init__(self, mod: tvm.IRModule, record: PassRecord) -> None:
        super().__init__(mod)
        self.record = record
        self.function = ""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        if call.op not in _OPS:
            return call
        reason = _refusal(call)
        if reason is not None:
            self.record.refuse(Refusal(reason, "attention", self.function))
            return call
        self.record.match("attention", 1, self.function)
        return _Expander(self.builder_).expand(call)


def _uses(func: Any) -> bool:
    found = False

    def visit(expr: Any) -> None:
        nonlocal found
        found = found or (isinstance(expr, relax.Call) and expr.op in _OPS)

    if isinstance(func, relax.Function):
        relax.analysis.post_order_visit(func, visit)
    return found


@register_pass("ExpandAttention", stage="clean")
def ExpandAttention(mod: tvm.IRModule, run: PassRun) -> tvm.IRModule:
    """Write `R.nn.attention` out as products and a softmax that are right for grouped heads."""
    todo = [(gvar, func) for gvar, func in mod.functions.items() if _uses(func)]
    if not todo:
        return mod
    mutator = _Mutator(mod, run.record)
    for gvar, func in todo:
        mutator.function = gvar.name_hint
        mutator.builder_.update_func(gvar, mutator.visit_expr(func))
    result = mutator.builder_.get()
    return result.with_attrs(dict(mod.attrs)) if mod.attrs else result
