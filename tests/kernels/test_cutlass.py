"""CUTLASS instances: what is planned and refused, the source, and what nvcc makes of it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op as O

from relax_llm_passes import default_pipeline, get_pass, lower, report
from relax_llm_passes.cuda_on_cpu import nvcc_missing, real_gpu_missing
from relax_llm_passes.fusion.partition_gemm import PartitionGemm
from relax_llm_passes.kernels import cutlass, cutlass_build
from relax_llm_passes.kernels.cutlass_source import CutlassSpec, source

from ..patterns.gemm_cases import ACCEPTED, SIZES, Case
from ..patterns.gemm_reference import Double, reference

HEADERS = cutlass_build.find_headers()
needs_nvcc = pytest.mark.skipif(
    HEADERS is None or bool(nvcc_missing()),
    reason=nvcc_missing() or "CUTLASS's headers are not installed (pip install nvidia-cutlass)",
)


def _target(arch="sm_80"):
    return tvm.target.Target({"kind": "cuda", "arch": arch, "host": {"kind": "llvm"}})


def _plan(case, dtype="float16", arch="sm_80", **options):
    (composite,) = lower.composites(PartitionGemm()(case.module(dtype))).values()
    return cutlass.plan_cutlass(composite, _target(arch), **{"min_rows": 1, **options})


def _named(name):
    return next(c for c in ACCEPTED if c.name == name)


def _product(rows, k, n, dtype="float", transposed=True):
    shape = (n, k) if transposed else (k, n)
    return Case(
        "product",
        [((rows, k), dtype), (shape, dtype)],
        lambda g, x, w: g(O.matmul(x, g(O.permute_dims(w)) if transposed else w)),
    )


REFUSED = {  # of the accepted GEMM forms, with the reason why CUTLASS does not take them
    "transposed_lhs": "transposed left operand with a symbolic number of rows",
    "batch_axes_moved": "rows have 7 elements",
    "symbolic_k": "symbolic",
    "gram": "symbolic",
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", ACCEPTED, ids=lambda c: c.name)
def test_every_accepted_form_is_planned_or_refused_with_a_reason(case, dtype):
    plan = _plan(case, dtype)
    if case.name not in REFUSED:
        assert isinstance(plan, cutlass.CutlassPlan), plan.reason
        steps = [s["op"] for s in _composite(case, dtype).attrs["epilogue"] if s["op"] != "cast"]
        assert [s.op for s in plan.spec.steps] == steps
        assert len(plan.operands) == sum(s.dtype != "" for s in plan.spec.steps)
        text = source(plan.spec)
        assert text.count("Compute<") == len(steps) and plan.spec.symbol in text
    else:
        assert not plan and REFUSED[case.name] in plan.reason


def _composite(case, dtype):
    (found,) = lower.composites(PartitionGemm()(case.module(dtype))).values()
    return found


FORMULAS = {  # of cutlass_gemm.cuh and of each source, as Python
    "erff": math.erf, "tanhf": math.tanh, "expf": math.exp,
}  # fmt: skip


def _python(formula):
    """`x > 0.0f ? x : 0.0f` as a function."""
    text = re.sub(r"(?<=[0-9.])f\b", "", formula)
    text = re.sub(r"-?0x[0-9a-f.]+p[+-]\d+", lambda m: repr(float.fromhex(m.group())), text)
    choice = re.fullmatch(r"(.*) \? (.*) : (.*)", text)
    if choice:
        text = f"({choice[2]}) if ({choice[1]}) else ({choice[3]})"
    return np.vectorize(eval(f"lambda x: {text}", dict(FORMULAS)))


def _functors(text):
    header = Path(cutlass_build.__file__).with_name("cutlass_gemm.cuh").read_text()
    steps = re.findall(r"RELAX_LLM_STEP\((\w+),\s*(.*)\)\n", header + text)
    return {name: _python(formula) for name, formula in steps if name != "Name"}


def _split(text):
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "<{(") - (c in ">})")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]


def _evaluate(kind, arguments, sums, operands, functors):
    """Compute what a visitor tree of this type computes when it gets these arguments."""
    if kind == "Sums":
        assert arguments == "{}"
        return sums
    if kind.startswith(("Row<", "Matrix<")):
        name, _, stride = _split(arguments[1:-1])
        assert stride == ("{_0{}, _1{}, 0}" if kind[0] == "R" else "{p.n, _1{}, p.m * p.n}")
        value = operands[name]
        return value.reshape(-1) if kind[0] == "R" else value
    node, *children = _split(kind.removeprefix("Sm80EVT<")[:-1])
    *inner, own = _split(arguments[1:-1])
    assert len(inner) == len(children)
    values = [
        _evaluate(k, a, sums, operands, functors) for k, a in zip(children, inner, strict=True)
    ]
    if node.startswith("Store<"):
        assert own.endswith("{p.n, _1{}, p.m * p.n}}")
        return values[0]
    functor = node.removeprefix("Compute<")[:-1]
    assert own == "{}"
    if functor.startswith("cutlass::"):
        return {"plus": np.add, "multiplies": np.multiply}[functor[9:]](*values)
    return functors[functor](*values)


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda c: c.name)
def test_the_tree_computes_the_epilogue(case):
    """The types and arguments that are generated, read back and evaluated in float64."""
    if case.name in REFUSED:
        pytest.skip("not planned")
    plan = _plan(case)
    text = source(plan.spec)
    kind = re.search(r"using Type = (.*);", text)[1]
    arguments = re.search(r"return (\{.*\});", text)[1]
    # The composite's own body is the reference.
    mod = PartitionGemm()(case.module("float64"))
    (composite,) = lower.composites(mod).values()
    generator = np.random.default_rng(0)
    arrays = [
        generator.normal(size=[SIZES[d.name] if hasattr(d, "name") else int(d) for d in p.ty.shape])
        for p in composite.func.params
    ]
    values = {role: arrays[i] for role, i in composite.roles.items()}
    rhs = values["rhs"]
    rhs = np.swapaxes(rhs, -1, -2) if composite.attrs["rhs_layout"] == "NK" else rhs
    operands = {f"e{i}": values[role] for i, role in enumerate(plan.operands)}
    sums = np.matmul(values["lhs"], rhs)
    got = _evaluate(kind, arguments, sums, operands, _functors(text))
    want = Double(mod).run(composite.name, arrays)
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "case, dtype, arch, options, reason",
    [
        (_product("n", 24, 16), "float32", "sm_80", {}, "option tf32"),
        (_product("n", 24, 16), "float64", "sm_80", {}, "float64 operands"),
        (_product("n", 24, 16), "float16", "sm_75", {}, "need sm_80"),
        (_product("n", 25, 16), "float16", "sm_80", {}, "rows have 25 elements"),
        (_product("n", 24, 15, transposed=False), "float16", "sm_90", {}, "have 15 elements"),
        (_product(1, 24, 16), "float16", "sm_80", {"min_rows": 2}, "left to GEMV"),
        (_product("n", "k", 16), "float16", "sm_80", {}, "symbolic or 0"),
    ],
)
def test_refused(case, dtype, arch, options, reason):
    plan = _plan(case, dtype, arch, **options)
    assert not plan and reason in plan.reason


def test_alignments_and_tiles_follow_the_shape():
    def of(rows, k, n, dtype="float16", **options):
        spec = _plan(_product(rows, k, n), dtype, **options).spec
        return (spec.align_lhs, spec.align_rhs, spec.align_out), spec.tiles

    both = ("128x128", "64x64")
    assert of("n", 64, 64) == ((8, 8, 8), both)
    assert of("n", 12, 50277) == ((4, 4, 1), both)  # an odd vocabulary costs the stores only
    assert of("n", 64, 64, "float32", tf32=True) == ((4, 4, 4), both)
    assert of(2048, 4096, 4096)[1] == ("128x128",)
    assert of(16, 4096, 4096)[1] == ("64x64",)


def test_products_of_one_kind_share_an_instance():
    plans = [_plan(_product("n", k, n)) for k, n in ((64, 128), (4096, 4096), (256, 1024))]
    assert len({p.spec.symbol for p in plans}) == 1
    others = [_plan(_named(name)) for name in ("bias", "silu", "scale", "residual", "multiply")]
    assert len({p.spec.symbol for p in [*plans, *others]}) == 6


def _offload(case, dtype="float16", arch="sm_80", **options):
    with _target(arch), report.collect() as seen:
        mod = get_pass("CanonicalizeBindings")(case.module(dtype))
        mod = PartitionGemm()(mod)
        mod = get_pass("OffloadCutlass", **{"min_rows": 1, **options})(mod)
    return mod, next(p for p in seen.passes if p.name == "OffloadCutlass")


def test_without_the_headers_a_message_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("RELAX_LLM_CUTLASS", str(tmp_path))
    mod, record = _offload(_named("bias"))
    assert "pip install nvidia-cutlass" in record.notes[0]
    assert "external_mods" not in (mod.attrs or {})
    # And the product compiles with what else there is.
    text = default_pipeline("cutlass, cuda -arch=sm_80")(_named("bias").module("float16")).script()
    assert "relax_llm_cutlass" not in text and "mma" in text


def test_cublas_comes_first(monkeypatch):
    with _target():
        mod = PartitionGemm()(_named("bias").module("float16"))
        mod = get_pass("OffloadCublas", assume_installed=True)(mod)
        with report.collect() as seen:
            after = get_pass("OffloadCutlass", min_rows=1)(mod)
    assert after.same_as(mod)
    assert "cuBLASLt has it" in seen.passes[0].refusals[0].reason


SCRIPT = """
import sys
sys.modules["relax_llm_passes"] = None  # nothing of ours may be needed
import numpy as np, tvm
from tvm import relax
module = tvm.runtime.load_module(sys.argv[1])
relax.VirtualMachine(module, tvm.cpu())
run = module.get_function(sys.argv[2], True)
t = lambda *shape: tvm.runtime.tensor(np.zeros(shape, "float16"))
try:
    run(t(5, 20), t(16, 24), t(16), t(5, 16), t(5, 16))
