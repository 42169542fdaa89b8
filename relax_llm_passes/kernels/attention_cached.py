"""Plans of decode attention on caches of fixed capacity: ragged batches, paged caches.

Every sequence of the batch has a length of its own, from memory. Its new tokens stand behind it;
their keys and values are written to the cache, in place, and nothing behind them is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx

from ..errors import InputError
from .attention_plan import Append, AttentionPlan
from .attention_standard import layout_index, rotated_element
from .scalar_expr import as_float32, i64

__all__ = ["cached_plan"]


def cached_plan(
    *,
    batch: Any,
    new: int,
    capacity: Any,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str = "float32",
    kv_layout: str = "BHSD",
    page_size: int | None = None,
    pages: Any = None,
    scale: float | None = None,
    window: int | None = None,
    alibi: bool = False,
    softcap: float | None = None,
    sink: bool = False,
    rotary: str | None = None,
    rotary_dim: int | None = None,
    positions: Any = None,
    in_place: bool = True,
) -> AttentionPlan:
    """Return the plan of `new` tokens a sequence against a cache of fixed capacity.

    The kernel's parameters, in order: query (B, new, H, D), new_key and new_value (B, new, K, D),
    lengths (B,) int32: rows of each sequence before this call, key_cache and value_cache, then,
    where asked for, page_table (B, capacity / page_size) int32, cos and sin (positions,
    rotary_dim / 2) float32, slopes (H,) and sink (H,) float32; the output (B, new, H, D). Without
    `in_place` the caches that come out follow it.

    Parameters
    ----------
    batch, capacity : int or tirx.Var
        Sequences; rows that a sequence can have.
    new : int
        Tokens a sequence.
    kv_layout : str
        Of contiguous caches, a permutation of "BHSD". A paged cache is (pages, K, page_size, D).
    page_size : int, optional
        Rows of a page; `page_table[b, i]` then says which page holds rows i * page_size onwards.
    pages : int or tirx.Var, optional
        Pages in the cache, with `page_size`.
    window : int, optional
        A token sees itself and the `window` - 1 rows before it.
    alibi : bool
        Adds slope * (t - position of the query).
    sink : bool
        One more logit for each head in the softmax's denominator.
    rotary : "half", "interleaved" or None
        Rotates queries and new keys by row `position` of the tables.
    positions : int or tirx.Var, optional
        Rows of the tables, with `rotary`.
    in_place : bool
        Write the new rows to the caches that come in; else the whole cache goes out anew.

    Raises
    ------
    InputError
        For sizes or options that do not go together.
    """
    _check(heads, kv_heads, page_size, pages, capacity, rotary, positions, in_place, window)
    group = heads // kv_heads
    b, h, s, t, d, e = (tirx.Var(n, "int64") for n in ("b", "h", "s", "t", "d", "e"))
    x = tirx.Var("x", "float32")
    B, S, T = i64(batch), i64(new), i64(capacity)
    inputs: list[Any] = []

    def buffer(name: str, shape: Sequence[Any], kind: str = dtype) -> Any:
        made = tirx.decl_buffer([i64(dim) for dim in shape], kind, name=name)
        inputs.append(made)
        return made

    query = buffer("query", (B, S, heads, head_dim))
    rows = [buffer(f"new_{n}", (B, S, kv_heads, head_dim)) for n in ("key", "value")]
    lengths = buffer("lengths", (B,), "int32")
    sizes = {"B": B, "H": i64(kv_heads), "S": T, "D": i64(head_dim)}
    if page_size is None:
        shape = layout_index(kv_layout, sizes)
    else:
        shape = [i64(pages), i64(kv_heads), i64(page_size), i64(head_dim)]
    caches = [buffer(f"{n}_cache", shape) for n in ("key", "value")]
    kv_head = tirx.floordiv(h, i64(group)) if group > 1 else h
    if page_size is not None:
        table = buffer("page_table", (B, tirx.floordiv(T, i64(page_size))), "int32")

    def place(row: Any, col: Any) -> list[Any]:
        if page_size is None:
            return layout_index(kv_layout, {"B": b, "H": kv_head, "S": row, "D": col})
        page = tirx.Cast("int64", table[b, tirx.floordiv(row, i64(page_size))])
        return [page, kv_head, tirx.floormod(row, i64(page_size)), col]

    length = tirx.Cast("int64", lengths[b])
    if rotary is not None:
        half = (rotary_dim or head_dim) // 2
        cos, sin = (buffer(n, (positions, half), "float32") for n in ("cos", "sin"))

    def rotated(load: Any, row: Any) -> Any:
        if rotary is None:
            return as_float32(load(d))
        return rotated_element(load, d, head_dim, rotary, rotary_dim or head_dim,
                               lambda col: cos[row, col], lambda col: sin[row, col])  # fmt: skip

    q = rotated(lambda col: query[b, s, h, col], length + s)
    fresh = (
        rotated(lambda col: rows[0][b, t, kv_head, col], length + t),
        as_float32(rows[1][b, t, kv_head, e]),
    )
    outs = caches
    if not in_place:
        outs = [tirx.decl_buffer(shape, dtype, name=f"{n}_cache_out") for n in ("key", "value")]
    appends = [
        Append(
            as_float32(old[tuple(place(t, col))]), value, length, S, out, place(t, col),
            grows=False, in_place=in_place,
        )
        for old, value, out, col in zip(caches, fresh, outs, (d, e), strict=True)
    ]  # fmt: skip
    score: Any = x * _f32(1.0 / math.sqrt(head_dim) if scale is None else scale)
    if softcap is not None:
        score = _f32(softcap) * tirx.tanh(score * _f32(1.0 / softcap))
    last = length + s
    if alibi:
        slopes = buffer("slopes", (heads,), "float32")
        score = score + slopes[h] * tirx.Cast("float32", t - last)
    allowed = t <= last
    begin: Any = i64(0)
    if window is not None:
        allowed = tirx.And(allowed, t > last - i64(window))
        begin = tirx.Max(begin, last - i64(window - 1))
    score = tirx.Select(allowed, score, _f32(-math.inf))
    extra = buffer("sink", (heads,), "float32")[h] if sink else None
    out = tirx.decl_buffer([B, S, i64(heads), i64(head_dim)], dtype, name="out")
    return AttentionPlan(
        batch=[(b, B), (h, i64(heads))], s=s, t=t, d=d, e=e, x=x, S=S, T=T, D=head_dim, E=head_dim,
        q=q, k=as_float32(outs[0][tuple(place(t, d))]), v=as_float32(outs[1][tuple(place(t, e))]),
        score=score, inputs=inputs, out=out, out_index=[b, s, h, e], group=group,
        key_begin=begin, key_end=tirx.Min(T, tirx.Max(last + i64(1), i64(0))), sink=extra,
        zero_if_masked=True, append_k=appends[0], append_v=appends[1],
        tir_vars=[capacity] if page_size is not None and isinstance(capacity, tirx.Var) else [],
    )  # fmt: skip


def _f32(value: float) -> Any:
    return tirx.FloatImm("float32", value)


def _check(
    heads: int,
    kv_heads: int,
    page_size: int | None,
    pages: Any,
    capacity: Any,
    rotary: str | None,
    positions: Any,
    in_place: bool,
    window: int | None,
) -> None:
    if heads % kv_heads:
        raise InputError(f"kv_heads={kv_heads} does not divide heads={heads}")
    if page_size is not None:
        if page_size < 1 or pages is None:
            raise InputError(f"page_size={page_size}, pages={pages}: expected both, at least 1")
        if isinstance(capacity, int) and capacity % page_size:
            raise InputError(f"capacity={capacity} is no multiple of page_size={page_size}")
        if not in_place:
            raise InputError("a paged cache is shared by sequences: it is updated in place only")
    if rotary not in (None, "half", "interleaved"):
        raise InputError(f"rotary={rotary!r}: expected 'half', 'interleaved' or None")
    if rotary is not None and positions is None:
        raise InputError("rotary needs positions, the number of rows of its tables")
    if window is not None and window < 1:
        raise InputError(f"window={window}: expected at least 1")
