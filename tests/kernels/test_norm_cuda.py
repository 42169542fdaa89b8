"""Norm kernels as CUDA code, executed on the CPU: results, and what the counters promise."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.cuda_on_cpu import nvcc_check, nvcc_missing, run_module, why_not
from relax_llm_passes.fusion.legalize_norms import LegalizeNorms
from relax_llm_passes.kernels.norm_cuda import LIMITS

from .norm_cases import (
    BOUND,
    CUDA,
    NUMPY,
    cuda_pipeline,
    group_norm_reference,
    operator_module,
    relative_error,
    softmax_reference,
)

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(why_not()), reason=why_not())]
op = relax.op


def lower(mod: tvm.IRModule) -> tvm.IRModule:
    with CUDA:
        new = LegalizeNorms()(mod)
    relax.analysis.well_formed(new)
    return new


def run(mod: tvm.IRModule, arrays: list[np.ndarray], orders: int = 1):
    result = run_module(lower(mod), arrays, CUDA, relax_pipeline=cuda_pipeline(), orders=orders)
    return result.outputs[0], result.stats


def draw(shape, dtype="float32", seed=0, mean=0.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) + mean).astype(NUMPY[dtype])


def group_norm_case(shape, sizes, groups, channel, axes, dtype="float32", mean=1e4):
    channels = sizes[channel]
    mod = operator_module(
        op.nn.group_norm, [shape, (channels,), (channels,)], dtype,
        num_groups=groups, channel_axis=channel, axes=axes,
    )  # fmt: skip
    x = draw(sizes, dtype, mean=mean)
    w, b = draw((channels,), dtype, 1), draw((channels,), dtype, 2)
    return mod, [x, w, b], group_norm_reference(x, w, b, groups, channel, axes)


@pytest.mark.parametrize(
    "shape, sizes, groups, channel, axes, dtype, mean",
    [
        ((1, "n", 192), (1, 5, 192), 3, -1, [], "float32", 1e4),
        (("b", 64, "h", 5), (2, 64, 7, 5), 4, 1, [2, 3], "float32", 1e4),
        ((1, 64, "h", "w"), (1, 64, 3, 9), 2, 1, [2, 3], "float32", 1e4),
        (("b", 64, "h", "w"), (2, 64, 3, 5), 4, 1, [2, 3], "float32", 1e4),
        (("b", 64, "n", "n"), (2, 64, 5, 5), 4, 1, [2, 3], "float16", 10),
        (("b", "h", "w", 64), (2, 3, 5, 64), 8, 3, [1, 2], "float32", 1e4),
        ((1, 128, 16), (1, 128, 16), 4, 1, [], "float16", 0),
        ((3, 70), (3, 70), 2, 1, [], "float32", 1e4),
    ],
)
def test_group_norm(shape, sizes, groups, channel, axes, dtype, mean):
    mod, arrays, wanted = group_norm_case(shape, sizes, groups, channel, axes, dtype, mean)
    got, _ = run(mod, arrays)
    assert relative_error(got, wanted) < BOUND[dtype]


def test_rwkv5_norm_uses_whole_warps_without_barriers():
    mod, arrays, wanted = group_norm_case((1, 16, 2048), (1, 16, 2048), 32, -1, [])
    got, (stats,) = run(mod, arrays, orders=1)
    assert relative_error(got, wanted) < BOUND["float32"]
    x, w, b = arrays
    assert stats.blocks >= 128
    assert stats.barriers == 0
    assert stats.lane_use > 0.9 and stats.balance > 0.9
    # Each token reads its elements once, and the weights beside them.
    assert stats.global_read == x.nbytes + 16 * (w.nbytes + b.nbytes)
    assert stats.global_written == x.nbytes


def test_large_groups_are_split_over_blocks():
    mod, arrays, wanted = group_norm_case((1, 128, 32, 32), (1, 128, 32, 32), 4, 1, [2, 3])
    got, stats = run(mod, arrays, orders=1)
    assert relative_error(got, wanted) < BOUND["float32"]
    assert len(stats) == 2
    assert all(s.blocks >= 64 for s in stats)


def test_vae_norm_fills_the_machine():
    from relax_llm_passes.kernels.norm import program_of
    from relax_llm_passes.kernels.norm_cuda_plan import plan_cuda

    mod, _, _ = group_norm_case((1, 512, 64, 64), (1, 512, 1, 1), 32, 1, [2, 3])
    call = mod["main"].body.blocks[0].bindings[0].value
    prog, _ = program_of(call, CUDA)
    plan = plan_cuda(prog, CUDA)
    assert prog.rows * plan.split >= 128


def test_vae_norm_at_full_size():
    """One image of 512 x 64 x 64, two million elements: TVM's schedule has one block for it."""
    mod, arrays, wanted = group_norm_case((1, 512, 64, 64), (1, 512, 64, 64), 32, 1, [2, 3])
    got, (moments, write) = run(mod, arrays)
    # 65536 elements of mean 1e4 are averaged in each group.
    assert relative_error(got, wanted) < BOUND["float32"]
    assert moments.blocks >= 128 and write.blocks >= 128
    # The warps of a block meet to add up; TVM's schedule has 65 barriers.
    assert moments.barriers_per_block <= 3 and write.barriers == 0
    assert write.lane_use > 0.9
    x = arrays[0]
    assert moments.global_read == x.nbytes
    assert write.global_written == x.nbytes
    # x again, and a little for every block: moments of its group, weights and biases.
    assert write.global_read < 1.5 * x.nbytes


