"""The matrix-valued wkv recurrences on the CPU: heads in parallel, vectors along the state's rows.

A head's state (16 KiB at N = 64) stays in the first-level cache while its tokens pass. A single
token reads the old state and writes the new one in the same sweep; more tokens work on the new
state in place, in float32 (a narrower state is kept in a float32 copy until the last token).

Sums stay in registers: a block of values (key-major) or of rows (value-major) goes over all keys
before the next one. The bonus is taken out of the inner loop: sum_j r_j u_j k_j is one number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..targets import num_threads, vector_lanes
from .cpu_build import is_little
from .flat_kernel import flat_kernel
from .norm_cpu import TASKS_PER_THREAD, split_loop
from .norm_math import CPU
from .wkv4 import wkv4_step
from .wkv_spec import WkvSpec, reading

__all__ = ["emit_wkv4_cpu", "emit_wkv_cpu"]

# Vectors (key-major) or rows (value-major) whose sums are kept in registers together: with the
# values and the state that is 12 of the 16 registers that the narrowest targets have.
BLOCK = 4


def _lanes(width: int) -> Any:
    return T.vectorized(width) if width > 1 else nullcontext(0)


def _spans(n: int, width: int) -> list[tuple[int, int]]:
    """Cut [0, n) into vectors of `width` and a tail of single elements."""
    cuts = [(i, width) for i in range(0, n - n % width, width)]
    return cuts + [(i, 1) for i in range(n - n % width, n)]


def _zero(buf: Any, size: int) -> None:
    with _lanes(size) as v:
        T.buffer_store(buf, tirx.const(0, "float32"), [v])


def _total(acc: Any, lanes: int) -> Any:
    """Return the sum of a vector, added by halves in registers."""
    out = T.alloc_buffer((1,), "float32", scope="local")
    if lanes < 4:
        T.buffer_store(out, acc[0] if lanes == 1 else acc[0] + acc[1], [0])
        return out[0]
    vec = tirx.BufferLoad(acc, [tirx.Ramp(0, 1, lanes)])
    width = lanes
    while width > 2:
        width //= 2
        half = f"float32x{width}"
        vec = tirx.vectorlow(half, vec) + tirx.vectorhigh(half, vec)
    pair = T.alloc_buffer((2,), "float32", scope="local")
    T.buffer_store(pair, vec, [tirx.Ramp(0, 1, 2)])
    T.buffer_store(out, pair[0] + pair[1], [0])
    return out[0]


def emit_wkv_cpu(spec: WkvSpec, target: tvm.target.Target) -> tirx.PrimFunc:
    """Return the PrimFunc of RWKV-5, 6 or 7's recurrence for the target's vector width."""
    lanes = vector_lanes(target, "float32")
    while lanes > 1 and lanes > spec.size:
        lanes //= 2
    name = "wkv7" if spec.delta else "wkv"

    def body(flat: list[Any]) -> None:
        with split_loop(spec.batch * spec.heads, _tasks(spec, target)) as head:
            b, h = tirx.floordiv(head, spec.heads), tirx.floormod(head, spec.heads)
            one = _Head(spec, flat, b, h, lanes)
            if spec.single:
                one.token(0, one.old)
            else:
                one.copy_state()
                with T.serial(spec.tokens) as t:
                    one.token(t, one.state)
                one.keep_state()

    return flat_kernel(name, spec.tensors, body)


class _Head:
    """One head's statements."""

    def __init__(self, spec: WkvSpec, flat: list[Any], b: Any, h: Any, lanes: int) -> None:
        self.spec, self.flat, self.b, self.h, self.lanes = spec, flat, b, h, lanes
        self.value = reading(spec, flat, CPU)
        self.new = spec.position("new_state")
        self.base = (b * spec.heads + h) * (spec.size * spec.size)
        self.narrow = spec.tensors[self.new].dtype != "float32" and not spec.single
        self.work = flat[self.new]
        if self.narrow:
            self.work = T.alloc_buffer((spec.size * spec.size,), "float32", scope="local")
            self.base = 0

    def old(self, row: Any, column: Any) -> Any:
        """The state before the first token; rows are keys or values, as the new state has them."""
        j, i = (column, row) if self.spec.value_major else (row, column)
        return self.value("state", b=self.b, h=self.h, j=j, i=i)

    def state(self, row: Any, column: Any) -> Any:
        """The state between tokens."""
        return self.work[self.base + row * self.spec.size + column]

    def set_state(self, row: Any, column: Any, value: Any) -> None:
        dtype = "float32" if self.narrow else self.spec.tensors[self.new].dtype
        value = value if dtype == "float32" else tirx.Cast(dtype, value)
        T.buffer_store(self.work, value, [self.base + row * self.spec.size + column])

    def copy_state(self) -> None:
        with T.serial(self.spec.size) as row:
            for start, width in _spans(self.spec.size, self.lanes):
                with _lanes(width) as v:
                    self.set_state(row, start + v, self.old(row, start + v))

    def keep_state(self) -> None:
        """Write a narrow state once, after the last token."""
        if not self.narrow:
            return
        n = self.spec.size
        base = (self.b * self.spec.heads + self.h) * (n * n)
        dtype = self.spec.tensors[self.new].dtype
        with T.serial(n) as row:
            for start, width in _spans(n, self.lanes):
                with _lanes(width) as v:
                    at = row * n + start + v
                    value = tirx.Cast(dtype, self.work[at])
                    T.buffer_store(self.flat[self.new], value, [base + at])

    def write(self, t: Any, n: Any, value: Any) -> None:
        i = self.spec.position("out")
        dtype = self.spec.tensors[i].dtype
        value = value if dtype == "float32" else tirx.Cast(dtype, value)
        T.buffer_store(self.flat[i], value, [self.spec.out_index(self.b, t, self.h, n)])

    def vectors(self, t: Any) -> dict[str, Any]:
        """Copy a token's vectors to float32 scratch: each is read N times below."""
        spec = self.spec
        out = {}
        for role in spec.operands:
            if role == "state":
                continue
            buf = T.alloc_buffer((spec.size,), "float32", scope="local")
            for start, width in _spans(spec.size, self.lanes):
                with _lanes(width) as v:
                    x = self.value(role, b=self.b, t=t, h=self.h, n=start + v)
                    T.buffer_store(buf, x, [start + v])
            out[role] = buf
        return out

    def token(self, t: Any, source: Callable[[Any, Any], Any]) -> None:
        x = self.vectors(t)
        bonus = None if self.spec.delta else self.bonus(x)
        if self.spec.value_major:
            self.by_rows(t, source, x, bonus)
        else:
            self.by_columns(t, source, x, bonus)

    def bonus(self, x: dict[str, Any]) -> Any:
        """Return sum_j r_j u_j k_j."""
        acc = T.alloc_buffer((self.lanes,), "float32", scope="local")
        _zero(acc, self.lanes)
        for start, width in _spans(self.spec.size, self.lanes):
            with _lanes(width) as v:
                j = start + v
                T.buffer_store(acc, acc[v] + x["r"][j] * x["u"][j] * x["k"][j], [v])
        return _total(acc, self.lanes)

    def blocks(self) -> Iterator[list[tuple[int, int]]]:
        """Cut the values into blocks of a few vectors."""
        spans = _spans(self.spec.size, self.lanes)
        for i in range(0, len(spans), BLOCK):
            yield spans[i : i + BLOCK]

    def by_columns(self, t: Any, source: Any, x: dict[str, Any], bonus: Any) -> None:
        """Key-major: vectors run over values, keys are the loop."""
        n = self.spec.size
        for block in self.blocks():
            sums = [T.alloc_buffer((w,), "float32", scope="local") for _, w in block]
            for buf, (_, width) in zip(sums, block, strict=True):
                _zero(buf, width)
            turned: list[Any] = []
            if self.spec.delta:
                turned = [T.alloc_buffer((w,), "float32", scope="local") for _, w in block]
                for buf, (_, width) in zip(turned, block, strict=True):
                    _zero(buf, width)
                with T.serial(n) as j:
                    for buf, (start, width) in zip(turned, block, strict=True):
                        with _lanes(width) as v:
                            s = source(j, start + v)
                            T.buffer_store(buf, buf[v] + x["a"][j] * s, [v])
            with T.serial(n) as j:
                for k, (start, width) in enumerate(block):
                    acc = sums[k]
                    old = T.alloc_buffer((width,), "float32", scope="local")
                    with _lanes(width) as v:
                        T.buffer_store(old, source(j, start + v), [v])
                    if self.spec.delta:
                        with _lanes(width) as v:
                            fresh = x["k"][j] * x["v"][start + v] + x["b"][j] * turned[k][v]
                            T.buffer_store(old, x["w"][j] * old[v] + fresh, [v])
                        with _lanes(width) as v:
                            T.buffer_store(acc, acc[v] + x["r"][j] * old[v], [v])
                    else:
                        with _lanes(width) as v:
                            T.buffer_store(acc, acc[v] + x["r"][j] * old[v], [v])
                        with _lanes(width) as v:
                            fresh = x["k"][j] * x["v"][start + v]
                            T.buffer_store(old, x["w"][j] * old[v] + fresh, [v])
                    with _lanes(width) as v:
                        self.set_state(j, start + v, old[v])
            for acc, (start, width) in zip(sums, block, strict=True):
                with _lanes(width) as v:
                    y = acc[v] if bonus is None else acc[v] + bonus * x["v"][start + v]
                    self.write(t, start + v, y)

    def by_rows(self, t: Any, source: Any, x: dict[str, Any], bonus: Any) -> None:
        """Value-major: each value is a row; vectors run over keys, several rows together."""
        n = self.spec.size
        whole = n // BLOCK
        if whole:
            with T.serial(whole) as r:
                self.rows(t, source, x, bonus, [r * BLOCK + k for k in range(BLOCK)])
        for i in range(whole * BLOCK, n):
            self.rows(t, source, x, bonus, [i])

    def rows(self, t: Any, source: Any, x: dict[str, Any], bonus: Any, rows: list[Any]) -> None:
        lanes = self.lanes
        spans = _spans(self.spec.size, lanes)
        sums = [T.alloc_buffer((lanes,), "float32", scope="local") for _ in rows]

        def add(term: Callable[[Any, Any], Any]) -> list[Any]:
            """Sum a term over the keys, for every row."""
            for acc in sums:
                _zero(acc, lanes)
            for start, width in spans:
                for acc, i in zip(sums, rows, strict=True):
                    with _lanes(width) as v:
                        T.buffer_store(acc, acc[v] + term(i, start + v), [v])
            return [_total(acc, lanes) for acc in sums]

        turned = add(lambda i, j: source(i, j) * x["a"][j]) if self.spec.delta else []
        for acc in sums:
            _zero(acc, lanes)
        for start, width in spans:
            for k, (acc, i) in enumerate(zip(sums, rows, strict=True)):
                old = T.alloc_buffer((width,), "float32", scope="local")
                with _lanes(width) as v:
                    T.buffer_store(old, source(i, start + v), [v])
                if not self.spec.delta:
                    with _lanes(width) as v:
                        T.buffer_store(acc, acc[v] + x["r"][start + v] * old[v], [v])
                with _lanes(width) as v:
                    j = start + v
                    fresh = x["k"][j] * x["v"][i]
                    if self.spec.delta:
                        fresh = fresh + turned[k] * x["b"][j]
                    T.buffer_store(old, x["w"][j] * old[v] + fresh, [v])
                if self.spec.delta:
                    with _lanes(width) as v:
                        T.buffer_store(acc, acc[v] + x["r"][start + v] * old[v], [v])
                with _lanes(width) as v:
                    self.set_state(i, start + v, old[v])
        for acc, i in zip(sums, rows, strict=True):
            y = _total(acc, lanes)
            self.write(t, i, y if bonus is None else y + bonus * x["v"][i])


