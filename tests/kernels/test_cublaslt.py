"""The cuBLASLt executor, run on the CPU against a stand-in that computes what it is told.

The stand-in (cublaslt_standin.cc) refuses what the library documents as unsupported, checks that
the algorithm belongs to the problem, and overwrites the workspace.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op as O

from relax_llm_passes import get_pass, lower, report
from relax_llm_passes.fusion.partition_gemm import PartitionGemm
from relax_llm_passes.kernels import cublaslt
from relax_llm_passes.kernels.native import compile_object

from ..patterns.gemm_cases import ACCEPTED, SIZES, Case
from ..patterns.gemm_reference import reference

HERE = Path(__file__).parent
NUMPY = {
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
# Unit roundoff of the result: sums are exact in the stand-in, each Relax step after it rounds once.
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}


class OnCpu(cublaslt.CublasLt):
    """The implementation for CUDA, let loose on host memory."""

    name = "test.cublas.lt"
    targets = ("llvm",)


@pytest.fixture(scope="module")
def standin():
    path = compile_object(
        HERE / "cublaslt_standin.cc",
        name="cublaslt_standin",
        shared=True,
        flags=[f"-I{HERE}", f"-I{Path(cublaslt.__file__).parent}"],
    )
    library = ctypes.CDLL(str(path))
    for name in ("heuristics", "matmuls", "last_batch", "last_epilogue", "last_compute"):
        getattr(library, f"standin_{name}").restype = ctypes.c_int64
    library.path = str(path)
    return library


@pytest.fixture(autouse=True)
def environment(standin, monkeypatch):
    monkeypatch.setenv("RELAX_LLM_CUBLASLT", standin.path)
    entries = lower._IMPLEMENTATIONS.setdefault("gemm", [])
    saved = list(entries)
    lower.register_implementation("gemm", priority=1000)(OnCpu())
    yield
    entries[:] = saved


def _compile(mod, **options):
    target = tvm.target.Target({"kind": "llvm"})
    options = {"min_rows": 1, "workspace_bytes": 4096, **options}
    with target, report.collect() as seen:
        mod = get_pass("CanonicalizeBindings")(mod)
        mod = PartitionGemm()(mod)
        mod = get_pass("OffloadCublas", **options)(mod)
        mod = get_pass("LowerComposites")(mod)
    relax.analysis.well_formed(mod)
    return tvm.compile(mod, target), seen, mod


def _run(ex, arrays):
    vm = relax.VirtualMachine(ex, tvm.cpu())
    result = vm["main"](*[tvm.runtime.tensor(a) for a in arrays])
    results = [result] if hasattr(result, "numpy") else list(result)
    return [r.numpy() for r in results]


def _inputs(case, dtype, sizes=None):
    kinds = [rest[0] if rest else "float" for _, *rest in case.params]
    return [
        a.astype(NUMPY[dtype if k == "float" else k])
        for a, k in zip(case.arrays(sizes=sizes), kinds, strict=True)
    ]


def _close(got, want, dtype):
    tolerance = TOLERANCE[dtype]
    for g, w in zip(got, want, strict=True):
        g = g.astype("float64")
        assert g.shape == w.shape
        np.testing.assert_allclose(g, w, atol=tolerance * max(1.0, np.abs(w).max()), rtol=0)


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda c: c.name)
def test_every_accepted_form(case, standin):
    before = standin.standin_matmuls()
    ex, seen, _ = _compile(case.module("float32"))
    arrays = _inputs(case, "float32")
    got = _run(ex, arrays)
    _close(got, reference(case, arrays), str(got[0].dtype))
    assert standin.standin_matmuls() == before + 1
    assert seen.matched("LowerComposites") == {"gemm:test.cublas.lt": 1}


HALVES = ["bias_residual_relu", "gelu_tanh_spelled", "batched_transposed", "importer",
          "transposed_lhs", "scale", "silu", "vector_expanded", "multiply"]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", HALVES)
def test_two_byte_floats(name, dtype):
    case = next(c for c in ACCEPTED if c.name == name)
    ex, _, _ = _compile(case.module(dtype))
    arrays = _inputs(case, dtype)
    _close(_run(ex, arrays), reference(case, arrays), dtype)


EPILOGUES = [
    ("bias_residual_relu", "float32", cublaslt.BIAS | cublaslt.RESIDUAL | cublaslt.RELU, []),
    ("gelu_tanh_spelled", "float16", cublaslt.GELU, []),
    ("gelu_tanh_spelled", "float32", 0, ["gelu_tanh"]),  # its fp32 error is not documented
    ("gelu", "float16", cublaslt.BIAS, ["gelu_erf"]),
    ("silu", "float16", 0, ["silu"]),
    ("scale", "float16", 0, []),
    ("addmm", "float32", cublaslt.BIAS | cublaslt.RESIDUAL, []),
    ("relu_squared", "float32", 0, ["relu_squared"]),
]


@pytest.mark.parametrize("name, dtype, flags, rest", EPILOGUES)
def test_which_steps_the_library_takes(name, dtype, flags, rest):
    case = next(c for c in ACCEPTED if c.name == name)
    (composite,) = lower.composites(PartitionGemm()(case.module(dtype))).values()
    plan = cublaslt.plan_cublaslt(composite)
    assert plan.flags == flags | cublaslt.RHS_TRANSPOSED
    assert [s["op"] for s in plan.rest] == rest


def test_wide_sums_of_halves_are_written_once():
    """f16 x f16 -> f32, scaled and cast: one call that writes f16."""
    case = Case(
        "wide",
        [(("n", 24),), ((24, 16),)],
        lambda g, x, w: g(
            O.astype(
                g(O.multiply(g(O.matmul(x, w, out_dtype="float32")), g.number(0.5, "float32"))),
                "float16",
            )
        ),
    )
    (composite,) = lower.composites(PartitionGemm()(case.module("float16"))).values()
    plan = cublaslt.plan_cublaslt(composite)
    assert (plan.result, plan.scale, plan.rest) == ("float16", 0.5, ())
    ex, _, _ = _compile(case.module("float16"))
    x, w = _inputs(case, "float16")
    want = 0.5 * x.astype("float64") @ w.astype("float64")
    _close(_run(ex, [x, w]), [want], "float16")


def test_int8():
    case = Case(
        "int8",
        [(("n", 24), "int8"), ((16, 24), "int8")],
        lambda g, x, w: g(O.matmul(x, g(O.permute_dims(w)), out_dtype="int32")),
    )
    ex, seen, _ = _compile(case.module())
    generator = np.random.default_rng(3)
    x = generator.integers(-127, 128, (5, 24), dtype=np.int8)
    w = generator.integers(-127, 128, (16, 24), dtype=np.int8)
    (got,) = _run(ex, [x, w])
    np.testing.assert_array_equal(got, x.astype(int) @ w.astype(int).T)
    assert seen.matched("LowerComposites") == {"gemm:test.cublas.lt": 1}


def _fp8(k=32, n=48, left="float8_e4m3fn", right="float8_e4m3fn", transposed=True):
    shape = (n, k) if transposed else (k, n)
    return Case(
        "fp8",
        [(("n", k), left), (shape, right)],
        lambda g, x, w: g(
            O.matmul(x, g(O.permute_dims(w)) if transposed else w, out_dtype="float32")
        ),
    )


def _plan(case, arch="sm_90", **options):
    (composite,) = lower.composites(PartitionGemm()(case.module("float16"))).values()
    target = tvm.target.Target({"kind": "cuda", "arch": arch, "host": {"kind": "llvm"}})
    return cublaslt.plan_cublaslt(composite, target, **options)


@pytest.mark.parametrize("right", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8(right):
    case = _fp8(right=right)
    ex, _, _ = _compile(case.module())
    x, w = _inputs(case, "float32")
    _close(_run(ex, [x, w]), [x.astype("float64") @ w.astype("float64").T], "float32")


@pytest.mark.parametrize(
    "case, arch, reason",
    [
        (_fp8(k=24), "sm_90", "multiples of 16"),
        (_fp8(n=20), "sm_90", "multiples of 16"),
        (_fp8(transposed=False), "sm_90", "rhs \\(N, K\\)"),
        (_fp8(left="float8_e5m2", right="float8_e5m2"), "sm_90", "two float8_e5m2"),
        (_fp8(), "sm_80", "needs sm_89"),
        (
            Case(
                "i8",
                [(("n", 22), "int8"), ((16, 22), "int8")],
                lambda g, x, w: g(O.matmul(x, g(O.permute_dims(w)), out_dtype="int32")),
            ),
            "sm_90",
            "multiples of 4",
        ),
        (
            Case("one_row", [((1, 24),), ((24, 16),)], lambda g, x, w: g(O.matmul(x, w))),
            "sm_90",
            "left to GEMV",
        ),
    ],
)
def test_refused(case, arch, reason):
    plan = _plan(case, arch)
    assert not plan
    assert __import__("re").search(reason, plan.reason)


def test_single_rows_are_an_option():
    case = Case("one_row", [((1, 24),), ((24, 16),)], lambda g, x, w: g(O.matmul(x, w)))
    assert _plan(case, min_rows=1)
    assert not _plan(case, min_rows=2)


def test_tf32_only_when_asked(standin):
    case = next(c for c in ACCEPTED if c.name == "transposed")
    for tf32, compute in ((False, 68), (True, 77)):
        ex, _, _ = _compile(case.module(), tf32=tf32)
        _run(ex, _inputs(case, "float32"))
        assert standin.standin_last_compute() == compute


def test_one_heuristic_a_shape(standin):
    case = next(c for c in ACCEPTED if c.name == "bias")
    ex, _, _ = _compile(case.module())
    counts = []
    for rows in (3, 3, 7, 3, 7):
        sizes = {**SIZES, "n": rows}
        arrays = _inputs(case, "float32", sizes)
        before = standin.standin_heuristics()
        _close(_run(ex, arrays), reference(case, arrays), "float32")
        counts.append(standin.standin_heuristics() - before)
    assert counts[0] <= 1 and counts[1:] == [0, 1, 0, 0]


def test_no_rows():
    case = next(c for c in ACCEPTED if c.name == "bias")
    ex, _, _ = _compile(case.module())
    (got,) = _run(ex, _inputs(case, "float32", {**SIZES, "n": 0}))
    assert got.shape == (0, 16)


def test_batches_are_strided(standin):
    case = next(c for c in ACCEPTED if c.name == "batched_transposed")
    ex, _, _ = _compile(case.module())
    arrays = _inputs(case, "float32")
    _close(_run(ex, arrays), reference(case, arrays), "float32")
    assert standin.standin_last_batch() == 8


SCRIPT = """
import sys
sys.modules["relax_llm_passes"] = None  # nothing of ours may be needed
import numpy as np, tvm
from tvm import relax
lib, data = sys.argv[1:]
arrays = [v for _, v in sorted(np.load(data).items())]
vm = relax.VirtualMachine(tvm.runtime.load_module(lib), tvm.cpu())
got = vm["main"](*[tvm.runtime.tensor(a) for a in arrays[:-1]]).numpy()
assert np.abs(got - arrays[-1]).max() < 1e-5, np.abs(got - arrays[-1]).max()
print("same")
"""


def test_export_and_reload_in_a_fresh_process(tmp_path, standin):
    case = next(c for c in ACCEPTED if c.name == "bias_residual_relu")
    ex, _, _ = _compile(case.module())
    arrays = _inputs(case, "float32")
    (want,) = _run(ex, arrays)
    ex.export_library(str(tmp_path / "model.so"))
    np.savez(tmp_path / "data.npz", **{f"a{i}": a for i, a in enumerate([*arrays, want])})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model.so"), str(tmp_path / "data.npz")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip().endswith("same"), done.stderr[-2000:]
    # And without the library: a message that says what to do.
    broken = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model.so"), str(tmp_path / "data.npz")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**__import__("os").environ, "RELAX_LLM_CUBLASLT": str(tmp_path / "absent.so")},
    )
    assert broken.returncode != 0
    assert "pip install nvidia-cublas" in broken.stderr and "absent.so" in broken.stderr


def test_without_the_library_tvm_compiles_the_product(monkeypatch):
    monkeypatch.delenv("RELAX_LLM_CUBLASLT")
    monkeypatch.setattr("relax_llm_passes.fusion.offload_cublas.find_library", lambda: None)
    case = next(c for c in ACCEPTED if c.name == "bias")
    ex, seen, mod = _compile(case.module())
    (record,) = [p for p in seen.passes if p.name == "OffloadCublas"]
    assert "pip install nvidia-cublas" in record.notes[0]
    assert cublaslt.FUNCTION not in mod.script(show_meta=False)
    arrays = _inputs(case, "float32")
    _close(_run(ex, arrays), reference(case, arrays), "float32")


def test_asking_twice_attaches_once():
    case = next(c for c in ACCEPTED if c.name == "bias")
    with tvm.target.Target({"kind": "llvm"}):
        mod = PartitionGemm()(case.module())
        once = get_pass("OffloadCublas")(mod)
        twice = get_pass("OffloadCublas")(once)
    assert len(twice.attrs["external_mods"]) == 1


HEADER = r"""
#include <cublasLt.h>
#include "cublaslt_abi.h"
using namespace relax_llm;
#define SAME(a, b) static_assert(static_cast<int>(a) == static_cast<int>(b), #a)
SAME(lt::kR32F, CUDA_R_32F); SAME(lt::kR64F, CUDA_R_64F); SAME(lt::kR16F, CUDA_R_16F);
SAME(lt::kR8I, CUDA_R_8I); SAME(lt::kR32I, CUDA_R_32I); SAME(lt::kR16BF, CUDA_R_16BF);
SAME(lt::kR8F_E4M3, CUDA_R_8F_E4M3); SAME(lt::kR8F_E5M2, CUDA_R_8F_E5M2);
SAME(lt::kCompute32F, CUBLAS_COMPUTE_32F); SAME(lt::kCompute64F, CUBLAS_COMPUTE_64F);
SAME(lt::kCompute32I, CUBLAS_COMPUTE_32I);
SAME(lt::kCompute32FFastTF32, CUBLAS_COMPUTE_32F_FAST_TF32);
SAME(lt::kDescTransA, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(lt::kDescTransB, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(lt::kDescEpilogue, CUBLASLT_MATMUL_DESC_EPILOGUE);
SAME(lt::kDescBiasPointer, CUBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(lt::kDescBiasDataType, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
SAME(lt::kLayoutBatchCount, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT);
SAME(lt::kLayoutBatchStride, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET);
SAME(lt::kPrefMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(lt::kPrefMinAlignmentA, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(lt::kPrefMinAlignmentB, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(lt::kPrefMinAlignmentC, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(lt::kPrefMinAlignmentD, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
SAME(lt::kEpilogueDefault, CUBLASLT_EPILOGUE_DEFAULT);
SAME(lt::kEpilogueRelu, CUBLASLT_EPILOGUE_RELU);
SAME(lt::kEpilogueBias, CUBLASLT_EPILOGUE_BIAS);
SAME(lt::kEpilogueGelu, CUBLASLT_EPILOGUE_GELU);
SAME(lt::kEpilogueRelu | lt::kEpilogueBias, CUBLASLT_EPILOGUE_RELU_BIAS);
SAME(lt::kEpilogueGelu | lt::kEpilogueBias, CUBLASLT_EPILOGUE_GELU_BIAS);
SAME(lt::kOpN, CUBLAS_OP_N); SAME(lt::kOpT, CUBLAS_OP_T);
SAME(lt::kSuccess, CUBLAS_STATUS_SUCCESS); SAME(lt::kNotSupported, CUBLAS_STATUS_NOT_SUPPORTED);
SAME(lt::kInvalidValue, CUBLAS_STATUS_INVALID_VALUE);
SAME(sizeof(lt::Algo), sizeof(cublasLtMatmulAlgo_t));
SAME(sizeof(lt::HeuristicResult), sizeof(cublasLtMatmulHeuristicResult_t));
SAME(offsetof(lt::HeuristicResult, state), offsetof(cublasLtMatmulHeuristicResult_t, state));
SAME(offsetof(lt::HeuristicResult, workspace_size),
     offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize));
// Pointers for pointers, and numbers of the same width for numbers and enums, in the same places.
template <class T>
constexpr int kKind = std::is_pointer_v<T>                             ? 1
                      : std::is_integral_v<T> || std::is_enum_v<T> ? 2
                                                                       : 0;
template <class R, class... A, class S, class... B>
constexpr bool Compatible(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) {
    return false;
  } else {
    return kKind<R> == kKind<S> && sizeof(R) == sizeof(S) &&
           (... && (kKind<A> != 0 && kKind<A> == kKind<B> && sizeof(A) == sizeof(B)));
  }
}
#define FITS(Type, function) static_assert(Compatible(lt::Type(nullptr), \
    static_cast<decltype(&function)>(nullptr)), #function)
FITS(Create, cublasLtCreate);
FITS(MatmulDescCreate, cublasLtMatmulDescCreate);
FITS(MatmulDescDestroy, cublasLtMatmulDescDestroy);
FITS(MatmulDescSetAttribute, cublasLtMatmulDescSetAttribute);
FITS(LayoutCreate, cublasLtMatrixLayoutCreate);
FITS(LayoutDestroy, cublasLtMatrixLayoutDestroy);
FITS(LayoutSetAttribute, cublasLtMatrixLayoutSetAttribute);
FITS(PreferenceCreate, cublasLtMatmulPreferenceCreate);
FITS(PreferenceDestroy, cublasLtMatmulPreferenceDestroy);
FITS(PreferenceSetAttribute, cublasLtMatmulPreferenceSetAttribute);
FITS(AlgoGetHeuristic, cublasLtMatmulAlgoGetHeuristic);
FITS(Matmul, cublasLtMatmul);
FITS(GetStatusString, cublasLtGetStatusString);
"""


def _header_folders():
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    bases = [Path(b) for b in (spec.submodule_search_locations or [])] if spec else []
    roots = [*bases, Path("/usr/local/cuda")]
    return sorted({h.parent for r in roots if r.exists() for h in r.rglob("cublasLt.h")})


@pytest.mark.skipif(not _header_folders(), reason="cublasLt.h is not installed")
def test_our_declarations_are_those_of_the_header():
    compile_object(HEADER, name="cublaslt_header", flags=_includes())
    # The check can fail: a function of another shape, and a value that is another.
    for wrong in ("FITS(Create, cublasLtMatmul);", "SAME(lt::kOpT, CUBLAS_OP_N);"):
        with pytest.raises(ValueError, match="static assertion failed"):
            compile_object(HEADER + wrong, name="cublaslt_header", flags=_includes())


def _includes():
    # The header itself includes files of the CUDA runtime, which nvidia-cublas does not bring.
    folders = [*_header_folders(), Path(cublaslt.__file__).parent, Path("/usr/local/cuda/include")]
    return [f"-I{p}" for p in folders if p.exists()]


def _installed():
    import os

    saved = os.environ.pop("RELAX_LLM_CUBLASLT", None)
    try:
        return cublaslt.find_library()
    finally:
        if saved is not None:
            os.environ["RELAX_LLM_CUBLASLT"] = saved


@pytest.mark.skipif(_installed() is None, reason="nvidia-cublas is not installed")
def test_the_real_library_opens_and_says_that_there_is_no_gpu(tmp_path):
    """Every function that we ask for is in it, and its error reaches the caller as text."""
    if tvm.cuda(0).exist:
        pytest.skip("there is a GPU")
    case = next(c for c in ACCEPTED if c.name == "bias_residual_relu")
    ex, _, _ = _compile(case.module())
    arrays = _inputs(case, "float32")
    ex.export_library(str(tmp_path / "model.so"))
    np.savez(tmp_path / "data.npz", **{f"a{i}": a for i, a in enumerate([*arrays, arrays[0]])})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model.so"), str(tmp_path / "data.npz")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**__import__("os").environ, "RELAX_LLM_CUBLASLT": str(_installed())},
    )
    assert done.returncode != 0
    assert "cublasLtCreate failed: the library was not initialized" in done.stderr
