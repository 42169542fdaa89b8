"""What a match_cast asserts is read through by recognisers, and still checked when it runs."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from relax_llm_passes import corpus, default_pipeline, get_pass
from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.lower import composites
from relax_llm_passes.shape_checks import ShapeChecks, asserted_shapes
from relax_llm_passes.signature import extent
from relax_llm_passes.targets import parse_target

NATIVE = parse_target("native")


def build(mod: tvm.IRModule) -> relax.VirtualMachine:
    ex = tvm.compile(mod, NATIVE, relax_pipeline=default_pipeline(NATIVE))
    return relax.VirtualMachine(ex, tvm.cpu())


def test_alibi_is_computed_from_positions_and_its_table_ends_where_it_ended():
    graph = corpus.load("mpt_hf_decode")
    mod = get_pass("FuseRotaryAttention")(get_pass("CanonicalizeBindings")(graph.mod))
    for composite in composites(mod).values():
        # Packed q, k, v and the two caches: no bias is read from memory.
        tensors = [p for p in composite.func.params if isinstance(p.ty, relax.TensorType)]
        assert len(tensors) == 3
        (pair,) = asserted_shapes(composite.func, composite.func.params)
        assert [extent(d) for d in pair[1]] == [4, 1, "(s17 + 1)"]
    relax.analysis.well_formed(mod)
    vm = build(graph.mod)
    plain = tvm.compile(graph.mod, "llvm", relax_pipeline="default_build")
    plain = relax.VirtualMachine(plain, tvm.cpu())
    for past in (1, 31, 255):
        arrays = [tvm.runtime.tensor(a) for a in graph.inputs(seed=3, past=past)]
        got, want = (m["main"](*arrays) for m in (vm, plain))
        assert graph.compare([x.numpy() for x in got], [x.numpy() for x in want])
    arrays = [tvm.runtime.tensor(a) for a in graph.inputs(seed=3, past=256)]
    with pytest.raises(RuntimeError, match="match_cast"):
        vm["main"](*arrays)


@I.ir_module
class Sizes:
    @R.function
    def main(x: R.Tensor(("n", 4), "float32"), y: R.Tensor(("m", 4), "float32")) -> R.Tensor(
        dtype="float32", ndim=2
    ):
        m, k = T.int64(), T.int64()
        with R.dataflow():
            same = R.match_cast(R.concat((x, x)), R.Tensor((m, 4), "float32"))
            new = R.match_cast(R.nn.relu(y), R.Tensor((k, 4), "float32"))
            out = R.add(same, R.add(y, new))
            R.output(out)
        return out


def test_only_a_match_cast_without_new_sizes_is_read_through():
    view = FunctionView(Sizes, "main")
    by_name = {b.var.name: b.var for b in view.bindings}
    assert view.asserted(by_name["same"]) is not None
    assert view.call(view.asserted(by_name["same"])).op.name == "relax.concat"
    assert view.asserted(by_name["new"]) is None
    assert view.asserted(by_name["out"]) is None


def test_a_check_is_written_once_and_again_outside_of_its_branch():
    n = tirx.Var("n", "int64")
    shapes = [([n + 1, 4], [2 * n, 4])]
    checks = ShapeChecks()
    mark = checks.mark()
    assert len(checks.bindings(shapes, True)) == 2
    assert checks.bindings(shapes, True) == []
    checks.forget(mark)
    assert len(checks.bindings(shapes, False)) == 2


def test_verification_and_report_see_the_fused_graph():
    graph = corpus.load("mpt_hf_decode_new3")
    seq = default_pipeline(NATIVE, verify=True)
    mod = seq(graph.mod)
    assert seq.report.matched("FuseRotaryAttention")["attention"] == 2
    assert "strided_slice" not in mod.script()
