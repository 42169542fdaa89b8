"""Plans of usual attentions from parameters: a cache that grows, masks, ALiBi, rotary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import tirx

from ..errors import InputError
from .attention_plan import Append, AttentionPlan
from .scalar_expr import as_float32, i64

__all__ = ["alibi_slopes", "layout_index", "rotated_element", "standard_plan"]


def alibi_slopes(heads: int, bias_max: float = 8.0) -> list[float]:
    """Return ALiBi's slopes, 2^-(i * bias_max / n) for i = 1..n, n the next power of two.

    For other head counts every second slope is taken first, then the rest (Press et al. 2021,
    "Train Short, Test Long", and its published code).
    """
    n = 1 << max(0, math.ceil(math.log2(heads)))
    slopes = [2.0 ** -(i * bias_max / n) for i in range(1, n + 1)]
    if n != heads:
        slopes = (slopes[1::2] + slopes[0::2])[:heads]
    return slopes


def _var(name: str) -> Any:
    return tirx.Var(name, "int64")


def _f32(value: float) -> Any:
    return tirx.FloatImm("float32", value)


def layout_index(layout: str, axes: Mapping[str, Any]) -> list[Any]:
    return [axes[a] for a in layout]


def rotated_element(
    load: Callable[[Any], Any],
    d: Any,
    head_dim: int,
    style: str,
    rotary_dim: int,
    cos: Callable[[Any], Any],
    sin: Callable[[Any], Any],
) -> Any:
    """Return element d of a rotated row: `load(d)` is one of the row, `cos(i)` one of its table."""
    half = rotary_dim // 2
    plain = as_float32(load(d))
    if style == "half":
        low, above, below, at = d < half, d + half, d - half, tirx.floormod(d, half)
    else:
        low, above, below, at = tirx.floormod(d, 2) < 1, d + 1, d - 1, tirx.floordiv(d, 2)
    partner = tirx.if_then_else(low, -as_float32(load(above)), as_float32(load(below)))
    turned = plain * cos(at) + partner * sin(at)
    return turned if rotary_dim == head_dim else tirx.if_then_else(d < rotary_dim, turned, plain)


def standard_plan(
    *,
    batch: Any,
    query_length: Any,
    key_length: Any,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: str = "float32",
    query_layout: str = "BHSD",
    kv_layout: str = "BHSD",
    out_layout: str = "BHSD",
    scale: float | None = None,
    causal: str | None = None,
    window: int | None = None,
    alibi: str | None = None,
    softcap: float | None = None,
    mask_shape: Sequence[Any] | None = None,
    mask_dtype: str = "float32",
    sink: bool = False,
    append: bool = False,
    rotary: str | None = None,
    rotary_dim: int | None = None,
    zero_if_masked: bool = False,
) -> AttentionPlan:
    """Return the plan of a usual attention.

    Parameters
    ----------
    batch, query_length, key_length : int or tirx.Var
        Sizes; symbolic ones are int64 variables. With `append`, `key_length` is that of the cache
        before the new rows, of which there are `query_length`.
    heads, kv_heads, head_dim, value_dim : int
        `kv_heads` divides `heads`; query head h uses key/value head h // (heads / kv_heads).
    query_layout, kv_layout, out_layout : str
        A permutation of "BHSD" each; "S" of the key layout is the key axis.
    scale : float, optional
        Default 1/sqrt(head_dim).
    causal : "bottom_right", "top_left" or None
        Query s sees key t up to s + (T - S), or up to s.
    window : int, optional
        With `causal`: only the last `window` of those keys.
    alibi : "mpt", "bloom", "distance" or None
        Adds slope * (t - (T - 1)), slope * t, or -slope * |s + T - S - t|; slopes (H,) float32 are
        an input.
    softcap : float, optional
        softcap * tanh(x / softcap), after the scale and before masks.
    mask_shape : sequence, optional
        An additive mask input of that shape, 1 where it is broadcast: (B, H, S, T).
    sink : bool
        An input (H,) float32 with one more logit for each head.
    rotary : "half", "interleaved" or None
        Rotates q, and the new keys with `append` (without, keys are expected rotated), by inputs
        cos and sin (S, rotary_dim / 2) float32.

    Raises
    ------
    InputError
        For sizes or options that do not go together.
    """
    E = head_dim if value_dim is None else value_dim
    if heads % kv_heads:
        raise InputError(f"kv_heads={kv_heads} does not divide heads={heads}")
    if window is not None and causal is None:
        raise InputError("window needs causal='bottom_right' or 'top_left'")
    if window is not None and window < 1:
        raise InputError(f"window={window}: expected at least 1")
    if causal not in (None, "bottom_right", "top_left"):
        raise InputError(f"causal={causal!r}: expected 'bottom_right', 'top_left' or None")
    if alibi not in (None, "mpt", "bloom", "distance"):
        raise InputError(f"alibi={alibi!r}: expected 'mpt', 'bloom', 'distance' or None")
    if rotary not in (None, "half", "interleaved"):
        raise InputError(f"rotary={rotary!r}: expected 'half', 'interleaved' or None")
    group = heads // kv_heads
    b, h, s, t, d, e = (_var(n) for n in ("b", "h", "s", "t", "d", "e"))
    x = tirx.Var("x", "float32")
    S = i64(query_length)
    past = i64(key_length)
    T = past + S if append else past
    sizes = {"B": i64(batch), "H": i64(heads), "S": S, "D": i64(head_dim)}
    kv_sizes = {**sizes, "H": i64(kv_heads), "S": past}
    inputs: list[Any] = []

    def buffer(name: str, shape: Sequence[Any], kind: str = dtype) -> Any:
        made = tirx.decl_buffer([i64(dim) for dim in shape], kind, name=name)
        inputs.append(made)
        return made

    query = buffer("query", layout_index(query_layout, sizes))

    def rotated(load: Any, row: Any) -> Any:
        if rotary is None:
            return as_float32(load(d))
        return rotated_element(load, d, head_dim, rotary, rotary_dim or head_dim,
                               lambda col: cos[row, col], lambda col: sin[row, col])  # fmt: skip

    def at(layout: str, bufr: Any, head: Any, row: Any, col: Any) -> Any:
        return bufr[tuple(layout_index(layout, {"B": b, "H": head, "S": row, "D": col}))]

    kv_head = tirx.floordiv(h, i64(group)) if group > 1 else h
    past_k = buffer("past_key" if append else "key", layout_index(kv_layout, kv_sizes))
    past_v = buffer(
        "past_value" if append else "value",
        layout_index(kv_layout, {**kv_sizes, "D": i64(E)}),
    )
    appends: list[Append | None] = [None, None]
    if append:
        new_sizes = {**sizes, "H": i64(kv_heads)}
        new_k = buffer("new_key", layout_index(kv_layout, new_sizes))
        new_v = buffer("new_value", layout_index(kv_layout, {**new_sizes, "D": i64(E)}))
    if rotary is not None:
        width = rotary_dim or head_dim
        cos = buffer("cos", (S, width // 2), "float32")
        sin = buffer("sin", (S, width // 2), "float32")
    q = rotated(lambda col: at(query_layout, query, h, s, col), s)
    if append:
        out_sizes = {**kv_sizes, "S": T}
        caches = [
            tirx.decl_buffer(layout_index(kv_layout, out_sizes), dtype, name="key_cache"),
            tirx.decl_buffer(
                layout_index(kv_layout, {**out_sizes, "D": i64(E)}), dtype, name="value_cache"
            ),
        ]
        axes_k = {"B": b, "H": kv_head, "S": t, "D": d}
        axes_v = {**axes_k, "D": e}
        k = as_float32(at(kv_layout, caches[0], kv_head, t, d))
        v = as_float32(at(kv_layout, caches[1], kv_head, t, e))
        appends = [
            Append(
                as_float32(at(kv_layout, past_k, kv_head, t, d)),
                rotated(lambda col: at(kv_layout, new_k, kv_head, t, col), t),
                past,
                S,
                caches[0],
                layout_index(kv_layout, axes_k),
            ),
            Append(
                as_float32(at(kv_layout, past_v, kv_head, t, e)),
                as_float32(at(kv_layout, new_v, kv_head, t, e)),
                past,
                S,
                caches[1],
                layout_index(kv_layout, axes_v),
            ),
        ]
    else:
        k = as_float32(at(kv_layout, past_k, kv_head, t, d))
        v = as_float32(at(kv_layout, past_v, kv_head, t, e))
    score: Any = x * _f32(1.0 / math.sqrt(head_dim) if scale is None else scale)
    if softcap is not None:
        score = _f32(softcap) * tirx.tanh(score * _f32(1.0 / softcap))
    if alibi is not None:
        slopes = buffer("slopes", (heads,), "float32")
        if alibi == "mpt":
            distance = tirx.Cast("float32", t - (T - 1))
        elif alibi == "bloom":
            distance = tirx.Cast("float32", t)
        else:
            gap = tirx.Cast("float32", s + (T - S) - t)
            distance = -tirx.Max(gap, -gap)
        score = score + slopes[h] * distance
    if mask_shape is not None:
        mask = buffer("mask", mask_shape, mask_dtype)
        index = [
            i64(0) if isinstance(dim, int) and dim == 1 else var
            for dim, var in zip(mask_shape, (b, h, s, t), strict=True)
        ]
        score = score + as_float32(mask[tuple(index)])
    key_begin, key_end = i64(0), T
    if causal is not None:
        last = s + (T - S) if causal == "bottom_right" else s
        allowed = t <= last
        if window is not None:
            allowed = tirx.And(allowed, t > last - window)
            key_begin = tirx.Max(i64(0), last - (window - 1))
        score = tirx.Select(allowed, score, _f32(-math.inf))
        key_end = tirx.Min(T, tirx.Max(last + 1, i64(0)))
    extra = buffer("sink", (heads,), "float32")[h] if sink else None
    out_sizes = {"B": i64(batch), "H": i64(heads), "S": S, "D": i64(E)}
    out = tirx.decl_buffer(layout_index(out_layout, out_sizes), dtype, name="out")
    plan = AttentionPlan(
        batch=[(b, i64(batch)), (h, i64(heads))],
        s=s, t=t, d=d, e=e, x=x, S=S, T=T, D=head_dim, E=E,
        q=q, k=k, v=v, score=score, inputs=inputs, out=out,
        out_index=layout_index(out_layout, {"B": b, "H": h, "S": s, "D": e}),
        group=group, key_begin=key_begin, key_end=key_end, sink=extra,
        zero_if_masked=zero_if_masked, append_k=appends[0], append_v=appends[1],
    )  # fmt: skip
    return plan
