"""CUTLASS's kernels, compiled by g++ and executed by the emulation of CUDA, against float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op as O

from relax_llm_passes import cuda_on_cpu, get_pass, lower
from relax_llm_passes.cuda_on_cpu import nvcc_missing
from relax_llm_passes.cuda_on_cpu.inline_ptx import translate_asm
from relax_llm_passes.errors import UnsupportedError
from relax_llm_passes.fusion import offload_cutlass
from relax_llm_passes.fusion.partition_gemm import PartitionGemm
from relax_llm_passes.kernels import cutlass, cutlass_build
from relax_llm_passes.kernels.cutlass_source import source

from ..patterns.gemm_cases import ACCEPTED, Case
from ..patterns.gemm_reference import reference

HEADERS = cutlass_build.find_headers()
needs_headers = pytest.mark.skipif(
    HEADERS is None or bool(nvcc_missing()),
    reason=nvcc_missing() or "CUTLASS's headers are not installed (pip install nvidia-cutlass)",
)
NAMES = ("plain", "bias_residual_relu", "gelu", "gelu_tanh_spelled", "silu", "scale", "multiply",
         "relu_squared", "batched_transposed", "vector_expanded")  # fmt: skip


def _product(name, rows, k, n, transposed=True, batch=None):
    lead = () if batch is None else (batch,)
    shape = (n, k) if transposed else (k, n)
    axes = [*range(len(lead)), len(lead) + 1, len(lead)]
    return Case(
        name,
        [((*lead, rows, k), "float"), ((*lead, *shape), "float")],
        lambda g, x, w: g(O.matmul(x, g(O.permute_dims(w, axes)) if transposed else w)),
    )


# Several blocks with tails in each direction, the smallest alignments, and strides of batches.
SHAPES = [
    _product("tails", 70, 88, 136),
    _product("tails_kn", 70, 88, 136, transposed=False),
    _product("small_alignments", 67, 10, 15),
    _product("small_alignments_kn", 67, 12, 70, transposed=False),
    _product("batched", 66, 40, 72, transposed=False, batch=3),
]
CASES = [*(next(c for c in ACCEPTED if c.name == name) for name in NAMES), *SHAPES]


def _arrays(case, dtype):
    kinds = [rest[0] if rest else "float" for _, *rest in case.params]
    of = {"bfloat16": ml_dtypes.bfloat16}
    return [
        a.astype(of.get(d := dtype if k == "float" else k, d))
        for a, k in zip(case.arrays(), kinds, strict=True)
    ]


def _run(case, dtype, target):
    arrays = _arrays(case, dtype)
    with target:
        mod = PartitionGemm()(get_pass("CanonicalizeBindings")(case.module(dtype)))
        mod = get_pass("OffloadCutlass", min_rows=1, tf32=True)(mod)
        mod = get_pass("LowerComposites")(mod)
    assert "relax_llm_cutlass_" in mod.script(show_meta=False)
    vm = relax.VirtualMachine(tvm.compile(mod, target), tvm.cuda(0))
    cuda_on_cpu.launches()
    found = vm["main"](*[tvm.runtime.tensor(a, tvm.cuda(0)) for a in arrays])
    found = [found] if hasattr(found, "numpy") else list(found)
    names = [launch.kernel for launch in cuda_on_cpu.launches()]
    assert "cutlass_gemm" in names and not cuda_on_cpu.findings()
    # Products of 8 to 11 bits each are exact in fp32; what is lost is the one rounding of the
    # result, and for fp32 the operands' to tf32 (2^-11 each, over sums of up to 88 terms).
    tolerance = {"float32": 2e-3, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    for got, want in zip(found, reference(case, arrays), strict=True):
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(
            got.numpy().astype("float64"), want, atol=tolerance * scale, rtol=0
        )


@pytest.mark.slow
@needs_headers
@pytest.mark.parametrize("tile", ["64x64", "128x128"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers(dtype, tile, monkeypatch):
    cuda_on_cpu.install()
    cases = CASES if tile == "64x64" else [c for c in CASES if c.name in ("tails", "silu")]
    monkeypatch.setattr(cutlass, "_tiles", lambda sizes: (tile,))
    target = cuda_on_cpu.cuda_target("sm_80")
    specs = {}
    for case in cases:
        mod = PartitionGemm()(get_pass("CanonicalizeBindings")(case.module(dtype)))
        (composite,) = lower.composites(mod).values()
        plan = cutlass.plan_cutlass(composite, target, 1, True)
        assert isinstance(plan, cutlass.CutlassPlan), (case.name, plan.reason)
        specs[plan.spec] = case
    # One source for all: most of the compiler's time is CUTLASS's headers.
    obj = cutlass_build.build_for_cpu(source(*specs), "cutlass_cpu", HEADERS)
    monkeypatch.setattr(offload_cutlass, "build", lambda wanted, arch: dict.fromkeys(wanted, obj))
    for case in cases:
        _run(case, dtype, target)


def test_predicated_loads_and_stores_are_translated():
    code = translate_asm(
        'asm volatile("{\\n .reg .pred p;\\n setp.ne.b32 p, %3, 0;\\n mov.b32 %0, %4;\\n"'
        ' " @p ld.global.lu.v2.u32 {%0, %1}, [%2];\\n @!p st.shared.u16 [%5], %6;\\n}\\n"'
        ' : "=r"(x), "=r"(y) : "l"(p), "r"(g), "r"(z), "r"(s), "h"(h));'
    )
    for part in (
        "emu_p = (g) != 0;",
        "emu_ptx_move(&(x), (z));",
        "if (emu_p) { emu_ptx_load<4>(EMU_SITE, (char*)((uint64_t)((p)) + 0), &(x), &(y)); }",
        "if (!emu_p) { emu_ptx_store<2>(EMU_SITE, emu_shared_pointer((uint64_t)((s)) + 0), (h)); }",
    ):
        assert part in code


def test_what_is_not_emulated_fails_when_it_is_reached():
    code = 'asm("wgmma.fence.sync.aligned;");'
    with pytest.raises(UnsupportedError, match="wgmma"):
        translate_asm(code)
    assert "emu_fail" in translate_asm(code, strict=False)
