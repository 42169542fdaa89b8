"""One decoding step of wkv: this package against TVM's default pipeline and torch, on the CPU.

    pytest benchmarks/kernels/bench_wkv.py

32 heads of 64 channels (RWKV-5 1.5B), one token, one thread. The state (0.5 MB) stays in cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_llm_passes.finish import finalize_passes
from relax_llm_passes.fusion.wkv import FuseWkv
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
