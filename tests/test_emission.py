"""Layers share what an implementation emitted: when they do, and when they must not."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.script import relax as R

from relax_llm_passes import get_pass, lower, report
from relax_llm_passes.fusion.partition_gemm import PartitionGemm

LLVM = tvm.target.Target({"kind": "llvm"})


class Counting:
    """Computes a product with two bindings, and counts how often it is asked to."""

    name = "test.counting"
    kind = "gemm"
    targets = ("llvm",)

    def __init__(self):
        self.emitted = 0

    def accepts(self, composite, target):
        return lower.Accept()

    def emit(self, composite, args, bb, target):
        self.emitted += 1
        lhs, rhs = (args[composite.roles[r]] for r in ("lhs", "rhs"))
        return op.matmul(lhs, bb.emit(op.permute_dims(rhs)))


@pytest.fixture
def counting():
    entries = lower._IMPLEMENTATIONS.setdefault("gemm", [])
    saved = list(entries)
    instance = Counting()
    lower.register_implementation("gemm", priority=1000)(instance)
    yield instance
    entries[:] = saved


def _lowered(build):
    """Lower a function of x (n, 4) and four (4, 4) weights; return it with its inputs."""
    bb = relax.BlockBuilder()
    n = tvm.tirx.Var("n", "int64")
    params = [relax.Var("x", R.Tensor([n, 4], "float32"))]
    params += [relax.Var(f"w{i}", R.Tensor([4, 4], "float32")) for i in range(4)]

    def linear(x, w):
        return bb.emit(op.matmul(x, bb.emit(op.permute_dims(w))))

    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(build(bb, linear, *params))
        bb.emit_func_output(out)
    mod = bb.get()
    with LLVM, report.collect() as seen:
        after = get_pass("LowerComposites")(PartitionGemm()(mod))
    relax.analysis.well_formed(after)
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal((n, 4)).astype("float32") for n in (3, 4, 4, 4, 4)]
    results = [
        relax.VirtualMachine(tvm.compile(m, LLVM), tvm.cpu())["main"](
            *[tvm.runtime.tensor(a) for a in arrays]
        ).numpy()
        for m in (mod, after)
    ]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)
    return seen.matched("LowerComposites")


def test_equal_layers_are_emitted_once(counting):
    def layers(bb, linear, x, *weights):
        for w in weights:
            x = linear(x, w)
        return x

    assert _lowered(layers) == {"gemm:test.counting": 4}
    assert counting.emitted == 1


def test_other_sizes_are_emitted_anew(counting):
    def rows(bb, linear, x, w0, w1, w2, w3):
        y = linear(bb.emit(op.concat([x, x], axis=0)), w0)
        return bb.emit(op.concat([y, linear(x, w1), linear(x, w2)], axis=0))

    assert _lowered(rows) == {"gemm:test.counting": 3}
    assert counting.emitted == 2


def test_one_variable_in_two_places_is_another_call(counting):
    def squares(bb, linear, x, w0, w1, w2, w3):
        return bb.emit(op.concat([linear(w0, w0), linear(w1, w2), linear(w3, w3)], axis=0))

    assert _lowered(squares) == {"gemm:test.counting": 3}
    assert counting.emitted == 2


def test_constants_are_emitted_each(counting):
    """What is emitted for a constant may depend on its value."""

    def constants(bb, linear, x, *weights):
        for i in range(3):
            x = linear(x, relax.const(np.eye(4, dtype="float32") * (i + 1)))
        return x

    assert sum(_lowered(constants).values()) == 3
    assert counting.emitted == 3
