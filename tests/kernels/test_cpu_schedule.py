"""What is no kernel of ours still runs right, and its loops along memory."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_llm_passes import default_pipeline
from relax_llm_passes.kernels.cpu_schedule import CpuLoops

from .cpu_gemm_cases import NATIVE


@I.ir_module
class Leftovers:
    @R.function
    def main(
        q: R.Tensor((2, 3, "n", 17), "float32"),
        k: R.Tensor((2, 3, "m", 17), "float32"),
        x: R.Tensor(("n", 40), "float32"),
        w: R.Tensor((24, 40), "float64"),
    ):
        with R.dataflow():
            scores = R.matmul(q, R.permute_dims(k, [0, 1, 3, 2]))
            gated = R.multiply(R.nn.silu(x), R.add(x, R.const(2.0, "float32")))
            turned = R.permute_dims(R.concat([x, gated], axis=1))
            doubles = R.matmul(R.astype(x, "float64"), R.permute_dims(w))
            R.output(scores, turned, doubles)
        return scores, turned, doubles


def test_values() -> None:
    pipeline = default_pipeline(NATIVE)
    vm = relax.VirtualMachine(tvm.compile(Leftovers, NATIVE, relax_pipeline=pipeline), tvm.cpu())
    rng = np.random.default_rng(0)
    w = rng.standard_normal((24, 40))
    for n, m in ((1, 5), (19, 1), (33, 40)):
        q, k, x = (
            rng.standard_normal(s).astype("float32")
            for s in ((2, 3, n, 17), (2, 3, m, 17), (n, 40))
        )
        scores, turned, doubles = vm["main"](*map(tvm.runtime.tensor, (q, k, x, w)))
        wide = x.astype(float)
        gated = wide / (1 + np.exp(-wide)) * (wide + 2)
        # fp32: 17 products of about 1; values of about 10.
        np.testing.assert_allclose(
            scores.numpy(), q.astype(float) @ k.astype(float).swapaxes(2, 3), atol=1e-5
        )
        np.testing.assert_allclose(turned.numpy(), np.hstack([wide, gated]).T, atol=1e-5)
        np.testing.assert_allclose(doubles.numpy(), wide @ w.T, atol=1e-12)


def test_a_product_runs_along_rows_in_parallel() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((64, 64), "float64"))
    w = relax.Var("w", relax.TensorType((64, 64), "float64"))
    with builder.function("main", [x, w]):
        builder.emit_func_output(builder.emit(relax.op.matmul(x, w)))
    mod = relax.transform.LegalizeOps()(builder.get())
    func = next(f for f in mod.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    with NATIVE:
        schedule = CpuLoops().apply(func, NATIVE, False)
    assert schedule is not None
    text = schedule.mod["main"].script()
    assert "T.parallel(" in text
    # The reduction is outside the loop over the columns.
    assert text.index("k, i1 in T.grid") > 0
