"""Lookups in quantised tables against float64, and what is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx

import relax_llm_passes
from relax_llm_passes.fusion.dequantize_take import FuseDequantizeTake

from ..graph_checks import assert_same, assert_signatures_kept, composites

ROWS, GROUP = 11, 32


def _module(
    bits: int, columns: int, dtype: str, *, mode: str = "fast", axis: int = 0, twice: bool = False,
    symbolic: bool = True, along: int = 1,
) -> tvm.IRModule:  # fmt: skip
    per_word = 32 // bits
    rows = tirx.Var("v", "int64") if symbolic else ROWS
    count = tirx.Var("n", "int64")

    def shape(divisor: int) -> list[Any]:
        if along == 1:
            return [rows, -(-columns // divisor)]
        return [-(-ROWS // divisor), columns]

    packed = relax.Var("packed", relax.TensorType(shape(per_word), "uint32"))
    scale = relax.Var("scale", relax.TensorType(shape(GROUP), dtype))
    ids = relax.Var("ids", relax.TensorType((count,), "int32"))

    def dequantize(words: te.Tensor, scales: te.Tensor) -> te.Tensor:
        def value(i: Any, j: Any) -> Any:
            k = j if along == 1 else i
            at = (lambda d: (i, j // d)) if along == 1 else (lambda d: (i // d, j))
            shift = tirx.Cast("uint32", (k % per_word) * bits)
            field = (words(*at(per_word)) >> shift) & tirx.const((1 << bits) - 1, "uint32")
            middle = tirx.const((1 << (bits - 1)) - 1, dtype)
            return (tirx.Cast(dtype, field) - middle) * scales(*at(GROUP))

        return te.compute((rows if along == 1 else ROWS, columns), value, name="dequantize")

    bb = relax.BlockBuilder()
    with bb.function("main", [packed, scale, ids]):
        with bb.dataflow():
            table = bb.emit_te(dequantize, packed, scale, primfunc_name_hint="unpack")
            out = bb.emit(relax.op.take(table, ids, axis=axis, mode=mode))
            if twice:
                out = relax.Tuple([out, bb.emit(relax.op.sum(table))])
            out = bb.emit_output(out)
        bb.emit_func_output(out)
    return bb.get()


def _draw(bits: int, columns: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(bits + columns)
    per_word = 32 // bits
    packed = rng.integers(0, 2**32, (ROWS, -(-columns // per_word)), dtype="uint32")
    scale = rng.uniform(0.5, 2, (ROWS, -(-columns // GROUP))).astype(dtype)
    k = np.arange(columns)
    fields = (packed[:, k // per_word] >> (bits * (k % per_word)).astype("uint32")) % (1 << bits)
    table = (fields.astype(float) - (1 << (bits - 1)) + 1) * scale.astype(float)[:, k // GROUP]
    return packed, scale, table


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns, dtype", [(64, "float16"), (70, "float32")])
@pytest.mark.parametrize("symbolic", [True, False])
def test_rows_are_unpacked_alone(bits: int, columns: int, dtype: str, symbolic: bool) -> None:
    mod = _module(bits, columns, dtype, symbolic=symbolic)
    fused = FuseDequantizeTake()(mod)
    relax.analysis.well_formed(fused)
    assert_signatures_kept(mod, fused)
    assert len(composites(fused)) == 1
    assert_same(FuseDequantizeTake()(fused), fused)

    seq = relax_llm_passes.default_pipeline("native", verify=True)
    executable = tvm.compile(mod, seq.target, relax_pipeline=seq)
    record = next(p for p in seq.report.passes if p.name == "FuseDequantizeTake")
    assert record.matched["dequantize_take"] == 1
    packed, scale, table = _draw(bits, columns, dtype)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    for ids in ([], [3], [10, 0, 3, 3]):
        chosen = np.array(ids, "int32")
        got = machine["main"](*map(tvm.runtime.tensor, (packed, scale, chosen))).numpy()
        # One rounding of the product to the type; integers and scales are exact.
        rounding = {"float16": 2.0**-11, "float32": 2.0**-24}[dtype]
        np.testing.assert_allclose(got, table[chosen], rtol=rounding, atol=0)


def test_clip_takes_the_nearest_row() -> None:
    mod = _module(4, 64, "float32", mode="clip")
    seq = relax_llm_passes.default_pipeline("native")
    machine = relax.VirtualMachine(tvm.compile(mod, seq.target, relax_pipeline=seq), tvm.cpu())
    packed, scale, table = _draw(4, 64, "float32")
    ids = np.array([-5, 99], "int32")
    got = machine["main"](*map(tvm.runtime.tensor, (packed, scale, ids))).numpy()
    np.testing.assert_allclose(got, table[[0, ROWS - 1]], rtol=2.0**-24)


def test_compiles_for_cuda() -> None:
    seq = relax_llm_passes.default_pipeline("cuda -arch=sm_80")
    with seq.target:
        lowered = seq(_module(4, 64, "float16"))
    assert not composites(lowered)
    names = [g.name_hint for g in lowered.get_global_vars()]
    assert any("dequantize_take" in n for n in names) and not any(n == "unpack" for n in names)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"twice": True}, "read by others too"),
        ({"axis": 1}, "expected rows"),
        ({"mode": "nan"}, "expected 'fast' or 'clip'"),
        ({"along": 0, "symbolic": False}, "packed along"),
    ],
)
def test_refused_with_a_reason(options: dict[str, Any], reason: str) -> None:
    mod = _module(4, 64, "float16", **options)
    seq = relax_llm_passes.default_pipeline("native", passes="FuseDequantizeTake")
    assert not composites(seq(mod))
    record = seq.report.passes[0]
    assert any(reason in r.reason for r in record.refusals), record.refusals
