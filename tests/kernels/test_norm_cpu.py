"""LegalizeNorms on the CPU: every layout, dtype and kind of numbers, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from relax_llm_passes import report
from relax_llm_passes.fusion.legalize_norms import LegalizeNorms

from .norm_cases import (
    BOUND,
    CPU,
    NUMPY,
    group_norm_reference,
    kernels,
    operator_module,
    relative_error,
    run_cpu,
    softmax_reference,
)

op = relax.op


def lower(mod: tvm.IRModule, **options: bool) -> tvm.IRModule:
    with CPU:
        new = LegalizeNorms(**options)(mod)
        relax.analysis.well_formed(new)
        assert tvm_ffi.structural_equal(LegalizeNorms(**options)(new), new)
    assert tvm_ffi.structural_equal(new["main"].ty, mod["main"].ty)
    return new


def draw(shape: tuple[int, ...], dtype: str, seed: int = 0, mean: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + mean).astype(NUMPY[dtype])


# shape with symbolic sizes, sizes to run, groups, channel axis, axes
GROUP_NORMS = [
    ((1, 16, 2048), (1, 16, 2048), 32, -1, []),
    ((1, "n", 192), (1, 5, 192), 3, -1, []),
    ((1, 64, 9, 7), (1, 64, 9, 7), 32, 1, [2, 3]),
    (("b", 64, "h", 5), (2, 64, 7, 5), 32, 1, [2, 3]),
    ((1, 64, "h", "w"), (1, 64, 7, 9), 32, 1, [2, 3]),
    (("b", 64, "h", "w"), (2, 64, 7, 9), 16, 1, [2, 3]),
    (("b", 64, "n", "n"), (2, 64, 5, 5), 32, 1, [2, 3]),
    (("b", "h", "w", 64), (2, 3, 5, 64), 32, 3, [1, 2]),
    ((1, 128, 16), (1, 128, 16), 4, 1, []),
    ((3, 70), (3, 70), 2, 1, []),
]


@pytest.mark.parametrize("shape, sizes, groups, channel, axes", GROUP_NORMS)
def test_group_norm_layouts(shape, sizes, groups, channel, axes):
    channels = sizes[channel]
    mod = operator_module(
        op.nn.group_norm, [shape, (channels,), (channels,)],
        num_groups=groups, channel_axis=channel, axes=axes,
    )  # fmt: skip
    new = lower(mod)
    assert len(kernels(new)) == 1
    # A mean of 1e4 with a spread of 1, where E[x*x] - E[x]**2 has no correct digit.
    x, w, b = (
        draw(sizes, "float32", mean=1e4),
        draw((channels,), "float32", 1),
        draw((channels,), "float32", 2),
    )
    (got,) = run_cpu(new, [x, w, b])
    wanted = group_norm_reference(x, w, b, groups, channel, axes)
    assert relative_error(got, wanted) < BOUND["float32"]


@pytest.mark.parametrize("kind", ["constant", "tiny", "large", "spread"])
def test_group_norm_numbers(kind):
    shape, groups = (2, 6, 96), 3
    mod = operator_module(
        op.nn.group_norm, [shape, (96,), (96,)], num_groups=groups, channel_axis=-1, axes=[]
    )
    rng = np.random.default_rng(3)
    x = {
        "constant": np.full(shape, 1234.567),
        "tiny": rng.standard_normal(shape) * 1e-18,
        "large": rng.standard_normal(shape) * 1e17,
        "spread": 10.0 ** rng.uniform(-6, 6, shape),
    }[kind].astype(np.float32)
    w, b = draw((96,), "float32", 1), draw((96,), "float32", 2)
    (got,) = run_cpu(lower(mod), [x, w, b])
    assert relative_error(got, group_norm_reference(x, w, b, groups, -1, [])) < 2e-6


@pytest.mark.parametrize(
    "dtype, shape, sizes, axes",
    [
        ("float16", (2, "n", 77), (2, 3, 77), [-1]),
        ("bfloat16", (2, "n", 77), (2, 3, 77), [-1]),
        ("float32", (3, 4, 8), (3, 4, 8), [1, 2]),
        ("float64", (2, "n", 40), (2, 3, 40), [-1]),
    ],
)
def test_layer_and_rms_norm(dtype, shape, sizes, axes):
    affine = tuple(sizes[a] for a in axes)
    x, w, b = draw(sizes, dtype, mean=3.0), draw(affine, dtype, 1), draw(affine, dtype, 2)
    over = tuple(a % 3 for a in axes)
    wide = x.astype(np.float64)
    if dtype != "bfloat16":
        # TVM cannot infer the type of a bfloat16 layer_norm's result with a bfloat16 weight.
        mod = operator_module(op.nn.layer_norm, [shape, affine, affine], dtype, axes=axes)
        (got,) = run_cpu(lower(mod), [x, w, b])
        wanted = (wide - wide.mean(over, keepdims=True)) / np.sqrt(
            wide.var(over, keepdims=True) + 1e-5
        ) * w.astype(np.float64) + b.astype(np.float64)
        assert relative_error(got, wanted) < BOUND[dtype]
    mod = operator_module(op.nn.rms_norm, [shape, affine], dtype, axes=axes)
    (got,) = run_cpu(lower(mod), [x, w])
    wanted = wide / np.sqrt((wide**2).mean(over, keepdims=True) + 1e-5) * w.astype(np.float64)
    assert relative_error(got, wanted) < BOUND[dtype]


@pytest.mark.parametrize(
    "dtype, shape, sizes, axis",
    [
        ("float32", (3, "n"), (3, 100), -1),
        ("float16", (2, 1031), (2, 1031), 1),
        ("float32", (1, 8, 6, 40), (1, 8, 6, 40), 1),
        ("bfloat16", ("b", 8, "n"), (2, 8, 33), 1),
        ("float32", (5, 26), (5, 26), 0),
    ],
)
def test_softmax(dtype, shape, sizes, axis):
    x = (draw(sizes, "float32") * 3).astype(NUMPY[dtype])
    mod = operator_module(op.nn.softmax, [shape], dtype, axis=axis)
    (got,) = run_cpu(lower(mod), [x])
    assert relative_error(got, softmax_reference(x, axis)) < BOUND[dtype]
    mod = operator_module(op.nn.log_softmax, [shape], dtype, axis=axis)
    (got,) = run_cpu(lower(mod), [x])
    assert relative_error(got, np.log(softmax_reference(x, axis))) < BOUND[dtype]


def test_softmax_keeps_masked_entries_zero_and_nan():
    x = draw((4, 64), "float32")
    x[0, 5:] = -np.inf
    x[1, 3] = np.nan
    x[2] = -200 * np.abs(x[2])
    x[2, 7] = 0
    mod = operator_module(op.nn.softmax, [(4, 64)], axis=-1)
    (got,) = run_cpu(lower(mod), [x])
    assert (got[0, 5:] == 0).all()
    assert np.isnan(got[1]).all()
    keep = [0, 2, 3]
    assert relative_error(got[keep], softmax_reference(x[keep], -1)) < 1e-6


@pytest.mark.parametrize(
    "kind, axis, keepdims",
    [
        ("sum", [0], False),
        ("sum", [0, 2], True),
        ("mean", [1], False),
        ("mean", None, True),
        ("max", [2], True),
        ("min", [1, 2], False),
        ("prod", [1], True),
        ("variance", [2], False),
        ("std", [0], False),
    ],
)
def test_reductions(kind, axis, keepdims):
    mod = operator_module(
        lambda x: getattr(op, kind)(x, axis=axis, keepdims=keepdims), [("n", 5, 33)]
    )
    x = (draw((3, 5, 33), "float32") * 0.3 + 1).astype(np.float32)
    over = None if axis is None else tuple(axis)
    numpy_name = {"variance": "var"}.get(kind, kind)
    wanted = getattr(np, numpy_name)(x.astype(np.float64), axis=over, keepdims=keepdims)
    (got,) = run_cpu(lower(mod, reductions=True), [x])
    assert got.shape == wanted.shape
    # A product of 500 factors has 500 roundings.
    assert relative_error(got, wanted) < (3e-5 if kind == "prod" else 1e-6)


def test_refusals_say_why():
    mod = operator_module(op.nn.layer_norm, [(2, 8), (8,), (8,)], axes=[-1], center=False)
    with CPU, report.collect() as collected:
        new = LegalizeNorms()(mod)
    assert tvm_ffi.structural_equal(new, mod)
    assert "center=False" in collected.refused()[0].reason


def test_without_target_nothing_changes():
    mod = operator_module(op.nn.softmax, [(2, 8)], axis=-1)
    assert tvm_ffi.structural_equal(LegalizeNorms()(mod), mod)
