"""Schedules that TVM would lower wrongly are seen, and replaced by others."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.s_tir import dlight as dl

from relax_llm_passes import get_pass, report
from relax_llm_passes.cross_thread import reads_dtype, why_unsafe
from relax_llm_passes.targets import parse_target

TARGET = parse_target("cuda -arch=sm_90")


def product(columns: int, dtype: str) -> tvm.IRModule:
    """One row times the transpose of (columns, 256), as TIR without a schedule."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 256), dtype))
    w = relax.Var("w", relax.TensorType((columns, 256), dtype))
    with bb.function("main", [x, w]):
        with bb.dataflow():
            y = bb.emit(relax.op.matmul(x, bb.emit(relax.op.permute_dims(w))))
            y = bb.emit_output(y)
        bb.emit_func_output(y)
    with TARGET:
        mod = relax.transform.FuseTransposeMatmul()(bb.get())
        return relax.transform.LegalizeOps()(mod)


def kernel(mod: tvm.IRModule, name: str = "NT_matmul") -> tirx.PrimFunc:
    return mod[name]


@pytest.mark.parametrize(
    "columns, dtype, reason",
    [
        (96, "float32", None),
        (96, "float16", None),
        (90, "float32", "unbounded"),
        (96, "bfloat16", "does not synchronise"),
    ],
)
def test_dlight_gemv(columns, dtype, reason):
    mod = product(columns, dtype)
    with TARGET:
        # It changes the module that it is given.
        scheduled = dl.ApplyDefaultSchedule(dl.gpu.GEMV())(product(columns, dtype))
    assert reads_dtype(kernel(mod), dtype) and not reads_dtype(kernel(mod), "int8")
    found = why_unsafe(kernel(scheduled))
    assert found is None if reason is None else reason in found

    with report.collect() as seen, TARGET:
        ours = get_pass("ScheduleKernels")(mod)
    assert why_unsafe(kernel(ours)) is None
    refused = [r for r in seen.refused("ScheduleKernels") if r.function == "NT_matmul"]
    assert bool(refused) == (reason is not None)


def test_a_bound_on_what_is_summed_is_fine():
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((5, 300), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            y = bb.emit_output(relax.op.nn.softmax(x))
        bb.emit_func_output(y)
    with TARGET:
        mod = relax.transform.LegalizeOps()(bb.get())
        mod = dl.ApplyDefaultSchedule(dl.gpu.GeneralReduction())(mod)
    assert why_unsafe(kernel(mod, "softmax")) is None
