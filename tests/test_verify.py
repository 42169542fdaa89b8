"""verify=True: what breaks the module or computes something else is undone, and said."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, te
from tvm.script import ir as I
from tvm.script import relax as R

import relax_llm_passes as rlp
from relax_llm_passes import lower, registry
from relax_llm_passes.verify import difference
from tests.small_modules import Alias, call, expected, inputs


@pytest.fixture
def scratch():
    """Registrations made inside a test are gone after it."""
    rlp.list_passes()
    passes = dict(registry._PASSES)
    entries = {k: list(v) for k, v in lower._IMPLEMENTATIONS.items()}
    yield
    for known, before in ((registry._PASSES, passes), (lower._IMPLEMENTATIONS, entries)):
        known.clear()
        known.update(before)


def compile_and_check(**options):
    seq = rlp.default_pipeline("llvm", **options)
    executable = tvm.compile(Alias, seq.target, relax_pipeline=seq)
    x, w = inputs(6)
    np.testing.assert_allclose(call(executable, x, w), expected(x, w), rtol=1e-5, atol=1e-5)
    return seq.report


def test_a_sound_pipeline_is_left_alone():
    report = compile_and_check(verify=True)
    assert not [n for p in report.passes for n in p.notes if n.startswith("undone")]
    assert not [r for r in report.refused() if "verification" in r.reason]


def broken_pass(body):
    """Register a pass called Broken of stage "fuse" that returns body(mod)."""

    def Broken(mod, run):
        return body(mod)

    rlp.register_pass("Broken", stage="fuse")(Broken)


def notes(report) -> list[str]:
    return next(p.notes for p in report.passes if p.name == "Broken")


def without_main(mod):
    return tvm.IRModule({})


def other_signature(mod):
    func = mod["main"]
    extra = relax.Var("extra", relax.TensorType((1,), "float32"))
    new = relax.Function([*func.params, extra], func.body, func.ret_ty, True, func.attrs)
    return with_main(mod, new)


def with_main(mod, new):
    result = tvm.IRModule(dict(mod.functions.items()))
    result.update_func(result.get_global_var("main"), new)
    return result


def ill_formed(mod):
    func = mod["main"]
    block = func.body.blocks[0]
    body = relax.SeqExpr([relax.DataflowBlock(list(block.bindings)[1:])], func.body.body)
    new = relax.Function(func.params, body, func.ret_ty, True, func.attrs)
    return with_main(mod, new)


def raises(mod):
    raise RuntimeError("no such thing\nas this")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (without_main, "undone: function 'main' is gone"),
        (other_signature, "undone: function 'main' has 3 parameters, had 2"),
        (ill_formed, "undone: the result is not well-formed"),
        (raises, "undone: RuntimeError: as this"),
    ],
)
def test_a_pass_that_breaks_the_module_is_undone(scratch, body, message):
    broken_pass(body)
    report = compile_and_check(verify=True, passes="default,Broken")
    assert len(notes(report)) == 1 and notes(report)[0].startswith(message)
    assert message.split(":")[0] in report.to_text()


class _Gemm:
    """Claims every float32 product."""

    kind = "gemm"
    targets = ("llvm",)

    def accepts(self, composite, target):
        return rlp.Accept()

    def emit(self, composite, args, bb, target):
        def kernel(*tensors):
            shape = [int(v) if isinstance(v, tvm.tirx.IntImm) else v for v in self.shape]
            return te.compute(shape, lambda *i: self.value(tensors[0], i), name="wrong")

        self.shape = composite.result_ty.shape.values
        # The composite's own sizes, with the caller's variables in place of them.
        lhs = args[composite.roles["lhs"]].ty.shape.values
        self.shape = [*lhs[:-1], self.shape[-1]]
        return bb.call_te(kernel, args[composite.roles["lhs"]], primfunc_name_hint="wrong")


class Wrong(_Gemm):
    name = "test.wrong"

    def value(self, lhs, i):
        return lhs[(*i[:-1], 0)] * 2.0


class WrongBeyondOneRow(_Gemm):
    name = "test.nan"

    def value(self, lhs, i):
        return te.sqrt(lhs[(*i[:-1], 0)] * 0.0 - 1.0)


@pytest.mark.parametrize("implementation", [Wrong, WrongBeyondOneRow])
def test_a_wrong_kernel_is_refused_and_the_program_stays(scratch, implementation):
    rlp.register_implementation("gemm", priority=1000)(implementation)
    report = compile_and_check(verify=True)
    assert f"gemm:{implementation.name}" not in report.matched()
    reasons = [r.reason for r in report.refused() if implementation.name in r.reason]
    assert reasons and reasons[0].startswith(f"verification: {implementation.name}: output 0")


def test_without_verify_the_wrong_kernel_is_used(scratch):
    # What the test above relies on: the kernel is really chosen when nobody checks it.
    rlp.register_implementation("gemm", priority=1000)(Wrong)
    seq = rlp.default_pipeline("llvm")
    executable = tvm.compile(Alias, seq.target, relax_pipeline=seq)
    assert seq.report.matched()["gemm:test.wrong"] == 1
    x, w = inputs(6)
    assert difference(call(executable, x, w), expected(x, w)) > 0.1


def test_an_emitted_value_of_another_type_is_refused(scratch):
    class OtherType(_Gemm):
        name = "test.type"

        def emit(self, composite, args, bb, target):
            return bb.emit(relax.op.zeros((3, 3), "float16"))

    rlp.register_implementation("gemm", priority=1000)(OtherType)
    for verify in (False, True):
        report = compile_and_check(verify=verify)
        assert "gemm:test.type" not in report.matched()
        assert any("test.type" in r.reason for r in report.refused())


@pytest.mark.parametrize(
    ("found", "wanted", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([np.nan, 2.0], [1.0, 2.0], np.inf),
        ([np.nan, 2.0], [np.nan, 2.0], 0.0),
        ([np.inf, 2.0], [np.inf, 2.0], 0.0),
        ([-np.inf, 2.0], [np.inf, 2.0], np.inf),
        ([1.0], [1.0, 2.0], np.inf),
        ([], [], 0.0),
    ],
)
def test_difference(found, wanted, error):
    a, b = np.array(found, "float32"), np.array(wanted, "float32")
    assert difference(a, b) == pytest.approx(error)


def test_a_fusion_that_raises_costs_speed_not_the_program(scratch):
    """Without verification too: the module before it goes on, with a warning and a note."""

    def fails(mod):
        raise RuntimeError("no such layout")

    broken_pass(fails)
    with pytest.warns(UserWarning, match="Broken failed and was left out"):
        report = compile_and_check(passes="default,Broken")
    assert notes(report) == ["undone: RuntimeError: no such layout"]


@I.ir_module
class Branches:
    @R.function
    def main(
        x: R.Tensor((3, 8), "float32"), w: R.Tensor((8, 8), "float32"), flag: R.Tensor((), "bool")
    ) -> R.Tensor((3, 8), "float32"):
        if flag:
            y = R.tanh(R.matmul(x, w))
        else:
            y = R.nn.relu(R.matmul(R.add(x, x), w))
        return y


def test_kernels_in_both_branches_are_verified_and_kept():
    seq = rlp.default_pipeline("llvm", verify=True)
    executable = tvm.compile(Branches, seq.target, relax_pipeline=seq)
    assert not [n for p in seq.report.passes for n in p.notes if n.startswith("undone")]
    lowered = next(p for p in seq.report.passes if p.name == "LowerComposites")
    assert lowered.matched["gemm:verified"] == 2
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype("float32") for s in ((3, 8), (8, 8)))
    for flag, wanted in ((True, np.tanh(x @ w)), (False, np.maximum(2 * x @ w, 0))):
        vm = relax.VirtualMachine(executable, tvm.cpu())
        found = vm["main"](*map(tvm.runtime.tensor, (x, w, np.array(flag)))).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("verify", [False, True])
def test_an_operator_that_tvm_cannot_lower_is_its_own_error(verify):
    """Lowering is not left out: what comes after would fail and not say why."""

    @I.ir_module
    class ByParameter:
        @R.function
        def main(x: R.Tensor(("n", "m"), "float32"), s: R.Shape(["m", "n"])):
            return R.reshape(x, s)

    with pytest.raises(AssertionError):  # of TVM's rule for reshape
        rlp.default_pipeline("llvm", verify=verify)(ByParameter)
