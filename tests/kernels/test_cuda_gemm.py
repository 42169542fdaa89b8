"""fp16 and bf16 products on tensor cores: right numbers in the harness, cubins by nvcc."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes import get_pass, report
from relax_llm_passes.cuda_on_cpu import nvcc_check, nvcc_missing, run_module, run_primfunc, why_not
from relax_llm_passes.fusion.partition_gemm import PartitionGemm
from relax_llm_passes.kernels.cuda_matmul import LIMITS, MmaSpec, Tile, mma_kernel

from ..patterns.gemm_cases import ACCEPTED
from ..patterns.gemm_reference import reference

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(why_not()), reason=str(why_not()))]

NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Sums in fp32 and one rounding of the result: one unit in the last place, relative to the largest.
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}
TARGET = {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024,
          "max_shared_memory_per_block": 49152, "thread_warp_size": 32}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "layout, m, n, k, batch, tile",
    [
        ("NK", 20, 40, 72, (), None),
        ("KN", 70, 96, 100, (), None),
        ("NK", 33, 130, 64, (2,), Tile(128, 128, 2, 4)),
        ("KN", 5, 33, 31, (3,), None),
    ],
)
def test_edges_layouts_and_tiles(dtype, layout, m, n, k, batch, tile):
    generator = np.random.default_rng(m)
    kind = NUMPY[dtype]
    draw = lambda *s: (generator.normal(size=s) * 0.5).astype(kind)  # noqa: E731
    x, b = draw(*batch, m, k), draw(n)
    w = draw(*batch, *((n, k) if layout == "NK" else (k, n)))
    spec = MmaSpec(
        batch,
        (m,) if batch else ("m",),
        n,
        k,
        layout,
        dtype,
        dtype,
        (("bias", "epi0", dtype, 1.0), ("relu", "", "", 1.0)),
    )
    out = np.zeros((*batch, m, n), kind)
    got = run_primfunc(mma_kernel(spec, tile), [x, w, b, out], orders=2).outputs[0]
    right = w.astype("f8").swapaxes(-1, -2) if layout == "NK" else w.astype("f8")
    want = np.maximum(x.astype("f8") @ right + b.astype("f8"), 0)
    error = np.abs(np.asarray(got).astype("f8") - want).max()
    assert error <= TOLERANCE[dtype] * max(1.0, np.abs(want).max())


FORMS = ["plain", "rows_3d", "batched_transposed", "bias_residual_relu", "gelu_spelled", "importer",
         "gelu_tanh_spelled", "silu", "multiply", "relu_squared", "scale"]  # fmt: skip


def _lower(mod):
    with tvm.target.Target(TARGET, host={"kind": "llvm"}), report.collect() as seen:
        mod = get_pass("CanonicalizeBindings")(mod)
        mod = get_pass("LowerComposites")(PartitionGemm()(mod))
    relax.analysis.well_formed(mod)
    return mod, seen


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FORMS)
def test_forms(name, dtype):
    case = next(c for c in ACCEPTED if c.name == name)
    mod, seen = _lower(case.module(dtype))
    assert seen.matched("LowerComposites") == {"gemm:cuda.mma": 1}
    arrays = [a.astype(NUMPY[dtype]) for a in case.arrays()]
    outputs = run_module(mod, arrays, orders=1, checks=False, relax_pipeline="default").outputs
    (want,) = reference(case, arrays)
    got = np.asarray(outputs[0] if isinstance(outputs, (list, tuple)) else outputs).astype("f8")
    assert np.abs(got - want).max() <= TOLERANCE[dtype] * max(1.0, np.abs(want).max())


def test_single_rows_and_fp32_have_other_kernels():
    one_row = next(c for c in ACCEPTED if c.name == "residual_one_row")
    _, seen = _lower(one_row.module("float16"))
    assert seen.matched("LowerComposites") == {"gemm:cuda.gemv": 1}
    _, seen = _lower(next(c for c in ACCEPTED if c.name == "bias").module("float32"))
    assert seen.matched("LowerComposites") == {"gemm:cuda.transposed": 1}


@pytest.mark.skipif(bool(nvcc_missing()), reason=str(nvcc_missing()))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compiles_to_tensor_core_code(dtype):
    spec = MmaSpec((), ("m",), 256, 512, "NK", dtype, dtype, (("bias", "epi0", dtype, 1.0),))
    func = mma_kernel(spec).with_attr("global_symbol", "main")
    for row in nvcc_check(tvm.IRModule({"main": func}), archs=("sm_80", "sm_90", "sm_100")):
        assert not row.within(LIMITS)
