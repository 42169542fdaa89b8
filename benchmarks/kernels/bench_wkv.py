"""wkv on the CPU: a decoding step, and prefill token by token against the chunked form.

    pytest benchmarks/kernels/bench_wkv.py

32 heads of 64 channels (RWKV-5 1.5B), one thread. The state (0.5 MB) stays in cache.

The chunked form turns C tokens into products of matrices, which torch's batched products compute
here. It divides keys by powers of the decay: with a decay of 0.3 and C = 32, by 2e-17. Errors
against float64 are printed; the kernel's own loop over tokens rescales nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.finish import finalize_passes
from relax_llm_passes.fusion.wkv import FuseWkv
from relax_llm_passes.kernels.norm_program import Tensor
from relax_llm_passes.kernels.wkv_cpu import emit_wkv_cpu
from relax_llm_passes.kernels.wkv_spec import ROLES_BONUS, WkvSpec, compact_operands
from relax_llm_passes.lower import LowerComposites
from relax_llm_passes.targets import parse_target

from .modules import module_of

CPU = parse_target("native")
H, N = 32, 64
op = relax.op
BONUS = [(H, 1, N), (H, N, 1), (H, 1, N), (H, N, 1), (H, N, 1), (H, N, N)]
DELTA = [(H, N, 1), (H, 1, N), (H, N, 1), (H, 1, N), (H, N, 1), (H, 1, N), (H, N, N)]


def bonus(bb: Any, r: Any, k: Any, v: Any, w: Any, u: Any, state: Any) -> list[Any]:
    kv = bb.emit(op.matmul(k, v))
    total = bb.emit(op.add(bb.emit(op.multiply(u, kv)), state))
    return [
        bb.emit(op.matmul(r, total)),
        bb.emit(op.add(kv, bb.emit(op.multiply(w, state)))),
    ]


def delta(bb: Any, r: Any, k: Any, v: Any, w: Any, a: Any, b: Any, state: Any) -> list[Any]:
    kept = bb.emit(op.multiply(state, w))
    turned = bb.emit(op.matmul(state, bb.emit(op.matmul(a, b))))
    new = bb.emit(op.add(bb.emit(op.add(kept, turned)), bb.emit(op.matmul(v, k))))
    return [bb.emit(op.matmul(new, r)), new]


def in_numpy(name: str, *x: Any) -> tuple[Any, Any]:
    """The step with @, * and +: numpy's and torch's arrays both have them."""
    if name == "wkv5":
        r, k, v, w, u, state = x
        kv = k @ v
        return r @ (u * kv + state), kv + w * state
    r, k, v, w, a, b, state = x
    new = state * w + state @ (a @ b) + v @ k
    return new @ r, new


@pytest.mark.parametrize("engine", ["tvm", "relax_llm", "torch"])
@pytest.mark.parametrize("name, shapes, body", [("wkv5", BONUS, bonus), ("wkv7", DELTA, delta)])
def test_wkv(benchmark, name, shapes, body, engine):
    benchmark.group = name
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(s, dtype=np.float32) * 0.3 for s in shapes]
    if engine == "torch":
        torch = pytest.importorskip("torch")
        torch.set_num_threads(1)
        tensors = [torch.from_numpy(a) for a in arrays]
        function = lambda: in_numpy(name, *tensors)  # noqa: E731
        result = [x.numpy() for x in function()]
    else:
        pipeline = relax.get_default_pipeline(CPU)
        if engine == "relax_llm":
            pipeline = tvm.transform.Sequential(
                [FuseWkv(), LowerComposites(), relax.transform.LegalizeOps(), *finalize_passes(CPU)]
            )
        with CPU:
            executable = tvm.compile(module_of(shapes, body), CPU, relax_pipeline=pipeline)
        main = relax.VirtualMachine(executable, tvm.cpu())["main"]
        tensors = [tvm.runtime.tensor(a) for a in arrays]
        function = lambda: main(*tensors)  # noqa: E731
        result = [x.numpy() for x in function()]
    wanted = in_numpy(name, *[a.astype(np.float64) for a in arrays])
    for got, want in zip(result, wanted, strict=True):
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    benchmark.pedantic(function, rounds=50, warmup_rounds=5)


def prefill_inputs(tokens: int) -> dict[str, np.ndarray]:
    """r, k, v (T, H, N), a decay per channel in (0.3, 0.99), a bonus, a state that is not zero."""
    rng = np.random.default_rng(0)
    out = {n: rng.standard_normal((tokens, H, N), dtype=np.float32) * 0.3 for n in "rkv"}
    out["w"] = rng.uniform(0.3, 0.99, (H, N)).astype(np.float32)
    out["u"] = rng.standard_normal((H, N), dtype=np.float32) * 0.5
    out["state"] = rng.standard_normal((H, N, N), dtype=np.float32) * 0.3
    return out


def loop_in_float64(x: dict[str, np.ndarray]) -> np.ndarray:
    """The outputs, token by token."""
    x = {n: a.astype(np.float64) for n, a in x.items()}
    state, out = x["state"], np.zeros_like(x["r"])
    for t in range(len(out)):
        kv = x["k"][t][:, :, None] * x["v"][t][:, None, :]
        out[t] = np.einsum("hj,hji->hi", x["r"][t], state + x["u"][:, :, None] * kv)
        state = x["w"][:, :, None] * state + kv
    return out


def kernel(tokens: int) -> Any:
    """This package's loop over tokens: returns a function of the inputs and the output."""
    shapes = {n: (tokens, H, N) for n in "rkv"} | {n: (H, N) for n in "wu"}
    shapes |= {"state": (H, N, N), "out": (tokens, H, N), "new_state": (H, N, N)}
    order = [*ROLES_BONUS, "out", "new_state"]
    operands, out_at = compact_operands(ROLES_BONUS, 1, tokens, H, N, decay_per_token=False)
    spec = WkvSpec(
        tuple(Tensor(n, shapes[n], "float32") for n in order), operands, out_at, 1, tokens, H, N
    )
    func = emit_wkv_cpu(spec, CPU).with_attr("global_symbol", "main")
    return tvm.compile(tvm.IRModule({"main": func}), CPU)["main"], order, shapes


