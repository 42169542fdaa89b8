"""Products by group-quantised weights against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_llm_passes.kernels.cpu_epilogue import Epilogue
from relax_llm_passes.kernels.cpu_spec import GemmSpec, QuantSpec
from relax_llm_passes.targets import parse_target

from .cpu_gemm_cases import NATIVE, ROUNDING, Case, random, wide


def quantise(weight: np.ndarray, quant: QuantSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return words, scales and what they stand for, as mlc-llm's group quantisation packs them."""
    n, k = weight.shape
    groups, words = -(-k // quant.group), -(-k // quant.per_word)
    full = np.zeros((n, groups * quant.group))
    full[:, :k] = weight
    grouped = full.reshape(n, groups, quant.group)
    scale = (np.abs(grouped).max(2) / quant.offset).astype("float16")
    integers = np.round(grouped / wide(scale)[..., None]) + quant.offset
    integers = np.clip(integers, 0, 2 * quant.offset).astype("uint32").reshape(n, -1)
    packed = np.zeros((n, words), "uint32")
    for j in range(quant.per_word):
        column = integers[:, j : words * quant.per_word : quant.per_word]
        packed[:, : column.shape[1]] |= column << np.uint32(quant.bits * j)
    value = (integers.astype(float) - quant.offset).reshape(n, groups, quant.group)
    return packed, scale, (value * wide(scale)[..., None]).reshape(n, -1)[:, :k]


def activation_rounding(spec: GemmSpec, lhs: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the documented bound: half a step of each group's largest left value, times |w|."""
    quant = spec.quant
    asked = quant.activation_bits
    if spec.lhs_dtype == "float32" and not asked:
        return np.zeros(1)
    # 16 bits: steps of a power of two, up to 2 / 2^16 of the largest.
    step = 1 / 127 if asked == 8 and quant.bits == 4 else 2.0**-14
    total = np.zeros((lhs.shape[0], value.shape[0]))
    for first in range(0, spec.k, quant.group):
        part = slice(first, first + quant.group)
        largest = np.abs(wide(lhs[:, part])).max(1, keepdims=True)
        total += step / 2 * largest * np.abs(value[:, part]).sum(1)
    return total


def check(case: Case, m: int, n: int | None = None) -> None:
    spec, rng = case.spec, np.random.default_rng(m)
    if n is not None:
        spec = replace(spec, n=n)
    packed, scale, value = quantise(rng.standard_normal((spec.n, spec.k)), spec.quant)
    lhs = random(rng, (m, spec.k), spec.lhs_dtype)
    want, size = wide(lhs) @ value.T, np.abs(wide(lhs)) @ np.abs(value).T
    weight = [packed, scale]
    if spec.layout == "KN":
        weight = [np.ascontiguousarray(part.T) for part in weight]
    got = case.call((m,), lhs, weight, [], n=n)
    rounding = activation_rounding(spec, lhs, value) if m == 1 else 0.0
    # The dequantised weights' offset is subtracted from larger sums: offset / 2 times the terms.
    bound = ROUNDING[spec.out_dtype] * np.abs(want) + 2.0**-20 * (size + 1) + rounding
    assert (np.abs(got - want) <= bound).all(), np.abs(got - want).max()


@pytest.mark.parametrize("bits, offset", [(4, 7), (8, 127)])
@pytest.mark.parametrize("dtype, n, k", [("float32", 33, 544), ("float16", 24, 320)])
def test_all_row_counts(bits: int, offset: int, dtype: str, n: int, k: int) -> None:
    quant = QuantSpec(bits, 32, offset)
    case = Case(GemmSpec(("m",), n, k, "NK", dtype, "uint32", dtype, Epilogue(), quant))
    for m in (0, 1, 3, 9):
        check(case, m)


@pytest.mark.parametrize("bits, offset", [(4, 7), (8, 127)])
@pytest.mark.parametrize("dtype, n, k", [("float32", 77, 544), ("float16", 64, 330)])
def test_weights_as_k_n(bits: int, offset: int, dtype: str, n: int, k: int) -> None:
    quant = QuantSpec(bits, 32, offset)
    case = Case(GemmSpec(("m",), n, k, "KN", dtype, "uint32", dtype, Epilogue(), quant))
    for m in (0, 1, 3, 9):
        check(case, m)


@pytest.mark.parametrize("layout", ["NK", "KN"])
def test_symbolic_columns(layout: str) -> None:
    quant = QuantSpec(4, 32, 7)
    spec = GemmSpec(("m",), "n", 288, layout, "float16", "uint32", "float16", Epilogue(), quant)
    case = Case(spec)
    for m in (1, 3, 9):
        for n in (1, 33, 200):
            check(case, m, n)


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("bits, offset", [(4, 7), (8, 127)])
@pytest.mark.parametrize("asked", [8, 16])
def test_rounded_left_operand(layout: str, bits: int, offset: int, asked: int) -> None:
    quant = QuantSpec(bits, 32, offset, activation_bits=asked)
    # 17 groups: no whole number of steps of 4, 8 or 16.
    spec = GemmSpec((1,), 37, 17 * 32 + 9, layout, "float32", "uint32", "float32", quant=quant)
    check(Case(spec), 1)


def test_rounding_is_that_of_eight_bits() -> None:
    """The option does something: more is lost than with 16 bits, within its bound."""
    errors = []
    for asked in (8, 16):
        quant = QuantSpec(4, 32, 7, activation_bits=asked)
        spec = GemmSpec((1,), 64, 512, "NK", "float32", "uint32", "float32", quant=quant)
        rng = np.random.default_rng(3)
        packed, scale, value = quantise(rng.standard_normal((64, 512)), quant)
        lhs = random(rng, (1, 512), "float32")
        got = Case(spec).call((1,), lhs, [packed, scale], [])
        errors.append(np.abs(got - wide(lhs) @ value.T).max())
    assert errors[0] > 20 * errors[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_largest_and_smallest_left_values(dtype: str) -> None:
    """Groups of zeros, tiny and huge values keep their own scales."""
    quant = QuantSpec(4, 32, 7, "float32", activation_bits=16)
    spec = GemmSpec((1,), 16, 512, "NK", dtype, "uint32", "float32", quant=quant)
    rng = np.random.default_rng(0)
    packed, scale, value = quantise(rng.standard_normal((16, 512)), quant)
    case = Case(spec)
    for size in (0.0, 1e-30, 1e-38, 1e30):
        lhs = (rng.standard_normal((1, 512)) * size).astype(random(rng, (1,), dtype).dtype)
        got = case.call((1,), lhs, [packed, scale.astype("float32")], [])
        want = wide(lhs) @ value.T
        # 2^-102 is the smallest step.
        bound = (
            activation_rounding(spec, lhs, value) + 2.0**-20 * np.abs(wide(lhs)) @ np.abs(value).T
        )
        assert (np.abs(got - want) <= bound + 2.0**-102 * np.abs(value).sum(1)).all()


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    n=st.integers(1, 90),
    k=st.integers(1, 700),
    layout=st.sampled_from(["NK", "KN"]),
    form=st.sampled_from([(4, 7), (8, 127)]),
    group=st.sampled_from([16, 32, 64, 128]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    asked=st.sampled_from([0, 8, 16]),
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=2),
)
def test_any_product(
    n: int,
    k: int,
    layout: str,
    form: tuple[int, int],
    group: int,
    dtype: str,
    asked: int,
    rows: list[int],
) -> None:
    quant = QuantSpec(form[0], group, form[1], activation_bits=asked)
    case = Case(GemmSpec(("m",), n, k, layout, dtype, "uint32", dtype, quant=quant))
    for m in rows:
        check(case, m)


@pytest.mark.parametrize("k", [5, 32, 264])
def test_decode_of_odd_lengths(k: int) -> None:
    quant = QuantSpec(4, 32, 7)
    spec = GemmSpec((1,), 9, k, "NK", "float16", "uint32", "float16", Epilogue(), quant)
    case = Case(spec)
    packed, scale, value = quantise(np.random.default_rng(0).standard_normal((9, k)), quant)
    lhs = random(np.random.default_rng(1), (1, k), "float16")
    got = case.call((1,), lhs, [packed, scale], [])
    # fp16 results of sums of k terms of about 1.
    np.testing.assert_allclose(got, wide(lhs) @ value.T, rtol=2e-3, atol=2e-3 * np.sqrt(k))


def test_a_plain_processor() -> None:
    quant = QuantSpec(4, 32, 7)
    spec = GemmSpec((1,), 9, 300, "NK", "float16", "uint32", "float16", Epilogue(), quant)
    check(Case(spec, parse_target("llvm")), 1)


def test_nan_reaches_the_result() -> None:
    quant = QuantSpec(4, 32, 7)
    spec = GemmSpec((1,), 8, 512, "NK", "float16", "uint32", "float16", Epilogue(), quant)
    packed, scale, _ = quantise(np.random.default_rng(0).standard_normal((8, 512)), quant)
    lhs = random(np.random.default_rng(1), (1, 512), "float16")
    lhs[0, 77] = np.nan
    assert np.isnan(Case(spec).call((1,), lhs, [packed, scale], [])).all()


def test_native_target_has_the_integer_instruction_where_x86_has() -> None:
    from relax_llm_passes.kernels.cpu_tiles import cpu_tiles

    arm = parse_target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"})
    assert cpu_tiles(arm).dot16 == ""
    assert cpu_tiles(parse_target("llvm -mcpu=haswell")).dot16.endswith("avx2.pmadd.wd")
    assert cpu_tiles(NATIVE).lanes >= 4
