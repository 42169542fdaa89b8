"""Softmaxes spelled as max, exp, sum and divide."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op as R
from tvm_ffi import structural_equal

import relax_llm_passes
from relax_llm_passes.targets import parse_target

TARGET = parse_target("llvm")


def _module(kind: str = "", dtype: str = "float32", axis: int = -1) -> tvm.IRModule:
    """softmax(q k^T / 4 + b0 + b1) v over T keys; `kind` is what is unusual."""
    B, H, S, D, T = 2, 4, 5, 16, tirx.Var("T", "int64")

    def var(name: str, *shape: object) -> relax.Var:
        return relax.Var(name, relax.TensorType(shape, dtype))

    params = [var("q", B, H, S, D), var("k", B, H, T, D), var("v", B, H, T, D),
              var("b0", B, 1, S, T), var("b1", 1, H, 1, T)]  # fmt: skip
    q, k, v, *biases = params
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            emit = bb.emit
            s = emit(R.matmul(q, emit(R.permute_dims(k, [0, 1, 3, 2]))))
            s = emit(R.multiply(s, relax.const(0.25, dtype)))
            for bias in biases:
                s = emit(R.add(s, bias))
            of = emit(R.negative(s)) if kind == "another maximum" else s
            if kind == "no axis kept":
                top = emit(R.expand_dims(emit(R.max(of, [axis])), [axis]))
            else:
                top = emit(R.max(of, [2 if kind == "another axis" else axis], keepdims=True))
            e = emit(R.exp(s if kind == "no maximum" else emit(R.subtract(s, top))))
            if kind == "no axis kept":
                total = emit(R.expand_dims(emit(R.sum(e, [axis])), [axis]))
            else:
                total = emit(R.sum(e, [axis], keepdims=True))
            p = emit(R.divide(e, total))
            gv = bb.emit_output(emit(R.matmul(p, v)))
        bb.emit_func_output(gv)
    return bb.get()


def _draw(keys: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(keys)
    shapes = [(2, 4, 5, 16), (2, 4, keys, 16), (2, 4, keys, 16), (2, 1, 5, keys), (1, 4, 1, keys)]
    return [rng.standard_normal(s).astype(dtype) for s in shapes]


def _reference(q, k, v, b0, b1) -> np.ndarray:
    q, k, v, b0, b1 = (a.astype("float64") for a in (q, k, v, b0, b1))
    s = q @ k.swapaxes(-1, -2) * 0.25 + b0 + b1
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


@pytest.mark.parametrize("kind", ["", "no axis kept"])
@pytest.mark.parametrize("axis", [-1, 3])
def test_it_is_raised_and_the_attention_found(kind: str, axis: int) -> None:
    mod = _module(kind, axis=axis)
    once = relax_llm_passes.get_pass("RaiseSoftmax")(mod)
    relax.analysis.well_formed(once)
    text = once.script()
    assert "nn.softmax" in text and "R.exp" not in text and "R.sum" not in text
    assert structural_equal(relax_llm_passes.get_pass("RaiseSoftmax")(once), once)
    assert [p.name for p in once["main"].params] == [p.name for p in mod["main"].params]
    pipeline = relax_llm_passes.default_pipeline(TARGET)
    lowered = pipeline(mod)
    assert pipeline.report.matched("RaiseSoftmax")["softmax"] == 1
    assert any(g.name_hint.startswith("attention") for g in lowered.get_global_vars())


@pytest.mark.parametrize("kind", ["no maximum", "another maximum", "another axis"])
def test_what_is_no_softmax_stays(kind: str) -> None:
    mod = _module(kind)
    assert structural_equal(relax_llm_passes.get_pass("RaiseSoftmax")(mod), mod)


def test_one_without_a_product_is_left_to_fuse_with_what_is_around() -> None:
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 33), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            e = bb.emit(R.exp(bb.emit(R.subtract(x, bb.emit(R.max(x, [-1], True))))))
            gv = bb.emit_output(R.divide(e, bb.emit(R.sum(e, [-1], True))))
        bb.emit_func_output(gv)
    mod = bb.get()
    assert structural_equal(relax_llm_passes.get_pass("RaiseSoftmax")(mod), mod)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_numbers(dtype: str) -> None:
    ex = tvm.compile(_module(dtype=dtype), TARGET,
                     relax_pipeline=relax_llm_passes.default_pipeline(TARGET))  # fmt: skip
    machine = relax.VirtualMachine(ex, tvm.cpu())
    # fp32: sums over 16 and over the keys; fp16: the result is rounded once.
    bound = 2e-6 if dtype == "float32" else 2.0**-11 + 2e-6
    for keys in (1, 7, 67):
        inputs = _draw(keys, dtype)
        got = machine["main"](*map(tvm.runtime.tensor, inputs)).numpy().astype("float64")
        want = _reference(*inputs)
        assert np.abs(got - want).max() <= bound * max(1.0, np.abs(want).max())
