"""What every CUDA kernel of the package needs of a GPU, held to the limits that its file states."""

import pytest
import tvm

import relax_llm_passes
from relax_llm_passes import corpus
from relax_llm_passes.cuda_on_cpu import cuda_target, install, nvcc_check, nvcc_missing
from relax_llm_passes.cuda_on_cpu.nvcc import cuda_sources
from relax_llm_passes.kernels import (
    attention_pieces_cuda,
    cuda_gemv,
    cuda_matmul,
    norm_cuda,
    rotary,
    wkv_cuda,
)
from relax_llm_passes.kernels.limits import TVM_ELEMENTWISE, TVM_TILED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(nvcc_missing()), reason=nvcc_missing() or ""),
]

ARCHS = ("sm_80", "sm_90", "sm_100")
# By what a kernel's name begins with.
LIMITS = {
    "attention_decode": attention_pieces_cuda.LIMITS,
    "attention": attention_pieces_cuda.LIMITS,
    "split_rotary": rotary.LIMITS,
    "layer_norm": norm_cuda.LIMITS,
    "rms_norm": norm_cuda.LIMITS,
    "group_norm": norm_cuda.LIMITS,
    "softmax": norm_cuda.LIMITS,
    "sum": norm_cuda.LIMITS,
    "wkv": wkv_cuda.LIMITS,
    "mma": cuda_matmul.LIMITS,
    "gemv": cuda_gemv.LIMITS,
}
GRAPHS = {
    "rwkv5_package_decode": {"wkv", "group_norm", "layer_norm", "gemv"},
    "rwkv7_package_prefill6": {"wkv", "group_norm"},
    "mpt_foundry_dail_decode": {"attention_decode", "layer_norm", "gemv"},
    "mpt_hf_prefill_fp16": {"attention", "mma", "layer_norm"},
    "gptj_prefill": {"split_rotary", "attention"},
}


@pytest.mark.parametrize("name", GRAPHS)
def test_kernels_of_a_graph(name):
    install()
    graph = corpus.load(name)
    target = cuda_target("sm_80")
    ex = tvm.compile(graph.mod, target, relax_pipeline=relax_llm_passes.default_pipeline(target))
    families = set()
    broken = []
    for source in cuda_sources(ex):
        for row in nvcc_check(source, ARCHS):
            family = next((f for f in LIMITS if row.kernel.startswith(f)), None)
            families.add(family)
            assert row.threads > 0
            others = TVM_TILED if row.static_smem else TVM_ELEMENTWISE
            broken.append(row.within(LIMITS[family] if family else others))
    assert not any(broken), [b for b in broken if b]
    assert families >= GRAPHS[name], families
