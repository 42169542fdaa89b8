"""nvcc's resources of kernels, and cubins made with no GPU in the machine."""

import pytest
import tvm
from tvm.relax.frontend import nn

from relax_llm_passes.cuda_on_cpu import (
    KernelResources,
    cuda_target,
    embedded_cubins,
    nvcc_check,
    nvcc_missing,
)
from relax_llm_passes.cuda_on_cpu.nvcc import compile_cubin, cuda_sources
from relax_llm_passes.kernels.limits import KernelLimits
from tests.cuda.tvm_kernels import module

pytestmark = pytest.mark.skipif(bool(nvcc_missing()), reason=nvcc_missing())

ARCHS = ("sm_80", "sm_90", "sm_100")


def test_resources_of_a_norm():
    mod = module(
        lambda x, w: nn.op.rms_norm(x, w, axes=-1), x=(("n", 512), "float16"), w=((512,), "float16")
    )
    rows = nvcc_check(mod, ARCHS)
    assert {r.arch for r in rows} == set(ARCHS) and len({r.kernel for r in rows}) == 1
    for row in rows:
        assert not row.within(registers=64, spills=0, static_smem=4096, dynamic_smem=0)
        assert row.within(registers=1).startswith(f"{row.kernel} on {row.arch}: registers")


def test_spills_static_shared_memory_and_errors():
    code = """
extern "C" __global__ void __launch_bounds__(1024, 2) k(float* a, float* b) {
  __shared__ float s[256];
  float r[96];
  #pragma unroll
  for (int i = 0; i < 96; i++) r[i] = a[i * 1024 + threadIdx.x];
  s[threadIdx.x & 255] = r[0];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 96; i++) b[i * 1024 + threadIdx.x] = r[95 - i] * r[i] + s[i];
}
"""
    (row,) = nvcc_check(code, ("sm_90",))
    assert row.static_smem == 1024 and row.registers <= 32 and row.spills > 0
    assert row.threads == 1024
    with pytest.raises(ValueError, match="undefined"):
        nvcc_check(code.replace("threadIdx.x & 255", "nonsense"), ("sm_90",))


def test_what_fits_on_a_multiprocessor():
    def row(**values):
        fields = {"kernel": "k", "arch": "sm_90", "registers": 32, "spills": 0, "stack": 0,
                  "static_smem": 0, "threads": 128}  # fmt: skip
        return KernelResources(**(fields | values))

    assert row().resident_threads == 2048
    assert row(registers=72).resident_threads == 7 * 128  # 65536 registers
    assert row(registers=65).resident_threads == 7 * 128  # allocated in units of 8
    assert row(threads=32).resident_threads == 32 * 32  # 32 blocks
    assert row(static_smem=47 * 1024).resident_threads == 4 * 128  # 228 KB, 1 KB reserved per block
    assert row(static_smem=47 * 1024, arch="sm_80").resident_threads == 3 * 128  # 164 KB
    assert row(threads=1024, registers=40).resident_threads == 1024
    assert row(threads=1024, arch="sm_89").resident_threads == 1024  # 1536 threads
    assert row(threads=0).resident_threads == 0
    limits = KernelLimits(registers=255, resident_threads=1024)
    assert row(registers=64).within(limits) == ""
    assert row(registers=72).within(limits) == (
        "k on sm_90: resident_threads 896 < 1024 (72 registers, 128 threads, 0 bytes)"
    )


def test_a_module_is_exported_with_cubins_and_no_gpu(tmp_path):
    target = cuda_target("sm_80")
    mod = module(lambda x: nn.op.relu(x), x=((4, 64), "float32"))
    with embedded_cubins("sm_80"):
        ex = tvm.compile(mod, target, relax_pipeline=tvm.relax.get_default_pipeline(target))
    (source,) = cuda_sources(ex)
    library = tmp_path / "relu.so"
    ex.export_library(str(library))
    cubin = compile_cubin(source, "sm_80")[0]
    assert cubin[:4] == b"\x7fELF" and int.from_bytes(cubin[18:20], "little") == 190  # EM_CUDA
    assert cubin in library.read_bytes()
    # Outside, kernels stay source for the emulated device.
    ex = tvm.compile(mod, target, relax_pipeline=tvm.relax.get_default_pipeline(target))
    ex.export_library(str(library))
    assert cubin not in library.read_bytes()
