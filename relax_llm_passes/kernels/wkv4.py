"""RWKV-4's wkv: a softmax-like average per channel, kept in the log domain.

With the state (num, den, peak) of a channel, decay w (negative, per channel) and bonus u,

    q = max(peak, u + k);  y = (e^(peak-q) num + e^(u+k-q) v) / (e^(peak-q) den + e^(u+k-q))
    q = max(peak + w, k);  num = e^(peak+w-q) num + e^(k-q) v;  den likewise;  peak = q

(BlinkDL/RWKV-LM, RWKV-v4). The peak starts at a large negative number, not at infinity.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .norm_math import Functions
from .wkv_spec import WkvSpec, reading

__all__ = ["wkv4_step"]


def wkv4_step(
    spec: WkvSpec, flat: list[Any], b: Any, c: Any, width: int, functions: Functions
) -> None:
    """Emit all tokens of `width` neighbouring channels from channel `c` of batch `b`."""
    value = reading(spec, flat, functions)

    def lanes() -> Any:
        return T.vectorized(width) if width > 1 else nullcontext(0)

    def local() -> Any:
        return T.alloc_buffer((width,), "float32", scope="local")

    def load(buf: Any, role: str, t: Any = 0) -> None:
        with lanes() as lane:
            T.buffer_store(buf, value(role, b=b, t=t, h=0, n=c + lane), [lane])

    num, den, peak, w, u = local(), local(), local(), local(), local()
    fixed = spec.fixed()
    for buf, role in ((w, "w"), (u, "u"), (num, "num"), (den, "den"), (peak, "peak")):
        if role not in ("w", "u") or role in fixed:
            load(buf, role)
    k, e1, e2, q, x = local(), local(), local(), local(), local()
    exp = functions.exp
    out = spec.position("out")

    def token(t: Any) -> None:
        load(k, "k", t)
        load(x, "v", t)
        for buf, role in ((w, "w"), (u, "u")):
            if role not in fixed:
                load(buf, role, t)
        with lanes() as v:
            T.buffer_store(q, tirx.max(peak[v], u[v] + k[v]), [v])
        with lanes() as v:
            T.buffer_store(e1, exp(peak[v] - q[v]), [v])
        with lanes() as v:
            T.buffer_store(e2, exp(u[v] + k[v] - q[v]), [v])
        with lanes() as v:
            y = (e1[v] * num[v] + e2[v] * x[v]) / (e1[v] * den[v] + e2[v])
            at = spec.out_index(b, t, 0, c + v)
            T.buffer_store(flat[out], tirx.Cast(spec.tensors[out].dtype, y), [at])
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

    if spec.single:
        token(0)
    else:
        with T.serial(spec.tokens) as t:
            token(t)
    for buf, name in ((num, "new_num"), (den, "new_den"), (peak, "new_peak")):
        i = spec.position(name)
        with lanes() as v:
            T.buffer_store(
                flat[i], tirx.Cast(spec.tensors[i].dtype, buf[v]), [b * spec.size + c + v]
            )
