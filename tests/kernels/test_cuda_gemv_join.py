"""JoinRowProducts: which products share a kernel, and that the kernel computes all of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

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
from relax_llm_passes.fusion.join_row_products import JoinRowProducts
from relax_llm_passes.kernels.cuda_gemv import spec_of
from relax_llm_passes.kernels.cuda_gemv_join import LIMITS, Member, chains, joined_kernel
from relax_llm_passes.kernels.cuda_matmul import MmaSpec

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# Sums in fp32, one rounding of the result at the end; relative to the sum of magnitudes.
UNIT = {"float32": 4 * 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
needs_harness = pytest.mark.skipif(bool(why_not()), reason=str(why_not()))


def lowered(mod):
    """Return the module as it is joined, the same before, and how many products were joined."""
    target = cuda_target()
    text = "CanonicalizeBindings,PartitionGemm,LowerComposites"
    before = relax_llm_passes.default_pipeline(target, passes=text)(mod)
    seq = relax_llm_passes.default_pipeline(target, passes="JoinRowProducts")
    after = seq(before)
    relax.analysis.well_formed(after)
    with target:
        assert tvm_ffi.structural_equal(JoinRowProducts()(after), after)
    return after, before, seq.report.matched().get("row_products", 0)


def kernels(mod) -> list[str]:
    return [str(gv.name_hint) for gv, f in mod.functions.items() if spec_of(f) is not None]


def _spec(layout, n, k, dtype, steps=()):
    return MmaSpec((), (1,), n, k, layout, dtype, dtype, steps, prefix="gemv")


@pytest.mark.cuda
@needs_harness
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [([(90, 256), (33, 256), (7, 33)], "float32"), ([(130, 264), (64, 8)], "float16"),
     ([(40, 96)] * 4, "bfloat16")],
)  # fmt: skip
def test_products_side_by_side(sizes, layout, dtype):
    rng = np.random.default_rng(len(sizes))
    members, inputs, want, scales = [], [], [], []
    for i, (n, k) in enumerate(sizes):
        steps = (("bias", "epi0", dtype, 1.0),) if i == 1 else ()
        members.append(Member(_spec(layout, n, k, dtype, steps)))
        x, w, b = (
            rng.standard_normal(s).astype(NUMPY[dtype])
            for s in ((1, k), (n, k) if layout == "NK" else (k, n), (n,))
        )
        inputs += [x, w, b] if steps else [x, w]
        X, W = x.astype("f8"), w.astype("f8")
        W, b = (W.T if layout == "NK" else W), b.astype("f8") * bool(steps)
        want.append(X @ W + b)
        scales.append(np.abs(X) @ np.abs(W) + np.abs(b))
    outs = [np.zeros((1, n), NUMPY[dtype]) for n, _ in sizes]
    found = run_primfunc(joined_kernel(members), [*inputs, *outs], orders=5, outputs=len(outs))
    assert len(found.stats) == 1
    for got, exact, scale in zip(found.outputs, want, scales, strict=True):
        assert (np.abs(got.astype("f8") - exact) <= UNIT[dtype] * scale).all()


@pytest.mark.cuda
@needs_harness
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("n", [160, 77])
def test_a_gate_and_what_it_gates(layout, n):
    k, dtype = 64, "float32"
    rng = np.random.default_rng(n)
    shape = (n, k) if layout == "NK" else (k, n)
    x, w1, w2 = (rng.standard_normal(s).astype("f4") for s in ((1, k), shape, shape))
    gate = Member(_spec(layout, n, k, dtype, (("silu", "", "", 1.0),)))
    up = Member(_spec(layout, n, k, dtype, (("multiply", "epi0", dtype, 1.0),)), {"epi0": 0})
    assert chains([gate, up]) == [[0, 1]]
    outs = [np.zeros((1, n), "f4") for _ in range(2)]
    found = run_primfunc(joined_kernel([gate, up]), [x, w1, x, w2, *outs], orders=5, outputs=2)
    X, A, B = (a.astype("f8") for a in (x, w1, w2))
    A, B = (A.T, B.T) if layout == "NK" else (A, B)
    silu = X @ A / (1 + np.exp(-(X @ A)))
    np.testing.assert_allclose(found.outputs[0], silu, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.outputs[1], silu * (X @ B), rtol=1e-5, atol=1e-5)


@I.ir_module
class Layer:
    @R.function
    def main(
        x: R.Tensor((1, 1, 64), "float32"),
        q: R.Tensor((64, 64), "float32"),
        k: R.Tensor((32, 64), "float32"),
        v: R.Tensor((32, 64), "float32"),
        o: R.Tensor((64, 64), "float32"),
    ):
        with R.dataflow():
            a = R.matmul(R.reshape(x, (1, 64)), R.permute_dims(q))
            b = R.matmul(R.reshape(x, (1, 64)), R.permute_dims(k))
            c = R.matmul(R.reshape(x, (1, 64)), R.permute_dims(v))
            d = R.matmul(a, R.permute_dims(o))
            R.output(b, c, d)
        return (b, c, d)


def test_products_of_one_value_join_and_those_that_wait_do_not():
    after, before, count = lowered(Layer)
    assert count == 3
    assert len(kernels(before)) == 2  # k and v share one
    assert len(kernels(after)) == 1  # o's, which is q's kernel again
    text = after["main"].script()
    assert text.count("gemv_join") == 1


@I.ir_module
class Written:
    @R.function(pure=False)
    def main(
        x: R.Tensor((1, 64), "float32"),
        q: R.Tensor((64, 64), "float32"),
        k: R.Tensor((64, 64), "float32"),
    ):
        a = R.matmul(x, R.permute_dims(q))
        _ = R.call_packed("writes.something", x, ty_args=(R.Tuple(),))
        b = R.matmul(x, R.permute_dims(k))
        return (a, b)


def test_nothing_moves_across_a_call_that_may_write():
    _, _, count = lowered(Written)
    assert count == 0


@pytest.mark.cuda
@needs_harness
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_decode_gqa_llama3", "rwkv7_package_decode"])
def test_graphs_of_the_corpus(name):
    graph = corpus.load(name)
    target = cuda_target()
    seq = relax_llm_passes.default_pipeline(target)
    result = run_module(
        graph.mod, graph.inputs(), target, function=graph.function, relax_pipeline=seq, orders=3
    )
    assert seq.report.matched()["row_products"] >= 8
    assert graph.compare(result.outputs)


@pytest.mark.skipif(bool(nvcc_missing()), reason=str(nvcc_missing()))
@pytest.mark.parametrize("layout", ["NK", "KN"])
def test_registers(layout):
    members = [Member(_spec(layout, 4096, 4096, "float16")) for _ in range(3)]
    func = joined_kernel(members).with_attr("global_symbol", "main")
    mod = tvm.IRModule({"main": func})
    rows = nvcc_check(mod, archs=("sm_80", "sm_90", "sm_100"))
    assert rows
    for row in rows:
        assert not row.within(LIMITS), row
