"""Recognising group_norm with its surroundings, and the one kernel that comes of it."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from relax_llm_passes import report
from relax_llm_passes.cuda_on_cpu import run_module, why_not
from relax_llm_passes.dataflow import FunctionView
from relax_llm_passes.fusion.group_norm_gate import FuseGroupNormGate
from relax_llm_passes.lower import LowerComposites, composites
from relax_llm_passes.patterns.group_norm import find_group_norm

from ..kernels.norm_cases import (
    CPU,
    CUDA,
    NUMPY,
    cuda_pipeline,
    group_norm_reference,
    kernels,
    relative_error,
    run_cpu,
)

op = relax.op
CHANNELS, HEADS = 96, 3


def norm(x, w, b, channel=-1, axes=(), groups=HEADS, epsilon=6.4e-4):
    return op.nn.group_norm(x, w, b, groups, channel, list(axes), epsilon)


def module(params, body):
    """`params` maps names to (shape, dtype); `body(bb, **params)` returns the result."""
    bb = relax.BlockBuilder()
    sizes: dict[str, tirx.Var] = {}
    names = {}
    for name, (shape, dtype) in params.items():
        dims = [
            sizes.setdefault(d, tirx.Var(d, "int64")) if isinstance(d, str) else d for d in shape
        ]
        names[name] = relax.Var(name, relax.TensorType(dims, dtype))
    with bb.function("main", list(names.values())):
        with bb.dataflow():
            result = body(bb, **names)
            result = bb.emit_output(relax.Tuple(result) if isinstance(result, list) else result)
        bb.emit_func_output(result)
    return bb.get()


def affine(dtype="float32"):
    return {"w": ((CHANNELS,), dtype), "b": ((CHANNELS,), dtype)}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# Each case: parameters, body, reference in float64 over arrays by name, sizes of "n".


def rwkv5(bb, x, w, b, g):
    """Symbolic length, reshape from heads, cast, gate as nn.silu."""
    n = x.ty.shape[1]
    flat = bb.emit(op.reshape(x, (1, n, CHANNELS)))
    y = bb.emit(norm(flat, w, b))
    y = bb.emit(op.astype(y, "float16"))
    gate = bb.emit(op.nn.silu(g))
    return bb.emit(op.multiply(y, gate))


def rwkv5_reference(x, w, b, g):
    y = group_norm_reference(x.reshape(1, -1, CHANNELS), w, b, HEADS, -1, [], 6.4e-4)
    return y * g * sigmoid(g)


def rwkv6(bb, x, w, b, g):
    """One-dimensional decode: expand, squeeze, silu spelled x * sigmoid(x), gate on the left."""
    flat = bb.emit(op.expand_dims(bb.emit(op.reshape(x, (CHANNELS,))), 0))
    scaled = bb.emit(op.divide(flat, relax.const(8.0, "float32")))
    y = bb.emit(op.squeeze(bb.emit(norm(scaled, w, b, channel=1)), 0))
    gate = bb.emit(op.multiply(g, bb.emit(op.sigmoid(g))))
    return bb.emit(op.multiply(gate, y))


def rwkv6_reference(x, w, b, g):
    y = group_norm_reference(x.reshape(1, CHANNELS) / 8, w, b, HEADS, 1, [], 6.4e-4)
    return y[0] * g * sigmoid(g)


def rwkv7(bb, x, w, b, r, k, u, v, g):
    """The bonus sum over each head, then the gate."""
    n = x.ty.shape[0]
    y = bb.emit(norm(x, w, b, channel=1))
    p = bb.emit(op.multiply(bb.emit(op.multiply(r, k)), u))
    p = bb.emit(op.reshape(p, (n, HEADS, CHANNELS // HEADS)))
    total = bb.emit(op.sum(p, axis=[-1], keepdims=True))
    heads = bb.emit(op.reshape(v, (n, HEADS, CHANNELS // HEADS)))
    bonus = bb.emit(op.reshape(bb.emit(op.multiply(total, heads)), (n, CHANNELS)))
    y = bb.emit(op.add(y, bonus))
    return bb.emit(op.multiply(y, g))


def rwkv7_reference(x, w, b, r, k, u, v, g):
    y = group_norm_reference(x, w, b, HEADS, 1, [], 6.4e-4)
    total = (r * k * u).reshape(-1, HEADS, CHANNELS // HEADS).sum(-1, keepdims=True)
    return (y + (total * v.reshape(-1, HEADS, CHANNELS // HEADS)).reshape(v.shape)) * g


def diffusion(bb, x, w, b):
    """Channel first, silu spelled with sigmoid."""
    y = bb.emit(norm(x, w, b, channel=1, axes=(2, 3)))
    return bb.emit(op.multiply(y, bb.emit(op.sigmoid(y))))


def diffusion_reference(x, w, b):
    y = group_norm_reference(x, w, b, HEADS, 1, [2, 3], 6.4e-4)
    return y * sigmoid(y)


def bfloat16(bb, x, w, b, g):
    """bfloat16 tensors around a float32 norm."""
    y = bb.emit(norm(bb.emit(op.astype(x, "float32")), w, b))
    y = bb.emit(op.astype(y, "bfloat16"))
    return bb.emit(op.multiply(y, bb.emit(op.nn.silu(g))))


def bfloat16_reference(x, w, b, g):
    return group_norm_reference(x, w, b, HEADS, -1, [], 6.4e-4) * g * sigmoid(g)


def token(*dtype_of):
    return {n: (("n", CHANNELS), "float32") for n in dtype_of}


CASES = {
    "rwkv5": (
        {"x": ((1, "n", HEADS, 32), "float32"), **affine(), "g": ((1, "n", CHANNELS), "float16")},
        rwkv5, rwkv5_reference, 2e-3,
    ),
    "rwkv6": (
        {"x": ((HEADS, 1, 32), "float32"), **affine(), "g": ((CHANNELS,), "float32")},
        rwkv6, rwkv6_reference, 2e-6,
    ),
    "rwkv7": (
        {**token("x"), **affine(), **token("r", "k"), "u": ((CHANNELS,), "float32"),
         **token("v", "g")},
        rwkv7, rwkv7_reference, 2e-6,
    ),
    "diffusion": (
        {"x": ((2, CHANNELS, "n", "m"), "float32"), **affine()},
        diffusion, diffusion_reference, 2e-6,
    ),
    "bfloat16": (
        {"x": ((2, "n", CHANNELS), "bfloat16"), **affine(), "g": ((2, "n", CHANNELS), "bfloat16")},
        bfloat16, bfloat16_reference, 1.6e-2,
    ),
}  # fmt: skip
SIZES = {"n": 5, "m": 7}


def build(name):
    params, body, reference, bound = CASES[name]
    rng = np.random.default_rng(0)
    arrays = {}
    for key, (shape, dtype) in params.items():
        dims = [SIZES.get(d, d) for d in shape]
        arrays[key] = rng.standard_normal(dims).astype(NUMPY[dtype])
    wanted = reference(**{k: v.astype(np.float64) for k, v in arrays.items()})
    return module(params, body), list(arrays.values()), wanted, bound


def fuse(mod, target):
    with target, report.collect() as collected:
        fused = FuseGroupNormGate()(mod)
        relax.analysis.well_formed(fused)
        assert tvm_ffi.structural_equal(FuseGroupNormGate()(fused), fused)
        lowered = LowerComposites()(fused)
    relax.analysis.well_formed(lowered)
    assert tvm_ffi.structural_equal(lowered["main"].ty, mod["main"].ty)
    return fused, lowered, collected


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_on_the_cpu(name):
    mod, arrays, wanted, bound = build(name)
    fused, lowered, _ = fuse(mod, CPU)
    assert len(composites(fused)) == 1
    assert len(kernels(lowered)) == 1
    calls = [b for b in FunctionView(lowered, "main").bindings if isinstance(b.value, relax.Call)]
    assert len(calls) == 1, lowered["main"]
    (got,) = run_cpu(lowered, arrays)
    assert relative_error(got, wanted) < bound


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("name", ["rwkv5", "rwkv7", "bfloat16"])
def test_one_kernel_on_cuda(name):
    mod, arrays, wanted, bound = build(name)
    _, lowered, _ = fuse(mod, CUDA)
    result = run_module(lowered, arrays, CUDA, relax_pipeline=cuda_pipeline(), orders=1)
    assert relative_error(result.outputs[0], wanted) < bound
    (stats,) = result.stats
    assert stats.barriers == 0
    # One read of each input: only weights are read again, once for each token.
    sizes = dict(zip(CASES[name][0], (a.nbytes for a in arrays), strict=True))
    tokens = arrays[0].size // CHANNELS
    weights = {k: s for k, s in sizes.items() if k in ("w", "b", "u")}
    full = sum(s for k, s in sizes.items() if k not in weights)
    # Threads past the last row load it again.
    extra = stats.blocks * stats.threads / (stats.blocks * stats.threads - 31)
    assert stats.global_read <= (full + tokens * sum(weights.values())) * max(1.0, extra) * 1.15


def test_chain_ends_where_others_read():
    def body(bb, x, w, b, g):
        y = bb.emit(norm(x, w, b))
        z = bb.emit(op.multiply(y, g))
        return [bb.emit(op.nn.relu(z)), bb.emit(op.add(z, y))]

    mod = module({**token("x"), **affine(), **token("g")}, body)
    found = find_group_norm(FunctionView(mod, "main"))
    assert len(found) == 1 and not found[0]
    assert "nothing that can be fused" in found[0].reason


def test_returned_norm_stays():
    def body(bb, x, w, b, g):
        y = bb.emit(norm(x, w, b))
        return [y, bb.emit(op.multiply(y, g))]

    mod = module({**token("x"), **affine(), **token("g")}, body)
    assert not any(find_group_norm(FunctionView(mod, "main")))


def test_widening_operand_ends_the_chain():
    def body(bb, x, w, b, g):
        y = bb.emit(op.nn.silu(bb.emit(norm(x, w, b))))
        return bb.emit(op.multiply(y, g))

    params = {**token("x"), **affine(), "g": ((2, 1, 1, CHANNELS), "float32")}
    mod = module({**params, "x": ((4, CHANNELS), "float32")}, body)
    (region,) = find_group_norm(FunctionView(mod, "main"))
    assert region and [s["op"] for s in region.attrs["after"]] == ["unary"]


def test_alias_between_norm_and_gate():
    mod = tvm.script.from_source(
        """
# from tvm.script import ir as I
# from tvm.script import relax as R
@I.ir_module
class Module:
    @R.function
    def main(x: R.Tensor((4, 96), "float32"), w: R.Tensor((96,), "float32"),
             b: R.Tensor((96,), "float32"), g: R.Tensor((4, 96), "float32")):
        with R.dataflow():
            y = R.nn.group_norm(x, w, b, 3, 1, [], 1e-5)
            z = y
            out = R.multiply(g, z)
            R.output(out)
        return out
"""
    )
    fused, lowered, _ = fuse(mod, CPU)
    assert len(composites(fused)) == 1 and len(kernels(lowered)) == 1