def test_bfloat16_layer_norm():
    """TVM cannot legalise it."""
    x, w, b = (
        draw((3, 200), "bfloat16", mean=5.0),
        draw((200,), "bfloat16", 1),
        draw((200,), "bfloat16", 2),
    )
    got, _ = run(
        operator_module(op.nn.layer_norm, [("n", 200), (200,), (200,)], "bfloat16", axes=[-1]),
        [x, w, b],
    )
    y = x.astype(np.float64)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
    assert relative_error(got, y * w.astype(np.float64) + b.astype(np.float64)) < BOUND["bfloat16"]


def test_rms_norm_over_every_axis():
    """TVM's schedule ends the process on it."""
    x, w = draw((4, 30)), draw((4, 30), seed=1)
    got, _ = run(operator_module(op.nn.rms_norm, [(4, 30), (4, 30)], axes=[0, 1]), [x, w])
    wide = x.astype(np.float64)
    assert relative_error(got, wide / np.sqrt((wide**2).mean() + 1e-5) * w) < BOUND["float32"]


@pytest.mark.parametrize(
    "shape, sizes, axis, dtype",
    [
        ((3, "n"), (3, 300), -1, "float32"),
        ((2, 4096), (2, 4096), 1, "float32"),
        ((1, 8, 6, 40), (1, 8, 6, 40), 1, "float16"),
        (("b", 8, "n"), (2, 8, 33), 1, "bfloat16"),
        ((2, 33), (2, 33), 1, "bfloat16"),
        # More elements than the registers of a block hold: the rest is read again.
        ((1, 50257), (1, 50257), 1, "float32"),
    ],
)
def test_softmax(shape, sizes, axis, dtype):
    x = (draw(sizes) * 3).astype(NUMPY[dtype])
    got, _ = run(operator_module(op.nn.softmax, [shape], dtype, axis=axis), [x])
    assert relative_error(got, softmax_reference(x, axis)) < BOUND[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rms_norm(dtype):
    x, w = draw((2, 3, 2048), dtype), draw((2048,), dtype, 1)
    got, (stats,) = run(
        operator_module(op.nn.rms_norm, [(2, "n", 2048), (2048,)], dtype, axes=[-1]), [x, w]
    )
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * w.astype(np.float64)
    assert relative_error(got, wanted) < BOUND[dtype]
    # Several warps share a row and meet once, through shared memory.
    assert stats.barriers_per_block <= 1
    assert stats.global_read == x.nbytes + 6 * w.nbytes


@pytest.mark.skipif(bool(nvcc_missing()), reason=nvcc_missing())
def test_nothing_spills():
    mod, _, _ = group_norm_case((1, "n", 2048), (1, 1, 2048), 32, -1, [])
    with CUDA:
        new = LegalizeNorms()(mod)
    for kernel in nvcc_check(new, archs=("sm_80", "sm_90", "sm_100")):
        assert not kernel.within(LIMITS)
