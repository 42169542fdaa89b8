"""RWKV-4's wkv: a softmax-like average per channel, kept in the log domain.

With the state (num, den, peak) of a channel, decay w (negative, per channel) and bonus u,

    q = max(peak, u + k);  y = (e^(peak-q) num + e^(u+k-q) v) / (e^(peak-q) den + e^(u+k-q))
    q = max(peak + w, k);  num = e^(peak+w-q) num + e^(k-q) v;  den likewise;  peak = q

(BlinkDL/RWKV-LM, RWKV-v4). The peak starts at a large negative number, not at infinity.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .norm_math import Functions
from .norm_program import Tensor

__all__ = ["ROLES4", "Wkv4Spec", "wkv4_step"]

ROLES4 = ("k", "v", "w", "u", "num", "den", "peak")


@dataclass(frozen=True)
class Wkv4Spec:
    """One RWKV-4 recurrence.

    Attributes
    ----------
    tensors : tuple[Tensor, ...]
        k, v (B, T, C); w, u (C); num, den, peak (B, C); then the output (B, T, C) and the three
        new state tensors. All compact.
    batch, tokens, channels : int or expression
        Extents.
    """

    tensors: tuple[Tensor, ...]
    batch: Any
    tokens: Any
    channels: Any


def wkv4_step(
    spec: Wkv4Spec, flat: list[Any], b: Any, c: Any, width: int, functions: Functions
) -> None:
    """Emit all tokens of `width` neighbouring channels from channel `c` of batch `b`."""

    def lanes() -> Any:
        return T.vectorized(width) if width > 1 else nullcontext(0)

    def read(i: int, index: Any) -> Any:
        x = flat[i][index]
        return x if spec.tensors[i].dtype == "float32" else tirx.Cast("float32", x)

    def local() -> Any:
        return T.alloc_buffer((width,), "float32", scope="local")

    num, den, peak, w, u = local(), local(), local(), local(), local()
    for buf, i, at in (
        (w, 2, c),
        (u, 3, c),
        (num, 4, b * spec.channels + c),
        (den, 5, b * spec.channels + c),
        (peak, 6, b * spec.channels + c),
    ):
        with lanes() as v:
            T.buffer_store(buf, read(i, at + v), [v])
    k, e1, e2, q, x = local(), local(), local(), local(), local()
    exp = functions.exp

    def token(t: Any) -> None:
        at = (b * spec.tokens + t) * spec.channels + c
        with lanes() as v:
            T.buffer_store(k, read(0, at + v), [v])
        with lanes() as v:
            T.buffer_store(x, read(1, at + v), [v])
        with lanes() as v:
            T.buffer_store(q, tirx.max(peak[v], u[v] + k[v]), [v])
        with lanes() as v:
            T.buffer_store(e1, exp(peak[v] - q[v]), [v])
        with lanes() as v:
            T.buffer_store(e2, exp(u[v] + k[v] - q[v]), [v])
        out = spec.tensors[7]
        with lanes() as v:
            y = (e1[v] * num[v] + e2[v] * x[v]) / (e1[v] * den[v] + e2[v])
            T.buffer_store(flat[7], tirx.Cast(out.dtype, y), [at + v])
        with lanes() as v:
            T.buffer_store(q, tirx.max(peak[v] + w[v], k[v]), [v])
        with lanes() as v:
            T.buffer_store(e1, exp(peak[v] + w[v] - q[v]), [v])
        with lanes() as v:
            T.buffer_store(e2, exp(k[v] - q[v]), [v])
        with lanes() as v:
            T.buffer_store(num, e1[v] * num[v] + e2[v] * x[v], [v])
        with lanes() as v:
            T.buffer_store(den, e1[v] * den[v] + e2[v], [v])
        with lanes() as v:
            T.buffer_store(peak, q[v], [v])

    if isinstance(spec.tokens, int) and spec.tokens == 1:
        token(0)
    else:
        with T.serial(spec.tokens) as t:
            token(t)
    for buf, i in ((num, 8), (den, 9), (peak, 10)):
        with lanes() as v:
            T.buffer_store(
                flat[i],
                tirx.Cast(spec.tensors[i].dtype, buf[v]),
                [b * spec.channels + c + v],
            )
