"""The wkv kernels against float64: CPU and CUDA code, decode and prefill, every state layout."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx

from relax_llm_passes.cuda_on_cpu import nvcc_check, nvcc_missing, run_primfunc, why_not
from relax_llm_passes.kernels.norm_program import Tensor
from relax_llm_passes.kernels.wkv_cpu import emit_wkv4_cpu, emit_wkv_cpu
from relax_llm_passes.kernels.wkv_cuda import LIMITS, emit_wkv4_cuda, emit_wkv_cuda, plan_wkv
from relax_llm_passes.kernels.wkv_spec import (
    ROLES_BONUS,
    ROLES_DELTA,
    ROLES_SOFTMAX,
    WkvSpec,
    compact_operands,
)

from .norm_cases import BOUND, CPU, NUMPY, relative_error

cuda = [pytest.mark.cuda, pytest.mark.skipif(bool(why_not()), reason=why_not())]
BOTH = pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=cuda)])


def reference(inputs, delta, value_major):
    """The recurrence in float64; returns the outputs and the state."""
    x = {k: v.astype(np.float64) for k, v in inputs.items()}
    batch, tokens, heads, size = x["r"].shape
    state = x["state"].transpose(0, 1, 3, 2) if value_major else x["state"]
    out = np.zeros((batch, tokens, heads, size))
    for t in range(tokens):
        kv = x["k"][:, t, :, :, None] * x["v"][:, t, :, None, :]
        w = x["w"][:, t] if x["w"].ndim == 4 else np.broadcast_to(x["w"], (batch, heads, size))
        if delta:
            sa = np.einsum("bhl,bhli->bhi", x["a"][:, t], state)
            state = w[..., None] * state + x["b"][:, t, :, :, None] * sa[:, :, None, :] + kv
            out[:, t] = np.einsum("bhj,bhji->bhi", x["r"][:, t], state)
        else:
            bonus = x["u"][None, :, :, None] * kv
            out[:, t] = np.einsum("bhj,bhji->bhi", x["r"][:, t], state + bonus)
            state = w[..., None] * state + kv
    return out, state.transpose(0, 1, 3, 2) if value_major else state


def draw(batch, tokens, heads, size, delta, per_token, dtype, seed=0):
    """Inputs with a strong decay somewhere and a state that is not zero."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape)

    token = (batch, tokens, heads, size)
    inputs = {n: normal(*token).astype(NUMPY[dtype]) for n in "rkv"}
    decay = np.exp(-np.exp(normal(*(token if per_token else (heads, size))) - 1))
    decay.reshape(-1)[::7] = 1e-6
    inputs["w"] = decay.astype(np.float32)
    if delta:
        kk = normal(*token)
        kk /= np.linalg.norm(kk, axis=-1, keepdims=True)
        inputs["a"], inputs["b"] = (-kk).astype(NUMPY[dtype]), (0.5 * kk).astype(NUMPY[dtype])
    else:
        inputs["u"] = normal(heads, size).astype(NUMPY[dtype])
    inputs["state"] = normal(batch, heads, size, size).astype(np.float32)
    return inputs


def spec_of(inputs, delta, value_major, per_token, dtype, symbolic=False):
    batch, tokens, heads, size = inputs["r"].shape
    count = tirx.Var("n", "int64") if symbolic else tokens

    def shape(x):
        return tuple(count if x.ndim == 4 and i == 1 and x.shape[-2:] == (heads, size) and (
            x.shape[1] == tokens
        ) else d for i, d in enumerate(x.shape))  # fmt: skip

    tensors = [
        Tensor(n, x.shape if n == "state" else shape(x), str(x.dtype)) for n, x in inputs.items()
    ]
    tensors.append(Tensor("out", (batch, count, heads, size), dtype))
    tensors.append(Tensor("new_state", inputs["state"].shape, "float32"))
    roles = ROLES_DELTA if delta else ROLES_BONUS
    operands, out_at = compact_operands(roles, batch, count, heads, size, value_major, per_token)
    return WkvSpec(
        tuple(tensors), operands, out_at, batch, count, heads, size,
        delta=delta, value_major=value_major,
    )  # fmt: skip


def run(spec, inputs, outputs, where, **kwargs):
    if where == "cuda":
        result = run_primfunc(
            emit_wkv_cuda(spec, **kwargs), [*inputs.values(), *outputs], outputs=2, orders=1
        )
        return result.outputs, result.stats
    func = emit_wkv_cpu(spec, CPU).with_attr("global_symbol", "main")
    built = tvm.compile(tvm.IRModule({"main": func}), target=CPU)
    arrays = [tvm.runtime.tensor(np.ascontiguousarray(x)) for x in [*inputs.values(), *outputs]]
    built["main"](*arrays)
    return [a.numpy() for a in arrays[-2:]], []


def blanks(inputs, dtype):
    return [np.full(inputs["r"].shape, 7, NUMPY[dtype]), np.full_like(inputs["state"], 7)]


CASES = [
    # batch, tokens, heads, size, delta, value major, per token, dtype, symbolic tokens
    (1, 1, 2, 64, False, False, False, "float32", False),
    (1, 1, 2, 64, True, True, True, "float32", False),
    (2, 11, 3, 64, False, False, True, "float32", True),
    (2, 11, 2, 64, True, True, True, "float16", True),
    (2, 5, 2, 24, True, False, True, "float32", False),
    (1, 5, 3, 33, False, True, True, "bfloat16", False),
    (1, 3, 2, 128, False, False, False, "float16", False),
]


