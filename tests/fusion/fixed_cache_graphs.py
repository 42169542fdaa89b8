"""Decode on caches of fixed capacity, in every spelling of "write these rows there"."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes  # noqa: F401  (bfloat16 for numpy)
import numpy as np
from tvm import relax, tirx
from tvm.relax import op as R

from relax_llm_passes.sampling import numpy_dtype
from tests.kernels.attention_reference import attention, rotate

# How the rows get into the cache, and where their position may come from: a size, a tensor of one
# element, a tensor with one element for each sequence.
SPELLINGS = {
    "pieces": ("size",),
    "slice_scatter": ("size",),
    "scatter_elements": ("size", "scalar", "rows"),
    "scatter_nd": ("scalar", "rows"),
    "index_put": ("scalar", "rows"),
    "where": ("size", "scalar", "rows"),
}


class FixedGraph:
    """One layer: rotary, update of a cache with room for `capacity` rows, attention."""

    def __init__(
        self, how: str, position: str = "scalar", *, batch: int = 2, new: int = 1, heads: int = 4,
        kv_heads: int = 2, dim: int = 8, capacity: Any = 12, dtype: str = "float32",
        finite: bool = True, rotary: bool = True, step: int = 1, index_dtype: str = "int64",
        sink: bool = False, softcap: float | None = None,
    ) -> None:  # fmt: skip
        self.B, self.S, self.H, self.K, self.D = batch, new, heads, kv_heads, dim
        self.how, self.position, self.dtype, self.finite = how, position, dtype, finite
        self.rotary, self.step, self.index_dtype = rotary, step, index_dtype
        self.sink, self.softcap = sink, softcap
        self.capacity = 12 if isinstance(capacity, str) else capacity
        self.T: Any = tirx.Var(capacity, "int64") if isinstance(capacity, str) else capacity
        B, S, H, K, D = batch, new, heads, kv_heads, dim

        def var(name: str, shape: Any, kind: str = dtype) -> Any:
            return relax.Var(name, relax.TensorType(shape, kind))

        q, k, v = (var(n, (B, h, S, D)) for n, h in (("q", H), ("k", K), ("v", K)))
        pasts = [var(n, (B, K, self.T, D)) for n in ("past_k", "past_v")]
        params = [q, k, v, *pasts]
        self.p: Any
        if position == "size":
            self.p = tirx.Var("p", "int64")
            params.append(relax.Var("length", relax.ShapeType([self.p])))
        else:
            params.append(var("length", () if position == "scalar" else (B,), index_dtype))
            self.p = params[-1]
        if rotary:
            tables = [var(n, (B, 1, S, D // 2), "float32") for n in ("cos", "sin")]
            params += tables
        if sink:
            params.append(var("sink", (H,), "float32"))
        bb = relax.BlockBuilder()
        with bb.function("main", params):
            with bb.dataflow():
                emit = self.emit = bb.emit
                if rotary:
                    q, k = (self._rotate(a, *tables) for a in (q, k))
                where = self._positions()
                k, v = (self._update(a, new, where) for a, new in zip(pasts, (k, v), strict=True))
                caches = [k, v]
                k, v = (self._repeat(a) for a in (k, v))
                if dtype != "float32":
                    q, k = (emit(R.astype(a, "float32")) for a in (q, k))
                scores = emit(R.matmul(q, emit(R.permute_dims(k, [0, 1, 3, 2]))))
                scores = emit(R.multiply(scores, _f32(1 / math.sqrt(D))))
                if softcap:
                    scores = emit(R.tanh(emit(R.divide(scores, _f32(softcap)))))
                    scores = emit(R.multiply(scores, _f32(softcap)))
                scores = emit(R.where(self._seen(where), scores, _f32(self.lowest)))
                if sink:
                    scores = self._with_sink(scores, params[-1])
                p = emit(R.nn.softmax(scores, axis=-1))
                if sink:
                    p = emit(R.strided_slice(p, [3], [0], [self.T], [1]))
                if dtype != "float32":
                    p = emit(R.astype(p, dtype))
                out = emit(R.permute_dims(emit(R.matmul(p, v)), [0, 2, 1, 3]))
                out = emit(R.reshape(out, (B, S, H * D)))
                result = bb.emit_output(relax.Tuple([out, *caches]))
            bb.emit_func_output(result)
        self.mod = bb.get()

    @property
    def lowest(self) -> float:
        return float(np.finfo("float32").min) if self.finite else -math.inf

    def _rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        emit, half = self.emit, self.D // 2
        wide = emit(R.astype(x, "float32")) if self.dtype != "float32" else x
        a, b = (emit(R.strided_slice(wide, [3], [i], [i + half], [1])) for i in (0, half))
        left = emit(R.subtract(emit(R.multiply(a, cos)), emit(R.multiply(b, sin))))
        right = emit(R.add(emit(R.multiply(b, cos)), emit(R.multiply(a, sin))))
        new = emit(R.concat([left, right], axis=3))
        return emit(R.astype(new, self.dtype)) if self.dtype != "float32" else new

    def _positions(self) -> Any:
        """Positions of the new rows: (S,), or (B, S) where each sequence has its own."""
        emit = self.emit
        if self.position == "size":
            return emit(R.arange(self.p, self.p + self.S * self.step, self.step, "int64"))
        steps = emit(R.arange(0, self.S * self.step, self.step, self.index_dtype))
        start = self.p
        if self.position == "rows":
            start = emit(R.expand_dims(start, 1))
        return emit(R.add(steps, start))

    def _update(self, past: Any, new: Any, where: Any) -> Any:
        emit = self.emit
        B, S, K, D, T = self.B, self.S, self.K, self.D, self.T
        own = self.position == "rows"
        if self.how == "pieces":
            before = emit(R.strided_slice(past, [2], [0], [self.p], [1], assume_inbound=True))
            after = emit(R.strided_slice(past, [2], [self.p + S], [T], [1], assume_inbound=True))
            whole = emit(R.concat([before, new, after], axis=2))
            return emit(R.reshape(whole, (B, K, T, D)))
        if self.how == "slice_scatter":
            bounds = [relax.prim_value(i) for i in (self.p, self.p + S * self.step, self.step)]
            return emit(R.slice_scatter(past, new, *bounds, axis=2))
        if self.how == "scatter_elements":
            shape = (B, 1, S, 1) if own else (1, 1, S, 1)
            index = emit(R.broadcast_to(emit(R.reshape(where, shape)), (B, K, S, D)))
            return emit(R.scatter_elements(past, index, new, axis=2))
        if self.how == "scatter_nd":
            if not own:  # rows first
                rows = emit(R.permute_dims(past, [2, 0, 1, 3]))
                fresh = emit(R.permute_dims(new, [2, 0, 1, 3]))
                rows = emit(R.scatter_nd(rows, emit(R.expand_dims(where, 1)), fresh))
                return emit(R.permute_dims(rows, [1, 2, 0, 3]))
            rows, fresh = (emit(R.permute_dims(a, [0, 2, 1, 3])) for a in (past, new))
            index = emit(R.stack([self._iota(B, (B, 1), (B, S)), where], axis=2))
            rows = emit(R.scatter_nd(rows, index, fresh))
            return emit(R.permute_dims(rows, [0, 2, 1, 3]))
        if self.how == "index_put":
            shape = (B, 1, S, 1) if own else (1, 1, S, 1)
            index = [
                self._iota(B, (B, 1, 1, 1)), self._iota(K, (1, K, 1, 1)),
                emit(R.reshape(where, shape)), self._iota(D, (1, 1, 1, D)),
            ]  # fmt: skip
            return emit(R.index_put(past, relax.Tuple(index), new))
        if self.how == "where":
            columns = emit(R.arange(0, T, 1, self.index_dtype if own or self.position == "scalar"
                                    else "int64"))  # fmt: skip
            here = emit(R.equal(columns, where))  # (T,) or (B, T), for one new row
            here = emit(R.reshape(here, (B, 1, T, 1) if own else (1, 1, T, 1)))
            return emit(R.where(here, new, past))
        raise ValueError(self.how)

    def _iota(self, size: int, shape: Any, wide: Any = None) -> Any:
        found = self.emit(R.reshape(self.emit(R.arange(0, size, 1, self.index_dtype)), shape))
        return found if wide is None else self.emit(R.broadcast_to(found, wide))

    def _repeat(self, x: Any) -> Any:
        return self.emit(R.repeat(x, self.H // self.K, axis=1)) if self.H != self.K else x

    def _seen(self, where: Any) -> Any:
        emit, own = self.emit, self.position == "rows"
        kind = "int64" if self.position == "size" else self.index_dtype
        columns = emit(R.reshape(emit(R.arange(0, self.T, 1, kind)), (1, 1, 1, self.T)))
        rows = emit(R.reshape(where, (self.B if own else 1, 1, self.S, 1)))
        return emit(R.less_equal(columns, rows))

    def _with_sink(self, scores: Any, sink: Any) -> Any:
        """The extra column, and a maximum subtracted as some models do."""
        emit = self.emit
        column = emit(R.reshape(sink, (1, self.H, 1, 1)))
        column = emit(R.broadcast_to(column, (self.B, self.H, self.S, 1)))
        wide = emit(R.concat([scores, column], axis=-1))
        return emit(R.subtract(wide, emit(R.max(wide, axis=-1, keepdims=True))))

    def lengths(self, base: int) -> np.ndarray:
        """Rows that each sequence has before the new ones."""
        own = self.position == "rows"
        return np.array([base - 2 * b if own else base for b in range(self.B)])

    def inputs(self, base: int = 5, seed: int = 0) -> list[Any]:
        rng = np.random.default_rng(seed)
        kind = numpy_dtype(self.dtype)

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(kind)

        B, S, D = self.B, self.S, self.D
        found: list[Any] = [draw(B, h, S, D) for h in (self.H, self.K, self.K)]
        found += [draw(B, self.K, self.capacity, D) for _ in range(2)]
        lengths = self.lengths(base)
        if self.position == "size":
            found.append(base)  # becomes a shape
        else:
            one = lengths if self.position == "rows" else lengths[0]
            found.append(np.asarray(one, self.index_dtype))
        if self.rotary:
            steps = 10000.0 ** (-np.arange(D // 2) * 2.0 / D)
            angles = (lengths[:, None] + np.arange(S))[:, None, :, None] * steps
            found += [np.cos(angles).astype("float32"), np.sin(angles).astype("float32")]
        if self.sink:
            found.append(rng.standard_normal(self.H).astype("float32"))
        return found

    def reference(self, inputs: list[Any], base: int = 5) -> list[np.ndarray]:
        """Float64; what goes to the cache is rounded once, as attention sees it."""
        q, k, v, past_k, past_v = (a.astype("float64") for a in inputs[:5])
        kind = numpy_dtype(self.dtype)
        outs = []
        caches = [past_k.copy(), past_v.copy()]
        for b, length in enumerate(self.lengths(base)):
            one = [a[b : b + 1] for a in (q, k, v)]
            if self.rotary:
                cos, sin = (a[b, 0].astype("float64") for a in inputs[6:8])
                one[:2] = [rotate(a, cos, sin, "half") for a in one[:2]]
            for cache, new in zip(caches, one[1:], strict=True):
                cache[b, :, length : length + self.S] = new[0].astype(kind)
            end = length + self.S
            sink = inputs[-1] if self.sink else None
            out = attention(
                one[0], *(c[b : b + 1, :, :end] for c in caches), causal="bottom_right",
                softcap=self.softcap, sink=sink,
            )  # fmt: skip
            outs.append(out.transpose(0, 2, 1, 3).reshape(1, self.S, -1))
        return [np.concatenate(outs), *caches]


def _f32(value: float) -> Any:
    return relax.const(np.float32(value), "float32")
