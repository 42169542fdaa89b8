"""The matrix-valued wkv recurrence on CUDA: the state lives in registers from first to last token.

A warp owns 32/P values (columns of the state) and splits each column's keys over P lanes, which
meet through shuffles. r, k, w (a, b) of a few tokens at a time are staged in shared memory for
all warps of the block. The state is read once before the first token and written once after the
last. A single token (decoding) is bound by the state's traffic, so heads are cut into more blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from .flat_kernel import flat_kernel
from .limits import KernelLimits
from .norm_cuda_plan import FILL_BLOCKS
from .norm_math import CUDA
from .wkv4 import wkv4_step
from .wkv_spec import WkvSpec, reading

__all__ = ["LIMITS", "WkvPlan", "emit_wkv4_cuda", "emit_wkv_cuda", "plan_wkv"]

# What ptxas may say that it needs; tests/cuda/test_limits.py holds it to that.
LIMITS = KernelLimits(registers=128, static_smem=16384, resident_threads=256)

STATE_REGISTERS = 16  # state values a thread aims to hold
STAGED_TOKENS = 8


@dataclass(frozen=True)
class WkvPlan:
    """Lanes per column, warps per block, and tokens staged at once."""

    key_lanes: int
    warps: int
    stage: int

    @property
    def columns(self) -> int:
        """Values (columns) a block owns."""
        return self.warps * (32 // self.key_lanes)

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * self.warps


def plan_wkv(spec: WkvSpec) -> WkvPlan:
    """Choose the plan from the head size, the token count and the number of heads."""
    lanes = 1
    while lanes < 32 and -(-spec.size // lanes) > STATE_REGISTERS:
        lanes *= 2
    columns = 32 // lanes
    warps = min(8, -(-spec.size // columns))
    single = spec.single
    heads = spec.batch * spec.heads
    if single and isinstance(heads, int):
        # Each block stages the token's vectors again, so stop a little short of a full machine.
        while warps > 1 and heads * -(-spec.size // (columns * warps)) < FILL_BLOCKS // 2:
            warps //= 2
    return WkvPlan(lanes, warps, 1 if single else STAGED_TOKENS)


def _local(value: Any) -> Any:
    buf = T.alloc_buffer((1,), "float32", scope="local")
    T.buffer_store(buf, value, [0])
    return buf


def emit_wkv_cuda(spec: WkvSpec, plan: WkvPlan | None = None) -> tirx.PrimFunc:
    """Return the scheduled PrimFunc of the recurrence."""
    plan = plan_wkv(spec) if plan is None else plan
    n, lanes = spec.size, plan.key_lanes
    held = -(-n // lanes)
    groups = -(-n // plan.columns)

    def body(flat: list[Any]) -> None:
        with (
            T.launch_thread("blockIdx.x", spec.batch * spec.heads * groups) as bx,
            T.launch_thread("threadIdx.x", plan.threads) as tx,
        ):
            _body(spec, plan, flat, bx, tx, held, groups)

    return flat_kernel("wkv7" if spec.delta else "wkv", spec.tensors, body)


def _body(
    spec: WkvSpec, plan: WkvPlan, flat: list[Any], bx: Any, tx: Any, held: int, groups: int
) -> None:
    n, lanes = spec.size, plan.key_lanes
    head = tirx.floordiv(bx, groups)
    b, h = tirx.floordiv(head, spec.heads), tirx.floormod(head, spec.heads)
    column = tirx.floormod(bx, groups) * plan.columns
    if spec.value_major:
        # Neighbouring lanes take neighbouring keys, which are neighbours in memory.
        part, mine = tirx.floormod(tx, lanes), tirx.floordiv(tx, lanes)
        value, first_step = column + mine, 1
    else:
        per_warp = 32 // lanes
        in_warp, warp = tirx.floormod(tx, 32), tirx.floordiv(tx, 32)
        part = tirx.floordiv(in_warp, per_warp)
        value = column + warp * per_warp + tirx.floormod(in_warp, per_warp)
        first_step = per_warp
    inside = None if n % plan.columns == 0 else value < n
    value = value if inside is None else tirx.min(value, n - 1)
    padded = held * lanes
    exact = padded == n

    def key(m: int) -> Any:
        return m * lanes + part

    read = reading(spec, flat, CUDA)

    def masked(m: int, value_: Any) -> Any:
        if exact or (m + 1) * lanes <= n:
            return value_
        return tirx.if_then_else(key(m) < n, value_, tirx.const(0, "float32"))

    state = T.alloc_buffer((held,), "float32", scope="local")
    for m in range(held):
        T.buffer_store(state, masked(m, read("state", b=b, h=h, j=key(m), i=value)), [m])
    shared = {
        name: T.alloc_buffer((plan.stage * padded,), "float32", scope="shared")
        for name in spec.staged()
    }
    shared |= {name: T.alloc_buffer((padded,), "float32", scope="shared") for name in spec.fixed()}

    def stage(name: str, tokens: int, first: Any, count: Any) -> None:
        total = tokens * padded
        for c in range(-(-total // plan.threads)):
            at = c * plan.threads + tx
            t, j = tirx.floordiv(at, padded), tirx.floormod(at, padded)
            conds = []
            if total % plan.threads:
                conds.append(at < total)
            loads = []
            if tokens > 1:
                loads.append(t < count)
            if not exact:
                loads.append(j < n)
            x = read(name, b=b, t=first + t, h=h, n=j)
            if loads:
                x = tirx.if_then_else(
                    loads[0] if len(loads) == 1 else tirx.all(*loads),
                    x,
                    tirx.const(0, "float32"),
                )
            if conds:
                with T.If(conds[0]), T.Then():
                    T.buffer_store(shared[name], x, [at])
            else:
                T.buffer_store(shared[name], x, [at])

    for name in spec.fixed():
        stage(name, 1, 0, 1)

    def step(t: Any, slot: Any) -> None:
        def at(name: str, m: int) -> Any:
            base = 0 if name in spec.fixed() else slot * padded
            return shared[name][base + key(m)]

        v = _local(read("v", b=b, t=t, h=h, n=value))
        acc = _local(tirx.const(0, "float32"))
        if spec.delta:
            for m in range(held):
                T.buffer_store(acc, acc[0] + state[m] * at("a", m), [0])
            _meet(acc, lanes, first_step)
            sa = _local(acc[0])
            T.buffer_store(acc, tirx.const(0, "float32"), [0])
            for m in range(held):
                T.buffer_store(
                    state,
                    state[m] * at("w", m) + sa[0] * at("b", m) + at("k", m) * v[0],
                    [m],
                )
                T.buffer_store(acc, acc[0] + state[m] * at("r", m), [0])
        else:
            for m in range(held):
                kv = _local(at("k", m) * v[0])
                T.buffer_store(acc, acc[0] + at("r", m) * (state[m] + at("u", m) * kv[0]), [0])
                T.buffer_store(state, state[m] * at("w", m) + kv[0], [m])
        _meet(acc, lanes, first_step)
        out = spec.tensors[spec.position("out")]
        conds = ([part == 0] if lanes > 1 else []) + ([] if inside is None else [inside])
        store_at = [spec.out_index(b, t, h, value)]
        y = acc[0] if out.dtype == "float32" else tirx.Cast(out.dtype, acc[0])
        if conds:
            with T.If(conds[0] if len(conds) == 1 else tirx.all(*conds)), T.Then():
                T.buffer_store(flat[spec.position("out")], y, store_at)
        else:
            T.buffer_store(flat[spec.position("out")], y, store_at)

    if plan.stage == 1 and spec.single:
        for name in spec.staged():
            stage(name, 1, 0, 1)
        step(0, 0)
    else:
        rounds = tirx.floordiv(spec.tokens + (plan.stage - 1), plan.stage)
        with T.serial(rounds) as i:
            left = tirx.min(spec.tokens - i * plan.stage, plan.stage)
            for name in spec.staged():
                stage(name, plan.stage, i * plan.stage, left)
            with T.serial(left) as t:
                step(i * plan.stage + t, t)
    target = spec.tensors[spec.position("new_state")]
    for m in range(held):
        x = state[m] if target.dtype == "float32" else tirx.Cast(target.dtype, state[m])
        conds = [] if inside is None else [inside]
        if not (exact or (m + 1) * lanes <= n):
            conds.append(key(m) < n)
        index = [spec.state_index(b, h, key(m), value)]
        if conds:
            with T.If(conds[0] if len(conds) == 1 else tirx.all(*conds)), T.Then():
                T.buffer_store(flat[spec.position("new_state")], x, index)
        else:
            T.buffer_store(flat[spec.position("new_state")], x, index)


def _meet(acc: Any, lanes: int, first_step: int) -> None:
    """Sum over the lanes that share a column (`first_step` apart)."""
    mask = tirx.const(0xFFFFFFFF, "uint32")
    for k in range(lanes.bit_length() - 1):
        other = T.tvm_warp_shuffle_xor(mask, acc[0], first_step << k, 32, 32)
        T.buffer_store(acc, acc[0] + other, [0])


def emit_wkv4_cuda(spec: WkvSpec) -> tirx.PrimFunc:
    """Return RWKV-4's recurrence: a thread owns a channel, its three state values in registers."""
    threads = 32 if isinstance(spec.size, int) and spec.size <= 4096 else 128
    total = spec.batch * spec.size
    exact = isinstance(total, int) and total % threads == 0
    blocks = tirx.floordiv(total + (threads - 1), threads)
    if isinstance(total, int):
        blocks = -(-total // threads)

    def body(flat: list[Any]) -> None:
        with (
            T.launch_thread("blockIdx.x", blocks) as bx,
            T.launch_thread("threadIdx.x", threads) as tx,
        ):
            at = bx * threads + tx

            def run() -> None:
                b, c = tirx.floordiv(at, spec.size), tirx.floormod(at, spec.size)
                wkv4_step(spec, flat, b, c, 1, CUDA)

            if exact:
                run()
            else:
                with T.If(at < total), T.Then():
                    run()

    return flat_kernel("wkv4", spec.tensors, body)
