"""CPU products against float64: every layout, dtype, epilogue and border of a tile."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_llm_passes.errors import InputError
from relax_llm_passes.kernels.cpu_gemm import gemm_kernel
from relax_llm_passes.kernels.cpu_spec import GemmSpec
from relax_llm_passes.kernels.cpu_tiles import cpu_tiles
from relax_llm_passes.targets import parse_target

from .cpu_gemm_cases import NATIVE, Case, epilogue

LAYOUTS = ("NK", "KN", "packed")
DTYPES = ("float32", "float16", "bfloat16")
STEPS = (
    "bias",
    "residual",
    "multiply",
    "relu",
    "relu_squared",
    "gelu_erf",
    "gelu_tanh",
    "silu",
    "sigmoid",
    "tanh",
    "scale",
)
TILES = cpu_tiles(NATIVE)
# One below, at and above what some path counts in.
ROWS = (0, 1, 2, TILES.dot_rows, TILES.rows, TILES.rows + 1, 16, 17, 3 * TILES.rows - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_row_counts(layout: str, dtype: str) -> None:
    case = Case(GemmSpec(("m",), 40, 72, layout, dtype, dtype, dtype))
    for m in ROWS:
        case.check((m,), seed=m)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, k", [(1, 1), (3, 1), (TILES.columns - 1, 7), (TILES.columns + 1, 33)])
def test_small_and_odd_sizes(layout: str, n: int, k: int) -> None:
    case = Case(GemmSpec(("m",), n, k, layout))
    for m in (0, 1, 2, 5, 17, 20):
        case.check((m,), seed=m)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_sums_are_cut_into_blocks(layout: str) -> None:
    case = Case(GemmSpec(("m",), 2 * TILES.columns + 5, 4100, layout))
    for m in (1, 3, 40):
        case.check((m,), seed=m)


@pytest.mark.parametrize("op", STEPS)
def test_epilogue_steps(op: str) -> None:
    case = Case(GemmSpec(("m",), 19, 24, "KN", epilogue=epilogue(op)))
    for m in (1, 7):
        case.check((m,), seed=m)


def test_epilogue_in_order_on_every_path() -> None:
    steps = epilogue("bias", "silu", "multiply", "scale", "residual", "cast")
    case = Case(GemmSpec(("m",), 21, 40, "NK", epilogue=steps))
    for m in (1, 6, 30):
        case.check((m,), seed=m)


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (1, 18)])
def test_static_leading_axes(lead: tuple[int, ...]) -> None:
    Case(GemmSpec(lead, 24, 16, "NK", epilogue=epilogue("residual"))).check(lead)


def test_symbolic_leading_axes() -> None:
    case = Case(GemmSpec(("b", "s"), 24, 16, "KN", epilogue=epilogue("residual", "bias")))
    for lead in ((1, 1), (2, 1), (0, 4), (3, 9)):
        case.check(lead)


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_symbolic_columns(layout: str, dtype: str) -> None:
    steps = epilogue("bias", "silu", dtype=dtype)
    case = Case(GemmSpec(("m",), "n", 40, layout, dtype, dtype, dtype, steps))
    for m in (1, 3, 9, 19):
        for n in (0, 1, 5, TILES.lanes, TILES.columns * 9 + 3, 4097):
            case.check((m,), seed=n, n=n)


def test_mixed_dtypes() -> None:
    spec = GemmSpec(("m",), 24, 40, "NK", "float32", "bfloat16", "float32")
    case = Case(spec)
    for m in (1, 4, 20):
        case.check((m,))


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 90),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    steps=st.lists(st.sampled_from(STEPS), max_size=2),
    rows=st.lists(st.integers(0, 40), min_size=2, max_size=4),
    static=st.booleans(),
)
def test_any_product(
    n: int, k: int, layout: str, dtype: str, steps: list[str], rows: list[int], static: bool
) -> None:
    lead = (rows[0],) if static else ("m",)
    case = Case(GemmSpec(lead, n, k, layout, dtype, dtype, dtype, epilogue(*steps, dtype=dtype)))
    for m in rows[:1] if static else rows:
        case.check((m,), seed=m)


@pytest.mark.parametrize("target", ["llvm"])
def test_plain_targets(target: str) -> None:
    case = Case(GemmSpec(("m",), 21, 40, "NK", epilogue=epilogue("bias", "gelu_erf")))
    plain = Case(case.spec, parse_target(target))
    for m in (1, 4, 19):
        plain.check((m,))


@pytest.mark.parametrize(
    "target",
    [
        {"kind": "llvm", "mcpu": "skylake-avx512"},
        {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"},
    ],
)
def test_other_processors_compile(target: dict[str, str]) -> None:
    import tvm

    target = parse_target(target)
    kernel = gemm_kernel(GemmSpec(("m",), 50, 40, "NK"), target)
    assembly = tvm.compile(kernel, target=target).mod.inspect_source("asm")
    wide_register = "zmm" if cpu_tiles(target).lanes == 16 else "v0.4s"
    assert wide_register in assembly


@pytest.mark.parametrize(
    "spec, word",
    [
        (GemmSpec(("m",), 4, 4, "NN"), "layout"),
        (GemmSpec(("m",), 0, 4), "at least 1"),
        (GemmSpec(("m",), 4, 4, lhs_dtype="int8"), "int8"),
    ],
)
def test_refused_with_a_reason(spec: GemmSpec, word: str) -> None:
    with pytest.raises(InputError, match=word):
        gemm_kernel(spec, NATIVE)
