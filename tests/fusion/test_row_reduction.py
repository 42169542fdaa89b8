"""FuseRowReductions: norms and softmaxes as they are spelled, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op

from relax_llm_passes import corpus, default_pipeline, get_pass, report
from relax_llm_passes.fusion.row_reduction import FuseRowReductions
from relax_llm_passes.lower import composites
from relax_llm_passes.outline import inline
from relax_llm_passes.patterns import row_reduction
from relax_llm_passes.targets import parse_target

NATIVE = parse_target("native")
# One rounding of the result, and sums of up to 700 terms in fp32: 2^-24 times a few.
TOLERANCE = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}
# Where the graph itself rounds the normalised value before the weight: one rounding more there.

Emit = Callable[[Any], Any]


def module(shapes: list[Any], dtypes: list[str], build: Callable[..., Any]) -> tvm.IRModule:
    """Return a module whose `main` computes build(emit, *params); names in shapes are symbols."""
    symbols: dict[str, Any] = {}

    def dim(d: Any) -> Any:
        return symbols.setdefault(d, tirx.Var(d, "int64")) if isinstance(d, str) else d

    params = [
        relax.Var(f"x{i}", relax.TensorType([dim(d) for d in shape], dtype))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(build(bb.emit, *params))
        bb.emit_func_output(out)
    return get_pass("CanonicalizeBindings")(bb.get())


def f32(value: float) -> Any:
    return relax.const(value, "float32")


def rms(g: Emit, x: Any, w: Any) -> Any:
    m = g(op.mean(g(op.power(x, f32(2.0))), -1, True))
    return g(op.multiply(g(op.multiply(x, g(op.rsqrt(g(op.add(m, f32(1e-5))))))), w))


def rms_square(g: Emit, x: Any, w: Any) -> Any:
    m = g(op.sum(g(op.multiply(x, x)), -1, False))
    m = g(op.sqrt(g(op.add(g(op.divide(m, f32(float(int(x.ty.shape.values[-1]))))), f32(1e-5)))))
    return g(op.multiply(w, g(op.divide(x, g(op.expand_dims(m, -1))))))


def rms_cast(g: Emit, x: Any, w: Any) -> Any:
    y = g(op.astype(x, "float32"))
    m = g(op.mean(g(op.square(y)), -1, True))
    y = g(op.multiply(y, g(op.rsqrt(g(op.add(m, f32(1e-5)))))))
    return g(op.multiply(g(op.astype(w, "float32")), y))


def gemma(g: Emit, x: Any, w: Any) -> Any:
    y = g(op.astype(x, "float32"))
    m = g(op.mean(g(op.power(y, f32(2.0))), -1, True))
    y = g(op.multiply(y, g(op.rsqrt(g(op.add(m, f32(1e-5)))))))
    y = g(op.multiply(y, g(op.add(f32(1.0), g(op.astype(w, "float32"))))))
    return g(op.astype(y, x.ty.dtype.dtype))


def layer(g: Emit, x: Any, w: Any) -> Any:
    c = g(op.subtract(x, g(op.mean(x, -1, True))))
    v = g(op.mean(g(op.multiply(c, c)), -1, True))
    return g(op.multiply(g(op.divide(c, g(op.sqrt(g(op.add(v, f32(1e-5))))))), w))


def softmax(g: Emit, x: Any, w: Any) -> Any:
    e = g(op.exp(g(op.subtract(x, g(op.max(x, -1, True))))))
    return g(op.multiply(g(op.divide(e, g(op.sum(e, -1, True)))), w))


def unit(g: Emit, x: Any, w: Any) -> Any:
    n = g(op.sqrt(g(op.sum(g(op.multiply(x, x)), -1, True))))
    return g(op.multiply(g(op.divide(x, g(op.maximum(n, f32(1e-12))))), w))


def exact(name: str, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    x, w = x.astype("float64"), w.astype("float64")
    if name == "layer":
        x = x - x.mean(-1, keepdims=True)
    if name == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) * w
    if name == "unit":
        return x / np.sqrt((x * x).sum(-1, keepdims=True)) * w
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    return y * (w + 1 if name == "gemma" else w)


SPELLINGS = {
    "rms": (rms, 1), "rms_square": (rms_square, 1), "rms_cast": (rms_cast, 1), "gemma": (gemma, 1),
    "layer": (layer, 2), "softmax": (softmax, 2), "unit": (unit, 1),
}  # fmt: skip


def fuse(mod: tvm.IRModule) -> tuple[tvm.IRModule, Any]:
    with report.collect() as seen:
        new = FuseRowReductions()(mod)
    relax.analysis.well_formed(new)
    assert tvm_ffi.structural_equal(FuseRowReductions()(new), new), "a second run changes nothing"
    assert tvm_ffi.structural_equal(inline(new), mod)
    return new, seen


def numpy_dtype(name: str) -> Any:
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


BATCH = (("b", "s"), (2, 3), 80)
CASES = [(name, *BATCH) for name in SPELLINGS] + [
    ("rms", (1, 1), (1, 1), 64),
    ("rms_cast", (5,), (5,), 77),
    ("layer", ("n",), (3,), 700),
    ("softmax", (4, 2), (4, 2), 33),
]


@pytest.mark.parametrize(("name", "lead", "sizes", "width"), CASES)
def test_spellings(name, lead, sizes, width):
    build, stages = SPELLINGS[name]
    dtypes = ["float16", "bfloat16"] if name in ("rms_cast", "gemma") else ["float32"]
    for dtype in dtypes:
        mod = module([(*lead, width), (width,)], [dtype, dtype], build)
        new, seen = fuse(mod)
        assert seen.matched() == {"row_reduction": 1}
        (composite,) = composites(new).values()
        assert composite.attrs == {"stages": stages, "per_row": False}
        calls = [b for b in new["main"].body.blocks[0].bindings]
        assert len(calls) == 1, "nothing is left outside"
        seq = default_pipeline(NATIVE, verify=True)
        ex = tvm.compile(mod, NATIVE, relax_pipeline=seq)
        assert seq.report.matched("LowerComposites")["row_reduction:row_reduction.fused"] == 1
        rng = np.random.default_rng(7)
        x = (rng.standard_normal((*sizes, width)) * 2 + 0.5).astype(numpy_dtype(dtype))
        w = rng.standard_normal(width).astype(numpy_dtype(dtype))
        vm = relax.VirtualMachine(ex, tvm.cpu())
        got = vm["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w)).numpy().astype("float64")
        want = exact(name, x, w)
        scale = np.abs(want).max()
        out = str(mod["main"].ret_ty.dtype)
        assert np.abs(got - want).max() <= TOLERANCE[out] * scale


def test_rows_of_a_length_known_at_run_time():
    mod = module([("n", "m"), ("m",)], ["float32"] * 2, layer)
    seq = default_pipeline(NATIVE, verify=True)
    ex = tvm.compile(mod, NATIVE, relax_pipeline=seq)
    assert seq.report.matched("FuseRowReductions") == {"row_reduction": 1}
    rng = np.random.default_rng(5)
    vm = relax.VirtualMachine(ex, tvm.cpu())
    for shape in ((3, 1), (2, 7), (5, 130)):
        x, w = (rng.standard_normal(s).astype("float32") for s in (shape, shape[1:]))
        got = vm["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w)).numpy()
        np.testing.assert_allclose(got, exact("layer", x, w), rtol=2e-6, atol=2e-6)


def test_huge_and_tiny_rows():
    ex = tvm.compile(
        module([(6, 96), (96,)], ["float32"] * 2, rms), NATIVE,
        relax_pipeline=default_pipeline(NATIVE),
    )  # fmt: skip
    rng = np.random.default_rng(3)
    scales = np.array([1e-12, 1e-3, 1.0, 1e4, 1e15, 0.0])[:, None]
    x = (rng.standard_normal((6, 96)) * scales).astype("float32")
    w = np.ones(96, "float32")
    vm = relax.VirtualMachine(ex, tvm.cpu())
    got = vm["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(w)).numpy()
    np.testing.assert_allclose(got, exact("rms", x, w), rtol=3e-6, atol=1e-30)


def left_alone(build: Callable[..., Any], shapes: list[Any], dtypes: list[str]) -> Any:
    mod = module(shapes, dtypes, build)
    with report.collect() as seen:
        new = FuseRowReductions()(mod)
    assert tvm_ffi.structural_equal(new, mod)
    return seen


def test_what_stays():
    # Alone, over another axis, over integers.
    left_alone(lambda g, x: g(op.mean(x, -1, True)), [(4, 8)], ["float32"])
    left_alone(lambda g, x: g(op.divide(x, g(op.sum(x, 0, True)))), [(4, 8)], ["float32"])
    left_alone(lambda g, x: g(op.subtract(x, g(op.max(x, -1, True)))), [(4, 8)], ["int32"])


def test_a_square_that_is_read_elsewhere_is_read():
    def build(g: Emit, x: Any, w: Any) -> Any:
        square = g(op.multiply(x, x))
        y = g(op.multiply(x, g(op.rsqrt(g(op.mean(square, -1, True))))))
        return relax.Tuple([y, square])

    new, seen = fuse(module([(4, 24), (24,)], ["float32"] * 2, build))
    assert seen.matched() == {"row_reduction": 1}
    (composite,) = composites(new).values()
    assert len(composite.func.params) == 2  # x and its square


def test_the_reduction_alone_leaves_with_what_stands_before():
    def build(g: Emit, x: Any) -> Any:
        return g(op.rsqrt(g(op.add(g(op.mean(g(op.power(x, f32(2.0))), -1, True)), f32(1e-6)))))

    mod = module([(("n"), 40)], ["float32"], build)
    new, seen = fuse(mod)
    assert seen.matched() == {"row_reduction": 1}
    (composite,) = composites(new).values()
    assert composite.attrs["per_row"]
    ex = tvm.compile(mod, NATIVE, relax_pipeline=default_pipeline(NATIVE, verify=True))
    x = np.random.default_rng(0).standard_normal((7, 40)).astype("float32")
    got = relax.VirtualMachine(ex, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    want = 1 / np.sqrt((x.astype("float64") ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_the_residual_of_a_post_norm_joins_and_the_next_norm_does_not():
    def build(g: Emit, x: Any, y: Any, w: Any) -> Any:
        stream = g(op.add(y, rms(g, x, w)))
        return relax.Tuple([stream, rms(g, stream, w)])

    new, seen = fuse(module([("n", 24), ("n", 24), (24,)], ["float32"] * 3, build))
    assert seen.matched() == {"row_reduction": 2}
    assert [c.attrs["stages"] for c in composites(new).values()] == [1, 1]


@pytest.mark.parametrize("name", ["llama_decode", "gemma2_decode", "llama_decode_fp16"])
def test_a_norm_like_the_one_before_is_compared(name, monkeypatch):
    mod = get_pass("CanonicalizeBindings")(corpus.load(name).mod)
    quick = FuseRowReductions()(mod)
    monkeypatch.setattr(row_reduction, "_again", lambda *_: None)
    slow = FuseRowReductions()(mod)
    assert len(composites(slow)) >= 4
    assert tvm_ffi.structural_equal(quick, slow)


def test_for_cuda():
    target = parse_target("cuda -arch=sm_80")
    seq = default_pipeline(target)
    mod = module([("b", "s", 80), (80,)], ["float16"] * 2, gemma)
    source = tvm.compile(mod, target, relax_pipeline=seq)
    assert source is not None
    assert seq.report.matched("LowerComposites")["row_reduction:row_reduction.fused"] == 1
