"""Products of one row on CUDA: right numbers, each weight read once, no copy of transposed ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_llm_passes
from relax_llm_passes.cuda_on_cpu import (
    cuda_target,
    nvcc_check,
    nvcc_missing,
    run_module,
    run_primfunc,
    why_not,
)
from relax_llm_passes.kernels.cuda_gemv import LIMITS, gemv_kernel, lanes_per_row, rows_together
from relax_llm_passes.kernels.cuda_matmul import MmaSpec

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Sums in fp32, one rounding of the result at the end; relative to the sum of magnitudes.
UNIT = {"float32": 4 * 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def _spec(layout, n, k, dtype, steps=(), lead=(1,)):
    return MmaSpec((), lead, n, k, layout, dtype, dtype, steps, prefix="gemv")


# Sizes around every edge: less than a vector, a warp, a group of vectors; odd; several rows a warp.
SIZES = [(90, 256), (7, 33), (33, 1100), (2050, 40), (64, 8), (130, 264), (97, 64), (33, 96)]
RUNS = [(n, k, "float32") for n, k in SIZES] + [(90, 256, d) for d in ("float16", "bfloat16")]


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("n, k, dtype", RUNS)
def test_sizes_and_layouts(n, k, layout, dtype):
    rng = np.random.default_rng(n + k)
    x, w, b = (
        rng.standard_normal(s).astype(NUMPY[dtype])
        for s in ((1, k), (n, k) if layout == "NK" else (k, n), (n,))
    )
    spec = _spec(layout, n, k, dtype, (("bias", "epi0", dtype, 1.0), ("relu", "", "", 1.0)))
    orders = 5 if (n, k) == (90, 256) else 2
    found = run_primfunc(gemv_kernel(spec), [x, w, b, np.zeros((1, n), x.dtype)], orders=orders)
    X, W = x.astype("f8"), w.astype("f8")
    W = W.T if layout == "NK" else W
    want = np.maximum(X @ W + b.astype("f8"), 0)
    scale = np.abs(X) @ np.abs(W) + np.abs(b.astype("f8"))
    assert (np.abs(found.outputs[0].astype("f8") - want) <= UNIT[dtype] * scale).all()
    (stats,) = found.stats
    assert stats.global_read_unique == x.nbytes + w.nbytes + b.nbytes
    assert stats.barriers_per_block == (0 if layout == "NK" else 1)


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("n, k", [(192, 64), (97, 96), (64, 256), (2048, 32)])
def test_short_rows_keep_the_lanes_busy(n, k):
    rng = np.random.default_rng(k)
    x, w = (rng.standard_normal(s).astype("f4") for s in ((1, k), (n, k)))
    spec = _spec("NK", n, k, "float32")
    (stats,) = run_primfunc(gemv_kernel(spec), [x, w, np.zeros((1, n), "f4")], orders=1).stats
    # A warp's store of a few results is the rest, and lanes past the last row.
    assert stats.lane_use > 0.75
    assert stats.bytes_over_minimum < 1.5  # the vector again for every 4 rows or more


def test_lanes_and_rows():
    assert [lanes_per_row(v) for v in (1, 8, 10, 16, 24, 32, 48, 192, 200)] == [
        4, 8, 4, 16, 8, 32, 16, 32, 32,
    ]  # fmt: skip
    assert [rows_together(768, s) for s in (1, 2, 3, 6)] == [4, 2, 1, 1]
    assert [rows_together(n, 8) for n in (768, 2048, 50257)] == [1, 2, 4]


def _model(dtype, n, k, transposed):
    shape = (n, k) if transposed else (k, n)

    @I.ir_module
    class Model:
        @R.function
        def main(
            x: R.Tensor((1, 1, k), dtype), w: R.Tensor(shape, dtype), b: R.Tensor((n,), dtype)
        ) -> R.Tensor((1, 1, n), dtype):
            with R.dataflow():
                wt = R.permute_dims(w) if transposed else w
                y = R.matmul(x, wt)
                z = R.add(y, b)
                R.output(z)
            return z

    return Model


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("transposed", [True, False])
def test_in_the_pipeline(transposed, dtype):
    n, k = 90, 136
    rng = np.random.default_rng(5)
    x, w, b = (
        rng.standard_normal(s).astype(NUMPY[dtype])
        for s in ((1, 1, k), (n, k) if transposed else (k, n), (n,))
    )
    target = cuda_target()
    pipeline = relax_llm_passes.default_pipeline(target)
    found = run_module(_model(dtype, n, k, transposed), [x, w, b], target,
                       relax_pipeline=pipeline)  # fmt: skip
    # One launch, nothing beyond the operands and the result is read or written.
    (stats,) = found.stats
    assert stats.kernel.startswith("gemv_")
    assert stats.global_read_unique == x.nbytes + w.nbytes + b.nbytes
    assert stats.global_written_unique == found.outputs[0].nbytes
    W = w.astype("f8").T if transposed else w.astype("f8")
    want = x.astype("f8") @ W + b.astype("f8")
    scale = np.abs(x.astype("f8")) @ np.abs(W) + np.abs(b.astype("f8"))
    assert (np.abs(found.outputs[0].astype("f8") - want) <= UNIT[dtype] * scale).all()


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=str(why_not()))
@pytest.mark.parametrize("batched", [False, True])
def test_several_rows_of_fp32_need_no_copy_of_the_weights(batched):
    bb = relax.BlockBuilder()
    rows = tvm.tirx.Var("rows", "int64")
    x = relax.Var("x", R.Tensor((2, rows, 40), "float32"))
    w = relax.Var("w", R.Tensor((2, 33, 40) if batched else (33, 40), "float32"))
    with bb.function("main", [x, w]):
        with bb.dataflow():
            axes = [0, 2, 1] if batched else [1, 0]
            product = bb.emit(relax.op.matmul(x, bb.emit(relax.op.permute_dims(w, axes))))
            out = bb.emit_output(relax.op.nn.relu(product))
        bb.emit_func_output(out)
    rng = np.random.default_rng(3)
    X = rng.standard_normal((2, 5, 40)).astype("f4")
    W = rng.standard_normal((2, 33, 40) if batched else (33, 40)).astype("f4")
    target = cuda_target()
    found = run_module(bb.get(), [X, W], target, orders=2,
                       relax_pipeline=relax_llm_passes.default_pipeline(target))  # fmt: skip
    want = np.maximum(X.astype("f8") @ W.astype("f8").swapaxes(-1, -2), 0)
    # sums of 40 products in fp32
    assert np.abs(found.outputs[0] - want).max() <= 8 * 2.0**-24 * np.abs(want).max()
    assert len(found.stats) == 1


@pytest.mark.slow
@pytest.mark.skipif(bool(nvcc_missing()), reason=str(nvcc_missing()))
@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("n, k", [(768, 768), (2304, 768), (50257, 4096)])
def test_limits(n, k, layout, dtype):
    func = gemv_kernel(_spec(layout, n, k, dtype)).with_attr("global_symbol", "main")
    for row in nvcc_check(tvm.IRModule({"main": func}), archs=("sm_80", "sm_90", "sm_100")):
        assert not row.within(LIMITS)
