"""Vector functions of CPU kernels against float64, special values included."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import tvm

from relax_llm_passes.kernels import cpu_math
from relax_llm_passes.kernels.cpu_build import T, TensorSpec, build_kernel, i64, let, load, store

from .cpu_gemm_cases import NATIVE

SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 88.0, 89.0, -87.0, -104.0, np.inf, -np.inf, np.nan]


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


FUNCTIONS: dict[str, tuple[Callable[[float], float], float]] = {
    # Absolute error allowed, for results up to 1 (relative to |x| for silu and gelu). exp is
    # checked relatively: its bound is that of one fp32 rounding of n ln 2, times 4.
    "tanh": (math.tanh, 4e-7),
    "sigmoid": (_sigmoid, 4e-7),
    "erf": (math.erf, 4e-7),
    "exp": (lambda x: math.exp(x) if x < 700 else math.inf, 5e-7),
}


@pytest.mark.parametrize("lanes", [1, 8])
def test_functions(lanes: int) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(600) * 4, rng.uniform(-80, 80, 405), SPECIAL])
    x = np.concatenate([x, np.zeros(-len(x) % 8)]).astype("float32")
    names = list(FUNCTIONS)

    def body(buffers: dict, sizes: dict) -> None:
        with T.serial(i64(0), i64(len(x) // lanes)) as i:
            value = let(load(buffers["x"], i * lanes, lanes))
            for name in names:
                store(buffers[name], getattr(cpu_math, name)(value, lanes), i * lanes, lanes)

    outputs = [TensorSpec(name, (len(x),), "float32") for name in names]
    kernel = build_kernel("functions", [TensorSpec("x", (len(x),), "float32")], outputs, body)
    out = [tvm.runtime.tensor(np.zeros_like(x)) for _ in names]
    tvm.compile(kernel, target=NATIVE)["functions"](tvm.runtime.tensor(x), *out)
    for name, got in zip(names, out, strict=True):
        function, bound = FUNCTIONS[name]
        want = np.array([function(float(v)) if not math.isnan(v) else math.nan for v in x])
        got = got.numpy().astype(float)
        assert np.isnan(got[np.isnan(x)]).all(), name
        known = np.isfinite(want) & (np.abs(want) < 1e38) & (np.abs(want) > 1.2e-38)
        known |= want == 0
        scale = np.maximum(np.abs(want), 1e-37) if name == "exp" else 1.0
        error = np.abs(got[known] - want[known]) / (scale[known] if name == "exp" else 1.0)
        assert error.max() <= bound, f"{name}: {error.max()}"
        assert (got[want == np.inf] == np.inf).all()
