"""default_pipeline: every way to use it, and nothing dropped in silence."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm_ffi import structural_equal

import relax_llm_passes as rlp
from tests.small_modules import Alias, call, expected, inputs


def check(executable) -> None:
    for n in (1, 6):  # a symbolic length, one row and several
        x, w = inputs(n, seed=n)
        # fp32, five products a sum
        np.testing.assert_allclose(call(executable, x, w), expected(x, w), rtol=1e-5, atol=1e-5)


def test_as_relax_pipeline():
    seq = rlp.default_pipeline("native")
    check(tvm.compile(Alias, seq.target, relax_pipeline=seq))
    assert seq.report.matched()


def test_called_on_a_module():
    seq = rlp.default_pipeline("llvm")
    check(tvm.compile(seq(Alias), seq.target, relax_pipeline=None))


def test_by_name_inside_and_outside_of_a_target():
    target = rlp.parse_target("llvm")
    check(tvm.compile(Alias, target, relax_pipeline="relax_llm"))
    with target:
        check(tvm.compile(Alias, relax_pipeline="relax_llm"))


def test_without_a_target():
    seq = rlp.default_pipeline()
    with pytest.raises(rlp.InputError, match="no target"):
        seq(Alias)
    with rlp.parse_target("llvm"):
        seq(Alias)


def test_the_input_is_not_changed():
    before = tvm.ir.save_json(Alias)
    rlp.default_pipeline("llvm")(Alias)
    assert tvm.ir.save_json(Alias) == before


def test_cuda_compiles_without_a_device():
    seq = rlp.default_pipeline("cuda -arch=sm_90")
    lowered = seq(Alias)
    kernels = [f for f in lowered.functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    assert kernels and "threadIdx.x" in lowered.script()


def test_stages_recombine():
    target = rlp.parse_target("llvm")
    parts = rlp.stages(target)
    graph = tvm.transform.Sequential(parts["clean"] + parts.get("raise", []) + parts["fuse"])
    rest = tvm.transform.Sequential(parts["lower"] + parts["schedule"] + parts["finish"])
    with target:
        mod = graph(Alias)
        relax.analysis.well_formed(mod)
        check(tvm.compile(rest(mod), target, relax_pipeline=None))
    parts["clean"].clear()
    assert rlp.stages(target)["clean"]


def test_a_pass_disabled_in_the_context_leaves_a_note():
    seq = rlp.default_pipeline("llvm")
    with tvm.transform.PassContext(disabled_pass=["PartitionGemm"]):
        check(tvm.compile(Alias, seq.target, relax_pipeline=seq))
    record = next(p for p in seq.report.passes if p.name == "PartitionGemm")
    assert record.notes == ["disabled by PassContext(disabled_pass=...)"]
    assert "PartitionGemm" in seq.report.to_text()


@pytest.mark.parametrize("level", [0, 1, 3])
def test_opt_level_drops_nothing_in_silence(level):
    seq = rlp.default_pipeline("llvm")
    with tvm.transform.PassContext(opt_level=level):
        check(tvm.compile(Alias, seq.target, relax_pipeline=seq))
    ran = [p.name for p in seq.report.passes]
    assert ran == [s.name for s in seq.steps(seq.target)]
    left_out = [p for p in seq.report.passes if any("left out" in n for n in p.notes)]
    own = {p.name for p in rlp.list_passes()}
    assert not [p.name for p in left_out if p.name in own]


def test_instruments_see_every_pass_by_name():
    seen = []

    @tvm.ir.instrument.pass_instrument
    class Names:
        def run_before_pass(self, mod, info):
            seen.append(str(info.name))

    seq = rlp.default_pipeline("llvm")
    timing = tvm.ir.instrument.PassTimingInstrument()
    with tvm.transform.PassContext(instruments=[Names(), timing]):
        seq(Alias)
        table = timing.render()
    wanted = [s.name for s in seq.steps(seq.target)]
    assert set(wanted) <= set(seen)
    assert all(name in table for name in wanted)


def test_progress_and_dump(tmp_path):
    told = []
    folder = tmp_path / "ir"
    seq = rlp.default_pipeline("llvm", progress=told.append, dump_dir=folder)
    seq(Alias)
    assert told == [s.name for s in seq.steps(seq.target)]
    files = sorted(p.name for p in folder.iterdir())
    assert files == [f"{i:02d}_{name}.py" for i, name in enumerate(told)]
    assert "@I.ir_module" in (folder / files[0]).read_text()


def test_unknown_target():
    with pytest.raises(rlp.UnknownNameError, match="Known: cuda, llvm"):
        rlp.default_pipeline("vulkan")


def test_signatures_stay():
    seq = rlp.default_pipeline("llvm", passes="default,-finish")
    before, after = Alias["main"], seq(Alias)["main"]
    assert len(before.params) == len(after.params)
    assert structural_equal(
        relax.FuncType([p.ty for p in before.params], before.ret_ty),
        relax.FuncType([p.ty for p in after.params], after.ret_ty),
        map_free_vars=True,
    )


@I.ir_module
class Branches:
    @R.function
    def main(
        x: R.Tensor((4, 32), "float32"), w: R.Tensor((16, 32), "float32"), c: R.Tensor((), "bool")
    ) -> R.Tensor((4, 16), "float32"):
        wt = R.permute_dims(w)
        if c:
            y = R.matmul(x, wt)
            z = R.nn.relu(y)
        else:
            y1 = R.matmul(x, wt)
            z = R.nn.softmax(y1, axis=0)
        q = R.add(z, z)
        return q


def test_both_branches_of_an_if_run():
    """TVM's memory planning lets branches share storage that only the first allocates."""
    seq = rlp.default_pipeline("llvm")
    machine = relax.VirtualMachine(tvm.compile(Branches, seq.target, relax_pipeline=seq), tvm.cpu())
    assert any("has an If" in n for p in seq.report.passes for n in p.notes)
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 32)), rng.standard_normal((16, 32))
    y = x @ w.T
    soft = np.exp(y) / np.exp(y).sum(0)
    for taken, wanted in ((True, np.maximum(y, 0)), (False, soft)):
        given = [x.astype("float32"), w.astype("float32"), np.array(taken)]
        found = machine["main"](*[tvm.runtime.tensor(a) for a in given]).numpy()
        np.testing.assert_allclose(found, 2 * wanted, rtol=1e-4, atol=1e-5)  # sums of 32 in fp32


def test_an_empty_pass_list_is_an_error():
    with pytest.raises(rlp.InputError, match="expected text"):
        rlp.default_pipeline("llvm", passes="")


def test_a_pass_is_asked_for_by_name():
    with pytest.raises(rlp.InputError, match="expected a name"):
        rlp.get_pass(3)
