"""What the tests of CPU products share: compile a spec, run it, the answer in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import tvm

from relax_llm_passes.kernels.cpu_epilogue import Epilogue, EpilogueOp
from relax_llm_passes.kernels.cpu_gemm import gemm_kernel
from relax_llm_passes.kernels.cpu_pack import pack_array
from relax_llm_passes.kernels.cpu_spec import GemmSpec
from relax_llm_passes.targets import parse_target

NATIVE = parse_target("native")
# Sums are fp32, so the error is that of rounding the result, plus fp32 rounding of each of K terms
# (in vectors of partial sums) relative to the sum of absolute products.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def random(rng: np.random.Generator, shape: Any, dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(numpy_dtype(dtype))


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def apply(op: EpilogueOp, value: np.ndarray, operand: np.ndarray | None) -> np.ndarray:
    if op.op in ("bias", "residual"):
        return value + wide(operand)
    if op.op == "multiply":
        return value * wide(operand)
    if op.op == "relu":
        return np.maximum(value, 0)
    if op.op == "relu_squared":
        return np.maximum(value, 0) ** 2
    if op.op == "gelu_erf":
        return 0.5 * value * (1 + np.vectorize(math.erf, otypes=[float])(value / math.sqrt(2)))
    if op.op == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
        return 0.5 * value * (1 + np.tanh(inner))
    if op.op == "silu":
        return value / (1 + np.exp(-value))
    if op.op == "sigmoid":
        return 1 / (1 + np.exp(-value))
    if op.op == "tanh":
        return np.tanh(value)
    if op.op == "scale":
        return value * op.value
    assert op.op == "cast"
    return value


@dataclass
class Case:
    """A compiled spec whose leading sizes may be symbolic."""

    spec: GemmSpec
    target: Any = NATIVE
    tiles: Any = None

    def __post_init__(self) -> None:
        kernel = gemm_kernel(self.spec, self.target, self.tiles)
        self.run = tvm.compile(kernel, target=self.target)[self.spec.key()]

    def check(self, lead: tuple[int, ...], seed: int = 0, n: int | None = None) -> None:
        """Compare with float64; `n` is N where the spec's is symbolic."""
        spec, rng = self.spec, np.random.default_rng(seed)
        if n is not None:
            spec = replace(spec, n=n)
        lhs = random(rng, (*lead, spec.k), spec.lhs_dtype)
        rows = random(rng, (spec.n, spec.k), spec.rhs_dtype)
        weight = rows
        if spec.layout == "KN":
            weight = np.ascontiguousarray(rows.T)
        elif spec.layout == "packed":
            weight = pack_array(rows, "NK", self.target)
        operands = {}
        for tensor in spec.epilogue.tensors((*lead, spec.n), spec.n):
            operands[tensor.name] = random(rng, tensor.shape, tensor.dtype)
        want = wide(lhs) @ wide(rows).T
        size = np.abs(wide(lhs)) @ np.abs(wide(rows)).T
        for op in spec.epilogue.ops:
            want = apply(op, want, operands.get(op.operand))
        got = self.call(lead, lhs, [weight], list(operands.values()), n=n)
        bound = ROUNDING[spec.out_dtype] * np.abs(want) + 8 * 2.0**-24 * (size + 1)
        if spec.epilogue.ops:
            # Steps after the sum scale its error: by the operand of a product (at most about 5
            # here), by |x| for a square, by less than 1.2 for the activations.
            bound = bound * 8 + 2.0**-20 * (1 + np.abs(want))
        worst = np.abs(got - want) - bound
        assert np.isfinite(got).all()
        assert (worst <= 0).all(), f"{spec.key()} {lead}: off by {np.abs(got - want).max()}"

    def call(
        self, lead: tuple[int, ...], lhs: Any, weights: Any, operands: Any, n: int | None = None
    ) -> np.ndarray:
        shape = (*lead, self.spec.n if n is None else n)
        poison = np.full(shape, np.nan).astype(numpy_dtype(self.spec.out_dtype))
        out = tvm.runtime.tensor(poison)
        self.run(*[tvm.runtime.tensor(a) for a in (lhs, *weights, *operands)], out)
        return wide(out.numpy())


def epilogue(*ops: str, dtype: str = "float32") -> Epilogue:
    steps = []
    for i, op in enumerate(ops):
        operand = f"epi{i}" if op in ("bias", "residual", "multiply") else ""
        steps.append(EpilogueOp(op, operand, dtype, 0.125))
    return Epilogue(tuple(steps))
