"""PartitionGemm: every form outlined and inlined back, the founding bug, whole graphs."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import op as O
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_llm_passes import get_pass, report
from relax_llm_passes.errors import InputError
from relax_llm_passes.fusion.partition_gemm import PartitionGemm
from relax_llm_passes.lower import composites
from relax_llm_passes.outline import inline

from ..interpreter import Interpreter, equal
from ..patterns.gemm_cases import ACCEPTED, NEAR_MISSES, PAIRS, Case
from ..patterns.test_gemm import SHARED, quantised

ALL = [*ACCEPTED, *NEAR_MISSES, *[case for case, _ in PAIRS]]


def _signatures(mod):
    return {
        gv.name_hint: (tuple(map(str, (p.ty for p in f.params))), str(f.ret_ty))
        for gv, f in mod.functions.items()
        if isinstance(f, relax.Function) and not (f.attrs and "Composite" in f.attrs)
    }


def _partition(mod):
    before = _signatures(mod)
    with report.collect() as seen:
        new = PartitionGemm()(mod)
    relax.analysis.well_formed(new)
    assert _signatures(new) == before
    assert tvm_ffi.structural_equal(PartitionGemm()(new), new), "a second run changes nothing"
    return new, seen


def _run(mod, arrays):
    """Run `main` on the CPU as TVM compiles it, composites called as functions."""
    ex = tvm.compile(mod, tvm.target.Target({"kind": "llvm"}))
    result = relax.VirtualMachine(ex, tvm.cpu())["main"](*map(tvm.runtime.tensor, arrays))
    results = [result] if hasattr(result, "numpy") else list(result)
    return [r.numpy() for r in results]


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_outlining_is_reversible(case):
    mod = case.module()
    new, seen = _partition(mod)
    regions = seen.matched("PartitionGemm")["gemm"]
    assert len(composites(new)) == regions
    canonical = get_pass("CanonicalizeBindings")(mod)
    assert tvm_ffi.structural_equal(get_pass("CanonicalizeBindings")(inline(new)), canonical)


@pytest.mark.parametrize("case", NEAR_MISSES, ids=lambda c: c.name)
def test_refused_forms_are_reported_and_not_offloaded(case):
    new, seen = _partition(case.module())
    assert len(composites(new)) == (0 if case.attrs is None else 1)
    if case.refused:
        assert any(case.refused in r.reason for r in seen.refused("PartitionGemm"))


def test_a_shared_transpose_is_copied_into_each_region():
    new, _ = _partition(SHARED.module())
    found = composites(new)
    assert [c.attrs["rhs_layout"] for c in found.values()] == ["NK", "NK"]
    main = new["main"]
    # The transpose itself stays: it is an output.
    assert "permute_dims" in main.script() and "matmul" not in main.script()
    arrays = [a.astype("float32") for a in SHARED.arrays()]
    for got, want in zip(_run(new, arrays), _run(SHARED.module(), arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_shared_transpose_that_nothing_else_reads_goes():
    case = Case(
        "shared_twice",
        [(("n", 24),), (("b", 24),), ((16, 24),)],
        lambda g, x, y, w: (lambda wt: (g(O.matmul(x, wt)), g(O.nn.relu(g(O.matmul(y, wt))))))(
            g(O.permute_dims(w))
        ),
    )
    new, _ = _partition(case.module())
    assert "permute_dims" not in new["main"].script()
    assert len(composites(new)) == 2


def test_both_operands_from_one_shared_view():
    case = Case(
        "gram_of_view",
        [((2, 6, 24),), ((12, 24),)],
        lambda g, x, y: (lambda v: (g(O.matmul(v, g(O.permute_dims(v)))), g(O.add(v, y))))(
            g(O.reshape(x, (12, 24)))
        ),
    )
    mod = case.module()
    new, _ = _partition(mod)
    arrays = [a.astype("float32") for a in case.arrays()]
    for got, want in zip(_run(new, arrays), _run(mod, arrays), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_view_outside_a_branch_is_an_operand_there():
    @I.ir_module
    class Module:
        @R.function
        def main(
            x: R.Tensor(("n", 24), "float32"),
            w: R.Tensor((16, 24), "float32"),
            c: R.Tensor((), "bool"),
        ) -> R.Tensor(("n", 16), "float32"):
            wt = R.permute_dims(w)
            kept = R.matmul(R.negative(x), wt)
            if c:
                m = R.matmul(x, wt)
                unused = R.subtract(m, m)  # noqa: F841
                y = R.add(m, kept)
            else:
                y = kept
            return y

    for mod in (Module, get_pass("CanonicalizeBindings")(Module)):
        new, seen = _partition(mod)
        assert seen.matched("PartitionGemm")["gemm"] == 2
        layouts = [c.attrs["rhs_layout"] for c in composites(new).values()]
        assert sorted(layouts) == ["KN", "NK"]  # inside the branch, outside of it
        body = new["main"].script()
        assert body.count("permute_dims") == 1
        rng = np.random.default_rng(0)
        x, w = (rng.standard_normal(s).astype("float32") for s in ((3, 24), (16, 24)))
        for condition in (True, False):
            args = [x, w, np.array(condition)]
            want = Interpreter(Module).run("main", args)
            for changed in (new, inline(new)):
                assert equal(Interpreter(changed).run("main", args), want)


def test_the_founding_bug():
    """`lv2260 = lv2259` between a product and its epilogue, and a diamond beside it."""

    @I.ir_module
    class Mod:
        @R.function
        def decode(
            x: R.Tensor((1, 1, 24), "float32"),
            w: R.Tensor((24, 24), "float32"),
            v: R.Tensor((24, 24), "float32"),
        ):
            with R.dataflow():
                lv2258 = R.permute_dims(w)
                lv2259 = R.matmul(x, lv2258)
                lv2260 = lv2259
                lv2261 = R.add(lv2260, x)
                lv2262 = R.nn.relu(lv2261)
                lv2263 = R.matmul(lv2262, v)
                lv2264 = lv2263
                lv2265 = R.tanh(R.nn.relu(lv2263))
                lv2266 = R.add(lv2264, lv2265)
                R.output(lv2266, lv2261)
            return lv2266, lv2261

    new, seen = _partition(Mod)
    assert seen.matched("PartitionGemm")["gemm"] == 2
    steps = sorted([s["op"] for s in c.attrs["epilogue"]] for c in composites(new).values())
    assert steps == [[], ["residual"]]


def test_groups_inside_if_and_functions_without_main():
    @I.ir_module
    class Mod:
        @R.function
        def prefill(
            x: R.Tensor(("n", 24), "float32"),
            w: R.Tensor((16, 24), "float32"),
            c: R.Tensor((), "bool"),
        ) -> R.Tensor(("n", 16), "float32"):
            n = T.int64()
            if c:
                wt = R.permute_dims(w)
                m = R.matmul(x, wt)
                r: R.Tensor((n, 16), "float32") = R.nn.relu(m)
            else:
                wt2 = R.permute_dims(w)
                r = R.matmul(x, wt2)
            return r

        @R.function
        def decode(x: R.Tensor((1, 24), "float32"), w: R.Tensor((16, 24), "float32")):
            with R.dataflow():
                m = R.matmul(x, R.permute_dims(w))
                R.output(m)
            return m

    new, seen = _partition(Mod)
    assert seen.matched("PartitionGemm")["gemm"] == 3
    assert len(composites(new)) == 3


def test_constants_that_differ_are_not_merged():
    case = Case(
        "constants",
        [(("n", 4),)],
        lambda g, x: (
            g(O.matmul(x, relax.const(np.ones((4, 8), "float32")))),
            g(O.matmul(x, relax.const(np.full((4, 8), 2.0, "float32")))),
        ),
    )
    mod = case.module()
    new, _ = _partition(mod)
    arrays = [a.astype("float32") for a in case.arrays()]
    first, second = _run(new, arrays)
    np.testing.assert_allclose(second, 2 * first)


def test_a_packed_weight_is_inside_with_its_function():
    new, _ = _partition(quantised())
    (composite,) = composites(new).values()
    assert sorted(composite.roles) == ["epi0", "lhs", "rhs_packed", "rhs_scale"]
    assert "call_tir" not in new["main"].script()


@pytest.mark.parametrize("bits", [0, 8])
def test_activation_bits_are_for_packed_weights_only(bits):
    options = {"activation_bits": bits} if bits else {}
    mod = get_pass("PartitionGemm", **options)(quantised())
    (composite,) = composites(mod).values()
    assert composite.attrs["quant"].get("activation_bits", 0) == bits


def test_activation_bits_reach_the_kernel():
    import relax_llm_passes

    target = relax_llm_passes.parse_target("llvm -mcpu=haswell")
    for bits, names in ((0, ["q4g32_"]), (8, ["q4g32a8_"])):
        pipeline = relax_llm_passes.default_pipeline(
            target, options={"PartitionGemm": {"activation_bits": bits}}
        )
        kernels = [g.name_hint for g in pipeline(quantised()).functions if "gemm" in g.name_hint]
        assert kernels and all(any(n in k for n in names) for k in kernels)


def test_other_activation_bits_are_refused():
    with pytest.raises(InputError, match="expected 0, 8 or 16"):
        get_pass("PartitionGemm", activation_bits=4)(quantised())


def _with_aliases(mod):
    """Put `var = t` behind every second binding `t = ...`, as importers leave them."""
    result = tvm.IRModule(dict(mod.functions.items()), attrs=mod.attrs)
    for gvar, func in mod.functions.items():
        if not isinstance(func, relax.Function):
            continue
        blocks, count = [], 0
        for block in func.body.blocks:
            bindings = []
            for binding in block.bindings:
                count += 1
                if count % 2 and isinstance(binding.var, relax.DataflowVar):
                    inner = relax.DataflowVar(binding.var.name + "_0", binding.var.ty)
                    bindings.append(relax.VarBinding(inner, binding.value))
                    bindings.append(relax.VarBinding(binding.var, inner))
                else:
                    bindings.append(binding)
            blocks.append(type(block)(bindings))
        body = relax.SeqExpr(blocks, func.body.body)
        result.update_func(
            gvar, relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
        )
    return relax.transform.Normalize()(result)


def test_rwkv5_decode_with_aliases_keeps_all_its_products():
    from relax_llm_passes import corpus

    graph = corpus.load("rwkv5_package_decode")
    plain = graph.mod
    aliased = _with_aliases(plain)
    assert aliased.script().count(" = lv") > 40
    count = str(aliased.script()).count("R.matmul(")
    new, seen = _partition(aliased)
    _, reference = _partition(plain)
    assert seen.matched("PartitionGemm")["gemm"] == count
    assert seen.matched("PartitionGemm") == reference.matched("PartitionGemm")
    steps = [s["op"] for c in composites(new).values() for s in c.attrs["epilogue"]]
    assert {"silu", "sigmoid", "relu_squared", "multiply", "bias"} <= set(steps)


@pytest.mark.slow
def test_rwkv5_decode_with_aliases_runs_as_the_source_framework_does():
    import relax_llm_passes
    from relax_llm_passes import corpus

    graph = corpus.load("rwkv5_package_decode")
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2})
    pipeline = relax_llm_passes.default_pipeline(target)
    ex = tvm.compile(_with_aliases(graph.mod), target, relax_pipeline=pipeline)
    vm = relax.VirtualMachine(ex, tvm.cpu())
    result = vm[graph.function](*map(tvm.runtime.tensor, graph.inputs()))

    def flat(value):
        return [value.numpy()] if hasattr(value, "numpy") else [y for x in value for y in flat(x)]

    comparison = graph.compare(flat(result))
    assert comparison.max_rel_err <= graph.tolerance, (comparison, graph.tolerance_reason)
