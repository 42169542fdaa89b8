"""Attention in float64 with numpy, and the arguments of a standard plan's kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from tvm import tirx

from relax_llm_passes.kernels.attention_plan import AttentionPlan
from relax_llm_passes.kernels.attention_standard import alibi_slopes, standard_plan

# Rounding the inputs is not an error of the kernel (the reference reads the rounded ones); rounding
# the output once is half a unit in the last place. Softmax averages, so outputs are at most as
# large as the largest value; float32 adds the rounding of sums over depth and keys.
TOLERANCE = {"float32": 2e-6, "float16": 2.0**-11 + 2e-6, "bfloat16": 2.0**-8 + 2e-6}


def numpy_dtype(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: str | None = None,
    window: int | None = None, alibi: str | None = None, softcap: float | None = None,
    mask: np.ndarray | None = None, sink: np.ndarray | None = None, scale: float | None = None,
) -> np.ndarray:  # fmt: skip
    """Return softmax attention of (B, H, S, D), (B, K, T, D), (B, K, T, E) in float64."""
    q, k, v = (a.astype("float64") for a in (q, k, v))
    B, H, S, D = q.shape
    T = k.shape[2]
    k, v = (np.repeat(a, H // a.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("bhsd,bhtd->bhst", q, k) * (1 / math.sqrt(D) if scale is None else scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    i, j = np.arange(S)[:, None], np.arange(T)[None]
    if alibi:
        slopes = np.array(alibi_slopes(H), "float32").astype("float64")[:, None, None]
        distance = {"mpt": j - (T - 1), "bloom": j + 0 * i, "distance": -abs(i + T - S - j)}[alibi]
        scores = scores + slopes * distance
    if mask is not None:
        scores = scores + mask
    if causal:
        last = i + (T - S) if causal == "bottom_right" else i
        allowed = j <= last
        if window:
            allowed &= j > last - window
        scores = np.where(allowed, scores, -np.inf)
    if sink is not None:
        extra = np.broadcast_to(sink.astype("float64")[:, None, None], (B, H, S, 1))
        scores = np.concatenate([scores, extra], axis=-1)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)
    return np.einsum("bhst,bhte->bhse", weights[..., :T], v)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, style: str) -> np.ndarray:
    """Rotate (B, H, S, D) in float64 by tables (S, rotary_dim / 2)."""
    x = x.astype("float64")
    width = 2 * cos.shape[1]
    turned, rest = x[..., :width], x[..., width:]
    if style == "half":
        a, b = turned[..., : width // 2], turned[..., width // 2 :]
        new = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        new = np.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    return np.concatenate([new, rest], axis=-1)


@dataclass
class Case:
    """A plan with symbolic batch and lengths, its arguments, and what must come out."""

    plan: AttentionPlan
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    want: np.ndarray
    caches: list[np.ndarray] = field(default_factory=list)
    out_layout: str = "BHSD"
    kv_layout: str = "BHSD"
    dtype: str = "float32"

    def check(self, got: list[Any], roundings: int = 1) -> None:
        """Compare the kernel's outputs, which were rounded so many times."""
        out = _back(got[0], self.out_layout).astype("float64")
        assert np.isfinite(out).all()
        error = np.abs(out - self.want).max() / max(1.0, np.abs(self.want).max())
        assert error <= roundings * TOLERANCE[self.dtype], f"error {error:.2e}"
        for cache, want in zip(got[1:], self.caches, strict=True):
            have = _back(cache, self.kv_layout)
            if self.dtype == "float32":
                np.testing.assert_allclose(have, want, rtol=1e-6, atol=1e-6)
            else:
                unit = TOLERANCE[self.dtype] * max(1.0, float(np.abs(want).max()))
                assert np.abs(have.astype("float64") - want).max() <= unit


def _to(array: np.ndarray, layout: str) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(["BHSD".index(c) for c in layout]))


def _back(array: np.ndarray, layout: str) -> np.ndarray:
    return array.transpose([layout.index(c) for c in "BHSD"])


def make_case(
    B: int, H: int, K: int, S: int, T: int, D: int, E: int | None = None, *, decode: bool,
    dtype: str = "float32", append: bool = False, layouts: tuple[str, str, str] = ("BHSD",) * 3,
    mask: bool = False, sink: bool = False, rotary: str | None = None,
    rotary_dim: int | None = None, position: int = 0, seed: int = 0, **options: Any,
) -> Case:  # fmt: skip
    """Return a case; T counts the keys before an append."""
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(dtype)
    E = E or D
    rows = T + (S if append else 0)
    length = tirx.Var("key_length", "int64")
    queries = S if decode else tirx.Var("query_length", "int64")
    plan = standard_plan(
        batch=tirx.Var("batch", "int64"), query_length=queries, key_length=length, heads=H,
        kv_heads=K, head_dim=D, value_dim=E, dtype=dtype, append=append, sink=sink,
        query_layout=layouts[0], kv_layout=layouts[1], out_layout=layouts[2], rotary=rotary,
        rotary_dim=rotary_dim, zero_if_masked=True,
        mask_shape=(1, H, queries, length) if mask else None, **options,
    )  # fmt: skip

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(kind)

    q, k, v = draw(B, H, S, D), draw(B, K, T, D), draw(B, K, T, E)
    inputs = [_to(q, layouts[0]), _to(k, layouts[1]), _to(v, layouts[1])]
    full_k, full_v = k.astype("float64"), v.astype("float64")
    new_k = new_v = None
    if append:
        new_k, new_v = draw(B, K, S, D), draw(B, K, S, E)
        inputs += [_to(new_k, layouts[1]), _to(new_v, layouts[1])]
    turned_q: np.ndarray = q
    turned_k = new_k
    if rotary:
        width = rotary_dim or D
        steps = (10000.0 ** (-np.arange(width // 2) * 2.0 / width)).astype("float32")
        angles = (position + np.arange(S, dtype="float32"))[:, None] * steps
        cos, sin = np.cos(angles), np.sin(angles)
        inputs += [cos, sin]
        turned_q = rotate(q, cos, sin, rotary)
        turned_k = None if new_k is None else rotate(new_k, cos, sin, rotary)
    if append:
        assert turned_k is not None and new_v is not None
        # What attention sees of a new key is what the cache keeps: rounded once.
        full_k = np.concatenate([full_k, turned_k.astype(kind).astype("float64")], axis=2)
        full_v = np.concatenate([full_v, new_v.astype("float64")], axis=2)
    extra: dict[str, Any] = {}
    if options.get("alibi"):
        inputs.append(np.array(alibi_slopes(H), "float32"))
    if mask:
        values = np.where(rng.random((1, H, S, rows)) < 0.3, -np.inf, rng.random((1, H, S, rows)))
        values[..., 0, :] = -np.inf  # a row without any key
        extra["mask"] = values.astype("float32")
        inputs.append(extra["mask"])
    if sink:
        extra["sink"] = rng.standard_normal(H).astype("float32")
        inputs.append(extra["sink"])
    names = ("causal", "window", "alibi", "softcap", "scale")
    known = {n: options[n] for n in names if n in options}
    want = attention(turned_q, full_k, full_v, **known, **extra)
    outputs = [_to(np.full((B, H, S, E), np.nan, kind), layouts[2])]
    caches = []
    if append:
        caches = [full_k, full_v]
        outputs += [_to(np.full(c.shape, np.nan, kind), layouts[1]) for c in caches]
    return Case(plan, inputs, outputs, want, caches, layouts[2], layouts[1], dtype)
