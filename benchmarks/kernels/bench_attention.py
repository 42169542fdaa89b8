"""Attention: this package against torch SDPA and TVM's default, on the CPU.

    TVM_NUM_THREADS=1 pytest benchmarks/kernels -k "rotary or attention" --benchmark-json out.json

TVM_NUM_THREADS sets the threads of all engines. Caches rotate through 150 MB, as the layers of a
model do. `extra_info` holds the bytes that have to move, GB/s or GFLOP/s. Every engine's result is
compared with float64 before it is timed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op as R

from relax_llm_passes.kernels.attention_decode_cpu import attention_decode_cpu
from relax_llm_passes.kernels.attention_prefill_cpu import attention_prefill_cpu
from relax_llm_passes.kernels.attention_standard import standard_plan
from relax_llm_passes.targets import parse_target, vector_lanes

CPU = parse_target("native")
LANES = vector_lanes(CPU, "float32")
THREADS = int(os.environ.get("TVM_NUM_THREADS", "1"))
HEADS, DIM = 16, 128
_ROTATED_BYTES = 150e6


def _reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    scores = np.einsum("bhsd,bhtd->bhst", q.astype("float64"), k) / math.sqrt(q.shape[-1])
    if causal:
        s, t = q.shape[2], k.shape[2]
        scores = np.where(np.arange(t) <= np.arange(s)[:, None] + t - s, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhst,bhtd->bhsd", weights / weights.sum(-1, keepdims=True), v)


def _draw(queries: int, keys: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (1, HEADS, keys, DIM)
    q = rng.standard_normal((1, HEADS, queries, DIM), dtype="float32")
    return q, rng.standard_normal(shape, "float32"), rng.standard_normal(shape, "float32")


def _package(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Any:
    decode = q.shape[2] == 1
    plan = standard_plan(
        batch=1, query_length=1 if decode else tirx.Var("s", "int64"),
        key_length=tirx.Var("t", "int64"), heads=HEADS, kv_heads=HEADS, head_dim=DIM,
        causal="bottom_right" if causal else None,
    )  # fmt: skip
    prim = (attention_decode_cpu if decode else attention_prefill_cpu)(plan, LANES)
    run = tvm.compile(tvm.IRModule({"attention": prim}), target=CPU)["attention"]
    query, out = tvm.runtime.tensor(q), tvm.runtime.tensor(np.zeros_like(q))
    pairs = [(tvm.runtime.tensor(k), tvm.runtime.tensor(v)) for _ in range(_copies(k))]

    def call() -> None:
        for key, value in pairs:
            run(query, key, value, out)

    return call, lambda: out.numpy(), len(pairs)


def _torch(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Any:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(THREADS)
    query = torch.from_numpy(q)
    pairs = [(torch.from_numpy(k.copy()), torch.from_numpy(v.copy())) for _ in range(_copies(k))]
    whole = causal and q.shape[2] > 1  # one query sees every key
    last: list[Any] = [None]

    def call() -> None:
        for key, value in pairs:
            last[0] = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=whole
            )

    return call, lambda: last[0].numpy(), len(pairs)


def _tvm_default(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Any:
    bb = relax.BlockBuilder()
    types = [relax.TensorType(a.shape, "float32") for a in (q, k, v)]
    params = [relax.Var(n, t) for n, t in zip("qkv", types, strict=True)]
    with bb.function("main", params):
        with bb.dataflow():
            moved = [bb.emit(R.permute_dims(p, [0, 2, 1, 3])) for p in params]
            mask = "BottomRight" if causal else None
            out = bb.emit(R.nn.attention(*moved, causal_mask=mask))
            out = bb.emit_output(R.permute_dims(out, [0, 2, 1, 3]))
        bb.emit_func_output(out)
    vm = relax.VirtualMachine(tvm.compile(bb.get(), target=CPU), tvm.cpu())
    arguments = [tvm.runtime.tensor(a) for a in (q, k, v)]
    last: list[Any] = [None]

    def call() -> None:
        last[0] = vm["main"](*arguments)

    return call, lambda: last[0].numpy(), 1


def _copies(k: np.ndarray) -> int:
    return max(1, min(16, int(_ROTATED_BYTES / (2 * k.nbytes))))


ENGINES: dict[str, Callable[..., Any]] = {
    "package": _package,
    "torch": _torch,
    "tvm_default": _tvm_default,
}


def _measure(benchmark: Any, engine: str, queries: int, keys: int) -> None:
    q, k, v = _draw(queries, keys)
    causal = True
    call, result, repeats = ENGINES[engine](q, k, v, causal)
    call()
    want = _reference(q, k, v, causal)
    assert np.abs(result() - want).max() <= 1e-5 * max(1.0, np.abs(want).max())
    benchmark.pedantic(call, rounds=5, warmup_rounds=1)
    seconds = benchmark.stats.stats.median / repeats
    moved = q.nbytes * 2 + k.nbytes * 2
    benchmark.extra_info.update(
        microseconds=seconds * 1e6,
        minimum_bytes=moved,
        gigabytes_per_second=moved / seconds / 1e9,
        gigaflops=2 * HEADS * queries * keys * DIM * (2 if queries == 1 else 1) / seconds / 1e9,
        threads=THREADS,
    )


@pytest.mark.parametrize("keys", [128, 512, 2048, 8192])
@pytest.mark.parametrize("engine", ["package", "torch"])
def test_attention_decode(benchmark: Any, engine: str, keys: int) -> None:
    _measure(benchmark, engine, 1, keys)


@pytest.mark.parametrize("keys", [128, 512, 1024])
@pytest.mark.parametrize("engine", ["package", "torch"])
def test_attention_prefill(benchmark: Any, engine: str, keys: int) -> None:
    _measure(benchmark, engine, keys, keys)


@pytest.mark.parametrize(("queries", "keys"), [(1, 512), (128, 128)])
def test_attention_tvm_default(benchmark: Any, queries: int, keys: int) -> None:
    _measure(benchmark, "tvm_default", queries, keys)