except ValueError as error:
    print(error)
try:
    run(t(5, 24), t(16, 24), t(16), t(5, 16), t(5, 16))
except RuntimeError as error:
    print(error)
"""


@pytest.fixture
def by_nvcc(monkeypatch):
    """Compile for a GPU, whether or not a test before has installed the emulation of one."""
    monkeypatch.setattr("relax_llm_passes.cuda_on_cpu.preload.stand_ins_loaded", lambda: False)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.usefixtures("by_nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_export_and_reload_in_a_fresh_process(arch, tmp_path):
    case = _named("bias_residual_relu")
    mod, record = _offload(case, arch=arch)
    assert record.matched == {"gemm": 1} and not record.refusals
    with _target(arch):
        mod = get_pass("LowerComposites")(mod)
    relax.analysis.well_formed(mod)
    symbol = _plan(case, arch=arch).spec.symbol
    assert f'call_dps_packed("{symbol}"' in mod.script(show_meta=False)
    path = tmp_path / "model.so"
    tvm.compile(mod, _target(arch)).export_library(str(path))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), symbol],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "multiples of N=8 and K=8" in done.stdout, done.stderr[-2000:]
    if real_gpu_missing():
        assert "CUTLASS GEMM (5, 24) times (24, 16)" in done.stdout
    needed = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True).stdout
    assert "cudart" not in needed and "libcuda" not in needed


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_epilogue_compiles(dtype):
    """All kinds of steps, and the smallest alignments, in one file."""
    names = ("bias_residual_relu", "gelu", "gelu_tanh_spelled", "silu", "scale", "multiply",
             "relu_squared", "batched_transposed", "plain", "vector_expanded")  # fmt: skip
    plans = [_plan(_named(name), dtype, tf32=True) for name in names]
    plans += [_plan(_product("n", k, n), dtype, tf32=True) for k, n in ((10, 15), (12, 6))]
    small = dict.fromkeys(CutlassSpec(**{**vars(p.spec), "tiles": ("64x64",)}) for p in plans)
    assert len(small) == len(plans)
    flags = cutlass_build.compiler_flags("sm_80", HEADERS)
    cutlass_build.compile_object(source(*small), name="all", compiler="nvcc", flags=flags)


@pytest.mark.gpu
@pytest.mark.skipif(bool(real_gpu_missing()), reason=real_gpu_missing())
@needs_nvcc
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", ACCEPTED, ids=lambda c: c.name)
def test_numbers_on_a_gpu(case, dtype):
    target = tvm.target.Target.from_device(tvm.cuda(0)).with_host("llvm")
    options = {"OffloadCutlass": {"min_rows": 1, "tf32": True}}
    pipeline = default_pipeline(target, passes="default,OffloadCutlass", options=options)
    ex = tvm.compile(case.module(dtype), target, relax_pipeline=pipeline)
    vm = relax.VirtualMachine(ex, tvm.cuda(0))
    kinds = [rest[0] if rest else "float" for _, *rest in case.params]
    of = {"bfloat16": ml_dtypes.bfloat16}
    arrays = [
        a.astype(of.get(d := dtype if k == "float" else k, d))
        for a, k in zip(case.arrays(), kinds, strict=True)
    ]
    found = vm["main"](*[tvm.runtime.tensor(a, tvm.cuda(0)) for a in arrays])
    found = [found] if hasattr(found, "numpy") else list(found)
    # Operands of tf32 have 10 bits like fp16; results are rounded once.
    tolerance = {"float32": 4e-3, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    for got, want in zip(found, reference(case, arrays), strict=True):
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(
            got.numpy().astype("float64"), want, atol=tolerance * scale, rtol=0
        )
