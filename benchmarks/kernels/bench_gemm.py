"""Products by weights: this package against torch and OpenBLAS, beside what the machine can do.

    TVM_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 \\
        pytest benchmarks/kernels -k "gemv or gemm" --benchmark-json out.json

TVM_NUM_THREADS sets the threads of all engines (TVM by itself takes one on a machine of two
virtual cores). Weights rotate through 200 MB, so that they come from memory as they do in a model.
All cases of one engine run before the next engine's: threads of OpenBLAS and OpenMP keep spinning
after a call and would halve what others get. `extra_info` holds GB/s of weights, GFLOP/s and the
machine's own. Every case is compared with float64 before it is timed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm

from relax_llm_passes.kernels.cpu_batched import BatchSpec, batched_kernel
from relax_llm_passes.kernels.cpu_gemm import gemm_kernel
from relax_llm_passes.kernels.cpu_pack import pack_array
from relax_llm_passes.kernels.cpu_spec import GemmSpec, QuantSpec

from .machine import CPU, peak_gflops, read_bandwidth

THREADS = int(os.environ.get("TVM_NUM_THREADS", "1"))
GEMV = [(2304, 768), (768, 3072), (2048, 2048), (4096, 4096), (50432, 4096)]
GEMM = [(2304, 768), (2048, 2048)]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_ROTATED_BYTES = 200e6


def _weights(n: int, k: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((n, k), dtype=np.float32) / 16).astype(DTYPES[dtype])


def _copies(array: np.ndarray) -> int:
    return max(1, min(64, int(_ROTATED_BYTES / array.nbytes)))


def _package(layout: str, rows: np.ndarray, lhs: np.ndarray, dtype: str) -> Any:
    (n, k), m = rows.shape, lhs.shape[0]
    spec = GemmSpec(("m",), n, k, layout, dtype, dtype, dtype)
    run = tvm.compile(gemm_kernel(spec, CPU), target=CPU)[spec.key()]
    weight = rows
    if layout == "KN":
        weight = np.ascontiguousarray(rows.T)
    elif layout == "packed":
        weight = pack_array(rows, "NK", CPU)
    weights = [tvm.runtime.tensor(weight) for _ in range(_copies(weight))]
    x, out = tvm.runtime.tensor(lhs), tvm.runtime.tensor(np.zeros((m, n), lhs.dtype))

    def call() -> None:
        for w in weights:
            run(x, w, out)

    return call, lambda: out.numpy(), len(weights)


def _torch(rows: np.ndarray, lhs: np.ndarray, dtype: str) -> Any:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(THREADS)
    kind = getattr(torch, dtype)
    weights = [torch.from_numpy(rows.astype("float32")).to(kind) for _ in range(_copies(rows))]
    x = torch.from_numpy(lhs.astype("float32")).to(kind)
    out = []

    def call() -> None:
        for w in weights:
            out[:] = [torch.nn.functional.linear(x, w)]

    return call, lambda: out[0].float().numpy(), len(weights)


def _openblas(rows: np.ndarray, lhs: np.ndarray, dtype: str) -> Any:
    if dtype != "float32":
        pytest.skip("OpenBLAS has no 16-bit products here")
    if os.environ.get("OPENBLAS_NUM_THREADS") != str(THREADS):
        pytest.skip(f"start with OPENBLAS_NUM_THREADS={THREADS}, so that it has as many threads")
    weights = [rows.copy() for _ in range(_copies(rows))]
    out = np.zeros((lhs.shape[0], rows.shape[0]), "float32")

    def call() -> None:
        for w in weights:
            np.matmul(lhs, w.T, out=out)

    return call, lambda: out, len(weights)


ENGINES: dict[str, Callable[..., Any]] = {
    "relax_llm_NK": lambda *a: _package("NK", *a),
    "relax_llm_KN": lambda *a: _package("KN", *a),
    "relax_llm_packed": lambda *a: _package("packed", *a),
    "torch": _torch,
    "openblas": _openblas,
}


def _measure(benchmark: Any, engine: str, n: int, k: int, m: int, dtype: str) -> None:
    rows = _weights(n, k, dtype)
    lhs = np.random.default_rng(1).standard_normal((m, k)).astype(DTYPES[dtype])
    call, result, calls = ENGINES[engine](rows, lhs, dtype)
    call()
    some = slice(0, min(n, 512))
    want = lhs.astype(float) @ rows[some].astype(float).T
    # Rounding of 16-bit results of about sqrt(k) / 16; fp32 sums.
    rounding = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}[dtype]
    got = result()[:, some].astype(float)
    np.testing.assert_allclose(got, want, rtol=rounding, atol=rounding * np.sqrt(k))
    benchmark.pedantic(call, rounds=9, warmup_rounds=1)
    _report(benchmark, benchmark.stats.stats.median / calls, rows.nbytes, 2 * m * n * k)


def _report(benchmark: Any, seconds: float, bytes_read: int, operations: int) -> None:
    benchmark.extra_info.update(
        threads=THREADS,
        microseconds_a_call=round(seconds * 1e6, 1),
        gigabytes_a_second=round(bytes_read / seconds / 1e9, 2),
        machine_read_gigabytes_a_second=round(read_bandwidth(), 2),
        gflops=round(operations / seconds / 1e9, 1),
        machine_peak_gflops=round(peak_gflops(), 1),
    )


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("n, k", GEMV)
@pytest.mark.parametrize("engine", list(ENGINES))
def test_gemv(benchmark: Any, engine: str, n: int, k: int, dtype: str) -> None:
    _measure(benchmark, engine, n, k, 1, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("m", [16, 128, 512])
@pytest.mark.parametrize("n, k", GEMM)
@pytest.mark.parametrize("engine", list(ENGINES))
def test_gemm(benchmark: Any, engine: str, n: int, k: int, m: int, dtype: str) -> None:
    _measure(benchmark, engine, n, k, m, dtype)


@pytest.mark.parametrize("bits, offset", [(4, 7), (8, 127)])
@pytest.mark.parametrize("n, k", [(2304, 768), (4096, 4096)])
@pytest.mark.parametrize("dtype, asked", [("float16", 0), ("float16", 8), ("float32", 0)])
def test_gemv_quantised(
    benchmark: Any, dtype: str, asked: int, n: int, k: int, bits: int, offset: int
) -> None:
    quant = QuantSpec(bits, 32, offset, activation_bits=asked)
    spec = GemmSpec((1,), n, k, "NK", dtype, "uint32", dtype, quant=quant)
    run = tvm.compile(gemm_kernel(spec, CPU), target=CPU)[spec.key()]
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 2**32, (n, k // quant.per_word), dtype="uint32")
    scale = (rng.random((n, k // 32)) / 256).astype("float16")
    weights = [
        (tvm.runtime.tensor(packed), tvm.runtime.tensor(scale)) for _ in range(_copies(packed))
    ]
    x = tvm.runtime.tensor(rng.standard_normal((1, k)).astype(dtype))
    out = tvm.runtime.tensor(np.zeros((1, n), dtype))

    def call() -> None:
        for words, scales in weights:
            run(x, words, scales, out)

    benchmark.pedantic(call, rounds=9, warmup_rounds=1)
    seconds = benchmark.stats.stats.median / len(weights)
    _report(benchmark, seconds, packed.nbytes + scale.nbytes, 2 * n * k)
    benchmark.extra_info["gigaweights_a_second"] = round(n * k / seconds / 1e9, 2)


# Batch, rows, columns, length of the sums: scores and values of 16 heads of 64, prefill and decode.
BATCHED = [(16, 128, 128, 64), (16, 128, 64, 128), (16, 1, 512, 64), (16, 1, 64, 512)]


def _batched(lhs: np.ndarray, rhs: np.ndarray, layout: str) -> Any:
    b, m, _ = lhs.shape
    n = rhs.shape[2 if layout == "KN" else 1]
    spec = BatchSpec(("b",), "m", "n", "k", rhs_layout=layout)
    run = tvm.compile(batched_kernel(spec, CPU), target=CPU)[spec.key()]
    out = tvm.runtime.tensor(np.zeros((b, m, n), "float32"))
    x, y = tvm.runtime.tensor(lhs), tvm.runtime.tensor(rhs)
    return lambda: run(x, y, out), lambda: out.numpy()


def _batched_torch(lhs: np.ndarray, rhs: np.ndarray, layout: str) -> Any:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(THREADS)
    x, y = torch.from_numpy(lhs), torch.from_numpy(rhs)
    y = y if layout == "KN" else y.transpose(1, 2)
    out = []

    def call() -> None:
        out[:] = [torch.matmul(x, y)]

    return call, lambda: out[0].numpy()


@pytest.mark.parametrize("layout", ["KN", "NK"])
@pytest.mark.parametrize("b, m, n, k", BATCHED)
@pytest.mark.parametrize("engine", ["relax_llm", "torch"])
def test_gemm_batched(
    benchmark: Any, engine: str, b: int, m: int, n: int, k: int, layout: str
) -> None:
    rng = np.random.default_rng(0)
    lhs = rng.standard_normal((b, m, k), dtype=np.float32)
    rhs = rng.standard_normal((b, k, n) if layout == "KN" else (b, n, k), dtype=np.float32)
    call, result = (_batched if engine == "relax_llm" else _batched_torch)(lhs, rhs, layout)
    call()
    want = lhs.astype(float) @ (rhs if layout == "KN" else rhs.swapaxes(1, 2)).astype(float)
    # fp32 sums of k terms of about 1.
    np.testing.assert_allclose(result(), want, rtol=1e-5, atol=1e-5 * np.sqrt(k))
    repeats = max(1, int(3e7 / (b * m * n * k)))
    benchmark.pedantic(lambda: [call() for _ in range(repeats)], rounds=9, warmup_rounds=1)
    seconds = benchmark.stats.stats.median / repeats
    _report(benchmark, seconds, rhs.nbytes, 2 * b * m * n * k)
