"""Weights packed at load and at compile time."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_llm_passes import default_pipeline
from relax_llm_passes.kernels.cpu_pack import pack_array, pack_kernel

from .cpu_gemm_cases import NATIVE


@I.ir_module
class TwoLayers:
    @R.function
    def main(
        x: R.Tensor(("n", 24), "float32"),
        w: R.Tensor((19, 24), "float32"),
        b: R.Tensor((19,), "float32"),
        v: R.Tensor((19, 33), "float32"),
    ):
        R.func_attr({"num_input": 1})
        with R.dataflow():
            y = R.nn.relu(R.add(R.matmul(x, R.permute_dims(w)), b))
            z = R.matmul(y, v)
            R.output(z)
        return z


def _inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype("float32") for s in ((19, 24), (19,), (19, 33))]


def _compile(mod: tvm.IRModule) -> tuple[relax.VirtualMachine, tvm.transform.Pass]:
    pipeline = default_pipeline(NATIVE, passes="default,PackWeights")
    executable = tvm.compile(mod, NATIVE, relax_pipeline=pipeline)
    return relax.VirtualMachine(executable, tvm.cpu()), pipeline


def _check(vm: relax.VirtualMachine, weights: list) -> None:
    w, b, v = _inputs()
    for n in (1, 20):
        x = np.random.default_rng(n).standard_normal((n, 24)).astype("float32")
        want = np.maximum(x.astype(float) @ w.T + b, 0) @ v
        # Two fp32 products of 24 and 19 terms of about 1 and 5.
        np.testing.assert_allclose(
            vm["main"](tvm.runtime.tensor(x), *weights).numpy(), want, rtol=1e-5, atol=1e-4
        )


def test_parameters_are_packed_by_transform_params() -> None:
    vm, pipeline = _compile(TwoLayers)
    packed = vm["main_transform_params"](tuple(tvm.runtime.tensor(a) for a in _inputs()))
    assert sorted(len(p.shape) for p in packed) == [1, 3, 3]
    assert "weight 2" in pipeline.report.to_text()
    _check(vm, list(packed))


def test_constants_are_packed_now() -> None:
    w, b, v = _inputs()
    names = {"w": w, "b": b, "v": v}
    mod = relax.transform.BindParams("main", names)(TwoLayers)
    vm, _ = _compile(mod)
    _check(vm, [])


def test_pack_kernel_is_pack_array() -> None:
    for layout, shape in (("NK", (19, 7)), ("KN", (7, 19))):
        weight = np.random.default_rng(0).standard_normal(shape).astype("float16")
        want = pack_array(weight, layout, NATIVE)
        kernel = pack_kernel(19, 7, layout, "float16", NATIVE)
        run = tvm.compile(kernel, target=NATIVE)[str(kernel.attrs["global_symbol"])]
        out = tvm.runtime.tensor(np.full(want.shape, np.nan, "float16"))
        run(tvm.runtime.tensor(weight), out)
        np.testing.assert_array_equal(out.numpy(), want)
