"""The schedule rules alone: what LegalizeOps and fusion make, read back and laid out again."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, tirx
from tvm.s_tir import dlight as dl

from relax_llm_passes.cuda_on_cpu import run_module, why_not
from relax_llm_passes.kernels.norm_rules import norm_rules

from .norm_cases import (
    BOUND,
    CPU,
    CUDA,
    NUMPY,
    cuda_pipeline,
    group_norm_reference,
    legalized,
    operator_module,
    relative_error,
    run_cpu,
    softmax_reference,
)

op = relax.op


def draw(shape, mean=0.0, dtype="float32", seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) + mean).astype(NUMPY[dtype])


def scheduled(mod, target, count=1):
    lowered = legalized(mod, target)
    with target:
        new = dl.ApplyDefaultSchedule(*norm_rules(target))(lowered)
    relax.analysis.well_formed(new)
    done = [
        g for g, f in new.functions.items()
        if isinstance(f, tirx.PrimFunc) and f.attrs.get("tirx.is_scheduled", 0)
    ]  # fmt: skip
    assert len(done) == count
    assert tvm_ffi.structural_equal(new["main"].ty, mod["main"].ty)
    return new


# shape, sizes, groups, channel axis, axes: the layouts that TVM's own CUDA schedule fails on, too
LAYOUTS = [
    ((1, "n", 64), (1, 5, 64), 4, -1, []),
    ((1, 64, "h", "w"), (1, 64, 3, 9), 2, 1, [2, 3]),
    (("b", 64, "h", "w"), (2, 64, 3, 5), 4, 1, [2, 3]),
    (("b", "h", "w", 64), (2, 3, 5, 64), 4, 3, [1, 2]),
    (("b", 64, "n", "n"), (2, 64, 5, 5), 4, 1, [2, 3]),
    ((1, 128, 16), (1, 128, 16), 4, 1, []),
]


def group_norm_case(shape, sizes, groups, channel, axes):
    channels = sizes[channel]
    mod = operator_module(
        op.nn.group_norm, [shape, (channels,), (channels,)],
        num_groups=groups, channel_axis=channel, axes=axes,
    )  # fmt: skip
    arrays = [draw(sizes, 1e4), draw((channels,), seed=1), draw((channels,), seed=2)]
    return mod, arrays, group_norm_reference(*arrays, groups, channel, axes)


@pytest.mark.parametrize("shape, sizes, groups, channel, axes", LAYOUTS)
def test_group_norm_on_the_cpu(shape, sizes, groups, channel, axes):
    mod, arrays, wanted = group_norm_case(shape, sizes, groups, channel, axes)
    (got,) = run_cpu(scheduled(mod, CPU), arrays)
    assert relative_error(got, wanted) < BOUND["float32"]


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("shape, sizes, groups, channel, axes", LAYOUTS)
def test_group_norm_on_cuda(shape, sizes, groups, channel, axes):
    mod, arrays, wanted = group_norm_case(shape, sizes, groups, channel, axes)
    run = run_module(scheduled(mod, CUDA), arrays, CUDA, relax_pipeline=cuda_pipeline(), orders=1)
    assert relative_error(run.outputs[0], wanted) < BOUND["float32"]


def test_layer_norm_at_a_large_mean():
    x, w, b = draw((2, 3, 40), 1e4), draw((40,), seed=1), draw((40,), seed=2)
    mod = operator_module(op.nn.layer_norm, [(2, "n", 40), (40,), (40,)], axes=[-1])
    (got,) = run_cpu(scheduled(mod, CPU), [x, w, b])
    y = x.astype(np.float64)
    wanted = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5) * w + b
    assert relative_error(got, wanted) < BOUND["float32"]


def test_softmax_with_what_was_fused_into_it():
    mod = operator_module(
        op.nn.softmax, [(1, 8, "n", 6)], axis=1,
        then=lambda bb, r, xs: bb.emit(op.multiply(r, relax.const(2.0, "float32"))),
    )  # fmt: skip
    x = draw((1, 8, 5, 6))
    (got,) = run_cpu(scheduled(mod, CPU), [x])
    assert relative_error(got, 2 * softmax_reference(x, 1)) < BOUND["float32"]


def test_reduction_with_an_epilogue_per_row():
    mod = operator_module(
        lambda x: op.mean(op.multiply(x, x), axis=-1, keepdims=True), [(2, 3, 40)],
        then=lambda bb, r, xs: bb.emit(op.multiply(xs[0], bb.emit(op.rsqrt(r)))),
    )  # fmt: skip
    x = draw((2, 3, 40))
    (got,) = run_cpu(scheduled(mod, CPU), [x])
    wide = x.astype(np.float64)
    assert relative_error(got, wide / np.sqrt((wide**2).mean(-1, keepdims=True))) < 1e-6


def test_bfloat16_sums_in_float32():
    mod = operator_module(lambda x: op.sum(x, axis=-1), [(4, 1000)], "bfloat16")
    x = draw((4, 1000), 1.0, "bfloat16")
    (got,) = run_cpu(scheduled(mod, CPU), [x])
    assert relative_error(got, x.astype(np.float64).sum(-1)) < BOUND["bfloat16"]


@pytest.mark.parametrize("shapes", [[(16, 32), (32, 24)], [(1, 32), (32, 24)]])
def test_products_are_left_to_other_rules(shapes):
    scheduled(operator_module(op.matmul, shapes), CPU, count=0)


def test_elementwise_functions_are_left_alone():
    scheduled(operator_module(op.nn.relu, [(4, 5)]), CPU, count=0)