def _tasks(spec: WkvSpec, target: tvm.target.Target) -> int:
    """Return into how many tasks the kernel is cut: one where the work is known to be little."""
    sizes = [spec.batch, spec.tokens, spec.heads, spec.size]
    if all(isinstance(n, int) for n in sizes) and is_little(math.prod(sizes) * spec.size):
        return 1
    return TASKS_PER_THREAD * num_threads(target)


def emit_wkv4_cpu(spec: WkvSpec, target: tvm.target.Target) -> tirx.PrimFunc:
    """Return the PrimFunc of RWKV-4's recurrence: channels fill the vector."""
    lanes = vector_lanes(target, "float32")
    channels = spec.size

    def body(flat: list[Any]) -> None:
        tiles = channels // lanes if isinstance(channels, int) else tirx.floordiv(channels, lanes)
        rest = channels - tiles * lanes
        if not isinstance(tiles, int) or tiles > 0:
            with split_loop(spec.batch * tiles, _tasks(spec, target)) as i:
                b, c = tirx.floordiv(i, tiles), tirx.floormod(i, tiles)
                wkv4_step(spec, flat, b, c * lanes, lanes, CPU)
        if not isinstance(rest, int) or rest > 0:
            with T.serial(spec.batch * rest) as i:
                b, c = tirx.floordiv(i, rest), tirx.floormod(i, rest)
                wkv4_step(spec, flat, b, tiles * lanes + c, 1, CPU)

    return flat_kernel("wkv4", spec.tensors, body)
