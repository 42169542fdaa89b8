"""Named devices and attributes of a module stay through every pass."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_llm_passes as rlp
from relax_llm_passes.targets import parse_target


@I.ir_module
class Placed:
    I.module_attrs({"model": "tiny"})
    I.module_global_infos({"vdevice": [I.vdevice("llvm")]})

    @R.function
    def main(
        x: R.Tensor((4, 6), "float32", "llvm"), w: R.Tensor((6, 6), "float32", "llvm")
    ) -> R.Tensor((4, 6), "float32", "llvm"):
        with R.dataflow():
            a = R.matmul(x, w)
            b = R.nn.softmax(a, axis=-1)
            _ = R.call_pure_packed(
                "vm.builtin.copy", b, ty_args=R.Tensor((4, 6), "float32", "llvm")
            )
            c = R.multiply(R.add(b, x), R.sigmoid(a))
            R.output(c)
        return c


def test_every_pass_keeps_devices_and_attributes():
    target = parse_target("llvm")
    mod = Placed
    with target:
        for step in rlp.default_pipeline(target).steps(target):
            mod = step.transform(mod)
            assert list(mod.global_infos) == ["vdevice"], step.name
            assert mod.attrs["model"] == "tiny", step.name


def test_a_module_on_a_named_device_computes_the_same():
    seq = rlp.default_pipeline("llvm")
    vm = relax.VirtualMachine(tvm.compile(Placed, seq.target, relax_pipeline=seq), tvm.cpu())
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype("float32") for s in ((4, 6), (6, 6)))
    a = x.astype("float64") @ w
    b = np.exp(a) / np.exp(a).sum(-1, keepdims=True)
    found = vm["main"](*map(tvm.runtime.tensor, (x, w))).numpy()
    # A few roundings of fp32 on values of about one.
    np.testing.assert_allclose(found, (b + x) / (1 + np.exp(-a)), rtol=1e-5, atol=1e-5)
