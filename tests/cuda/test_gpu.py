"""The kernels of test_kernels.py on a real GPU: pytest -m gpu tests/cuda."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

from relax_llm_passes.cuda_on_cpu import real_gpu_missing
from tests.cuda.test_kernels import UNIT, array, module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(real_gpu_missing()), reason=real_gpu_missing()),
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_softmax_and_rms_norm(dtype):
    target = tvm.target.Target.from_device(tvm.cuda(0)).with_host("llvm")
    x = array((5, 300), dtype)
    w = array(300, dtype)
    mod = module(
        lambda x, w: nn.op.rms_norm(nn.op.softmax(x, -1), w, axes=-1),
        x=(("n", 300), dtype), w=((300,), dtype))  # fmt: skip
    ex = tvm.compile(mod, target, relax_pipeline=relax.get_default_pipeline(target))
    vm = relax.VirtualMachine(ex, tvm.cuda(0))
    got = vm["forward"](*(tvm.runtime.tensor(a, tvm.cuda(0)) for a in (x, w))).numpy()
    X = x.astype("f8")
    p = np.exp(X - X.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    want = p / np.sqrt((p**2).mean(-1, keepdims=True) + 1e-5) * w.astype("f8")
    assert np.abs(got - want).max() <= 64 * UNIT[dtype] * np.abs(want).max()
