"""Recognising wkv steps as importers spell them, and running what comes of it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import relax

from relax_llm_passes import report
from relax_llm_passes.cuda_on_cpu import run_module, why_not
from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.fusion.wkv import FuseWkv
from relax_llm_passes.lower import LowerComposites, composites
from relax_llm_passes.patterns.wkv import find_wkv

from ..kernels.norm_cases import CPU, CUDA, cuda_pipeline, kernels, relative_error, run_cpu
from .test_group_norm import module

op = relax.op
H, N = 3, 32


def bonus_step(bb, r, k, v, w, u, state, swap=False):
    """RWKV-5, 6: heads lead, no batch axis."""

    def pair(f, a, b):
        return bb.emit(f(b, a) if swap else f(a, b))

    kv = bb.emit(op.matmul(k, v))
    total = pair(op.add, pair(op.multiply, u, kv), state)
    out = bb.emit(op.matmul(r, total))
    return out, pair(op.add, kv, pair(op.multiply, w, state))


def delta_step(bb, r, k, v, w, a, b, state):
    """RWKV-7: the state is value-major."""
    vk = bb.emit(op.matmul(v, k))
    ab = bb.emit(op.matmul(a, b))
    kept = bb.emit(op.multiply(state, w))
    turned = bb.emit(op.matmul(state, ab))
    new = bb.emit(op.add(bb.emit(op.add(kept, turned)), vk))
    return bb.emit(op.matmul(new, r)), new


def bonus_reference(r, k, v, w, u, state):
    kv = k @ v
    return r @ (u * kv + state), kv + w * state


def delta_reference(r, k, v, w, a, b, state):
    new = state * w + state @ (a @ b) + v @ k
    return new @ r, new


ROW, COLUMN, FULL = (1, N), (N, 1), (N, N)
BONUS = {"r": ROW, "k": COLUMN, "v": ROW, "w": COLUMN, "u": COLUMN, "state": FULL}
DELTA = {"r": COLUMN, "k": ROW, "v": COLUMN, "w": ROW, "a": COLUMN, "b": ROW, "state": FULL}


def params(spec, lead=(H,), **other):
    return {n: ((*other.get(n, lead), *s), "float32") for n, s in spec.items()}


def draw(given, sizes):
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal([sizes.get(d, d) for d in shape]) * 0.5).astype(dtype)
        for shape, dtype in given.values()
    ]


def fuse(mod, target):
    with target, report.collect() as collected:
        fused = FuseWkv()(mod)
        relax.analysis.well_formed(fused)
        assert tvm_ffi.structural_equal(FuseWkv()(fused), fused)
        lowered = LowerComposites()(fused)
    relax.analysis.well_formed(lowered)
    assert tvm_ffi.structural_equal(lowered["main"].ty, mod["main"].ty)
    return fused, lowered, collected


def two(step):
    def body(bb, **x):
        return list(step(bb, **x))

    return body


STEPS = {
    "v5": (params(BONUS), two(bonus_step), bonus_reference),
    "v5 operands swapped": (
        params(BONUS), two(lambda bb, **x: bonus_step(bb, **x, swap=True)), bonus_reference,
    ),
    "v6 with a batch": (
        params(BONUS, (2, H), u=(H,)), two(bonus_step), bonus_reference,
    ),
    "v5 with a symbolic batch": (
        params(BONUS, ("n", H), u=(1, H), w=(1, H)), two(bonus_step), bonus_reference,
    ),
    "v7": (params(DELTA), two(delta_step), delta_reference),
    "v7 with a batch": (params(DELTA, ("n", H)), two(delta_step), delta_reference),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_one_kernel_on_the_cpu(name):
    given, body, reference = STEPS[name]
    mod = module(given, body)
    fused, lowered, _ = fuse(mod, CPU)
    assert len(composites(fused)) == 1
    assert len(kernels(lowered)) == 1
    arrays = draw(given, {"n": 2})
    wanted = reference(*[a.astype(np.float64) for a in arrays])
    for got, want in zip(run_cpu(lowered, arrays), wanted, strict=True):
        assert got.shape == want.shape
        assert relative_error(got, want) < 1e-6


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("name", ["v6 with a batch", "v7"])
def test_one_kernel_on_cuda(name):
    given, body, reference = STEPS[name]
    _, lowered, _ = fuse(module(given, body), CUDA)
    arrays = draw(given, {"n": 2})
    result = run_module(lowered, arrays, CUDA, relax_pipeline=cuda_pipeline(), orders=1)
    assert len(result.stats) == 1
    wanted = reference(*[a.astype(np.float64) for a in arrays])
    for got, want in zip(result.outputs, wanted, strict=True):
        assert relative_error(got, want) < 1e-6


def test_returned_outer_product_is_refused():
    def body(bb, r, k, v, w, u, state):
        kv = bb.emit(op.matmul(k, v))
        total = bb.emit(op.add(bb.emit(op.multiply(u, kv)), state))
        out = bb.emit(op.matmul(r, total))
        return [out, bb.emit(op.add(kv, bb.emit(op.multiply(w, state)))), kv]

    found = find_wkv(FunctionView(module(params(BONUS), body), "main"))
    assert found and not any(found)
    assert "read 3 times" in found[0].reason


def test_decay_of_another_tensor_is_refused():
    def body(bb, r, k, v, w, u, state, other):
        kv = bb.emit(op.matmul(k, v))
        total = bb.emit(op.add(bb.emit(op.multiply(u, kv)), state))
        out = bb.emit(op.matmul(r, total))
        return [out, bb.emit(op.add(kv, bb.emit(op.multiply(w, other))))]

    given = {**params(BONUS), "other": ((H, N, N), "float32")}
    found = find_wkv(FunctionView(module(given, body), "main"))
    assert found and not any(found)
    assert "another tensor" in found[0].reason


def test_plain_products_are_left_alone():
    def body(bb, x, y):
        return bb.emit(op.nn.relu(bb.emit(op.matmul(x, y))))

    given = {"x": ((H, N, 1), "float32"), "y": ((H, 1, N), "float32")}
    assert find_wkv(FunctionView(module(given, body), "main")) == []
