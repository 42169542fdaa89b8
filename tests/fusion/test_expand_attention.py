"""R.nn.attention written out: against float64, where TVM's own lowering is wrong too."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (bfloat16 for numpy)
import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import TensorType
from tvm_ffi import structural_equal

import relax_llm_passes
from relax_llm_passes import report
from relax_llm_passes.sampling import numpy_dtype

TARGET = relax_llm_passes.parse_target("llvm")

# fp32: a few hundred roundings of 2^-24. Half types: inputs and weights rounded once each, and
# the output once; magnitudes are near 1, so a few roundings of 2^-11 and 2^-8.
BOUND = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def module(b, s, t, h, kv, d, dtype, bias, **attrs):
    """A function with one R.nn.attention; extents may be names of symbolic sizes."""
    sizes = {n: tvm.tirx.Var(n, "int64") for n in (b, s, t) if isinstance(n, str)}
    b, s, t = (sizes.get(n, n) if isinstance(n, str) else n for n in (b, s, t))
    q = relax.Var("q", TensorType([b, s, h, d], dtype))
    k = relax.Var("k", TensorType([b, t, kv, d], dtype))
    v = relax.Var("v", TensorType([b, t, kv, d], dtype))
    params = [q, k, v]
    if bias:
        params.append(relax.Var("bias", TensorType([1, h, 1, t], dtype)))
    bb = relax.BlockBuilder()
    with bb.function("main", params):
        with bb.dataflow():
            out = bb.emit_output(relax.op.nn.attention(*params, **attrs))
        bb.emit_func_output(out)
    return bb.get()


def reference(q, k, v, bias=None, causal=None, window=None, scale=None):
    """Attention in float64, layout (B, S, H, D)."""
    q, k, v = (a.astype("float64").transpose(0, 2, 1, 3) for a in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = q @ k.transpose(0, 1, 3, 2) * (1 / np.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.astype("float64")
    if causal:
        i = np.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2]) * (causal == "BottomRight")
        j = np.arange(k.shape[2])[None]
        seen = j <= i
        if window:
            seen &= j > i - window
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v).transpose(0, 2, 1, 3)


def run(mod, arguments):
    executable = tvm.compile(mod, TARGET, relax_pipeline="default")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    return machine["main"](*[tvm.runtime.tensor(a) for a in arguments]).numpy().astype("float64")


def draw(shapes, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(numpy_dtype(dtype)) for s in shapes]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "kv", "causal", "window"),
    [
        (4, 4, None, None),
        (6, 2, "BottomRight", None),
        (6, 1, "TopLeft", None),
        (3, 3, "BottomRight", 3),
    ],
)
def test_numbers(heads, kv, causal, window, dtype):
    mod = module("b", "s", "t", heads, kv, 10, dtype, False, causal_mask=causal, window_size=window)
    expanded = relax_llm_passes.get_pass("ExpandAttention")(mod)
    relax.analysis.well_formed(expanded)
    assert structural_equal(expanded["main"].ret_ty, mod["main"].ret_ty, map_free_vars=True)
    for b, s, t in ((2, 5, 11), (1, 1, 7), (1, 7, 7)):
        q, k, v = draw([(b, s, heads, 10), (b, t, kv, 10), (b, t, kv, 10)], dtype)
        expected = reference(q, k, v, causal=causal, window=window)
        error = np.abs(run(expanded, [q, k, v]) - expected).max() / np.abs(expected).max()
        assert error < BOUND[dtype], (b, s, t)


def test_alibi_bias_with_causal_mask_has_no_nan():
    """MPT's slope*(j-(T-1)) makes the early rows' allowed scores very negative."""
    t, heads = 512, 4
    mod = module(1, t, t, heads, heads, 8, "float32", True, causal_mask="BottomRight")
    slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
    bias = (slopes[:, None] * (np.arange(t) - (t - 1)))[None, :, None].astype("float32")
    q, k, v = draw([(1, t, heads, 8)] * 3, "float32")
    found = run(relax_llm_passes.get_pass("ExpandAttention")(mod), [q, k, v, bias])
    expected = reference(q, k, v, bias, causal="BottomRight")
    # The bias reaches -256 before the maximum is subtracted: 256 * 2^-24 is lost there.
    assert np.abs(found - expected).max() < 2e-5


def test_scale_is_kept_and_second_run_changes_nothing():
    mod = module(1, 3, 5, 2, 2, 4, "float32", False, scale=0.3)
    once = relax_llm_passes.get_pass("ExpandAttention")(mod)
    assert structural_equal(relax_llm_passes.get_pass("ExpandAttention")(once), once)
    q, k, v = draw([(1, 3, 2, 4), (1, 5, 2, 4), (1, 5, 2, 4)], "float32")
    assert np.abs(run(once, [q, k, v]) - reference(q, k, v, scale=0.3)).max() < 2e-6


def test_window_without_causal_mask_is_refused():
    mod = module(1, 3, 5, 2, 2, 4, "float32", False, window_size=2)
    with report.collect() as collected:
        same = relax_llm_passes.get_pass("ExpandAttention")(mod)
    assert structural_equal(same, mod)
    assert "window without a causal mask" in collected.refused()[0].reason
