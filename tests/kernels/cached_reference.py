"""Arguments of a cached plan's kernel, and what must come out, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from relax_llm_passes.kernels.attention_cached import cached_plan
from relax_llm_passes.kernels.attention_plan import AttentionPlan
from relax_llm_passes.kernels.attention_standard import alibi_slopes

from .attention_reference import TOLERANCE, attention, numpy_dtype, rotate


@dataclass
class CachedCase:
    """A plan with its arguments; `caches` are the contents that the caches must have."""

    plan: AttentionPlan
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    want: np.ndarray
    caches: list[np.ndarray]
    in_place: bool
    dtype: str

    @property
    def changed(self) -> list[int]:
        """Places of the arguments that the kernel writes: the output, then the caches."""
        first = len(self.inputs)
        return [first, 4, 5] if self.in_place else [first, first + 1, first + 2]

    def check(self, got: list[np.ndarray]) -> None:
        error = np.abs(got[0].astype("float64") - self.want).max()
        assert error <= TOLERANCE[self.dtype] * max(1.0, np.abs(self.want).max()), error
        for cache, want in zip(got[1:], self.caches, strict=True):
            unit = TOLERANCE[self.dtype] * max(1.0, float(np.abs(want).max()))
            assert np.abs(cache.astype("float64") - want).max() <= unit


def make_cached(
    lengths: list[int], new: int, H: int, K: int, D: int, *, capacity: int = 24,
    dtype: str = "float32", kv_layout: str = "BHSD", page_size: int | None = None,
    rotary: str | None = None, alibi: bool = False, sink: bool = False,
    in_place: bool = True, seed: int = 0, **options: Any,
) -> CachedCase:  # fmt: skip
    """Return a case with one sequence for each length."""
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(dtype)
    B = len(lengths)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(kind)

    batch, pages = tirx.Var("batch", "int64"), tirx.Var("pages", "int64")
    positions = tirx.Var("positions", "int64")
    plan = cached_plan(
        batch=batch, new=new, capacity=capacity, heads=H, kv_heads=K, head_dim=D, dtype=dtype,
        kv_layout=kv_layout, page_size=page_size, pages=pages if page_size else None,
        rotary=rotary, positions=positions if rotary else None, alibi=alibi, sink=sink,
        in_place=in_place, **options,
    )  # fmt: skip
    q, k, v = draw(B, new, H, D), draw(B, new, K, D), draw(B, new, K, D)
    dense = [draw(B, K, capacity, D) for _ in range(2)]  # (B, K, T, D), as it is read
    inputs: list[np.ndarray] = [q, k, v, np.array(lengths, "int32")]
    table = None
    if page_size is None:
        stored = [c.transpose(["BHSD".index(a) for a in kv_layout]).copy() for c in dense]
    else:
        count = B * capacity // page_size
        table = rng.permutation(count + 3)[:count].reshape(B, -1).astype("int32")
        stored = [draw(count + 3, K, page_size, D) for _ in range(2)]
        for pool, one in zip(stored, dense, strict=True):
            for b in range(B):
                for i, page in enumerate(table[b]):
                    pool[page] = one[b, :, i * page_size : (i + 1) * page_size]
    inputs += stored
    if table is not None:
        inputs.append(table)
    turned_q, turned_k = (a.transpose(0, 2, 1, 3).astype("float64") for a in (q, k))
    if rotary:
        rows = capacity + 5
        angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(D // 2) * 2.0 / D)
        cos, sin = np.cos(angles).astype("float32"), np.sin(angles).astype("float32")
        inputs += [cos, sin]
        for b, n in enumerate(lengths):
            for each in (turned_q, turned_k):
                one = each[b : b + 1]
                each[b : b + 1] = rotate(one, cos[n : n + new], sin[n : n + new], rotary)
    slopes = np.array(alibi_slopes(H), "float32")
    if alibi:
        inputs.append(slopes)
    sinks = rng.standard_normal(H).astype("float32")
    if sink:
        inputs.append(sinks)
    wanted = [c.astype("float64") for c in dense]
    outs = []
    for b, n in enumerate(lengths):
        end = min(n + new, capacity)
        wanted[0][b, :, n:end] = turned_k[b, :, : end - n].astype(kind)
        wanted[1][b, :, n:end] = v[b].transpose(1, 0, 2)[:, : end - n]
        place = np.arange(end)[None] - (n + np.arange(new))[:, None]
        seen = (place <= 0) & (place > -options.get("window", capacity + new))
        mask = np.where(seen, slopes.astype("float64")[:, None, None] * place * alibi, -np.inf)
        outs.append(
            attention(
                turned_q[b : b + 1], *(c[b : b + 1, :, :end] for c in wanted), mask=mask,
                sink=sinks if sink else None, softcap=options.get("softcap"),
            )[0].transpose(1, 0, 2)
        )  # fmt: skip
    if table is None:
        caches = [c.transpose(["BHSD".index(a) for a in kv_layout]) for c in wanted]
    else:
        caches = [p.astype("float64") for p in stored]
        for pool, one in zip(caches, wanted, strict=True):
            for b in range(B):
                for i, page in enumerate(table[b]):
                    pool[page] = one[b, :, i * page_size : (i + 1) * page_size]
    outputs = [np.full((B, new, H, D), np.nan, kind)]
    if not in_place:
        outputs += [np.full(s.shape, np.nan, kind) for s in stored]
    return CachedCase(plan, inputs, outputs, np.stack(outs), caches, in_place, dtype)
