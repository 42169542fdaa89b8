"""One layer from packed QKV to attention output: split, rotary, cache append, attention.

    TVM_NUM_THREADS=1 pytest benchmarks/kernels -k "rotary or attention" --benchmark-json out.json

Engines: this package's pipeline, TVM's default on the same module, torch eager (rotate_half,
`torch.cat`, SDPA) and torch.compile of that. All append functionally: the caches that go out are
new tensors. Every engine's result is compared with float64 before it is timed. `extra_info` holds
the bytes that have to move; those that the CUDA kernel moves are counted by
`tests/kernels/test_attention_bytes.py`, which holds them to 1.1 times that minimum.
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

import relax_llm_passes
from relax_llm_passes.targets import parse_target

CPU = parse_target("native")
THREADS = int(os.environ.get("TVM_NUM_THREADS", "1"))
HEADS, DIM = 16, 128


def _module(new: Any) -> tvm.IRModule:
    """The layer; `new` tokens (a number, or a symbolic size) behind a past of any length."""
    H, D, half = HEADS, DIM, DIM // 2
    past, S = tirx.Var("past", "int64"), new
    total = past + S

    def var(name: str, *shape: Any) -> relax.Var:
        return relax.Var(name, relax.TensorType(shape, "float32"))

    qkv, cos, sin = var("qkv", 1, S, 3 * H * D), var("cos", S, D), var("sin", S, D)
    pasts = [var(n, 1, H, past, D) for n in ("past_k", "past_v")]
    bb = relax.BlockBuilder()
    with bb.function("main", [qkv, cos, sin, *pasts]):
        with bb.dataflow():
            emit = bb.emit
            parts = emit(R.split(qkv, 3, axis=2))
            q, k, v = (
                emit(R.permute_dims(emit(R.reshape(emit(relax.TupleGetItem(parts, i)),
                                                   (1, S, H, D))), [0, 2, 1, 3]))
                for i in range(3)
            )  # fmt: skip

            def rotated(x: relax.Var) -> relax.Var:
                low = emit(R.strided_slice(x, [3], [0], [half], [1]))
                high = emit(R.strided_slice(x, [3], [half], [D], [1]))
                other = emit(R.concat([emit(R.negative(high)), low], axis=3))
                return emit(R.add(emit(R.multiply(x, cos)), emit(R.multiply(other, sin))))

            q, k = rotated(q), rotated(k)
            k, v = (
                emit(R.concat([old, fresh], axis=2))
                for old, fresh in zip(pasts, (k, v), strict=True)
            )
            scores = emit(R.matmul(q, emit(R.permute_dims(k, [0, 1, 3, 2]))))
            scores = emit(R.multiply(scores, relax.const(1 / math.sqrt(D), "float32")))
            rows = emit(R.expand_dims(emit(R.arange(past, total, 1, "int64")), 1))
            columns = emit(R.expand_dims(emit(R.arange(0, total, 1, "int64")), 0))
            lowest = relax.const(np.finfo("float32").min, "float32")
            scores = emit(R.where(emit(R.less_equal(columns, rows)), scores, lowest))
            out = emit(R.matmul(emit(R.nn.softmax(scores, axis=-1)), v))
            out = emit(R.reshape(emit(R.permute_dims(out, [0, 2, 1, 3])), (1, S, H * D)))
            result = bb.emit_output(relax.Tuple([out, k, v]))
        bb.emit_func_output(result)
    return bb.get()


def _draw(new: int, past: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    steps = 10000.0 ** (-np.arange(DIM // 2) * 2.0 / DIM)
    angles = (past + np.arange(new))[:, None] * np.concatenate([steps, steps])
    tables = [np.cos(angles).astype("float32"), np.sin(angles).astype("float32")]
    qkv = rng.standard_normal((1, new, 3 * HEADS * DIM), dtype="float32")
    pasts = [rng.standard_normal((1, HEADS, past, DIM), dtype="float32") for _ in range(2)]
    return [qkv, *tables, *pasts]


def _reference(inputs: list[np.ndarray]) -> np.ndarray:
    qkv, cos, sin, past_k, past_v = (a.astype("float64") for a in inputs)
    S = qkv.shape[1]
    q, k, v = (a.reshape(1, S, HEADS, DIM).transpose(0, 2, 1, 3) for a in np.split(qkv, 3, axis=2))

    def rotated(x: np.ndarray) -> np.ndarray:
        low, high = np.split(x, 2, axis=3)
        return x * cos + np.concatenate([-high, low], axis=3) * sin

    k = np.concatenate([past_k, rotated(k)], axis=2)
    v = np.concatenate([past_v, v], axis=2)
    scores = rotated(q) @ k.transpose(0, 1, 3, 2) / math.sqrt(DIM)
    T = k.shape[2]
    scores = np.where(np.arange(T) <= np.arange(S)[:, None] + T - S, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ v
    return out.transpose(0, 2, 1, 3).reshape(1, S, HEADS * DIM)


def _vm(inputs: list[np.ndarray], pipeline: Any) -> Callable[[], Any]:
    new = inputs[0].shape[1]
    mod = _module(new if new == 1 else tirx.Var("new", "int64"))
    options = {} if pipeline is None else {"relax_pipeline": pipeline}
    machine = relax.VirtualMachine(tvm.compile(mod, target=CPU, **options), tvm.cpu())
    arguments = [tvm.runtime.tensor(a) for a in inputs]
    return lambda: machine["main"](*arguments)[0].numpy


def _package(inputs: list[np.ndarray]) -> Callable[[], Any]:
    return _vm(inputs, relax_llm_passes.default_pipeline(CPU))


def _tvm_default(inputs: list[np.ndarray]) -> Callable[[], Any]:
    return _vm(inputs, None)


def _torch(inputs: list[np.ndarray], compiled: bool = False) -> Callable[[], Any]:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(THREADS)

    def layer(qkv: Any, cos: Any, sin: Any, past_k: Any, past_v: Any) -> Any:
        rows = qkv.shape[1]
        q, k, v = (a.view(1, rows, HEADS, DIM).transpose(1, 2) for a in qkv.chunk(3, dim=2))

        def rotated(x: Any) -> Any:
            low, high = x.chunk(2, dim=3)
            return x * cos + torch.cat([-high, low], dim=3) * sin

        q = rotated(q)
        k, v = torch.cat([past_k, rotated(k)], dim=2), torch.cat([past_v, v], dim=2)
        # Without a past, or with one query, is_causal or nothing says what the mask says.
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=rows > 1)
        return out.transpose(1, 2).reshape(1, rows, HEADS * DIM), k, v

    run = torch.compile(layer) if compiled else layer
    arguments = [torch.from_numpy(a) for a in inputs]

    def call() -> Any:
        with torch.no_grad():
            return run(*arguments)[0].numpy

    return call


ENGINES: dict[str, Callable[[list[np.ndarray]], Callable[[], Any]]] = {
    "package": _package,
    "torch": _torch,
    "torch_compile": lambda inputs: _torch(inputs, compiled=True),
    "tvm_default": _tvm_default,
}


def _measure(benchmark: Any, engine: str, new: int, past: int) -> None:
    inputs = _draw(new, past)
    call = ENGINES[engine](inputs)
    want = _reference(inputs)
    assert np.abs(call()() - want).max() <= 1e-5 * max(1.0, np.abs(want).max())
    benchmark.pedantic(call, rounds=7, warmup_rounds=1, iterations=max(1, 2048 // (past + new)))
    seconds = benchmark.stats.stats.median
    caches = sum(a.nbytes for a in inputs[3:])
    moved = 2 * caches + inputs[0].nbytes * 2 + inputs[0].nbytes // 3
    benchmark.extra_info.update(
        microseconds=seconds * 1e6, minimum_bytes=moved,
        gigabytes_per_second=moved / seconds / 1e9, threads=THREADS,
    )  # fmt: skip


@pytest.mark.parametrize("past", [127, 511, 2047, 8191])
@pytest.mark.parametrize("engine", ["package", "torch", "torch_compile"])
def test_rotary_decode(benchmark: Any, engine: str, past: int) -> None:
    _measure(benchmark, engine, 1, past)


@pytest.mark.parametrize("new", [128, 512, 1024])
@pytest.mark.parametrize("engine", ["package", "torch", "torch_compile"])
def test_rotary_prefill(benchmark: Any, engine: str, new: int) -> None:
    _measure(benchmark, engine, new, 0)


@pytest.mark.parametrize(("new", "past"), [(1, 511), (128, 0)])
def test_rotary_tvm_default(benchmark: Any, new: int, past: int) -> None:
    _measure(benchmark, "tvm_default", new, past)
