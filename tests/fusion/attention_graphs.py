"""Small attention graphs in several spellings, built with a BlockBuilder, and their inputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import op as R

from tests.kernels.attention_reference import attention, rotate


class Graph:
    """One layer: packed product -> split -> rotary -> append -> attention."""

    def __init__(
        self, *, batch: int = 2, new: int = 1, past: bool = True, heads: int = 4, kv_heads: int = 2,
        dim: int = 8, rotary: str | None = "half", rotary_dim: int | None = None,
        split: str = "split", mask: str = "causal", dtype: str = "float32",
        alias: bool = False, return_scores: bool = False, softmax_axis: int = -1,
    ) -> None:  # fmt: skip
        self.options = dict(locals())
        H, K, D, S, B = heads, kv_heads, dim, new, batch
        self.H, self.K, self.D, self.S, self.B = H, K, D, S, B
        self.width = rotary_dim or D
        bb = relax.BlockBuilder()
        n = self.n = tirx.Var("n", "int64")
        total = n + S if past else S
        T: Any = total if past else S
        packed = (H + 2 * K) * D
        qkv = relax.Var("qkv", relax.TensorType((B, S, packed), dtype))
        half = self.width // 2
        cos = relax.Var("cos", relax.TensorType((S, half), dtype))
        sin = relax.Var("sin", relax.TensorType((S, half), dtype))
        params = [qkv] + ([cos, sin] if rotary else [])
        if past:
            past_k = relax.Var("past_k", relax.TensorType((B, K, n, D), dtype))
            past_v = relax.Var("past_v", relax.TensorType((B, K, n, D), dtype))
            params += [past_k, past_v]
        with bb.function("main", params):
            with bb.dataflow():
                emit = bb.emit
                x = emit(R.add(qkv, relax.const(np.asarray(0.25, dtype), dtype)))
                if alias:
                    x = emit(x)
                q, k, v = self._split(emit, x, split)
                q, k, v = (
                    emit(R.permute_dims(emit(R.reshape(a, (B, S, h, D))), [0, 2, 1, 3]))
                    for a, h in ((q, H), (k, K), (v, K))
                )
                if rotary:
                    q, k = (self._rotate(emit, a, cos, sin, rotary) for a in (q, k))
                outputs = []
                if past:
                    k = emit(R.concat([past_k, k], axis=2))
                    v = emit(R.concat([past_v, v], axis=2))
                    outputs = [k, v]
                if H != K:
                    k, v = (self._repeat(emit, a, T) for a in (k, v))
                scores = emit(R.matmul(q, emit(R.permute_dims(k, [0, 1, 3, 2]))))
                scale = relax.const(np.asarray(1 / math.sqrt(D), dtype), dtype)
                scores = emit(R.multiply(scores, scale))
                scores = self._mask(emit, scores, mask, S, T, dtype)
                p = emit(R.nn.softmax(scores, axis=softmax_axis))
                out = emit(R.matmul(p, v))
                out = emit(R.permute_dims(out, [0, 2, 1, 3]))
                out = emit(R.reshape(out, (B, S, H * D)))
                results = [out, *outputs, *([p] if return_scores else [])]
                result = bb.emit_output(relax.Tuple(results) if len(results) > 1 else results[0])
            bb.emit_func_output(result)
        self.mod = bb.get()
        self.past, self.rotary, self.dtype = past, rotary, dtype

    def _split(self, emit: Any, x: Any, how: str) -> list[Any]:
        H, K, D = self.H, self.K, self.D
        edges = [0, H * D, (H + K) * D, (H + 2 * K) * D]
        if how == "split":
            parts = emit(R.split(x, edges[1:3], axis=2))
            return [emit(relax.TupleGetItem(parts, i)) for i in range(3)]
        if how == "slice":
            return [
                emit(R.strided_slice(x, [2], [edges[i]], [edges[i + 1]], [1])) for i in range(3)
            ]
        heads = emit(R.reshape(x, (self.B, self.S, H + 2 * K, D)))
        return [
            emit(R.strided_slice(heads, [2], [a], [b], [1]))
            for a, b in ((0, H), (H, H + K), (H + K, H + 2 * K))
        ]

    def _rotate(self, emit: Any, x: Any, cos: Any, sin: Any, style: str) -> Any:
        half, width = self.width // 2, self.width
        turned = emit(R.strided_slice(x, [3], [0], [width], [1])) if width < self.D else x
        if style == "half":
            a = emit(R.strided_slice(turned, [3], [0], [half], [1]))
            b = emit(R.strided_slice(turned, [3], [half], [width], [1]))
            other = emit(R.concat([emit(R.negative(b)), a], axis=3))
            wide = [emit(R.concat([t, t], axis=1)) for t in (cos, sin)]
        else:
            a = emit(R.strided_slice(turned, [3], [0], [width], [2]))
            b = emit(R.strided_slice(turned, [3], [1], [width], [2]))
            pair = [emit(R.expand_dims(t, 4)) for t in (emit(R.negative(b)), a)]
            shape = (*[int(d) for d in turned.ty.shape.values[:3]], width)
            other = emit(R.reshape(emit(R.concat(pair, axis=4)), shape))
            wide = [emit(R.repeat(t, 2, axis=1)) for t in (cos, sin)]
        new = emit(R.add(emit(R.multiply(turned, wide[0])), emit(R.multiply(other, wide[1]))))
        if width == self.D:
            return new
        rest = emit(R.strided_slice(x, [3], [width], [self.D], [1]))
        return emit(R.concat([new, rest], axis=3))

    def _repeat(self, emit: Any, x: Any, T: Any) -> Any:
        group = self.H // self.K
        wide = emit(R.expand_dims(x, 2))
        wide = emit(R.broadcast_to(wide, (self.B, self.K, group, T, self.D)))
        return emit(R.reshape(wide, (self.B, self.H, T, self.D)))

    def _mask(self, emit: Any, scores: Any, kind: str, S: int, T: Any, dtype: str) -> Any:
        if kind == "none":
            return scores
        rows = emit(R.arange(0, S, 1, "int64"))
        before = relax.const(0, "int64") if isinstance(T, int) else self.n
        rows = emit(R.add(rows, before))
        rows = emit(R.expand_dims(rows, 1))
        cols = emit(R.expand_dims(emit(R.arange(0, T, 1, "int64")), 0))
        allowed = emit(R.less_equal(cols, rows))
        lowest = -65504.0 if dtype == "float16" else -3.4028234663852886e38
        low = relax.const(np.asarray(lowest, dtype), dtype)
        zero = relax.const(np.asarray(0, dtype), dtype)
        if kind == "causal":
            return emit(R.where(allowed, scores, low))
        if kind == "added":
            return emit(R.add(scores, emit(R.where(allowed, zero, low))))
        raise ValueError(kind)

    def inputs(self, past: int = 7, seed: int = 0) -> list[np.ndarray]:
        """Return random arguments of `main` with `past` cached rows."""
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(self.dtype)

        found = [draw(self.B, self.S, (self.H + 2 * self.K) * self.D)]
        if self.rotary:
            steps = 10000.0 ** (-np.arange(self.width // 2) * 2.0 / self.width)
            angles = (np.arange(self.S) + past)[:, None] * steps
            found += [np.cos(angles).astype(self.dtype), np.sin(angles).astype(self.dtype)]
        if self.past:
            found += [draw(self.B, self.K, past, self.D) for _ in range(2)]
        return found

    def reference(self, inputs: list[np.ndarray]) -> list[np.ndarray]:
        """Return what `main` computes, in float64 with numpy."""
        rest = list(inputs)
        x = rest.pop(0).astype("float64") + 0.25
        heads = x.reshape(self.B, self.S, self.H + 2 * self.K, self.D).transpose(0, 2, 1, 3)
        q, k, v = np.split(heads, [self.H, self.H + self.K], axis=1)
        if self.rotary:
            cos, sin = (rest.pop(0).astype("float64") for _ in range(2))
            q, k = (rotate(a, cos, sin, self.rotary) for a in (q, k))
        caches = []
        if self.past:
            k = np.concatenate([rest.pop(0).astype("float64"), k], axis=2)
            v = np.concatenate([rest.pop(0).astype("float64"), v], axis=2)
            caches = [k, v]
        causal = None if self.options["mask"] == "none" else "bottom_right"
        out = attention(q, k, v, causal=causal).transpose(0, 2, 1, 3)
        return [out.reshape(self.B, self.S, self.H * self.D), *caches]


def run(mod: tvm.IRModule, inputs: list[np.ndarray], target: Any) -> list[np.ndarray]:
    """Compile `mod` as it is and return its outputs."""
    with target:
        vm = relax.VirtualMachine(tvm.compile(mod, target=target), tvm.cpu())
    found = vm["main"](*[tvm.runtime.tensor(np.ascontiguousarray(a)) for a in inputs])
    return [found.numpy()] if isinstance(found, tvm.runtime.Tensor) else [x.numpy() for x in found]