@BOTH
@pytest.mark.parametrize(
    "batch, tokens, heads, size, delta, value_major, per_token, dtype, symbolic", CASES
)
def test_against_float64(
    batch, tokens, heads, size, delta, value_major, per_token, dtype, symbolic, where
):
    inputs = draw(batch, tokens, heads, size, delta, per_token, dtype)
    spec = spec_of(inputs, delta, value_major, per_token, dtype, symbolic)
    (out, state), _ = run(spec, inputs, blanks(inputs, dtype), where)
    want_out, want_state = reference(inputs, delta, value_major)
    assert relative_error(out, want_out) < BOUND[dtype]
    # The state is float32 whatever the tensors hold.
    assert relative_error(state, want_state) < BOUND["float32"]


@BOTH
@pytest.mark.parametrize("delta", [False, True])
def test_prefill_equals_decode_steps(delta, where):
    inputs = draw(1, 3, 2, 32, delta, True, "float32", seed=4)
    spec = spec_of(inputs, delta, delta, True, "float32")
    (out, state), _ = run(spec, inputs, blanks(inputs, "float32"), where)
    step_state = inputs["state"]
    for t in range(3):
        one = {
            k: v if k in ("u", "state") else np.ascontiguousarray(v[:, t : t + 1])
            for k, v in inputs.items()
        }
        one["state"] = step_state
        (step, step_state), _ = run(
            spec_of(one, delta, delta, True, "float32"), one, blanks(one, "float32"), where
        )
        assert relative_error(step[:, 0], out[:, t].astype(np.float64)) < 2e-7
    assert relative_error(step_state, state.astype(np.float64)) < 2e-7


@pytest.mark.cuda
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_decode_moves_the_state_once():
    inputs = draw(1, 1, 32, 64, False, False, "float32")
    spec = spec_of(inputs, False, False, False, "float32")
    plan = plan_wkv(spec)
    _, (stats,) = run(spec, inputs, blanks(inputs, "float32"), "cuda")
    state, vector = inputs["state"].nbytes, inputs["r"].nbytes
    # Each of a head's blocks stages r, k, w and u; each column's lanes read its v.
    blocks_per_head = 64 // plan.columns
    vectors = 4 * blocks_per_head * vector + plan.key_lanes * vector
    assert stats.global_read == state + vectors
    assert stats.global_written == state + vector
    assert stats.barriers_per_block <= 1
    assert stats.blocks >= 64
    assert stats.lane_use > 0.9


@pytest.mark.skipif(bool(nvcc_missing()), reason=nvcc_missing())
@pytest.mark.parametrize("delta", [False, True])
def test_state_stays_in_registers(delta):
    inputs = draw(1, 3, 2, 64, delta, True, "float16")
    func = emit_wkv_cuda(spec_of(inputs, delta, delta, True, "float16", symbolic=True))
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    for kernel in nvcc_check(mod, archs=("sm_80", "sm_90", "sm_100")):
        assert not kernel.within(LIMITS) and kernel.stack == 0


@BOTH
@pytest.mark.parametrize("batch, tokens, channels", [(1, 1, 128), (2, 7, 33)])
def test_rwkv4(batch, tokens, channels, where):
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((2, batch, tokens, channels)) * 4).astype(np.float32)
    w = -np.exp(rng.standard_normal(channels)).astype(np.float32)
    u = rng.standard_normal(channels).astype(np.float32)
    num = rng.standard_normal((batch, channels)).astype(np.float32)
    den = np.exp(rng.standard_normal((batch, channels))).astype(np.float32)
    peak = rng.standard_normal((batch, channels)).astype(np.float32)
    num[:, ::3], den[:, ::3], peak[:, ::3] = 0, 0, -1e38  # as a sequence starts
    inputs = {"k": k, "v": v, "w": w, "u": u, "num": num, "den": den, "peak": peak}
    outputs = [np.zeros_like(k), np.zeros_like(num), np.zeros_like(num), np.zeros_like(num)]
    names = [*inputs, "out", "new_num", "new_den", "new_peak"]
    tensors = tuple(
        Tensor(n, x.shape, "float32")
        for n, x in zip(names, [*inputs.values(), *outputs], strict=True)
    )
    operands = {n: {"load": n, "at": {"b": channels, "n": 1}} for n in ROLES_SOFTMAX}
    for n in "kv":
        operands[n]["at"] = {"b": tokens * channels, "t": channels, "n": 1}
    for n in "wu":
        operands[n]["at"] = {"n": 1}
    spec = WkvSpec(tensors, operands, operands["k"]["at"], batch, tokens, 1, channels)
    if where == "cuda":
        found = run_primfunc(
            emit_wkv4_cuda(spec), [*inputs.values(), *outputs], outputs=4, orders=1
        ).outputs
    else:
        func = emit_wkv4_cpu(spec, CPU).with_attr("global_symbol", "main")
        arrays = [tvm.runtime.tensor(x) for x in [*inputs.values(), *outputs]]
        tvm.compile(tvm.IRModule({"main": func}), target=CPU)["main"](*arrays)
        found = [a.numpy() for a in arrays[-4:]]
    a, b, p = (x.astype(np.float64) for x in (num, den, peak))
    out = np.zeros(k.shape)
    for t in range(tokens):
        kt, vt = k[:, t].astype(np.float64), v[:, t].astype(np.float64)
        q = np.maximum(p, u + kt)
        e1, e2 = np.exp(p - q), np.exp(u + kt - q)
        out[:, t] = (e1 * a + e2 * vt) / (e1 * b + e2)
        q = np.maximum(p + w, kt)
        e1, e2 = np.exp(p + w - q), np.exp(kt - q)
        a, b, p = e1 * a + e2 * vt, e1 * b + e2, q
    for got, wanted in zip(found, (out, a, b, p), strict=True):
        assert relative_error(got, wanted) < BOUND["float32"]
