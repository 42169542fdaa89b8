"""Products of one row by packed weights on CUDA: right numbers, every word is read once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm

import relax_llm_passes
from relax_llm_passes import corpus
from relax_llm_passes.cuda_on_cpu import (
    cuda_target,
    nvcc_check,
    nvcc_missing,
    run_module,
    run_primfunc,
    why_not,
)
from relax_llm_passes.kernels.cpu_spec import GemmSpec, QuantSpec
from relax_llm_passes.kernels.cuda_gemv_quantized import LIMITS, quantized_gemv_kernel

from .cpu_gemm_cases import ROUNDING, apply, epilogue, random, wide
from .test_cpu_quantized import quantise

cuda = [pytest.mark.cuda, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]


def _cuda(func):
    for mark in cuda:
        func = mark(func)
    return func


def _spec(layout, bits, n, k, dtype, group=32, **options):
    quant = QuantSpec(bits, group, 2 ** (bits - 1) - 1)
    return GemmSpec((1,), n, k, layout, dtype, "uint32", dtype, quant=quant, **options)


# Around every edge: fewer words than lanes, a tail of lanes, whole steps with and without a rest.
SIZES = [(90, 64), (7, 96), (33, 544), (130, 2144), (2050, 64), (5, 1088)]


@_cuda
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n, k, dtype", [(n, k, "float32") for n, k in SIZES]
                         + [(90, 1056, "float16"), (90, 1056, "bfloat16")])  # fmt: skip
def test_sizes_and_layouts(n, k, dtype, bits, layout):
    rng = np.random.default_rng(n + k)
    ops = epilogue("bias", "silu", dtype=dtype)
    spec = _spec(layout, bits, n, k, dtype, epilogue=ops)
    packed, scale, value = quantise(rng.standard_normal((n, k)), spec.quant)
    x, bias = random(rng, (1, k), dtype), random(rng, (n,), dtype)
    weights = [packed, scale] if layout == "NK" else [packed.T.copy(), scale.T.copy()]
    arguments = [x, *weights, bias, np.zeros_like(x, shape=(1, n))]
    orders = 5 if (n, k) == (33, 544) else 2
    found = run_primfunc(quantized_gemv_kernel(spec), arguments, orders=orders)
    want = apply(ops.ops[1], wide(x) @ value.T + wide(bias), None)
    size = np.abs(wide(x)) @ np.abs(value).T + np.abs(wide(bias))
    # fp32 sums of K terms, then one rounding.
    bound = ROUNDING[dtype] * np.abs(want) + 2.0**-20 * (size + 1)
    assert (np.abs(wide(found.outputs[0]) - want) <= bound).all()
    (stats,) = found.stats
    assert stats.global_read_unique == sum(a.nbytes for a in (x, packed, scale, bias))
    assert stats.global_written_unique == found.outputs[0].nbytes


@_cuda
@pytest.mark.parametrize("layout", ["NK", "KN"])
def test_symbolic_columns(layout):
    spec = _spec(layout, 4, "n", 288, "float16")
    func = quantized_gemv_kernel(spec)
    for n in (1, 33, 200):
        rng = np.random.default_rng(n)
        packed, scale, value = quantise(rng.standard_normal((n, 288)), replace(spec, n=n).quant)
        x = random(rng, (1, 288), "float16")
        weights = [packed, scale] if layout == "NK" else [packed.T.copy(), scale.T.copy()]
        found = run_primfunc(func, [x, *weights, np.zeros((1, n), "f2")], orders=2)
        want, size = wide(x) @ value.T, np.abs(wide(x)) @ np.abs(value).T
        bound = ROUNDING["float16"] * np.abs(want) + 2.0**-20 * (size + 1)
        assert (np.abs(wide(found.outputs[0]) - want) <= bound).all()


@_cuda
def test_nan_and_infinity_reach_the_result():
    spec = _spec("NK", 4, 16, 64, "float32")
    packed, scale, _ = quantise(np.random.default_rng(1).standard_normal((16, 64)), spec.quant)
    x = np.ones((1, 64), "f4")
    for bad in (np.nan, np.inf):
        x[0, 5] = bad
        found = run_primfunc(
            quantized_gemv_kernel(spec), [x, packed, scale, np.zeros((1, 16), "f4")]
        )
        assert not np.isfinite(found.outputs[0][0, packed[:, 0] >> 20 & 15 != 7]).any()


@_cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_mlc_decode_q4f16_0", "llama_mlc_decode_q4f32_1",
                                  "llama_mlc_decode_q8f32_0"])  # fmt: skip
def test_a_decode_step_unpacks_no_weight_to_memory(name):
    graph, target = corpus.load(name), cuda_target()
    inputs = graph.inputs()
    found = run_module(graph.mod, inputs, target, function=graph.function, orders=2,
                       relax_pipeline=relax_llm_passes.default_pipeline(target))  # fmt: skip
    assert graph.compare(found.outputs)
    assert not any(
        s.kernel.startswith(("fused_dequantize", "dequantize_kernel")) for s in found.stats
    )
    written = sum(s.global_written_unique for s in found.stats)
    packed = max(a.nbytes for a in inputs if a.dtype == np.uint32)
    assert written < 40_000 < 4 * packed * 4  # activations and caches


@pytest.mark.slow
@pytest.mark.skipif(bool(nvcc_missing()), reason=str(nvcc_missing()))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("bits", [4, 8])
def test_limits(bits, layout, dtype):
    for n in (4096, "n"):
        func = quantized_gemv_kernel(_spec(layout, bits, n, 4096, dtype))
        mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
        for row in nvcc_check(mod, archs=("sm_80", "sm_90", "sm_100")):
            assert not row.within(LIMITS)
