"""The wkv recurrences on the CPU: heads in parallel, the state's contiguous axis in vectors.

A head's state (16 KiB at N = 64) stays in the first-level cache while its tokens pass. A single
token reads the old state and writes the new one in the same sweep; more tokens work on the new
state in place. Sums over the vectorised axis are kept as vectors and folded at the end of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from ..targets import num_threads, vector_lanes
from .norm_cpu import TASKS_PER_THREAD, split_loop
from .norm_math import CPU
from .wkv4 import Wkv4Spec, wkv4_step
from .wkv_spec import WkvSpec

__all__ = ["emit_wkv4_cpu", "emit_wkv_cpu"]


def _views(tensors: Any, buffers: Any) -> list[Any]:
    out = []
    for t, b in zip(tensors, buffers, strict=True):
        size: Any = 1
        for d in t.shape:
            size = size * d
        out.append(T.decl_buffer((size,), t.dtype, data=b.data))
    return out


def _kernel(name: str, tensors: Any, body: Callable[[list[Any]], None]) -> tirx.PrimFunc:
    with IRBuilder() as builder:
        with T.prim_func(is_private=True, s_tir=True):
            T.func_name(name)
            T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
            handles = [T.arg(f"p_{t.name}", T.handle()) for t in tensors]
            buffers = [
                T.match_buffer(h, t.shape, t.dtype) for h, t in zip(handles, tensors, strict=True)
            ]
            with T.sblock("root"):
                T.reads()
                T.writes()
                body(_views(tensors, buffers))
    return builder.get()


def _lanes(width: int) -> Any:
    return T.vectorized(width) if width > 1 else nullcontext(0)


def _spans(n: int, width: int) -> list[tuple[int, int]]:
    """Cut [0, n) into vectors of `width` and a tail of single elements."""
    cuts = [(i, width) for i in range(0, n - n % width, width)]
    return cuts + [(i, 1) for i in range(n - n % width, n)]


def emit_wkv_cpu(spec: WkvSpec, target: tvm.target.Target) -> tirx.PrimFunc:
    """Return the PrimFunc of RWKV-5, 6 or 7's recurrence for the target's vector width."""
    lanes = vector_lanes(target, "float32")
    while lanes > 1 and lanes > spec.size:
        lanes //= 2
    name = "wkv7" if spec.delta else "wkv6" if spec.decay_per_token else "wkv5"

    def body(flat: list[Any]) -> None:
        tasks = TASKS_PER_THREAD * num_threads(target)
        with split_loop(spec.batch * spec.heads, tasks) as head:
            b, h = tirx.floordiv(head, spec.heads), tirx.floormod(head, spec.heads)
            one = _Head(spec, flat, b, h, lanes)
            if isinstance(spec.tokens, int) and spec.tokens == 1:
                one.token(0, "state")
            else:
                one.copy_state()
                with T.serial(spec.tokens) as t:
                    one.token(t, "new_state")

    return _kernel(name, spec.tensors, body)


class _Head:
    """One head's statements."""

    def __init__(self, spec: WkvSpec, flat: list[Any], b: Any, h: Any, lanes: int) -> None:
        self.spec, self.flat, self.b, self.h, self.lanes = spec, flat, b, h, lanes
        self.base = (b * spec.heads + h) * (spec.size * spec.size)

    def read(self, role: str, index: Any) -> Any:
        i = self.spec.position(role)
        x = self.flat[i][index]
        return x if self.spec.tensors[i].dtype == "float32" else tirx.Cast("float32", x)

    def write(self, role: str, index: Any, value: Any) -> None:
        i = self.spec.position(role)
        dtype = self.spec.tensors[i].dtype
        value = value if dtype == "float32" else tirx.Cast(dtype, value)
        T.buffer_store(self.flat[i], value, [index])

    def copy_state(self) -> None:
        size = self.spec.size * self.spec.size
        width = self.lanes if size % self.lanes == 0 else 1
        with T.serial(size // width) as i:
            with _lanes(width) as v:
                at = self.base + i * width + v
                self.write("new_state", at, self.read("state", at))

    def vectors(self, t: Any) -> dict[str, Any]:
        """Copy a token's vectors to float32 scratch: each is read N times below."""
        spec = self.spec
        out = {}
        for role in spec.roles[:-1]:
            buf = T.alloc_buffer((spec.size,), "float32", scope="local")
            at = spec.offset(role, self.b, t, self.h)
            for start, width in _spans(spec.size, self.lanes):
                with _lanes(width) as v:
                    T.buffer_store(buf, self.read(role, at + start + v), [start + v])
            out[role] = buf
        return out

    def token(self, t: Any, source: str) -> None:
        vecs = self.vectors(t)
        if self.spec.value_major:
            self._value_major(t, source, vecs)
        else:
            self._key_major(t, source, vecs)

    def _key_major(self, t: Any, source: str, x: dict[str, Any]) -> None:
        """The vector runs over values; keys are the outer loop."""
        spec, n = self.spec, self.spec.size
        spans = _spans(n, self.lanes)
        acc = T.alloc_buffer((n,), "float32", scope="local")

        def clear(buf: Any) -> None:
            for start, width in spans:
                with _lanes(width) as v:
                    T.buffer_store(buf, tirx.const(0, "float32"), [start + v])

        clear(acc)
        sa = None
        if spec.delta:
            sa = T.alloc_buffer((n,), "float32", scope="local")
            clear(sa)
            with T.serial(n) as j:
                for start, width in spans:
                    with _lanes(width) as v:
                        s = self.read(source, self.base + j * n + start + v)
                        T.buffer_store(sa, sa[start + v] + x["a"][j] * s, [start + v])
        with T.serial(n) as j:
            for start, width in spans:
                if sa is None:
                    with _lanes(width) as v:
                        i = start + v
                        s = self.read(source, self.base + j * n + i)
                        kv = x["k"][j] * x["v"][i]
                        T.buffer_store(acc, acc[i] + x["r"][j] * (s + x["u"][j] * kv), [i])
                with _lanes(width) as v:
                    i = start + v
                    at = self.base + j * n + i
                    new = x["w"][j] * self.read(source, at) + x["k"][j] * x["v"][i]
                    if sa is not None:
                        new = new + sa[i] * x["b"][j]
                    self.write("new_state", at, new)
                if sa is not None:
                    with _lanes(width) as v:
                        i = start + v
                        s = self.read("new_state", self.base + j * n + i)
                        T.buffer_store(acc, acc[i] + x["r"][j] * s, [i])
        out = spec.token_offset(self.b, t, self.h)
        for start, width in spans:
            with _lanes(width) as v:
                self.write("out", out + start + v, acc[start + v])

    def _value_major(self, t: Any, source: str, x: dict[str, Any]) -> None:
        """The vector runs over keys; each value is a row with sums across it."""
        spec, n = self.spec, self.spec.size
        spans = _spans(n, self.lanes)
        lanes = self.lanes
        out = spec.token_offset(self.b, t, self.h)
        with T.serial(n) as i:
            row = self.base + i * n
            acc = T.alloc_buffer((lanes,), "float32", scope="local")
            total = T.alloc_buffer((1,), "float32", scope="local")

            def start_sum(acc: Any = acc) -> None:
                with _lanes(lanes) as v:
                    T.buffer_store(acc, tirx.const(0, "float32"), [v])

            def fold(acc: Any = acc, total: Any = total) -> None:
                half = lanes // 2
                while half:
                    with _lanes(half) as v:
                        T.buffer_store(acc, acc[v] + acc[half + v], [v])
                    half //= 2
                T.buffer_store(total, acc[0], [0])

            start_sum()
            if spec.delta:
                for start, width in spans:
                    with _lanes(width) as v:
                        s = self.read(source, row + start + v)
                        T.buffer_store(acc, acc[v] + s * x["a"][start + v], [v])
                fold()
                sa = T.alloc_buffer((1,), "float32", scope="local")
                T.buffer_store(sa, total[0], [0])
                start_sum()
            for start, width in spans:
                if not spec.delta:
                    with _lanes(width) as v:
                        j = start + v
                        kv = x["k"][j] * x["v"][i]
                        s = self.read(source, row + j)
                        T.buffer_store(acc, acc[v] + x["r"][j] * (s + x["u"][j] * kv), [v])
                with _lanes(width) as v:
                    j = start + v
                    new = x["w"][j] * self.read(source, row + j) + x["k"][j] * x["v"][i]
                    if spec.delta:
                        new = new + sa[0] * x["b"][j]
                    self.write("new_state", row + j, new)
                if spec.delta:
                    with _lanes(width) as v:
                        j = start + v
                        s = self.read("new_state", row + j)
                        T.buffer_store(acc, acc[v] + x["r"][j] * s, [v])
            fold()
            self.write("out", out + i, total[0])


def emit_wkv4_cpu(spec: Wkv4Spec, target: tvm.target.Target) -> tirx.PrimFunc:
    """Return the PrimFunc of RWKV-4's recurrence: channels fill the vector."""
    lanes = vector_lanes(target, "float32")
    channels = spec.channels

    def body(flat: list[Any]) -> None:
        tiles = channels // lanes if isinstance(channels, int) else tirx.floordiv(channels, lanes)
        rest = channels - tiles * lanes
        if not isinstance(tiles, int) or tiles > 0:
            tasks = TASKS_PER_THREAD * num_threads(target)
            with split_loop(spec.batch * tiles, tasks) as i:
                b, c = tirx.floordiv(i, tiles), tirx.floormod(i, tiles)
                wkv4_step(spec, flat, b, c * lanes, lanes, CPU)
        if not isinstance(rest, int) or rest > 0:
            with T.serial(spec.batch * rest) as i:
                b, c = tirx.floordiv(i, rest), tirx.floormod(i, rest)
                wkv4_step(spec, flat, b, tiles * lanes + c, 1, CPU)

    return _kernel("wkv4", spec.tensors, body)
