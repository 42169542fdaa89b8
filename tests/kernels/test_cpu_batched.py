"""Batched products of activations on the CPU against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_llm_passes import default_pipeline
from relax_llm_passes.errors import InputError
from relax_llm_passes.kernels.cpu_batched import BatchSpec, batched_kernel
from relax_llm_passes.kernels.cpu_tiles import cpu_tiles

from .cpu_gemm_cases import NATIVE, ROUNDING, apply, epilogue, numpy_dtype, random, wide

TILES = cpu_tiles(NATIVE)
LAYOUTS = [("MK", "KN"), ("KM", "KN"), ("MK", "NK")]


class Case:
    """A compiled spec, called with the values of its symbolic sizes."""

    def __init__(self, spec: BatchSpec) -> None:
        self.spec = spec
        self.run = tvm.compile(batched_kernel(spec, NATIVE), target=NATIVE)[spec.key()]

    def check(self, seed: int = 0, **sizes: int) -> None:
        spec, rng = self.spec, np.random.default_rng(seed)

        def shape(dims: Any) -> tuple[int, ...]:
            return tuple(sizes.get(d, d) for d in dims)

        inputs, (out,) = spec.tensors()
        arrays = [random(rng, shape(t.shape), t.dtype) for t in inputs]
        left, right = wide(arrays[0]), wide(arrays[1])
        left = left if spec.lhs_layout == "MK" else left.swapaxes(-1, -2)
        right = right if spec.rhs_layout == "KN" else right.swapaxes(-1, -2)
        want, size = left @ right, np.abs(left) @ np.abs(right)
        operands = dict(zip([t.name for t in inputs], arrays, strict=True))
        for op in spec.epilogue.ops:
            want = apply(op, want, operands.get(op.operand))
        result = tvm.runtime.tensor(
            np.full(shape(out.shape), np.nan).astype(numpy_dtype(out.dtype))
        )
        self.run(*map(tvm.runtime.tensor, arrays), result)
        # As for products by weights (`cpu_gemm_cases`).
        bound = ROUNDING[out.dtype] * np.abs(want) + 8 * 2.0**-24 * (size + 1)
        if spec.epilogue.ops:
            bound = bound * 8 + 2.0**-20 * (1 + np.abs(want))
        got = wide(result.numpy())
        assert np.isfinite(got).all()
        assert (np.abs(got - want) <= bound).all(), (spec.key(), sizes)


@pytest.mark.parametrize("lhs, rhs", LAYOUTS)
def test_every_size_symbolic(lhs: str, rhs: str) -> None:
    case = Case(BatchSpec(("b", 3), "m", "n", "k", True, True, lhs, rhs))
    wide_tile = TILES.columns + TILES.lanes + 3
    for b, m, n, k in (
        (0, 2, 3, 4),
        (2, 0, 3, 4),
        (1, 1, 1, 1),
        (2, 1, wide_tile * 8, TILES.lanes + 1),
        (1, TILES.rows + 1, wide_tile, 33),
        (2, 3, TILES.lanes, 0),
        (2, 2 * TILES.rows + 1, 4 * TILES.columns + 5, 3 * TILES.lanes + 2),
    ):
        case.check(b=b, m=m, n=n, k=k)


@pytest.mark.parametrize("shared", ["lhs", "rhs"])
@pytest.mark.parametrize("lhs, rhs", LAYOUTS)
def test_one_operand_for_the_whole_batch(shared: str, lhs: str, rhs: str) -> None:
    spec = BatchSpec((2, 3), 5, 21, 40, shared != "lhs", shared != "rhs", lhs, rhs)
    Case(spec).check()


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    m=st.integers(1, 20),
    n=st.integers(1, 60),
    k=st.integers(1, 70),
    layouts=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    steps=st.lists(st.sampled_from(["bias", "residual", "scale", "gelu_erf"]), max_size=2),
)
def test_any_batch(
    batch: list[int],
    m: int,
    n: int,
    k: int,
    layouts: tuple[str, str],
    dtype: str,
    steps: list[str],
) -> None:
    dtypes = (dtype,) * 3
    operations = epilogue(*steps, dtype=dtype)
    Case(BatchSpec(tuple(batch), m, n, k, True, True, *layouts, *dtypes, operations)).check()


@I.ir_module
class _Attention:
    """Scores and values of attention in a form that is no attention: a power of the scores."""

    @R.function
    def main(
        q: R.Tensor((2, "h", 3, 16), "float32"),
        k: R.Tensor((2, "h", "t + 1", 16), "float32"),
        v: R.Tensor((2, "h", "t + 1", 20), "float32"),
        step: R.Shape(["t"]),
    ) -> R.Tensor((2, "h", 3, 20), "float32"):
        with R.dataflow():
            turned = R.permute_dims(k, [0, 1, 3, 2])
            scores = R.matmul(q, turned)
            weights = R.multiply(scores, scores)
            out = R.matmul(weights, v)
            R.output(out)
        return out


def test_graphs_get_the_kernel_for_both_products() -> None:
    pipeline = default_pipeline("native")
    machine = relax.VirtualMachine(
        tvm.compile(_Attention, pipeline.target, relax_pipeline=pipeline), tvm.cpu()
    )
    lowered = next(r for r in pipeline.report.passes if r.name == "LowerComposites")
    assert lowered.matched["gemm:cpu.batched"] == 2
    rng = np.random.default_rng(0)
    for heads, past in ((1, 0), (5, 30)):
        q, k, v = (
            rng.standard_normal((2, heads, rows, width)).astype("float32")
            for rows, width in ((3, 16), (past + 1, 16), (past + 1, 20))
        )
        got = machine["main"](*map(tvm.runtime.tensor, (q, k, v)), tvm_ffi_shape(past)).numpy()
        scores = wide(q) @ wide(k).swapaxes(2, 3)
        # fp32 scores of up to 20, squared, times up to 31 values.
        np.testing.assert_allclose(got, scores**2 @ wide(v), rtol=1e-4, atol=1e-3)


def tvm_ffi_shape(value: int) -> Any:
    from tvm_ffi import Shape

    return Shape((value,))


@pytest.mark.parametrize(
    "spec, word",
    [
        (BatchSpec((2,), 3, 4, 5, lhs_dtype="int8"), "int8"),
        (BatchSpec((2,), 3, 4, 5, lhs_layout="KM", rhs_layout="NK"), "across"),
        (BatchSpec((2,), 3, 4, 5, rhs_layout="packed"), "layouts"),
    ],
)
def test_refused_with_a_reason(spec: BatchSpec, word: str) -> None:
    with pytest.raises(InputError, match=word):
        batched_kernel(spec, NATIVE)
