"""What an attention kernel has to compute, as scalar expressions over canonical indices.

A plan says how one element of the query, the key, the value, the score and the output is found
from the buffers, whatever the graph's layouts, masks and rotary form are. Recognisers make plans
from graphs (`patterns/attention.py`), `standard_plan` makes them from parameters; the kernels in
`attention_decode_*.py` and `attention_prefill_*.py` only read plans. So masks and ALiBi are computed
from positions when the graph does so, and no layout needs a copy.

Axes: B batch, S query length, T key length, H query heads, K key/value heads, D head dim, E value
head dim. `batch` holds one (variable, extent) per batch axis, usually B and H.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from ..errors import InputError
from .scalar_expr import (
    TensorLoad,
    as_float32,
    bound_analyzer,
    depends_on,
    i64,
    rewrite,
    substitute,
)

__all__ = ["Append", "AttentionPlan", "alibi_slopes", "grouped", "shares_keys", "standard_plan"]


@dataclass
class Append:
    """A functional cache append that the attention kernel does on its way.

    `concat(past, new)`, or new rows that replace some of a cache of fixed capacity (a slice update
    or a scatter): then old rows follow behind the new ones.

    Attributes
    ----------
    past : expression over batch, key, depth
        An element of the cache that came in.
    new : expression over batch, key, depth
        An element of the new rows (rotary included); `key` counts from 0 at the first new row.
    start : int64 expression over batch
        Where the first new row goes. For a fixed capacity it may come from memory, and differ
        between the rows of a batch; new rows outside of the cache are not written.
    rows : int64 expression
        How many new rows there are.
    cache : tirx.Buffer
        The output.
    index : list of expressions over batch, key, depth
        Where an element goes.
    grows : bool
        The cache ends behind the new rows (a concat).
    in_place : bool
        The cache is one of the plan's inputs and only the new rows are written to it (by a kernel
        called in place); its fixed capacity makes `grows` False.
    """

    past: Any
    new: Any
    start: Any
    rows: Any
    cache: Any
    index: list[Any]
    grows: bool = True
    in_place: bool = False


@dataclass
class AttentionPlan:
    """One attention: out = softmax(score(q k^T)) v. See the module for the axes.

    Attributes
    ----------
    batch : list of (tirx.Var, extent)
    s, t, d, e : tirx.Var
        Query, key, depth and value-depth index (int64).
    S, T : expressions; D, E : int
    x : tirx.Var
        Stands for the float32 product q.k in `score`.
    q, k, v : float32 expressions over (batch, s, d), (batch, t, d), (batch, t, e)
    score : float32 expression over (x, batch, s, t)
    inputs : list[tirx.Buffer]
        Every buffer that the expressions load from, in the order of the kernel's parameters.
    out : tirx.Buffer; out_index : list of expressions over (batch, s, e)
    group : int
        Consecutive values of the last batch variable that share keys and values.
    key_begin, key_end : expressions over s
        Keys outside have no weight in any row of s, and at least one key inside is not masked.
    sink : float32 expression over batch, or None
        One more logit in the softmax's denominator.
    zero_if_masked : bool
        A row whose scores are all -inf gives 0 (a safe softmax), not NaN.
    append_k, append_v : Append or None
        Set together; then `k` and `v` read the appended caches.
    tir_vars : list[tirx.Var]
        Symbolic sizes that no buffer's shape defines by itself.
    """

    batch: list[tuple[Any, Any]]
    s: Any
    t: Any
    d: Any
    e: Any
    x: Any
    S: Any
    T: Any
    D: int
    E: int
    q: Any
    k: Any
    v: Any
    score: Any
    inputs: list[Any]
    out: Any
    out_index: list[Any]
    group: int = 1
    key_begin: Any = None
    key_end: Any = None
    sink: Any = None
    zero_if_masked: bool = False
    append_k: Append | None = None
    append_v: Append | None = None
    tir_vars: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.key_begin is None:
            self.key_begin = i64(0)
        if self.key_end is None:
            self.key_end = i64(self.T)

    @property
    def ranges(self) -> dict[Any, Any]:
        """Index variables with their extents."""
        found = {var: extent for var, extent in self.batch}
        found.update({self.s: self.S, self.t: self.T, self.d: self.D, self.e: self.E})
        return found

    @property
    def outputs(self) -> list[Any]:
        """Buffers that the kernel writes: the output, then the caches."""
        appends = [
            a.cache for a in (self.append_k, self.append_v) if a is not None and not a.in_place
        ]
        return [self.out, *appends]

    def past_rows(self) -> tuple[Any, Any]:
        """Return `k` and `v` of the old rows, read from the caches that came in.

        What the graph does to the appended cache (a scale that is split over q and k, say) is
        done to what is read from the old one.
        """
        found = []
        for expr, append in ((self.k, self.append_k), (self.v, self.append_v)):
            assert append is not None

            def put(node: Any, append: Append = append) -> Any:
                inner = node.value if isinstance(node, tirx.Cast) else node
                if isinstance(inner, TensorLoad) and inner.source.same_as(append.cache):
                    return append.past
                return None

            found.append(rewrite(expr, put))
        return found[0], found[1]

    def simplified(self, expr: Any) -> Any:
        """Return `expr` simplified within the ranges of the index variables."""
        return bound_analyzer(self.ranges).simplify(expr)


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


def _layout_index(layout: str, axes: Mapping[str, Any]) -> list[Any]:
    return [axes[a] for a in layout]


def _product(values: Sequence[Any]) -> Any:
    result: Any = 1
    for value in values:
        result = result * value
    return result


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
    position: str | None = None,
    in_place: bool = False,
    page_size: int | None = None,
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

    query = buffer("query", _layout_index(query_layout, sizes))

    def rotated(load: Any, row: Any) -> Any:
        """Return the rotation of `load(d)` at row `row` of the tables, over the variable d."""
        plain = as_float32(load(d))
        if rotary is None:
            return plain
        width = rotary_dim or head_dim
        half = width // 2
        if rotary == "half":
            low, pair, at = d < half, lambda: (d + half, d - half), tirx.floormod(d, half)
        else:
            low = tirx.floormod(d, 2) < 1
            pair, at = lambda: (d + 1, d - 1), tirx.floordiv(d, 2)
        above, below = pair()
        partner = tirx.if_then_else(low, -as_float32(load(above)), as_float32(load(below)))
        turned = plain * cos[row, at] + partner * sin[row, at]
        return turned if width == head_dim else tirx.if_then_else(d < width, turned, plain)

    def at(layout: str, bufr: Any, head: Any, row: Any, col: Any) -> Any:
        return bufr[tuple(_layout_index(layout, {"B": b, "H": head, "S": row, "D": col}))]

    kv_head = tirx.floordiv(h, i64(group)) if group > 1 else h
    past_k = buffer("past_key" if append else "key", _layout_index(kv_layout, kv_sizes))
    past_v = buffer(
        "past_value" if append else "value",
        _layout_index(kv_layout, {**kv_sizes, "D": i64(E)}),
    )
    appends: list[Append | None] = [None, None]
    if append:
        new_sizes = {**sizes, "H": i64(kv_heads)}
        new_k = buffer("new_key", _layout_index(kv_layout, new_sizes))
        new_v = buffer("new_value", _layout_index(kv_layout, {**new_sizes, "D": i64(E)}))
    if rotary is not None:
        width = rotary_dim or head_dim
        cos = buffer("cos", (S, width // 2), "float32")
        sin = buffer("sin", (S, width // 2), "float32")
    q = rotated(lambda col: at(query_layout, query, h, s, col), s)
    if append:
        out_sizes = {**kv_sizes, "S": T}
        caches = [
            tirx.decl_buffer(_layout_index(kv_layout, out_sizes), dtype, name="key_cache"),
            tirx.decl_buffer(
                _layout_index(kv_layout, {**out_sizes, "D": i64(E)}), dtype, name="value_cache"
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
                start,
                S,
                caches[0],
                _layout_index(kv_layout, axes_k),
                update is None,
            ),
            Append(
                as_float32(at(kv_layout, past_v, kv_head, t, e)),
                as_float32(at(kv_layout, new_v, kv_head, t, e)),
                start,
                S,
                caches[1],
                _layout_index(kv_layout, axes_v),
                update is None,
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
    out = tirx.decl_buffer(_layout_index(out_layout, out_sizes), dtype, name="out")
    plan = AttentionPlan(
        batch=[(b, i64(batch)), (h, i64(heads))],
        s=s, t=t, d=d, e=e, x=x, S=S, T=T, D=head_dim, E=E,
        q=q, k=k, v=v, score=score, inputs=inputs, out=out,
        out_index=_layout_index(out_layout, {"B": b, "H": h, "S": s, "D": e}),
        group=group, key_begin=key_begin, key_end=key_end, sink=extra,
        zero_if_masked=zero_if_masked, append_k=appends[0], append_v=appends[1],
    )  # fmt: skip
    return plan


def grouped(plan: AttentionPlan, expr: Any, member: Any) -> Any:
    """Return `expr` with the last batch variable h as h * group + member, simplified.

    The variable then counts groups: its extent is that of the plan divided by `group`.
    """
    if plan.group == 1 or not plan.batch:
        return expr
    var, extent = plan.batch[-1]
    ranges = {**plan.ranges, var: tirx.floordiv(i64(extent), i64(plan.group))}
    new = substitute(expr, {var: var * i64(plan.group) + i64(member)})
    return bound_analyzer(ranges).simplify(new)


def shares_keys(plan: AttentionPlan, group: int) -> bool:
    """Tell whether `group` consecutive values of the last batch variable read the same k and v."""
    if not plan.batch:
        return False
    var, extent = plan.batch[-1]
    inner, outer = _var("inner"), _var("outer")
    count = tirx.floordiv(i64(extent), i64(group))
    ranges = {**plan.ranges, inner: group, outer: count}
    analyzer = bound_analyzer(ranges)
    if not analyzer.can_prove_equal(count * group, i64(extent)):
        return False
    for expr in (plan.k, plan.v):
        new = analyzer.simplify(substitute(expr, {var: outer * i64(group) + inner}))
        if depends_on(new, inner):
            return False
    return True