def chunked(torch: Any, x: dict[str, Any], size: int) -> Any:
    """The chunked form over (H, T, N) with batched products."""
    r, k, v, w, u, state = (x[n] for n in ROLES_BONUS)
    steps = torch.arange(size, dtype=torch.float32)
    power = w[:, None, :] ** steps[None, :, None]
    shrink = w[:, None, :] ** -(steps[None, :, None] + 1)
    ahead = w[:, None, :] ** (size - 1 - steps[None, :, None])
    whole = (w**size)[:, :, None]
    out = torch.empty_like(r)
    for t in range(0, r.shape[1], size):
        rc, kc, vc = (a[:, t : t + size] for a in (r, k, v))
        turned = rc * power
        inside = torch.tril(turned @ (kc * shrink).transpose(1, 2), -1)
        bonus = (rc * u[:, None, :] * kc).sum(-1, keepdim=True) * vc
        out[:, t : t + size] = inside @ vc + turned @ state + bonus
        state = whole * state + (kc * ahead).transpose(1, 2) @ vc
    return out


@pytest.mark.parametrize("tokens", [128, 1024])
@pytest.mark.parametrize("engine", ["loop", "chunk 16", "chunk 32"])
def test_wkv_prefill(benchmark, engine, tokens):
    benchmark.group = f"wkv5 prefill of {tokens}"
    inputs = prefill_inputs(tokens)
    wanted = loop_in_float64(inputs)
    if engine == "loop":
        run, order, shapes = kernel(tokens)
        buffers = [
            tvm.runtime.tensor(inputs.get(n, np.zeros(shapes[n], np.float32))) for n in order
        ]
        function = lambda: run(*buffers)  # noqa: E731
        function()
        found = buffers[order.index("out")].numpy()
    else:
        torch = pytest.importorskip("torch")
        torch.set_num_threads(1)
        size = int(engine.split()[1])
        tensors = {n: torch.from_numpy(a) for n, a in inputs.items()}
        for n in "rkv":
            tensors[n] = tensors[n].transpose(0, 1).contiguous()
        function = lambda: chunked(torch, tensors, size)  # noqa: E731
        found = function().transpose(0, 1).numpy()
    error = np.abs(found - wanted).max() / np.abs(wanted).max()
    print(f"\n{engine}, {tokens} tokens: error {error:.1e} against float64")
    assert error < 1e-2
    benchmark.pedantic(function, rounds=20, warmup_rounds=2)
