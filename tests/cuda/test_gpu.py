"""The kernels of test_kernels.py on a real GPU: pytest -m gpu tests/cuda."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.cuda_on_cpu import cuda_target, install, real_gpu_missing
from tests.cuda.paged_attention import (
    DECODING,
    DIM,
    HEADS,
    KV_HEADS,
    TOKENS,
    PagedAttention,
    attention_reference,
)
from tests.cuda.tvm_kernels import CASES, DTYPES, UNIT, array, compile_case

gpu = [pytest.mark.gpu, pytest.mark.skipif(bool(real_gpu_missing()), reason=real_gpu_missing())]
RUNS = [(c, d) for c in CASES.values() for d in c.roundings]


def check_case(case, dtype, target):
    """Run a case once on whatever ``tvm.cuda(0)`` is, against float64."""
    inputs = case.inputs(dtype)
    vm = relax.VirtualMachine(compile_case(case, dtype, target), tvm.cuda(0))
    got = vm["forward"](*(tvm.runtime.tensor(a, tvm.cuda(0)) for a in inputs)).numpy()
    assert case.worst(dtype, inputs, got) <= 1


def real_target():
    return tvm.target.Target.from_device(tvm.cuda(0)).with_host("llvm")


@pytest.mark.parametrize(
    "case, dtype", [pytest.param(c, d, marks=gpu, id=f"{c}-{d}") for c, d in RUNS]
)
def test_kernel(case, dtype):
    if dtype in case.racing:
        pytest.skip("TVM's code has a data race (test_kernels.py): undefined on this GPU")
    check_case(case, dtype, real_target())


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=gpu) for d in DTYPES])
def test_paged_attention(dtype):
    qkv = array((1, TOKENS, HEADS + 2 * KV_HEADS, DIM), dtype)
    got = PagedAttention(dtype, real_target())(qkv, DECODING)
    want, scale = attention_reference(qkv)
    roundings = {"float32": 16, "float16": 4, "bfloat16": 4}[dtype]
    assert (np.abs(got.astype("f8") - want) <= roundings * UNIT[dtype] * scale).all()


@pytest.mark.skipif(not real_gpu_missing(), reason="this machine has a GPU")
def test_these_tests_run_where_a_device_is_emulated():
    install()
    check_case(CASES["rms_norm"], "float16", cuda_target())
