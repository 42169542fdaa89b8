"""The wkv PrimFunc of mlc-style modules: recognised by structure, replaced, right."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.script import tirx as T

from relax_llm_passes.cuda_on_cpu import run_module, why_not
from relax_llm_passes.fusion.wkv_primfunc import ReplaceWkvKernels
from relax_llm_passes.patterns.wkv_primfunc import find_wkv_primfunc
from relax_llm_passes.report import Refusal

from ..kernels.norm_cases import CPU, CUDA, cuda_pipeline, relative_error, run_cpu
from ..kernels.test_wkv import reference

H, N = 2, 32


def kernel(bonus_sign: float = 1.0, decay_axis: int = 1):
    """A thread-bound recurrence, its state in global memory; `decay_axis` 0 is a wrong variant."""

    @T.prim_func(private=True, s_tir=True)
    def some_name(
        p_state: T.handle, p_r: T.handle, p_v: T.handle, p_k: T.handle,
        decay: T.Buffer((T.int64(H), T.int64(N)), "float32"),
        first: T.Buffer((T.int64(H), T.int64(N)), "float32"),
        p_out: T.handle, p_new: T.handle,
    ):  # fmt: skip
        T.func_attr({"tirx.is_scheduled": 1, "tirx.noalias": True})
        batch, length = T.int64(), T.int64()
        state = T.match_buffer(p_state, (batch, T.int64(H), T.int64(N), T.int64(N)), "float32")
        r = T.match_buffer(p_r, (batch, length, T.int64(H), T.int64(N)), "float16")
        v = T.match_buffer(p_v, (batch, length, T.int64(H), T.int64(N)), "float16")
        k = T.match_buffer(p_k, (batch, length, T.int64(H), T.int64(N)), "float16")
        out = T.match_buffer(p_out, (batch, length, T.int64(H), T.int64(N)), "float32")
        new = T.match_buffer(p_new, (batch, T.int64(H), T.int64(N), T.int64(N)), "float32")
        for b in T.thread_binding(batch, thread="blockIdx.y"):
            for h in T.thread_binding(T.int64(H), thread="blockIdx.x"):
                for i in T.thread_binding(T.int64(N), thread="threadIdx.x"):
                    for j in range(T.int64(N)):
                        with T.sblock("start"):
                            vb, vh, vi, vj = T.axis.remap("SSSS", [b, h, i, j])
                            new[vb, vh, vi, vj] = state[vb, vh, vi, vj]
                    for t in range(length):
                        with T.sblock("step"):
                            vb = T.axis.spatial(batch, b)
                            vt = T.axis.opaque(length, t)
                            vh = T.axis.spatial(T.int64(H), h)
                            vi = T.axis.spatial(T.int64(N), i)
                            out[vb, vt, vh, vi] = T.float32(0)
                            for c in range(T.int64(N)):
                                x: T.let = T.Cast("float32", k[vb, vt, vh, c]) * T.Cast(
                                    "float32", v[vb, vt, vh, vi]
                                )
                                out[vb, vt, vh, vi] = out[vb, vt, vh, vi] + T.Cast(
                                    "float32", r[vb, vt, vh, c]
                                ) * (first[vh, c] * x + new[vb, vh, vi, c])
                                new[vb, vh, vi, c] = new[vb, vh, vi, c] * decay[vh, c] + x

    return some_name


def module() -> tvm.IRModule:
    bb = relax.BlockBuilder()
    n, b = tvm.tirx.Var("n", "int64"), tvm.tirx.Var("b", "int64")
    full, whole = (b, n, H, N), (b, H, N, N)

    def var(name, shape, dtype):
        return relax.Var(name, relax.TensorType(shape, dtype))

    state, r, v, k = (
        var("state", whole, "float32"), var("r", full, "float16"), var("v", full, "float16"),
        var("k", full, "float16"),
    )  # fmt: skip
    w, u = var("w", (H, N), "float32"), var("u", (H, N), "float32")
    params = [state, r, v, k, w, u]
    with bb.function("main", params):
        gvar = bb.add_func(kernel(), "recurrence")
        with bb.dataflow():
            types = [relax.TensorType(full, "float32"), relax.TensorType(whole, "float32")]
            result = bb.emit_output(relax.call_tir(gvar, params, types))
        bb.emit_func_output(result)
    return bb.get()


def inputs(batch=2, tokens=9):
    rng = np.random.default_rng(0)
    arrays = {"state": rng.standard_normal((batch, H, N, N)).astype(np.float32)}
    for name in "rvk":
        arrays[name] = rng.standard_normal((batch, tokens, H, N)).astype(np.float16)
    arrays["w"] = np.exp(-np.exp(rng.standard_normal((H, N)))).astype(np.float32)
    arrays["u"] = rng.standard_normal((H, N)).astype(np.float32)
    return arrays


def replaced(target):
    mod = module()
    with target:
        new = ReplaceWkvKernels()(mod)
        assert tvm_ffi.structural_equal(ReplaceWkvKernels()(new), new)
    relax.analysis.well_formed(new)
    assert not tvm_ffi.structural_equal(new, mod)
    assert tvm_ffi.structural_equal(new["main"].ty, mod["main"].ty)
    return new


def check(outputs, arrays):
    wanted = reference(arrays, False, True)
    for got, want in zip(outputs, wanted, strict=True):
        assert relative_error(got, want) < 1e-6


def test_on_the_cpu():
    arrays = inputs()
    check(run_cpu(replaced(CPU), list(arrays.values())), arrays)


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_on_cuda():
    arrays = inputs(tokens=3)
    result = run_module(
        replaced(CUDA), list(arrays.values()), CUDA, relax_pipeline=cuda_pipeline(), orders=1
    )
    check(result.outputs, arrays)


def test_roles_follow_the_operands():
    spec = find_wkv_primfunc(kernel())
    names = ["state", "r", "v", "k", "w", "u", "out", "new_state"]
    assert [t.name for t in spec.tensors] == names
    assert spec.value_major and spec.size == N
    assert spec.staged() == ["r", "k"] and spec.fixed() == ["w", "u"]


def test_state_updated_before_it_is_read_is_refused():
    @T.prim_func(private=True, s_tir=True)
    def other(
        state: T.Buffer((1, H, N, N), "float32"), r: T.Buffer((1, 4, H, N), "float32"),
        v: T.Buffer((1, 4, H, N), "float32"), k: T.Buffer((1, 4, H, N), "float32"),
        w: T.Buffer((H, N), "float32"), u: T.Buffer((H, N), "float32"),
        out: T.Buffer((1, 4, H, N), "float32"), new: T.Buffer((1, H, N, N), "float32"),
    ):  # fmt: skip
        for h, i in T.grid(H, N):
            for j in range(N):
                new[0, h, i, j] = state[0, h, i, j]
            for t in range(4):
                out[0, t, h, i] = T.float32(0)
                for c in range(N):
                    new[0, h, i, c] = new[0, h, i, c] * w[h, c] + k[0, t, h, c] * v[0, t, h, i]
                    out[0, t, h, i] = out[0, t, h, i] + r[0, t, h, c] * (
                        u[h, c] * (k[0, t, h, c] * v[0, t, h, i]) + new[0, h, i, c]
                    )

    found = find_wkv_primfunc(other)
    assert isinstance(found, Refusal) and "update the state" in found.reason
